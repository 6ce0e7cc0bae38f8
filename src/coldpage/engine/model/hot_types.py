"""The types in which a model's keys and values are kept on the hot level, and which can be."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import torch

from coldpage.errors import ConfigurationError
from coldpage.kernels.kv_types import KV_TYPES, KVType, plain_type

__all__ = ["AUTO_TYPE", "HotTypes", "choose_hot_types", "why_unsupported"]

AUTO_TYPE: Final = "auto"
# Of the CUDA kernels, which address tokens of a page by bits.
_MIN_CUDA_BLOCK_TOKENS: Final = 16
# What one KV head reads of a page is a tile of theirs, in two bytes a number or more. Compiled for
# an H200, tiles of this size take up to 155 KB of its 227 KB of shared memory; larger ones do not
# fit.
_MAX_CUDA_TILE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class HotTypes:
    """How hot pages hold keys, and how values."""

    key: KVType
    value: KVType

    @classmethod
    def plain(cls, dtype: torch.dtype) -> HotTypes:
        """The model's own numbers, as they are."""
        return cls(plain_type(dtype), plain_type(dtype))

    @property
    def identity(self) -> str:
        """What makes the bytes of a page readable, and what it has lost; of pages in one type
        nothing is found in another."""
        return f"keys {self.key.identity}, values {self.value.identity}"

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether nothing is lost in a page of a model of this type, nor changed."""
        return self == HotTypes.plain(dtype)

    def __str__(self) -> str:
        return f"keys as {self.key.name} and values as {self.value.name}"


def choose_hot_types(key_name: str, value_name: str, dtype: torch.dtype) -> HotTypes:
    """The types of these names; ``auto`` is the one of the model's ``dtype``. Raises
    ConfigurationError for a name that is none."""
    types = {AUTO_TYPE: plain_type(dtype), **KV_TYPES}
    for name in (key_name, value_name):
        if name not in types:
            raise ConfigurationError(f"{name!r} is no cache type: use {', '.join(types)}")
    return HotTypes(types[key_name], types[value_name])


def why_unsupported(
    types: HotTypes,
    head_dims: Collection[int],
    tokens_per_block: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """One sentence that says what is supported instead; None where these are. Pure."""
    most_tokens = _most_cuda_block_tokens(types, head_dims)
    is_block_good = device.type != "cuda" or (
        _MIN_CUDA_BLOCK_TOKENS <= tokens_per_block <= most_tokens
        and tokens_per_block.bit_count() == 1
    )
    good = [t for t in KV_TYPES.values() if all(t.supports(n) for n in head_dims)]
    if is_block_good and types.key in good and types.value in good:
        return None
    heads = ", ".join(str(n) for n in sorted(set(head_dims)))
    blocks = (
        f"a power of two from {_MIN_CUDA_BLOCK_TOKENS} to {most_tokens} tokens a block"
        if device.type == "cuda"
        else "any number of tokens a block"
    )
    return (
        f"hot pages of {types} with {tokens_per_block} tokens a block are not supported for heads "
        f"of {heads} numbers in {str(dtype).removeprefix('torch.')} on {device.type}: supported "
        f"there are {', '.join(t.name for t in good)} for either, and {blocks}"
    )


def _most_cuda_block_tokens(types: HotTypes, head_dims: Collection[int]) -> int:
    number_bytes = max(2, types.key.value_dtype.itemsize, types.value.value_dtype.itemsize)
    most = _MAX_CUDA_TILE_BYTES // (number_bytes * max(head_dims))
    return 1 << most.bit_length() - 1
