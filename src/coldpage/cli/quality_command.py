"""``coldpage quality``: what each codec costs, on a real model and real text."""

from __future__ import annotations

from pathlib import Path

import click

from coldpage.cli.codec_flags import recent_blocks_flag
from coldpage.cli.failure import failures_as_sentences
from coldpage.cli.table_console import table_console
from coldpage.errors import ConfigurationError

__all__ = ["quality"]


def _token_counts(
    context: click.Context, parameter: click.Parameter, value: str
) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in value.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise click.BadParameter(f"{value!r}: write numbers of tokens, such as 512,2048")
    return counts


@click.command()
@click.argument("model", required=False)
@click.option(
    "--codec",
    "codecs",
    multiple=True,
    metavar="CODEC",
    help="A codec as serve takes it; may be given again. [default: all there are]",
)
@click.option(
    "--tokens",
    "context_tokens",
    default="2048",
    show_default=True,
    metavar="NUMBERS",
    callback=_token_counts,
    help="Tokens that go through the codecs at each place, such as 512,1024,2048,4096.",
)
@click.option(
    "--text",
    default="committed",
    show_default=True,
    metavar="TEXT",
    help="committed: this project's prose and code; topics and stdlib: the interpreter's "
    "documentation and library; or a file.",
)
@click.option(
    "--places",
    "num_places",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="Places of each text.",
)
@click.option(
    "--needles",
    "num_needles",
    type=click.IntRange(0, 8),
    default=8,
    show_default=True,
    help="Facts early in a context that are asked for at its end.",
)
@click.option(
    "--repeats",
    "num_repeats",
    type=click.IntRange(0, 1000),
    default=5,
    show_default=True,
    help="Samples of each speed; 0 leaves sizes and speeds out.",
)
@click.option(
    "--block-tokens",
    "tokens_per_block",
    type=click.IntRange(1, 1024),
    default=16,
    show_default=True,
    help="Tokens a block.",
)
@recent_blocks_flag("How many of the newest blocks built-in codecs leave as they are.")
@click.option(
    "--study",
    "is_study",
    is_flag=True,
    help="Other settings of the codecs: keys before or after rotary embedding, centred or not, "
    "first and newest blocks whole or packed; without needles and speeds.",
)
@click.option("--verbose", "is_verbose", is_flag=True, help="Show each answer to a needle.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    help="Append every row to this file, one JSON object a line.",
)
@click.option(
    "--write",
    "document",
    type=click.Path(path_type=Path),
    help="Replace the table between the two comments for this command in this document.",
)
def quality(
    model: str | None,
    codecs: tuple[str, ...],
    context_tokens: tuple[int, ...],
    text: str,
    num_recent_blocks: int,
    is_study: bool,
    is_verbose: bool,
    json_path: Path | None,
    document: Path | None,
    **evaluation: int,
) -> None:
    """What each codec does to MODEL: its next tokens, keys and values, against the cache as it was
    computed; with sizes and speeds.

    MODEL is smollm2 (the default), gemma3 where its test package is installed, a Hugging Face
    directory or a .gguf file. It computes in float32 on the CPU.

    \b
    Examples:
      coldpage quality
      coldpage quality gemma3 --codec turbo4 --codec int8 --tokens 512,4096
      coldpage quality --text notes.txt --verbose
      coldpage quality --write docs/CODECS.md
    """
    with failures_as_sentences():
        try:
            from coldpage.bench.quality.options import QualityOptions
            from coldpage.bench.quality.run import run_quality
            from coldpage.bench.quality.settings import EvaluationOptions
        except ImportError as error:
            raise ConfigurationError(f"quality needs torch and transformers ({error})") from error
        options = QualityOptions(
            model=model,
            codecs=codecs,
            context_tokens=context_tokens,
            text=text,
            num_recent_blocks=num_recent_blocks,
            evaluation=EvaluationOptions(**evaluation),
            is_study=is_study,
            is_verbose=is_verbose,
            json_path=json_path,
            document=document,
        )
        run_quality(options, table_console())
