"""The check of a packed page on a GPU: sums over all buffers, and results that come later."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coldpage.kernels.cold.formats import ColdFormat, KVShape, NumberType, PackedBuffers
from coldpage.kernels.cold.gpu_guard import GpuCheck, squares_reference
from coldpage.kernels.cold.gpu_pages import GpuPages, current_device
from tests.kernels.conftest import HAS_GPU

pytestmark = [pytest.mark.gpu] if HAS_GPU else []

_TYPES = {
    NumberType.BF16: torch.bfloat16,
    NumberType.F16: torch.float16,
    NumberType.F32: torch.float32,
}
_NUM_SLOTS = 3


class _Scene:
    """Two kinds of buffers in tensors [num_slots, num_buffers, num_numbers]."""

    def __init__(self, number_type: NumberType) -> None:
        self.device = current_device()
        dtype, generator = _TYPES[number_type], torch.Generator().manual_seed(5)
        kinds = (
            (ColdFormat.INT8, KVShape(3, 5, 24, number_type), 2),
            (ColdFormat.TURBO4, KVShape(1, 16, 128, number_type), 1),
        )
        self.hot, self.buffers, offset = [], [], 0
        sizes = [it.buffer_bytes(shape) for it, shape, count in kinds for _ in range(count)]
        for cold_format, shape, count in kinds:
            numbers = torch.randn(_NUM_SLOTS, count, shape.num_numbers, generator=generator)
            hot = numbers.to(self.device, dtype)
            size = cold_format.buffer_bytes(shape)
            self.buffers.append(
                PackedBuffers(
                    cold_format,
                    shape,
                    hot.data_ptr() + np.arange(count) * shape.num_bytes,
                    np.full(count, count * shape.num_bytes),
                    offset + np.arange(count) * size,
                    sum(sizes),
                    None,
                    None,
                )
            )
            self.hot.append(hot)
            offset += count * size
        self.cold = torch.zeros(4, sum(sizes), dtype=torch.uint8, device=self.device)

    def pairs(self, *pairs: tuple[int, int]) -> torch.Tensor:
        return torch.tensor(pairs, dtype=torch.int32, device=self.device)

    def pack(self, pairs: torch.Tensor) -> None:
        pages = GpuPages(self.buffers)
        pages.pack(self.cold.data_ptr(), pairs.data_ptr(), len(pairs), None)

    def finish(self) -> None:
        if HAS_GPU:
            torch.cuda.synchronize()


@pytest.mark.parametrize("number_type", list(NumberType))
def test_squares_are_those_of_what_comes_back(number_type: NumberType) -> None:
    scene, other = _Scene(number_type), _Scene(number_type)
    check = GpuCheck(scene.buffers)
    check.warm_up()
    assert check.take_results() == []
    for numbers in scene.hot:
        numbers[..., ::5] = 0  # which does not count
    pairs = scene.pairs((3, 1), (0, 2))
    scene.pack(pairs)
    for index, tag in ((1, 7), (0, 8)):
        assert check.enqueue(scene.cold.data_ptr(), pairs.data_ptr() + 8 * index, None, tag)
    scene.finish()
    found = check.take_results()
    assert [tag for tag, _ in found] == [7, 8]
    assert check.take_results() == []
    back = scene.pairs((2, 0), (1, 3))  # the same slots, in another scene
    GpuPages(other.buffers).unpack(scene.cold.data_ptr(), back.data_ptr(), 2, None)
    scene.finish()
    for slot, (_, squares) in zip((2, 1), found, strict=True):
        wanted = sum(
            squares_reference(was[slot].ravel(), now[slot].ravel())
            for was, now in zip(scene.hot, other.hot, strict=True)
        )
        assert isinstance(wanted, torch.Tensor)
        np.testing.assert_allclose(squares, wanted.cpu(), rtol=1e-4)
        assert squares[0] > 0


def test_a_check_reads_and_writes_nothing_else() -> None:
    scene = _Scene(NumberType.F32)
    pairs = scene.pairs((3, 1))
    scene.pack(pairs)
    was = [tensor.clone() for tensor in (*scene.hot, scene.cold, pairs)]
    check = GpuCheck(scene.buffers)
    check.warm_up()
    check.enqueue(scene.cold.data_ptr(), pairs.data_ptr(), None, 0)
    scene.finish()
    for before, after in zip(was, (*scene.hot, scene.cold, pairs), strict=True):
        assert torch.equal(before, after)


def test_no_more_are_on_their_way_than_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coldpage.kernels.cold.gpu_guard._MAX_RUNNING", 3)
    scene = _Scene(NumberType.F32)
    pairs = scene.pairs((3, 1))
    scene.pack(pairs)
    check = GpuCheck(scene.buffers)
    accepted = [
        check.enqueue(scene.cold.data_ptr(), pairs.data_ptr(), None, index) for index in range(5)
    ]
    assert accepted == [True] * 3 + [False] * 2
    scene.finish()
    assert [tag for tag, _ in check.take_results()] == [0, 1, 2]
    assert check.enqueue(scene.cold.data_ptr(), pairs.data_ptr(), None, 1)
    scene.finish()
