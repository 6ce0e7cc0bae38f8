"""CUDA's attention operators as their rules say, computed by definition: what breaks a rule fails
here too.
"""

from __future__ import annotations

import torch

from coldpage.engine.attention.dense_attention import BIAS_ALIGNMENT, CudaOperators, plain_attention

HALF = (torch.float16, torch.bfloat16)


class StandIns:
    """The three operators; ``calls`` says which were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def operators(self, dtype: torch.dtype) -> CudaOperators:
        """Those that a GPU has for the dtype."""
        is_half = dtype in HALF
        return CudaOperators(
            self._cudnn if is_half else None, self._flash if is_half else None, self._efficient
        )

    def _cudnn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_bias: torch.Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None,
    ) -> tuple[torch.Tensor, ...]:
        self.calls.append("cudnn")
        assert query.dtype in HALF and attn_bias is None
        assert compute_log_sumexp and dropout_p == 0 and not return_debug_mask
        assert not is_causal or query.shape[2] == key.shape[2]
        out, lse = plain_attention(query, key, value, is_causal=is_causal, scale=scale)
        return out, lse[..., None], torch.empty(0)

    def _flash(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None,
    ) -> tuple[torch.Tensor, ...]:
        self.calls.append("flash")
        assert query.dtype in HALF and query.shape[3] % 8 == 0
        assert dropout_p == 0 and not return_debug_mask
        assert not is_causal or query.shape[2] == key.shape[2]
        out, lse = plain_attention(query, key, value, is_causal=is_causal, scale=scale)
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse, torch.empty(0)

    def _efficient(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_bias: torch.Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None,
    ) -> tuple[torch.Tensor, ...]:
        self.calls.append("efficient")
        assert compute_log_sumexp and dropout_p == 0
        assert key.shape[:2] == query.shape[:2] == value.shape[:2]
        assert query.stride(3) == key.stride(3) == value.stride(3) == 1
        assert not is_causal or query.shape[2] == key.shape[2]
        if attn_bias is not None:
            assert attn_bias.dtype == query.dtype
            assert attn_bias.shape == (*query.shape[:3], key.shape[2])
            assert attn_bias.stride(3) == 1
            assert all(s % BIAS_ALIGNMENT == 0 for s in attn_bias.stride()[:3])
        out, lse = plain_attention(
            query, key, value, bias=attn_bias, is_causal=is_causal, scale=scale
        )
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
        return out.transpose(1, 2).contiguous().transpose(1, 2), padded, torch.empty(0)
