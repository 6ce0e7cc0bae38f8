"""Settings beside the built-in ones, to choose defaults by: what each of several choices does.

Keys are packed as they are stored, which is after rotary embedding, or turned back; with or without
their means taken out; the first block, and the newest ones, whole or packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from coldpage.bench.quality.settings import CodecSetting
from coldpage.codecs import ColdPageCodec, LayerVectors, ModelPages, PackedCodec
from coldpage.codecs.packed import PACKED_FORMATS
from coldpage.engine.model.calibration import default_text
from coldpage.engine.model.layer_keys import layer_keys
from coldpage.engine.model.model import LoadedModel
from coldpage.errors import ConfigurationError
from coldpage.types import LayerId

__all__ = ["STUDIED_CODECS", "KeyMeans", "stored_key_means", "study_settings"]

STUDIED_CODECS: Final = ("turbo4", "turbo3", "int4", "k8v4", "fp8", "int8")
# Newest blocks that stay whole, beside none.
_RECENT_BLOCKS: Final = (1, 4, 16)
# As calibration has it: sequences of so many tokens, without the first block of usual size.
_CHUNK_TOKENS: Final = 2048
_SINK_TOKENS: Final = 16
_MAX_CHUNKS: Final = 4

KeyMeans = Mapping[LayerId, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class _Choice:
    """What happens to keys before they are packed."""

    turns_back: bool
    is_centred: bool

    def __str__(self) -> str:
        place = "before rotary" if self.turns_back else "after rotary"
        return f"{place}, centred" if self.is_centred else place

    def vectors(self, layer: LayerVectors, stored_means: npt.NDArray[np.float32]) -> LayerVectors:
        """What a codec is told of a layer that is described in full."""
        means = layer.key_means if self.turns_back else stored_means
        return replace(
            layer,
            frequencies=layer.frequencies if self.turns_back else None,
            key_means=means if self.is_centred else None,
        )


_CHOICES: Final = tuple(
    _Choice(turns_back, is_centred) for turns_back in (False, True) for is_centred in (False, True)
)


def study_settings(names: Sequence[str], stored_means: KeyMeans) -> list[CodecSetting]:
    """For each codec every choice, with the first block whole and packed; and keys before rotary
    and centred with newest blocks whole. ``stored_means`` are of keys as they are stored.

    Raises ConfigurationError for a name that is no built-in codec, or one that packs nothing.
    """
    settings = []
    for name in names:
        if PACKED_FORMATS.get(name) is None:
            packing = [known for known, formats in PACKED_FORMATS.items() if formats is not None]
            raise ConfigurationError(
                f"the codec {name!r} leaves nothing to study: choose of {', '.join(packing)}"
            )
        for first, has_whole_sinks in (("whole", True), ("packed", False)):
            settings += [
                CodecSetting(
                    f"{name}: {choice}, first block {first}",
                    _maker(name, choice, stored_means),
                    separates_sinks=has_whole_sinks,
                )
                for choice in _CHOICES
            ]
        settings += [
            CodecSetting(
                f"{name}: {_CHOICES[-1]}, first block and {num_blocks} newest whole",
                _maker(name, _CHOICES[-1], stored_means),
                num_recent_blocks=num_blocks,
            )
            for num_blocks in _RECENT_BLOCKS
        ]
    return settings


def _maker(
    name: str, choice: _Choice, stored_means: KeyMeans
) -> Callable[[ModelPages], ColdPageCodec]:
    formats = PACKED_FORMATS[name]
    assert formats is not None, "a codec that packs"

    def make(pages: ModelPages) -> ColdPageCodec:
        chosen = {i: choice.vectors(layer, stored_means[i]) for i, layer in pages.items()}
        # What is known of keys is used, whatever the codec of this name does with it.
        return PackedCodec(name, chosen, formats={name: replace(formats, turns_back=True)})

    return make


def stored_key_means(model: LoadedModel) -> KeyMeans:
    """What keys are on average as they are stored, in the text that calibration takes. The model is
    not switched to paged attention yet. Blocks for seconds.
    """
    token_ids = np.array(model.tokenizer(default_text())["input_ids"], np.int64)
    chunks = np.split(token_ids, range(_CHUNK_TOKENS, token_ids.size, _CHUNK_TOKENS))[:_MAX_CHUNKS]
    sums = [np.zeros((layer.num_kv_heads, layer.head_dim)) for layer in model.layers]
    for chunk in chunks:
        ids, positions = torch.from_numpy(chunk), torch.arange(chunk.size)
        for index, seen in enumerate(layer_keys(model.model, len(sums), ids, positions)):
            sums[index] += seen.keys[:, _SINK_TOKENS:].double().sum(1).numpy()
    num_tokens = sum(chunk.size - _SINK_TOKENS for chunk in chunks)
    return {
        LayerId(index): (total / num_tokens).astype(np.float32) for index, total in enumerate(sums)
    }
