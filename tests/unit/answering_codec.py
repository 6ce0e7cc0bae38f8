"""A codec whose answers a test decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coldpage.codecs import ColdPageCodec, PoolGroupDesc, create_default_cold_page_codec
from coldpage.types import LifeCycleId, PageIndexLocation


class AnsweringCodec(ColdPageCodec):
    """The answers of the default codec, or others, and a note of what was asked in order."""

    codec_id = "odd"

    def __init__(self, **answers: Any) -> None:
        self._inner = create_default_cold_page_codec()
        self._answers = answers
        self.calls: list[str] = []
        self.described: list[PoolGroupDesc] = []
        self.num_closed = 0

    def _answer(self, name: str, life_cycle_id: LifeCycleId) -> Any:
        self.calls.append(f"{name} {life_cycle_id}")
        answers = self._answers.get(name, {})
        if isinstance(answers, Exception):
            raise answers
        if life_cycle_id in answers:
            return answers[life_cycle_id]
        return getattr(self._inner, name)(life_cycle_id)

    def configure(self, pool_groups: Sequence[PoolGroupDesc]) -> None:
        self.calls.append("configure")
        self.described = list(pool_groups)
        if "configure" in self._answers:
            raise self._answers["configure"]
        self._inner.configure(pool_groups)

    def query_cold_page_bytes(self, life_cycle_id: LifeCycleId) -> int:
        return self._answer("query_cold_page_bytes", life_cycle_id)

    def get_batching_layer_group_id(self, life_cycle_id: LifeCycleId) -> LifeCycleId:
        return self._answer("get_batching_layer_group_id", life_cycle_id)

    def query_page_index_location(self, life_cycle_id: LifeCycleId) -> PageIndexLocation:
        return self._answer("query_page_index_location", life_cycle_id)

    def encode(self, *args: Any) -> None:
        self._inner.encode(*args)

    def decode(self, *args: Any) -> None:
        self._inner.decode(*args)

    def close(self) -> None:
        self.num_closed += 1
