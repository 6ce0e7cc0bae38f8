"""How fast a codec packs and unpacks the pages of a context in bf16, beside a copy of the same."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import numpy as np
import torch

from coldpage.bench.quality.hot_store import HotStore
from coldpage.bench.quality.passage import Passage
from coldpage.bench.quality.settings import CodecSetting, EvaluationOptions, with_number_type
from coldpage.bench.rows import median, timed_ms
from coldpage.codecs import ModelPages, NumberType
from coldpage.engine.model.hot_types import HotTypes
from coldpage.engine.model.model import KEY_ROLE, VALUE_ROLE, LoadedModel, manager_layers
from coldpage.types import HalfOpenRange, LayerId

__all__ = ["SpeedBench", "SpeedSamples"]


@dataclass(frozen=True, slots=True)
class SpeedSamples:
    """Milliseconds for ``num_bytes`` of hot pages in bf16, and for a copy of as many by one thread,
    in turn. ``ratio`` is what of them a cold page has, where it is neither a sink nor recent.
    """

    num_bytes: int
    ratio: float
    encode_ms: tuple[float, ...]
    decode_ms: tuple[float, ...]
    copy_ms: tuple[float, ...]

    @property
    def encode_gb_per_s(self) -> float:
        """Of hot bytes, by the median."""
        return self.num_bytes / 1e6 / median(self.encode_ms)

    @property
    def decode_gb_per_s(self) -> float:
        """Of hot bytes, by the median."""
        return self.num_bytes / 1e6 / median(self.decode_ms)

    @property
    def copy_gb_per_s(self) -> float:
        """Of as many bytes, read once and written once, by the median."""
        return self.num_bytes / 1e6 / median(self.copy_ms)


class SpeedBench:
    """A context's pages in bf16, as ``store`` has them in f32."""

    def __init__(
        self, model: LoadedModel, pages: ModelPages, store: HotStore, options: EvaluationOptions
    ) -> None:
        self._pages = with_number_type(pages, NumberType.BF16)
        self._options = options
        half = replace(model, hot_types=HotTypes.plain(torch.bfloat16))
        layers = manager_layers(half, options.tokens_per_block)
        self._store = HotStore(
            store.device, layers, options.tokens_per_block, store.max_blocks, store.num_tail_blocks
        )
        for index in range(len(model.layers)):
            for role in (KEY_ROLE, VALUE_ROLE):
                source, target = (s.hot_array(LayerId(index), role) for s in (store, self._store))
                numbers = torch.from_numpy(source).view(torch.float32)
                torch.from_numpy(target).view(torch.bfloat16).copy_(numbers)

    def measure(self, setting: CodecSetting) -> SpeedSamples:
        """Blocks for the repetitions; one more comes first and does not count. Raises CodecError
        and ConfigurationError where the codec refuses the pages.
        """
        num_blocks, num_repeats = self._store.max_blocks, self._options.num_repeats
        blocks = HalfOpenRange(0, num_blocks)
        passage = Passage(
            self._store,
            setting.make(self._pages),
            separates_sinks=setting.separates_sinks,
            num_recent_blocks=setting.num_recent_blocks,
        )
        with contextlib.closing(passage):
            num_bytes = passage.hot_bytes(num_blocks, blocks)
            target, source = np.zeros(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
            works = (
                lambda: passage.encode(num_blocks, blocks),
                lambda: passage.decode(num_blocks, blocks),
                lambda: np.copyto(target, source),
            )
            rounds = [[timed_ms(work) for work in works] for _ in range(num_repeats + 1)][1:]
            encode, decode, copy = (tuple(column) for column in zip(*rounds, strict=True))
            return SpeedSamples(num_bytes, passage.body_ratio(), encode, decode, copy)

    def close(self) -> None:
        """Free the pages."""
        self._store.free()
