"""What packing is for: the same memory has more to give back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.codec_capacity import NUM_HOST_CONVERSATIONS, come_back, make_prompts
from coldpage.engine.model import calibration
from coldpage.engine.model.random_model import ModelGeometry, random_model

# The heads of SmolLM2, and two layers of them.
GEOMETRY = ModelGeometry(2, 9, 3, 64, 72, 64, 320, 4096)


@pytest.mark.usefixtures("one_thread")
def test_4_bits_give_back_3_4_times_as_many_tokens_from_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First blocks are whole: of 94 blocks of a conversation, 93 take 34 bytes for 128."""
    monkeypatch.setattr(calibration, "model_cache_directory", lambda: tmp_path)
    reused = {}
    for codec in ("concat", "turbo4"):
        model = random_model(GEOMETRY, torch.device("cpu"), torch.bfloat16)
        prompts = make_prompts(model, 4 * NUM_HOST_CONVERSATIONS + 1)
        reused[codec] = come_back(model, codec, prompts).host_tokens
    room = NUM_HOST_CONVERSATIONS * 97 * 16  # tokens, without a codec
    assert 0.95 * room <= reused["concat"] <= room
    assert 3.4 * reused["concat"] <= reused["turbo4"] <= 94 / (93 * 34 / 128 + 1) * room
