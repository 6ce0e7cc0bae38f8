"""A step's tensors travel as one and arrive as they were."""

from __future__ import annotations

import numpy as np
import torch

from coldpage.engine.attention.step_plan import GroupPlan, ItemSpan, plan_group
from coldpage.engine.forward import upload

CPU = torch.device("cpu")


def plans() -> list[GroupPlan]:
    slots = np.arange(40, dtype=np.int32)
    slots[3] = -1
    items = [
        ItemSpan(0, 60, 1, slots),
        ItemSpan(1, 33, 1, slots + 40),
        ItemSpan(2, 10, 30, slots + 80),
    ]
    return [plan_group(items, 4, window, torch.bfloat16) for window in (None, 24)]


def tensors(node: object) -> list[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return [node]
    children = node if isinstance(node, tuple | list) else ()
    return [found for child in children for found in tensors(child)]


def shape_of(node: object) -> object:
    if isinstance(node, torch.Tensor):
        return None
    if isinstance(node, tuple | list):
        return type(node), [shape_of(child) for child in node]
    return node


def test_on_the_cpu_nothing_moves() -> None:
    tree = plans()
    assert upload.to_device(tree, CPU) is tree


def test_a_step_arrives_in_one_copy_as_it_was() -> None:
    tree = (torch.zeros(0, dtype=torch.int64), plans(), torch.arange(7)[None])
    leaves = tensors(tree)
    packed, offsets = upload.pack(leaves, pin_memory=False)
    assert all(offset % 256 == 0 for offset in offsets)
    got = upload.unpack(tree, packed)
    assert shape_of(got) == shape_of(tree)
    for before, after in zip(leaves, tensors(got), strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)
        assert after.numel() == 0 or after.untyped_storage().data_ptr() == packed.data_ptr()
    assert {leaf.dtype for leaf in leaves} == {torch.int64, torch.int32, torch.bfloat16}
