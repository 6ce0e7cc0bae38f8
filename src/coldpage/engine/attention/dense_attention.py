"""Attention over keys that lie in a row, with its log-sum-exp: one contract, an operator for each
device. What is exact here: every operator is deterministic, and none drops or rounds a key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

__all__ = [
    "BIAS_ALIGNMENT",
    "CudaAttention",
    "CudaOperators",
    "DenseAttention",
    "cpu_attention",
    "dense_attention",
    "plain_attention",
]

# Elements. The memory-efficient CUDA operator reads rows of a bias in pieces of 16 bytes and more.
BIAS_ALIGNMENT: Final = 8
# cuDNN builds a plan for every shape it has not seen, which takes as long as many small calls. So
# it gets large chunks whose sizes come from a short list; on an H200 it does 1.4 times the work of
# the flash operator there.
_MIN_CUDNN_QUERIES: Final = 512
_CUDNN_SIZE_STEP: Final = 256
# Where the number of keys is not from that list, the most that is goes to cuDNN and the rest to the
# flash operator: of so many keys that saves more than two launches and a merge cost. At most a
# sixteenth is left, so that there are few sizes however many keys there are.
_MIN_SPLIT_KEYS: Final = 4096
_MIN_SPLIT_PARTS: Final = 16

# An operator of torch's with the arguments of its schema; the first two results count.
_Operator = Callable[..., Any]


class DenseAttention(Protocol):
    """Softmax of query times key, times value.

    ``query`` is [batch, heads, queries, head_dim]; ``key`` and ``value`` [batch, kv_heads, keys,
    head_dim] may have fewer heads: a query head then uses the KV head of its group, and where they
    have, ``batch`` is 1. ``bias`` is [batch or 1, 1, queries or 1, keys or more] of the query's
    dtype; what it has beyond the keys is not read, and the rows of its memory begin at multiples of
    BIAS_ALIGNMENT. No query is masked from every key. ``is_causal`` is for as many keys as queries.
    ``scale`` None is 1 / sqrt(head_dim).
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        is_causal: bool = False,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, heads, queries, head_dim] in the query's dtype, and the natural log-sum-exp of
        the scores [batch, heads, queries] in f32. Deterministic."""
        ...


def dense_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> DenseAttention:
    """What computes attention on this device."""
    if device.type == "cpu":
        return cpu_attention
    return CudaAttention(_operators_of(device, dtype, head_dim))


def cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See DenseAttention.

    Only this operator, of those that ``scaled_dot_product_attention`` chooses from on a CPU,
    returns the log-sum-exp.
    """
    out: tuple[torch.Tensor, torch.Tensor] = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query,
            key,
            value,
            is_causal=is_causal,
            attn_mask=None if bias is None else bias[..., : key.shape[2]],
            scale=scale,
        )
    )
    return out


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See DenseAttention: by its definition, in f32, with all scores in memory."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    groups = query.shape[1] // key.shape[1]
    keys, values = (t.float().repeat_interleave(groups, 1) for t in (key, value))
    scores = query.float() @ keys.transpose(-1, -2)
    scores *= query.shape[3] ** -0.5 if scale is None else scale
    if bias is not None:
        scores += bias[..., :num_keys]
    if is_causal:
        later = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).triu(1)
        scores.masked_fill_(later, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    out = torch.exp(scores - lse[..., None]) @ values
    return out.to(query.dtype), lse


@dataclass(frozen=True, slots=True)
class CudaOperators:
    """The operators that one GPU has for one dtype and head size; None: not that one."""

    cudnn: _Operator | None  # half precision, no bias
    flash: _Operator | None  # half precision, no bias
    efficient: _Operator | None  # every dtype, any bias, as many KV heads as heads


def _operators_of(device: torch.device, dtype: torch.dtype, head_dim: int) -> CudaOperators:
    """Asks torch, which knows the GPUs and what the user has switched off."""
    backends: Any = torch.backends.cuda
    sample = torch.empty(1, 1, 2 * _CUDNN_SIZE_STEP, head_dim, dtype=dtype, device=device)
    question = backends.SDPAParams(sample, sample, sample, None, 0.0, False, False)
    aten: Any = torch.ops.aten
    return CudaOperators(
        cudnn=aten._scaled_dot_product_cudnn_attention.default
        if backends.can_use_cudnn_attention(question)
        else None,
        flash=aten._scaled_dot_product_flash_attention.default
        if backends.can_use_flash_attention(question)
        else None,
        efficient=aten._scaled_dot_product_efficient_attention.default
        if backends.can_use_efficient_attention(question)
        else None,
    )


class CudaAttention:
    """DenseAttention by whichever operator fits the call: of the shapes only, so that equal calls
    give equal bits."""

    def __init__(self, operators: CudaOperators) -> None:
        self._operators = operators

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        is_causal: bool = False,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DenseAttention."""
        operators = self._operators
        if bias is None and operators.cudnn is not None and _is_for_cudnn(query, key):
            # Its causal mask starts at the first key whatever the sizes, which are equal here.
            out, lse = operators.cudnn(
                query, key, value, None, True, 0.0, is_causal, False, scale=scale
            )[:2]
            return out, lse.reshape(out.shape[:3])
        num_split = _keys_for_cudnn(query, key)
        if bias is None and operators.cudnn is not None and not is_causal and num_split:
            return self._in_two(query, key, value, num_split, scale)
        if bias is None and operators.flash is not None:
            out, lse = operators.flash(query, key, value, 0.0, is_causal, False, scale=scale)[:2]
            return out, lse
        if operators.efficient is not None:
            return self._efficient(operators.efficient, query, key, value, bias, is_causal, scale)
        return plain_attention(query, key, value, bias=bias, is_causal=is_causal, scale=scale)

    def _in_two(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        split: int,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``split`` keys and the others apart. For a batch of one."""
        from coldpage.kernels.merge_attention import merge_attention

        first = self(query, key[:, :, :split], value[:, :, :split], scale=scale)
        rest = self(query, key[:, :, split:], value[:, :, split:], scale=scale)
        return merge_attention(*first, *rest, out=first[0])

    @staticmethod
    def _efficient(
        operator: _Operator,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads, num_queries, head_dim = query.shape[1:]
        kv_heads, num_keys = key.shape[1:3]
        groups = heads // kv_heads
        if groups > 1:
            # It knows no groups of heads. The n-th query heads of all groups become entry n of the
            # batch, and all entries read the same keys: strides of 0 instead of copies.
            assert query.shape[0] == 1
            query = query[0].view(kv_heads, groups, num_queries, head_dim).transpose(0, 1)
            key, value = (t.expand(groups, -1, -1, -1) for t in (key, value))
        if bias is not None:
            bias = bias[..., :num_keys].expand(*query.shape[:3], num_keys)
        out, lse = operator(query, key, value, bias, True, 0.0, is_causal, scale=scale)[:2]
        lse = lse[..., :num_queries]  # it comes in multiples of 32
        if groups > 1:
            out = out.transpose(0, 1).reshape(1, heads, num_queries, head_dim)
            lse = lse.transpose(0, 1).reshape(1, heads, num_queries)
        return out, lse


def _keys_for_cudnn(query: torch.Tensor, key: torch.Tensor) -> int:
    """How many of a long row of keys make a shape for cuDNN; 0: none, or all of them do."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_keys < _MIN_SPLIT_KEYS or query.shape[0] > 1:
        return 0
    if num_queries < _MIN_CUDNN_QUERIES or num_queries % _CUDNN_SIZE_STEP:
        return 0
    step = max(_CUDNN_SIZE_STEP, 1 << (num_keys // _MIN_SPLIT_PARTS).bit_length() - 1)
    return num_keys - num_keys % step


def _is_for_cudnn(query: torch.Tensor, key: torch.Tensor) -> bool:
    num_queries, num_keys = query.shape[2], key.shape[2]
    return (
        num_queries >= _MIN_CUDNN_QUERIES
        and num_queries % _CUDNN_SIZE_STEP == 0
        and num_keys % _CUDNN_SIZE_STEP == 0
    )
