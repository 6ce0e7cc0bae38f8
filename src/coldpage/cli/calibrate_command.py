"""``coldpage calibrate``: the means that codecs take out of a model's keys."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from coldpage.cli.device_flag import device_flag
from coldpage.cli.failure import failures_as_sentences
from coldpage.cli.machine import expand_user
from coldpage.errors import ConfigurationError

__all__ = ["calibrate"]


@click.command()
@click.argument("model", required=False)
@click.option(
    "--text",
    metavar="FILE",
    help="Text like that which will be served, in UTF-8; of more than 65,536 tokens the beginning "
    "is read. [default: some prose and code that come with coldpage]",
)
@device_flag
@click.option(
    "--dtype",
    type=click.Choice(("auto", "bfloat16", "float32")),
    default="auto",
    show_default=True,
    help="Number type of the weights, which serve is to have too: each has a calibration of its "
    "own.",
)
def calibrate(model: str | None, text: str | None, device: str, dtype: str) -> None:
    """Measure what the keys of MODEL are on average, and store it for its codecs.

    Codecs of few bits take that mean out of keys before they round them. They use what was
    calibrated last for the model; where nothing was, the first start does it. Pages on disk that
    were packed with other means are not found any more.

    \b
    Examples:
      coldpage calibrate
      coldpage calibrate ~/models/llama --text conversations.txt
    """
    with failures_as_sentences():
        from coldpage.cli.serve_command import check_model

        source = check_model(model)
        content = None if text is None else _read(expand_user(text))
        from coldpage.engine.model.calibrating import run_calibrate

        run_calibrate(source, content, device, dtype, Console())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--text {path} is not UTF-8 at byte {error.start:,}") from error
    except OSError as error:
        raise ConfigurationError(f"--text {path} can not be read: {error.strerror}") from error
