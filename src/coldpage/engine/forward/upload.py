"""A step's small tensors go to the device together, in one transfer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any, Final, TypeVar

import torch

__all__ = ["pack", "packed_bytes", "to_buffer", "to_device", "unpack"]

# Where a part may begin: a multiple of what any kernel reads at once.
_ALIGNMENT_BYTES: Final = 256

_Tree = TypeVar("_Tree")


def to_device(tree: _Tree, device: torch.device) -> _Tree:
    """The same tuples, named or not, lists and values, with every tensor on ``device``. On the CPU
    that is ``tree`` itself; elsewhere it enqueues one copy on the current stream, and the tensors
    of ``tree`` may be changed at once.
    """
    if device.type == "cpu":
        return tree
    packed, _ = pack(list(_tensors(tree)), pin_memory=True)
    return unpack(tree, packed.to(device, non_blocking=True))


def to_buffer(tree: _Tree, buffer: torch.Tensor) -> _Tree:
    """The same tree with every tensor in ``buffer``, bytes on some device: at the same places
    whenever the shapes are the same. Enqueues one copy on the current stream."""
    packed, _ = pack(list(_tensors(tree)), pin_memory=buffer.is_cuda)
    buffer[: len(packed)].copy_(packed, non_blocking=True)
    return unpack(tree, buffer)


def packed_bytes(tree: object) -> int:
    """What ``to_buffer`` needs."""
    return _offsets(list(_tensors(tree)))[-1]


def pack(tensors: list[torch.Tensor], *, pin_memory: bool) -> tuple[torch.Tensor, list[int]]:
    """The bytes of all tensors in one row, and where in it each begins."""
    offsets = _offsets(tensors)
    packed = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=pin_memory)
    for tensor, offset in zip(tensors, offsets, strict=False):
        _part(packed, tensor, offset).copy_(tensor)
    return packed, offsets[:-1]


def unpack(tree: _Tree, packed: torch.Tensor) -> _Tree:
    """The same tree with what ``pack`` made of its tensors, in the memory of ``packed``."""
    tensors = list(_tensors(tree))
    parts = map(partial(_part, packed), tensors, _offsets(tensors))
    result: _Tree = _with_tensors(tree, parts)
    return result


def _offsets(tensors: list[torch.Tensor]) -> list[int]:
    sizes = [-(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for tensor in tensors]
    return list(accumulate(sizes, initial=0))


def _part(packed: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    return packed[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def _tensors(node: object) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, tuple | list):
        for child in node:
            yield from _tensors(child)


def _with_tensors(node: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        return next(tensors)
    if not isinstance(node, tuple | list):
        return node
    children = [_with_tensors(child, tensors) for child in node]
    return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)
