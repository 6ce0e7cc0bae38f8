"""``coldpage calibrate``: measure a model's keys on a text, and say what was stored."""

from __future__ import annotations

import numpy as np
from rich.console import Console

from coldpage.engine.model.calibration import calibrate, default_text
from coldpage.engine.model.model import load_model
from coldpage.engine.model.placement import choose_device, choose_dtype

__all__ = ["run_calibrate"]


def run_calibrate(
    source: str | None, text: str | None, device: str, dtype: str, console: Console
) -> None:
    """``text`` None is the default one. Raises ColdpageError for bad input."""
    place = choose_device(device)
    with console.status("loading the model") as status:

        def progress(line: str) -> None:
            if console.is_terminal:
                status.update(line)
            else:
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        model = load_model(source, choose_dtype(dtype, place), progress, place)
        made = calibrate(model, default_text() if text is None else text, progress)
    num_turned = sum(frequencies is not None for frequencies in made.frequencies)
    lengths = [float(np.linalg.norm(mean, axis=1).mean()) for mean in made.key_means]
    for line in (
        f"{model.name}, {model.form}: means of the keys of {made.num_tokens:,} tokens in "
        f"{len(lengths)} layers, {min(lengths):.2g} to {max(lengths):.2g} long; "
        f"{num_turned} layers turn keys with their position in a way that is undone first.",
        f"Stored in {made.path}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
