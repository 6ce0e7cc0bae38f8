"""What a model's keys are on average: measured on a text, kept in a file, found again.

Codecs take a mean out of keys before they round them. It is taken of keys that are turned back to
position 0, where a channel means the same in every token, and without those at the start of a
sequence, which are unlike all others and which cold pages keep whole.

Of several files of one model the newest counts: the one that was asked for last.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from coldpage.engine.model.layer_keys import layer_keys
from coldpage.engine.model.model import LoadedModel, model_cache_directory
from coldpage.engine.model.rotary import Frequencies, measure_frequencies, turn_back
from coldpage.errors import ConfigurationError, ModelError
from coldpage.types import Int32Array

__all__ = ["Calibration", "calibrate", "default_text", "load_calibration", "stored_or_made"]

_LOG = logging.getLogger(__name__)

# Of the procedure and the file: another one makes other means.
_VERSION: Final = "1"
# Tokens that are computed together, as a sequence of their own.
_CHUNK_TOKENS: Final = 2048
# Left out at the start of each: a block of usual size, of which attention sinks are the most.
_SINK_TOKENS: Final = 16
_MIN_TOKENS: Final = 256
# Of a longer text, the beginning.
_MAX_TOKENS: Final = 65_536
_DEFAULT_TEXT: Final = "calibration_text.txt"
# What codecs cost by default is what was measured with the default text of this version.
_IS_DEFAULT: Final = "default"

_Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Of each layer the frequencies, where they are known, and the means of its keys, f32
    [kv_heads, head_dim], turned back by them."""

    frequencies: tuple[Frequencies | None, ...]
    key_means: tuple[npt.NDArray[np.float32], ...]
    num_tokens: int  # that they are the means of
    path: Path

    @property
    def name(self) -> str:
        """Of the file: the model and the text, both as digests."""
        return self.path.stem


def default_text() -> str:
    """English prose and Python code, about 9,000 tokens."""
    return resources.files("coldpage.engine.model").joinpath(_DEFAULT_TEXT).read_text("utf-8")


def calibrate(model: LoadedModel, text: str, progress: _Progress) -> Calibration:
    """Run ``text`` through the model, which is not switched to paged attention yet, and store what
    its keys are. Blocks: ``progress`` gets a line for each chunk. The result is the one that
    ``load_calibration`` finds from now on.

    Raises ConfigurationError for a text that is too short, ModelError when it can not be stored.
    """
    token_ids = np.array(model.tokenizer(text)["input_ids"][:_MAX_TOKENS], np.int32)
    frequencies = measure_frequencies(model)
    chunk_tokens = min(_CHUNK_TOKENS, model.context_tokens)
    starts = range(0, token_ids.size - _SINK_TOKENS, chunk_tokens)
    chunks = [token_ids[start : start + chunk_tokens] for start in starts]
    num_tokens = sum(chunk.size - _SINK_TOKENS for chunk in chunks)
    if num_tokens < _MIN_TOKENS:
        raise ConfigurationError(
            f"the text has {token_ids.size:,} tokens, {num_tokens:,} of which count: give one of "
            f"{_MIN_TOKENS + _SINK_TOKENS} or more to calibrate {model.name} on"
        )
    means = _means(model, frequencies, chunks, progress)
    made = Calibration(frequencies, means, num_tokens, _path(model, _text_digest(text)))
    _store(made, model, is_default=text == default_text())
    return made


def _means(
    model: LoadedModel,
    frequencies: Sequence[Frequencies | None],
    chunks: Sequence[Int32Array],
    progress: _Progress,
) -> tuple[npt.NDArray[np.float32], ...]:
    sums = [np.zeros((layer.num_kv_heads, layer.head_dim), np.float64) for layer in model.layers]
    total, num_done, num_counted = sum(chunk.size for chunk in chunks), 0, 0
    for chunk in chunks:
        progress(f"calibrating {model.name}: {num_done:,} of {total:,} tokens")
        ids, positions = torch.from_numpy(chunk.astype(np.int64)), torch.arange(chunk.size)
        for index, seen in enumerate(layer_keys(model.model, len(sums), ids, positions)):
            keys = seen.keys[:, _SINK_TOKENS:].float().cpu().numpy()
            turns = frequencies[index]
            if turns is not None:
                keys = turn_back(keys, turns, _SINK_TOKENS)
            sums[index] += keys.sum(axis=1, dtype=np.float64)
        num_done += chunk.size
        num_counted += chunk.size - _SINK_TOKENS
    return tuple((total / num_counted).astype(np.float32) for total in sums)


# ---------------------------------------------------------------------- files


def stored_or_made(model: LoadedModel, progress: _Progress) -> Calibration:
    """The model's calibration; made from the default text where none is stored. The model is not
    switched to paged attention yet. Raises ModelError."""
    found = load_calibration(model)
    return found or calibrate(model, default_text(), progress)


def load_calibration(model: LoadedModel) -> Calibration | None:
    """The newest one that is stored for the model and whole. Of others a line is logged."""
    paths = list(model_cache_directory().glob(_path(model, "*").name))
    if not paths:
        return None
    frequencies = measure_frequencies(model)
    for path in sorted(paths, key=_age):
        try:
            return _load(path, model, frequencies)
        except _NotUsableError as error:
            _LOG.warning("the calibration %s is not used: %s", path, error)
    return None


class _NotUsableError(Exception):
    """Why a file is none for the model, in a few words."""


def _age(path: Path) -> tuple[int, str]:
    """Sorts the newest first."""
    try:
        return -path.stat().st_mtime_ns, path.name
    except OSError:  # it has gone: loading it will say so
        return 0, path.name


def _path(model: LoadedModel, text_digest: str) -> Path:
    name = f"calibration-{model.fingerprint.hex()[:16]}-{text_digest[:16]}.safetensors"
    return model_cache_directory() / name


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _store(made: Calibration, model: LoadedModel, *, is_default: bool) -> None:
    tensors = _tensors(made)
    metadata = {
        "version": _VERSION,
        "model": model.fingerprint.hex(),
        "model_name": model.name,
        "tokens": str(made.num_tokens),
        "text": _IS_DEFAULT if is_default else "",
        "digest": _digest(tensors),
    }
    try:
        made.path.parent.mkdir(parents=True, exist_ok=True)
        number, work = tempfile.mkstemp(prefix=".calibration-", dir=made.path.parent)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(save(tensors, metadata))
            os.replace(work, made.path)
        except BaseException:
            os.unlink(work)
            raise
    except OSError as error:
        raise ModelError(
            f"the calibration of {model.name} can not be kept in {str(made.path.parent)!r}: {error}"
        ) from error


def _tensors(made: Calibration) -> dict[str, npt.NDArray[np.generic]]:
    tensors: dict[str, npt.NDArray[np.generic]] = {}
    for index, (turns, mean) in enumerate(zip(made.frequencies, made.key_means, strict=True)):
        tensors[f"layer.{index}.key_mean"] = mean
        if turns is not None:
            tensors[f"layer.{index}.frequencies"] = turns
    return tensors


def _digest(tensors: dict[str, npt.NDArray[np.generic]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode() + tensor.tobytes())
    return digest.hexdigest()


def _load(
    path: Path, model: LoadedModel, frequencies: tuple[Frequencies | None, ...]
) -> Calibration:
    """Raises _NotUsableError."""
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise _NotUsableError(f"it is damaged ({error})") from error
    if metadata.get("digest") != _digest(tensors):
        raise _NotUsableError("it is damaged (its checksum is another)")
    if metadata.get("version") != _VERSION:
        raise _NotUsableError("another version made it")
    if metadata.get("model") != model.fingerprint.hex():
        raise _NotUsableError("it is of another model")
    if metadata.get("text") == _IS_DEFAULT and path != _path(model, _text_digest(default_text())):
        raise _NotUsableError("it is of a default text that another version came with")
    means = tuple(tensors[f"layer.{index}.key_mean"] for index in range(len(model.layers)))
    found = Calibration(frequencies, means, int(metadata["tokens"]), path)
    # The digest has the forms of all; what a layer turns its keys by may be known better by now.
    if _digest(_tensors(found)) != metadata["digest"]:
        raise _NotUsableError("it was made for other rotary frequencies")
    return found
