"""Runners on the kernels that a GPU has, on the CPU too: under Triton's interpreter."""

from __future__ import annotations

import pytest

from coldpage.engine.attention import attention_choice
from coldpage.engine.attention.dense_attention import CudaAttention
from coldpage.engine.forward import paged_model, runner
from coldpage.kernels import decode_attention
from tests.engine.stand_ins import StandIns


def use_kernels(patch: pytest.MonkeyPatch) -> StandIns:
    """From here on, runners that are made on the CPU do as on CUDA."""
    made = StandIns()
    # The interpreter runs one program after another, also those without work.
    patch.setattr(decode_attention, "_NUM_PROCESSORS", 2)
    for module in (attention_choice, runner):
        patch.setattr(module, "follows_tables", lambda device: True)
    patch.setattr(
        attention_choice,
        "dense_attention",
        lambda device, dtype, head_dim: CudaAttention(made.operators(dtype)),
    )
    assert paged_model.choose_attention is attention_choice.choose_attention
    return made
