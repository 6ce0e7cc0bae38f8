"""Where in a page's bytes each stored number lies: what pages written before are read by."""

from __future__ import annotations

import pytest
import torch

from coldpage.kernels.kv_types import BF16, Q8_0, TURBO4, KVType, page_views

BLOCK, HEADS, HEAD_DIM = 16, 3, 256


@pytest.mark.parametrize("is_value", [False, True], ids=["key", "value"])
@pytest.mark.parametrize("kv_type", [Q8_0, TURBO4, BF16], ids=lambda t: t.name)
def test_every_number_has_its_place(kv_type: KVType, is_value: bool) -> None:
    num_bytes = BLOCK * HEADS * kv_type.vector_bytes(HEAD_DIM)
    pool = torch.randint(0, 256, (2, num_bytes + 64), dtype=torch.uint8)[:, 32:-32]
    pages = page_views(pool, kv_type, BLOCK, HEADS, HEAD_DIM, is_value=is_value)
    parts = {Q8_0: 8, TURBO4: 2, BF16: 1}[kv_type]
    part_values = {Q8_0: 32, TURBO4: 64, BF16: 256}[kv_type]
    assert pages.values.shape == (2, BLOCK, HEADS, parts, part_values)
    assert pages.head_dim == HEAD_DIM
    size = kv_type.value_dtype.itemsize
    for token, head, part, number in ((0, 0, 0, 1), (1, 2, parts - 1, 5), (15, 1, 0, 31)):
        if kv_type != BF16 and is_value:
            index = ((head * parts + part) * part_values + number) * BLOCK + token
        else:
            index = ((head * parts + part) * BLOCK + token) * part_values + number
        stored = pool[1, index * size : (index + 1) * size]
        assert torch.equal(
            pages.values[1, token, head, part, number].reshape(1).view(torch.uint8), stored
        )
        if pages.scales is None:
            continue
        index = (head * BLOCK + token) * parts + part
        at = BLOCK * HEADS * kv_type.num_values(HEAD_DIM) + index * 2
        scale = pages.scales[1, token, head, part]
        assert torch.equal(scale.reshape(1).view(torch.uint8), pool[1, at : at + 2])
