"""The commands and their flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click
from rich.console import Console

from coldpage.cli.bench_command import bench
from coldpage.cli.calibrate_command import calibrate
from coldpage.cli.codec_flags import codec_flags
from coldpage.cli.device_flag import device_flag
from coldpage.cli.failure import failures_as_sentences
from coldpage.cli.instance_commands import run_clean, run_inspect
from coldpage.cli.quality_command import quality
from coldpage.cli.tiers import DEFAULT_GPU_HOT_FRACTION, DEFAULT_TIERS
from coldpage.config import DiskAdmission
from coldpage.engine.settings import CACHE_TYPES, DemoOptions, Injection, VerifyOptions
from coldpage.errors import ConfigurationError

__all__ = ["clean", "coldpage", "demo", "inspect", "serve", "verify"]

_MIN_CONVERSATION_TOKENS: Final = 64
_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="coldpage", prog_name="coldpage")
def coldpage() -> None:
    """LLM conversations in tiers of memory: hot, host and disk.

    A conversation that has left hot memory comes back by a copy, not by recomputing its prompt.

    \b
    Examples:
      coldpage serve                       the bundled model on http://127.0.0.1:8080/v1
      coldpage demo                        eight conversations on room for two, timed
      coldpage verify                      proof that nothing differs
      coldpage inspect                     what is on disk
      coldpage bench migrate               how fast pages move here
      coldpage quality                     what codecs cost a model
      coldpage calibrate --text notes.txt  what codecs take out of keys, from a text of yours
    """


coldpage.add_command(bench)
coldpage.add_command(quality)
coldpage.add_command(calibrate)


def _model_flags(command: _Command) -> _Command:
    block_tokens = click.option(
        "--block-tokens",
        type=click.IntRange(1, 1024),
        default=16,
        show_default=True,
        help="Tokens a block. Smaller matches prefixes more exactly, larger moves bigger pages.",
    )
    return click.argument("model", required=False)(block_tokens(command))


def _dtype_flag(command: _Command) -> _Command:
    return click.option(
        "--dtype",
        type=click.Choice(("auto", "bfloat16", "float32")),
        default="auto",
        show_default=True,
        help="Number type of weights and cache; auto: what suits the model and the machine.",
    )(command)


def _cache_type_flags(command: _Command) -> _Command:
    for name, what in (("v", "values"), ("k", "keys")):
        command = click.option(
            f"--cache-type-{name}",
            type=click.Choice(CACHE_TYPES),
            default=CACHE_TYPES[0],
            show_default=True,
            help=f"How hot pages hold {what}; auto: in the model's number type. q8_0 (8 bits) and "
            "turbo4 (4) hold more tokens and change the answers a little.",
        )(command)
    return command


def _size_help(text: str, tier: str, resource: str) -> str:
    return f"{text} 512MiB, 8GiB or a percentage of {resource}. [default: {DEFAULT_TIERS[tier]}]"


@coldpage.command()
@_model_flags
@device_flag
@_dtype_flag
@_cache_type_flags
@codec_flags
@click.option(
    "--hot",
    metavar="SIZE",
    help=_size_help("Memory that attention reads.", "hot", "the machine's memory")
    + " On a GPU the percentage is of what is free there with the weights loaded. [default: "
    f"{DEFAULT_GPU_HOT_FRACTION:.0%}]",
)
@click.option(
    "--host",
    metavar="SIZE",
    help=_size_help("Memory for waiting conversations; 0: none.", "host", "the machine's memory"),
)
@click.option(
    "--disk",
    metavar="PATH:SIZE",
    help=_size_help("Directory and bound of the disk tier; none: no disk.", "disk", "free space")
    + " The default PATH is under the user's cache directory.",
)
@click.option(
    "--bind",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. There is no authentication: others reach it beyond 127.0.0.1.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@click.option(
    "--max-batch",
    type=click.IntRange(1, 1024),
    default=8,
    show_default=True,
    help="Conversations that decode together.",
)
@click.option(
    "--max-waiting",
    type=click.IntRange(0, 100_000),
    default=64,
    show_default=True,
    help="Requests that may wait beyond a full batch; more are answered with 429.",
)
@click.option(
    "--pool-ratio",
    metavar="SHARES",
    help="How the hot bytes are divided between layer groups (layers with one window), such as "
    "0.7,0.3. Default: as a sequence of 4,096 tokens needs them.",
)
@click.option(
    "--instance-id",
    metavar="ID",
    help="Under which name the disk tier finds what it held. [default: follows from the model]",
)
@click.option(
    "--disk-admission",
    type=click.Choice(tuple(admission.value for admission in DiskAdmission)),
    default=DiskAdmission.ALWAYS.value,
    show_default=True,
    help="Which blocks are written to disk: all, or only those that were used twice.",
)
@click.option(
    "--disk-ttl",
    type=click.FloatRange(0, min_open=True),
    metavar="HOURS",
    help="Blocks on disk that nobody has used for so long are dropped. [default: never]",
)
@click.option(
    "--save-dir",
    metavar="PATH",
    help="Where sessions are saved; none: nowhere. [default: under the user's cache directory]",
)
@click.option(
    "--shutdown-budget",
    type=click.FloatRange(0, 3600),
    default=10.0,
    show_default=True,
    help="Seconds that a clean stop may take to write what is cached to disk.",
)
def serve(**flags: Any) -> None:
    """Serve MODEL, a Hugging Face directory or a GGUF file, to OpenAI clients.

    Without MODEL the bundled SmolLM2-135M-Instruct is served.

    \b
    Examples:
      coldpage serve
      coldpage serve ~/models/llama --hot 8GiB --host 25% --disk /var/tmp/pages:100GiB
      coldpage serve model.gguf --host none --disk none --port 9000
      coldpage serve --host-codec turbo4
    """
    with failures_as_sentences():
        from coldpage.cli.serve_command import ServeFlags, run_serve

        run_serve(ServeFlags(**flags), Console())


def _run_flags(command: _Command) -> _Command:
    """Flags of the two commands that play conversations."""
    flags = (
        click.option(
            "--conversations",
            "num_conversations",
            type=click.IntRange(1, 1000),
            default=8,
            show_default=True,
            help="Conversations that take turns.",
        ),
        click.option(
            "--hot-conversations",
            "num_hot_conversations",
            type=click.IntRange(1, 1000),
            default=2,
            show_default=True,
            help="Conversations that the hot tier has room for.",
        ),
        click.option(
            "--rounds",
            "num_rounds",
            type=click.IntRange(1, 1000),
            default=3,
            show_default=True,
            help="Turns of each conversation.",
        ),
        click.option(
            "--tokens",
            "conversation_tokens",
            type=click.IntRange(_MIN_CONVERSATION_TOKENS),
            default=1500,
            show_default=True,
            help="Length of a conversation's first prompt.",
        ),
        click.option(
            "--disk-directory",
            metavar="PATH",
            help="Where the disk tier lives. [default: a temporary directory]",
        ),
    )
    for flag in reversed(flags):
        command = flag(command)
    return command


@coldpage.command()
@_model_flags
@device_flag
@_dtype_flag
@_cache_type_flags
@codec_flags
@_run_flags
def demo(model: str | None, block_tokens: int, **flags: Any) -> None:
    """Play conversations on a hot tier that holds a few of them, and time each turn.

    Each turn is shown beside the same turn recomputed from its whole prompt.

    \b
    Examples:
      coldpage demo
      coldpage demo --conversations 4 --rounds 2
      coldpage demo --host-codec turbo4
    """
    with failures_as_sentences():
        from coldpage.cli.serve_command import check_model

        options = DemoOptions(model=check_model(model), tokens_per_block=block_tokens, **flags)
        from coldpage.engine.demo import run_demo

        _exit_with(run_demo(options, Console()))


@coldpage.command()
@_model_flags
@click.option(
    "--random-model",
    "has_random_model",
    is_flag=True,
    help="Instead of MODEL, a small model with random weights, made for the run.",
)
@device_flag
@_cache_type_flags
@codec_flags
@_run_flags
@click.option(
    "--inject",
    "injection",
    type=click.Choice(tuple(injection.value for injection in Injection)),
    default=Injection.NONE.value,
    show_default=True,
    help="Damage to do on purpose: flip a bit on disk, or make the coldest tier too small.",
)
def verify(model: str | None, block_tokens: int, injection: str, **flags: Any) -> None:
    """Prove that tiers change nothing: compare bytes, logits and tokens. Exits 1 on a difference.

    A run under pressure is recorded, replayed on a hot tier that holds everything, and compared
    with plain transformers, all in float32. Other cache types lose something against plain
    transformers, and are compared with the replay alone. Where a codec loses something, the
    replay's pages go through it where the run's did, and must then be equal; what that costs is
    measured beside a replay without codecs.

    \b
    Examples:
      coldpage verify
      coldpage verify --inject flip
      coldpage verify --cache-type-k q8_0 --cache-type-v turbo4
      coldpage verify --host-codec turbo4
      coldpage verify --device cuda --random-model
    """
    with failures_as_sentences():
        if model is not None and flags["has_random_model"]:
            raise ConfigurationError("give a MODEL or --random-model, not both")
        from coldpage.cli.serve_command import check_model

        options = VerifyOptions(
            model=check_model(model),
            tokens_per_block=block_tokens,
            injection=Injection(injection),
            **flags,
        )
        from coldpage.engine.proof.verify import run_verify

        _exit_with(run_verify(options, Console()))


@coldpage.command()
@click.argument("path", required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def inspect(path: str | None, as_json: bool) -> None:
    """Show what the disk tier's instances in PATH hold. Changes nothing, whoever has them open.

    PATH is what --disk was given; without it the default directory. A damaged slot is one whose
    header is neither good nor blank; "-" where an index was read and no headers were.

    \b
    Examples:
      coldpage inspect
      coldpage inspect /var/tmp/pages --json
    """
    with failures_as_sentences():
        run_inspect(path, Console(), as_json=as_json)


@coldpage.command()
@click.argument("path", required=False)
@click.option("--instance-id", metavar="ID", help="Only this one. [default: all]")
@click.option("--yes", "is_real", is_flag=True, help="Do it; without, only show what would go.")
def clean(path: str | None, instance_id: str | None, is_real: bool) -> None:
    """Remove the disk tier's instances in PATH that nobody has open.

    PATH is what --disk was given; without it the default directory.

    \b
    Examples:
      coldpage clean
      coldpage clean /var/tmp/pages --yes
    """
    with failures_as_sentences():
        run_clean(path, Console(), instance_id=instance_id, is_real=is_real)


def _exit_with(status: int) -> None:
    if status != 0:
        raise click.exceptions.Exit(status)
