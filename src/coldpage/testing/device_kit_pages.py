"""What every device promises of copies of whole pages by index pairs in its memory.

A part of ``DeviceConformance``, which is what one subclasses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest

from coldpage.device.base import Device, Memory, MemoryKind, PageParts, Stream
from coldpage.errors import DeviceError, SubmissionError
from coldpage.testing.device_kit_memory import (
    DeviceMemoryConformance,
    byte_range,
    copy_bytes,
    fail,
    free_all,
    random_bytes,
    sleep_a_little,
)
from coldpage.testing.memory_access import allocate_ready, read_memory, write_memory
from coldpage.types import PAGE_INDEX_PAIR, DeviceArray, Int64Array, MemAddress

__all__ = ["DevicePageConformance", "PageSide", "copy_pages", "index_pairs", "page_parts"]

_Pairs = npt.NDArray[np.void]

# Where pages go: down, up, and between levels of the device.
_WAYS: Final = (
    (MemoryKind.PINNED, MemoryKind.DEVICE),
    (MemoryKind.DEVICE, MemoryKind.PINNED),
    (MemoryKind.DEVICE, MemoryKind.DEVICE),
)
_GUARD_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class PageSide:
    """One side of a copy: memory in which each part of the pages has a pool of its own."""

    memory: Memory
    starts: Int64Array  # of each pool in the memory, [num_parts]
    strides: Int64Array

    @classmethod
    def allocate(
        cls,
        device: Device,
        kind: MemoryKind,
        num_slots: int,
        strides: Sequence[int],
        offsets: Sequence[int],
    ) -> PageSide:
        """Pools that begin ``offsets`` bytes after multiples of 64, with nothing in them yet."""
        starts: list[int] = []
        stop = 0
        for stride, offset in zip(strides, offsets, strict=True):
            starts.append(-(-stop // _GUARD_BYTES) * _GUARD_BYTES + _GUARD_BYTES + offset)
            stop = starts[-1] + num_slots * stride
        memory = allocate_ready(device, stop + _GUARD_BYTES, kind)
        return cls(memory, np.array(starts, np.int64), np.array(strides, np.int64))

    def address_of(self, part: int, slot: int) -> int:
        """Of a part of a page, as an offset in the memory."""
        return int(self.starts[part] + slot * self.strides[part])


def index_pairs(dst: npt.ArrayLike, src: npt.ArrayLike) -> _Pairs:
    """PAGE_INDEX_PAIRs [num_pages]."""
    pairs = np.empty(np.size(dst), PAGE_INDEX_PAIR)
    pairs["dst"], pairs["src"] = dst, src
    return pairs


def page_parts(dst: PageSide, src: PageSide, num_bytes: Sequence[int]) -> PageParts:
    """How pages of parts of so many bytes lie on the two sides."""
    return PageParts(
        dst.starts + dst.memory.address,
        dst.strides,
        src.starts + src.memory.address,
        src.strides,
        np.array(num_bytes, np.int64),
    )


def copy_pages(
    stream: Stream, index: Memory, parts: PageParts, pairs: _Pairs, *, has_host: bool
) -> None:
    """Enqueue the upload of the pairs to ``index``, the copy, and what overwrites the pairs: they
    hold not a moment longer than the contract says.
    """
    assert pairs.nbytes <= index.num_bytes
    stream.upload(index.address, np.frombuffer(pairs.tobytes(), np.uint8))
    host = pairs.copy() if has_host else None
    stream.copy_pages(parts, DeviceArray(index.address, pairs.size, host))
    if host is not None:
        host[...] = np.zeros((), host.dtype)
    stream.upload(index.address, np.zeros(pairs.nbytes, np.uint8))


class DevicePageConformance(DeviceMemoryConformance):
    """Tests of ``Stream.copy_pages``."""

    def _check(
        self,
        device: Device,
        sides: tuple[PageSide, PageSide],
        num_bytes: Sequence[int],
        pairs: _Pairs,
        *,
        has_host: bool = True,
    ) -> None:
        """The pages go where they should, and not a byte else changes."""
        dst, src = sides
        for seed, side in enumerate(sides):
            write_memory(device, side.memory, random_bytes(seed, side.memory.num_bytes))
        expected, before = read_memory(device, dst.memory), read_memory(device, src.memory)
        for to, source in pairs.tolist():
            for part, size in enumerate(num_bytes):
                start, origin = dst.address_of(part, to), src.address_of(part, source)
                expected[start : start + size] = before[origin : origin + size]
        index = allocate_ready(device, max(1, pairs.nbytes), MemoryKind.DEVICE)
        write_memory(device, index, 0)
        stream = device.create_stream("pages")
        stream.launch(sleep_a_little, reads=(), writes=())  # so that nothing is read in time
        parts = page_parts(dst, src, num_bytes)
        copy_pages(stream, index, parts, pairs, has_host=has_host)
        stream.synchronize()
        _assert_equal(read_memory(device, dst.memory), expected)
        _assert_equal(read_memory(device, src.memory), before)
        free_all(dst.memory, src.memory, index)

    @pytest.mark.parametrize(("to", "source"), _WAYS)
    @pytest.mark.parametrize("size", [1, 3, 16, 100, 4096, 4099, 65536, 100_003, 1 << 20, 4 << 20])
    def test_pages_of_any_size(
        self, device: Device, size: int, to: MemoryKind, source: MemoryKind
    ) -> None:
        num_slots = 6 if size > 1 << 17 else 24
        dst = PageSide.allocate(device, to, num_slots, [size], [0])
        src = PageSide.allocate(device, source, num_slots, [size], [0])
        rng = np.random.default_rng(size)
        slots, sources = (rng.permutation(num_slots)[: num_slots // 2] for _ in range(2))
        self._check(device, (dst, src), [size], index_pairs(slots, sources))

    @pytest.mark.parametrize(("to", "source"), _WAYS)
    @pytest.mark.parametrize("align", [1, 2, 4, 8, 16])
    @pytest.mark.parametrize("other", [1, 8, 16])
    def test_pages_of_any_alignment(
        self, device: Device, align: int, other: int, to: MemoryKind, source: MemoryKind
    ) -> None:
        """Addresses, strides and sizes are odd multiples of the alignment, each side of its own."""
        size = 333 * align
        dst = PageSide.allocate(device, to, 9, [size, size + 2 * align], [align, 3 * align])
        src = PageSide.allocate(
            device, source, 9, [-(-size // other) * other + other, size], [other, 5 * other]
        )
        self._check(device, (dst, src), [size, size], index_pairs([8, 0, 3], [1, 0, 7]))

    @pytest.mark.parametrize(("to", "source"), _WAYS)
    @pytest.mark.parametrize("has_host", [False, True])
    @pytest.mark.parametrize("seed", range(4))
    def test_pages_of_several_parts(
        self, device: Device, seed: int, has_host: bool, to: MemoryKind, source: MemoryKind
    ) -> None:
        """Slots are larger than the parts, by different numbers of bytes on the two sides."""
        rng = np.random.default_rng(seed)
        sizes = rng.choice([1, 2, 7, 16, 48, 512, 1000, 8192, 33_000], 1 + seed).tolist()
        num_slots = 40
        strides, offsets = rng.integers(0, 3, (2, 2, len(sizes))) * rng.choice([1, 4, 16], 2)[0]
        dst = PageSide.allocate(device, to, num_slots, strides[0] + sizes, offsets[0])
        src = PageSide.allocate(device, source, num_slots, strides[1] + sizes, offsets[1])
        slots, sources = rng.permutation(num_slots)[:29], rng.permutation(num_slots)[:29]
        self._check(device, (dst, src), sizes, index_pairs(slots, sources), has_host=has_host)

    @pytest.mark.parametrize(("to", "source"), _WAYS)
    @pytest.mark.parametrize("has_host", [False, True])
    @pytest.mark.parametrize("num_pages", [0, 1, 2, 31, 2000])
    def test_any_number_of_pages(
        self, device: Device, num_pages: int, has_host: bool, to: MemoryKind, source: MemoryKind
    ) -> None:
        num_slots = num_pages + 1
        rng = np.random.default_rng(num_pages)
        dst = PageSide.allocate(device, to, num_slots, [48, 128], [0, 0])
        src = PageSide.allocate(device, source, num_slots, [48, 128], [0, 0])
        pairs = index_pairs(*(rng.permutation(num_slots)[:num_pages] for _ in range(2)))
        self._check(device, (dst, src), [48, 128], pairs, has_host=has_host)

    def test_one_page_may_go_to_many_slots(self, device: Device) -> None:
        dst = PageSide.allocate(device, MemoryKind.PINNED, 8, [500], [0])
        src = PageSide.allocate(device, MemoryKind.DEVICE, 8, [500], [4])
        self._check(device, (dst, src), [500], index_pairs(range(8), [3] * 8))

    def test_copies_of_pages_within_one_memory(self, device: Device) -> None:
        side = PageSide.allocate(device, MemoryKind.DEVICE, 12, [1000], [8])
        content = random_bytes(5, side.memory.num_bytes)
        write_memory(device, side.memory, content)
        pairs = index_pairs([0, 2, 11], [10, 1, 1])
        for to, source in pairs.tolist():
            start, origin = side.address_of(0, to), side.address_of(0, source)
            content[start : start + 1000] = content[origin : origin + 1000]
        index = allocate_ready(device, 64, MemoryKind.DEVICE)
        stream = device.create_stream("pages")
        copy_pages(stream, index, page_parts(side, side, [1000]), pairs, has_host=True)
        stream.synchronize()
        _assert_equal(read_memory(device, side.memory), content)
        free_all(side.memory, index)

    @pytest.mark.parametrize("has_host", [False, True])
    def test_copies_of_pages_keep_their_order(self, device: Device, has_host: bool) -> None:
        """With each other, with copies and with launched work, on one stream; all use one array of
        pairs.
        """
        down = PageSide.allocate(device, MemoryKind.PINNED, 32, [256], [0])
        hot = PageSide.allocate(device, MemoryKind.DEVICE, 32, [256], [0])
        index = allocate_ready(device, 64, MemoryKind.DEVICE)
        write_memory(device, down.memory, 0)
        write_memory(device, hot.memory, 0)
        stream, array = device.create_stream("pages"), down.memory.array
        first = down.address_of(0, 0)
        seen: list[int] = []
        for value in range(1, 21):
            content = np.full(256, value, np.uint8)
            address = MemAddress(down.memory.address + down.address_of(0, 31))
            stream.upload(address, content)
            up, back = page_parts(hot, down, [256]), page_parts(down, hot, [256])
            copy_pages(stream, index, up, index_pairs([7], [31]), has_host=has_host)
            copy_bytes(
                stream, hot.memory, hot.address_of(0, 8), hot.memory, hot.address_of(0, 7), 256
            )
            copy_pages(stream, index, back, index_pairs([0, value], [8, 7]), has_host=has_host)
            one = byte_range(down.memory, first, 1)
            stream.launch(lambda: seen.append(int(array[first])), reads=[one], writes=())
        stream.synchronize()
        assert seen == list(range(1, 21))
        for value in range(1, 21):
            start = down.address_of(0, value)
            assert array[start : start + 256].tolist() == [value] * 256
        free_all(down.memory, hot.memory, index)

    def test_a_copy_of_pages_waits_for_an_event(self, device: Device) -> None:
        """Of the stream that makes the pages; and the pages are there after its own event."""
        src = PageSide.allocate(device, MemoryKind.PINNED, 4, [4096], [0])
        dst = PageSide.allocate(device, MemoryKind.DEVICE, 4, [4096], [0])
        back = allocate_ready(device, dst.memory.num_bytes, MemoryKind.PINNED)
        index = allocate_ready(device, 64, MemoryKind.DEVICE)
        producer, mover, reader = (device.create_stream(name) for name in ("make", "move", "read"))
        array = src.memory.array
        array[:] = 0

        def work() -> None:
            sleep_a_little()
            array[:] = 9

        whole = byte_range(src.memory, 0, src.memory.num_bytes)
        producer.launch(work, reads=(), writes=[whole])
        mover.wait(producer.record())
        pairs = index_pairs([0, 1, 2, 3], [3, 2, 1, 0])
        copy_pages(mover, index, page_parts(dst, src, [4096]), pairs, has_host=True)
        reader.wait(mover.record())
        begin = dst.address_of(0, 0)
        copy_bytes(reader, back, begin, dst.memory, begin, 4 * 4096)
        reader.synchronize()
        assert (back.array[begin : begin + 4 * 4096] == 9).all()
        free_all(src.memory, dst.memory, back, index)

    def test_a_refused_copy_of_pages_can_be_repeated(self, device: Device) -> None:
        sides = [PageSide.allocate(device, kind, 4, [64], [0]) for kind in MemoryKind]
        dst, src = sides
        write_memory(device, src.memory, random_bytes(1, src.memory.num_bytes))
        index = allocate_ready(device, 64, MemoryKind.DEVICE)
        pairs = index_pairs([0, 1], [3, 2])
        write_memory(device, index, np.frombuffer(pairs.tobytes(), np.uint8))
        stream = device.create_stream("refused")
        if not self.inject_submission_failure(device):
            free_all(dst.memory, src.memory, index)
            pytest.skip("this device can not be made to refuse work")
        parts, lent = page_parts(dst, src, [64]), DeviceArray(index.address, 2, pairs)
        with pytest.raises(SubmissionError):
            stream.copy_pages(parts, lent)
        stream.synchronize()
        stream.copy_pages(parts, lent)
        stream.synchronize()
        found, original = read_memory(device, dst.memory), read_memory(device, src.memory)
        for to, source in pairs.tolist():
            start, origin = dst.address_of(0, to), src.address_of(0, source)
            _assert_equal(found[start : start + 64], original[origin : origin + 64])
        free_all(dst.memory, src.memory, index)

    def test_a_copy_of_pages_to_a_poisoned_stream_is_refused(self, device: Device) -> None:
        side = PageSide.allocate(device, MemoryKind.DEVICE, 4, [64], [0])
        index = allocate_ready(device, 64, MemoryKind.DEVICE)
        stream = device.create_stream("poisoned")
        stream.launch(fail, reads=(), writes=())  # type: ignore[arg-type]
        with pytest.raises(DeviceError):
            stream.synchronize()
        with pytest.raises(DeviceError):
            stream.copy_pages(page_parts(side, side, [64]), DeviceArray(index.address, 1))
        free_all(side.memory, index)


def _assert_equal(found: npt.NDArray[np.uint8], expected: npt.NDArray[np.uint8]) -> None:
    """As numpy's, which takes long to say where megabytes differ."""
    where = np.flatnonzero(found != expected)
    assert not where.size, f"{where.size} bytes differ, the first at {int(where[0])}"
