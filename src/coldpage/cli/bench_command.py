"""``coldpage bench``: tables of measurements beside the limit of the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from coldpage.cli.device_flag import device_flag
from coldpage.cli.failure import failures_as_sentences
from coldpage.cli.machine import default_disk_directory, expand_user, prepare_directory
from coldpage.cli.sizes import AbsoluteSize, parse_size
from coldpage.cli.table_console import table_console
from coldpage.engine.settings import CACHE_TYPES
from coldpage.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from coldpage.bench.rows import Row
    from coldpage.device.base import Device

__all__ = ["attention", "bench", "codecs", "decode", "disk", "manager", "migrate", "resume"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group()
def bench() -> None:
    """Measure this machine: tables with the physical limit measured in the same run.

    \b
    Examples:
      coldpage bench migrate               pages between hot and host memory
      coldpage bench codecs                pages through each codec, packed
      coldpage bench disk                  pages to disk and back
      coldpage bench resume                a session until its first step may launch
      coldpage bench manager               what the manager costs its thread
      coldpage bench attention             attention over pages, one layer
      coldpage bench decode                steps of a whole model that decodes
    """


def _common_flags(num_repeats: int) -> Callable[[_Command], _Command]:
    def add(command: _Command) -> _Command:
        repeats = click.option(
            "--repeats",
            "num_repeats",
            type=click.IntRange(1, 1000),
            default=num_repeats,
            show_default=True,
            help="Repetitions of each measurement; the table shows medians.",
        )
        rows = click.option(
            "--json",
            "json_path",
            type=click.Path(path_type=Path),
            help="Append every row, with all samples, to this file, one JSON object a line.",
        )
        return device_flag(repeats(rows(command)))

    return add


def _bytes_of(text: str, flag: str) -> int:
    size = parse_size(text)
    if not isinstance(size, AbsoluteSize) or size.num_bytes == 0:
        raise ConfigurationError(f"{flag} {text}: write a number of bytes, such as 64KiB")
    return size.num_bytes


def _sizes(text: str, flag: str, separator: str = ",") -> tuple[int, ...]:
    return tuple(_bytes_of(part, flag) for part in text.split(separator))


def _measure(
    device_name: str,
    json_path: Path | None,
    benchmark: str,
    run: Callable[[Device, Console], list[Row]],
) -> None:
    """Run the benchmark on the device and keep its rows."""
    from coldpage.bench.rows import append_rows
    from coldpage.device.opening import open_device

    if json_path is not None:
        _check_writable(json_path)
    with contextlib.closing(open_device(device_name)) as device:
        rows = run(device, table_console())
        if json_path is not None:
            append_rows(json_path, benchmark, rows, device.name)


def _check_writable(path: Path) -> None:
    """Before minutes are spent. Raises ConfigurationError."""
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigurationError(f"--json: can not write to {path}: {error.strerror}") from error


@bench.command()
@_common_flags(5)
@click.option(
    "--bytes",
    "total",
    metavar="SIZE",
    help="What a direction moves at a time. [default: 1GiB on a GPU, 64MiB elsewhere]",
)
@click.option(
    "--segments",
    metavar="SIZES",
    help="Sizes of the parts of a page, such as 4KiB,64KiB,64KiB+16KiB; a plus joins the parts of "
    "one page. [default: 4KiB to 4MiB, and a page of three parts]",
)
@click.option(
    "--path",
    type=click.Choice(("auto", "driver", "kernel")),
    default="auto",
    show_default=True,
    help="Batches of single copies, a kernel that copies pages by index, or what suits the size.",
)
@click.option("--no-decode", is_flag=True, help="Leave out decoding beside moves (GPU only).")
def migrate(
    device: str,
    num_repeats: int,
    json_path: Path | None,
    total: str | None,
    segments: str | None,
    path: str,
    no_decode: bool,
) -> None:
    """Scattered pages between hot and host memory, against one contiguous copy of the same bytes.

    \b
    Examples:
      coldpage bench migrate
      coldpage bench migrate --device cuda:1 --segments 4KiB,2MiB --path kernel
      coldpage bench migrate --json rows.jsonl
    """
    with failures_as_sentences():
        from coldpage.bench.migrate import MigrateOptions, run_migrate
        from coldpage.bench.page_moves import MovePath

        defaults = MigrateOptions()
        options = MigrateOptions(
            path=MovePath(path),
            num_bytes=None if total is None else _bytes_of(total, "--bytes"),
            num_repeats=num_repeats,
            segments=defaults.segments if segments is None else _segments(segments),
            has_decode=not no_decode,
        )
        _measure(device, json_path, "migrate", lambda d, console: run_migrate(d, options, console))


def _segments(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_sizes(page, "--segments", "+") for page in text.split(","))


@bench.command()
@_common_flags(5)
@click.option(
    "--bytes",
    "total",
    metavar="SIZE",
    help="Hot bytes that a direction moves at a time. [default: 4GiB on a GPU, 256MiB elsewhere]",
)
@click.option("--codecs", "names", metavar="NAMES", help="Such as int8,turbo4. [default: all]")
@click.option("--no-decode", is_flag=True, help="Leave out decoding beside moves (GPU only).")
def codecs(
    device: str,
    num_repeats: int,
    json_path: Path | None,
    total: str | None,
    names: str | None,
    no_decode: bool,
) -> None:
    """Pages of an 8B model through each codec, against one contiguous copy of the packed bytes.

    \b
    Examples:
      coldpage bench codecs
      coldpage bench codecs --device cuda --codecs concat,turbo4 --json rows.jsonl
    """
    with failures_as_sentences():
        from coldpage.bench.codecs import CODECS, CodecBenchOptions, run_codecs

        options = CodecBenchOptions(
            codecs=CODECS if names is None else tuple(names.split(",")),
            num_bytes=None if total is None else _bytes_of(total, "--bytes"),
            num_repeats=num_repeats,
            has_decode=not no_decode,
        )
        _measure(device, json_path, "codecs", lambda d, console: run_codecs(d, options, console))


@bench.command()
@_common_flags(5)
@click.option(
    "--bytes",
    "total",
    metavar="SIZE",
    help="What moves at a time. [default: 512MiB on a GPU, 128MiB elsewhere]",
)
@click.option(
    "--blocks",
    metavar="SIZES",
    help="Sizes of a page, such as 64KiB,2MiB. [default: 64KiB,256KiB,1MiB,2MiB]",
)
@click.option(
    "--directory",
    metavar="PATH",
    help="Where files are made, and removed again. [default: under the user's cache directory]",
)
def disk(
    device: str,
    num_repeats: int,
    json_path: Path | None,
    total: str | None,
    blocks: str | None,
    directory: str | None,
) -> None:
    """Pages from hot memory to disk and back, against plain O_DIRECT reads and writes of the same.

    \b
    Examples:
      coldpage bench disk
      coldpage bench disk --directory /mnt/nvme --bytes 2GiB --blocks 2MiB
    """
    with failures_as_sentences():
        from coldpage.bench.disk import BLOCKS, DiskOptions, run_disk

        path = default_disk_directory() if directory is None else expand_user(directory)
        prepare_directory(path, "--directory")
        options = DiskOptions(
            directory=path,
            num_bytes=None if total is None else _bytes_of(total, "--bytes"),
            block_bytes=BLOCKS if blocks is None else _sizes(blocks, "--blocks"),
            num_repeats=num_repeats,
        )
        _measure(device, json_path, "disk", lambda d, console: run_disk(d, options, console))


@bench.command()
@_common_flags(5)
@click.option(
    "--tokens",
    "num_tokens",
    type=click.IntRange(16),
    help="Tokens of the session, a multiple of 16. [default: 32768 on a GPU, 2048 elsewhere]",
)
@click.option(
    "--model",
    type=click.Choice(("8b", "smollm2", "tiny")),
    help="Whose cache: 128 KiB a token, 22.5 KiB or 384 bytes. [default: 8b on a GPU, else "
    "smollm2]",
)
@click.option(
    "--step-tokens",
    type=click.IntRange(16),
    help="Tokens of a step of the prefill; larger is faster. [default: 8192 on a GPU, else 1024]",
)
@click.option("--no-prefill", is_flag=True, help="Leave the prefill out, which needs torch.")
def resume(
    device: str, json_path: Path | None, model: str | None, no_prefill: bool, **sizes: Any
) -> None:
    """A session in host memory until its first step may launch, against the speed of the link and
    against prefill of the same tokens with random weights.

    \b
    Examples:
      coldpage bench resume
      coldpage bench resume --device cuda --tokens 131072 --no-prefill
    """
    with failures_as_sentences():
        from coldpage.bench.kv import LLAMA_8B, SMOLLM2_135M, TINY_LLAMA
        from coldpage.bench.resume import ResumeOptions, run_resume

        geometries = {"8b": LLAMA_8B, "smollm2": SMOLLM2_135M, "tiny": TINY_LLAMA, None: None}
        options = ResumeOptions(geometry=geometries[model], has_prefill=not no_prefill, **sizes)
        _measure(device, json_path, "resume", lambda d, console: run_resume(d, options, console))


@bench.command()
@_common_flags(7)
@click.option(
    "--pages",
    "num_pages",
    type=click.IntRange(1, 1_000_000),
    default=2048,
    show_default=True,
    help="Pages of the session that is suspended and resumed.",
)
@click.option(
    "--sequences",
    "num_sequences",
    type=click.IntRange(1, 4096),
    default=64,
    show_default=True,
    help="Sequences that decode together.",
)
@click.option(
    "--context",
    "context_tokens",
    type=click.IntRange(1, 1_000_000),
    default=2048,
    show_default=True,
    help="Tokens of each.",
)
def manager(device: str, json_path: Path | None, **sizes: Any) -> None:
    """What the manager costs the thread that owns it; the work it enqueues is not waited for.

    On a GPU the pages are those of an 8B model (2 MiB), elsewhere tiny.

    \b
    Examples:
      coldpage bench manager
      coldpage bench manager --pages 10000 --repeats 3
    """
    with failures_as_sentences():
        from coldpage.bench.manager_cost import ManagerOptions, run_manager

        options = ManagerOptions(**sizes)
        _measure(device, json_path, "manager", lambda d, console: run_manager(d, options, console))


@contextlib.contextmanager
def _torch_needed(benchmark: str) -> Iterator[None]:
    """Around imports. Raises ConfigurationError where one is not installed."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"bench {benchmark} needs torch, triton and transformers ({error})"
        ) from error


@bench.command()
@_common_flags(7)
@click.option(
    "--types",
    default="bf16,q8_0,turbo4,q8_0/turbo4",
    show_default=True,
    metavar="TYPES",
    help="How pages hold keys and values, or keys/values: bf16, f16, q8_0, turbo4.",
)
@click.option(
    "--only",
    "parts",
    multiple=True,
    type=click.Choice(("decode", "prefill", "moves")),
    help="A part of it; may be given again. [default: all]",
)
@click.option(
    "--bytes",
    "total",
    metavar="SIZE",
    help="Memory of the pool of pages. [default: 70% of what is free on a GPU, 128MiB elsewhere]",
)
def attention(
    device: str,
    num_repeats: int,
    json_path: Path | None,
    types: str,
    parts: tuple[str, ...],
    total: str | None,
) -> None:
    """Attention over scattered pages, against the library's over contiguous memory, and what brings
    keys and values into pages and out of them, against plain copies. Of one layer.

    On a GPU the sizes are those of a loaded server, elsewhere small.

    \b
    Examples:
      coldpage bench attention
      coldpage bench attention --device cuda --only decode --types bf16,q8_0/turbo4
      coldpage bench attention --json rows.jsonl
    """
    with failures_as_sentences():
        with _torch_needed("attention"):
            from coldpage.bench.attention import PARTS, AttentionBenchOptions, run_attention

        options = AttentionBenchOptions(
            types=tuple(types.split(",")),
            parts=parts or PARTS,
            pool_bytes=None if total is None else _bytes_of(total, "--bytes"),
            num_repeats=num_repeats,
        )
        _measure(
            device, json_path, "attention", lambda d, console: run_attention(d, options, console)
        )


def _batches(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        batches = tuple(int(part) for part in value.split(","))
    except ValueError:
        batches = ()
    if not batches or min(batches) < 1:
        raise click.BadParameter(f"{value!r}: write numbers of sequences, such as 1,16,64")
    return batches


def _cache_types(command: _Command) -> _Command:
    for name, what in (("value", "values"), ("key", "keys")):
        command = click.option(
            f"--cache-type-{name[0]}",
            f"{name}_type",
            type=click.Choice(CACHE_TYPES),
            default=CACHE_TYPES[0],
            show_default=True,
            help=f"How hot pages hold {what}; auto: bf16, as the model.",
        )(command)
    return command


@bench.command()
@_common_flags(5)
@click.option(
    "--model",
    type=click.Choice(("8b", "smollm2", "tiny")),
    help="Whose sizes the random weights have. [default: 8b on a GPU, else smollm2]",
)
@click.option(
    "--batches",
    default="1,16,64",
    show_default=True,
    metavar="NUMBERS",
    callback=_batches,
    help="How many sequences decode together.",
)
@click.option(
    "--tokens",
    "num_tokens",
    type=click.IntRange(1),
    help="Tokens of each. [default: 1024 on a GPU, 256 elsewhere]",
)
@_cache_types
def decode(device: str, json_path: Path | None, model: str | None, **options: Any) -> None:
    """Steps in which every sequence decodes one token, with random weights, against the time that
    reading weights and cache takes at the speed of a copy; on a GPU with and without CUDA graphs.

    \b
    Examples:
      coldpage bench decode
      coldpage bench decode --device cuda --batches 1,64 --tokens 8192
      coldpage bench decode --cache-type-k q8_0 --cache-type-v turbo4
    """
    with failures_as_sentences():
        with _torch_needed("decode"):
            from coldpage.bench.decode import DecodeOptions, run_decode
        from coldpage.bench.kv import LLAMA_8B, SMOLLM2_135M, TINY_LLAMA

        geometries = {"8b": LLAMA_8B, "smollm2": SMOLLM2_135M, "tiny": TINY_LLAMA, None: None}
        chosen = DecodeOptions(geometry=geometries[model], **options)
        _measure(device, json_path, "decode", lambda d, console: run_decode(d, chosen, console))
