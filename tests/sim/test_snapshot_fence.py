"""Saving and restoring wait for what a refused codec call had enqueued before it was refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coldpage import (
    AttentionLayerConfig,
    BufferConfig,
    DeviceTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    SubmissionError,
)
from coldpage.device.simulated import SimulatedDevice
from coldpage.snapshot.transfer import PageTransfer
from coldpage.types import LayerGroupId, LayerId

GROUP = LayerGroupId(0)
SLOTS = np.array([2, 0], np.int32)


def move(transfer: PageTransfer, direction: str) -> None:
    if direction == "encode":
        next(transfer.encode(GROUP, SLOTS))
    else:
        transfer.decode(GROUP, SLOTS, lambda start, stop, pages: pages.fill(1))


@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_a_refused_call_leaves_nothing_running(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedDevice(raise_on_violation=True)
    layers = (AttentionLayerConfig(LayerId(0), (BufferConfig("key", 256),)),)
    config = KVCacheManagerConfig(4, (DeviceTierConfig(4096),), layers, 1.0, b"model" * 6 + b"xx")
    with KVCacheManager(config, device=device) as manager:
        transfer = PageTransfer(manager)
        codec: Any = transfer._codec.codec
        submit = getattr(codec, direction)

        def refuse_after_a_part(*arguments: Any) -> None:
            submit(*arguments)
            raise SubmissionError("the second part is refused")

        monkeypatch.setattr(codec, direction, refuse_after_a_part)
        with pytest.raises(SubmissionError):
            move(transfer, direction)
        assert transfer._stream.is_idle  # type: ignore[attr-defined]
        transfer.close()
    device.close()
