"""A stream that watches what a codec does with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Accesses, Event, Memory, PageParts, Stream
from coldpage.errors import SubmissionError
from coldpage.types import ByteRange, DeviceArray, Int64Array, MemAddress

__all__ = ["WatchedStream"]

_Mask = npt.NDArray[np.bool_]


class WatchedStream(Stream):
    """Passes everything on, and rejects a submission where it is told to. Codecs get this stream;
    whoever tries them uses the one within.

    With ``isolates``, launched work sees only the bytes that it has declared: before it runs, the
    rest of the ``memories`` is zeroed, and put back afterwards. ``findings`` says in sentences what
    it wrote beside its ranges. Only for a device on which nothing else runs meanwhile, and while
    the host reaches all of the memories.
    """

    def __init__(self, stream: Stream, memories: Sequence[Memory], *, isolates: bool) -> None:
        self.name = stream.name
        self.runs_kernels = stream.runs_kernels
        self.inner = stream
        self.submissions_until_rejection: int | None = None
        self.is_in_codec_call = False
        self.findings: list[str] = []
        self._memories = memories
        self._isolates = isolates

    def launch(self, work: Callable[[], None], *, reads: Accesses, writes: Accesses) -> None:
        """As the stream within, with the work in isolation."""
        self._count()
        if self._isolates and all(memory.is_host_reachable for memory in self._memories):
            self.inner.launch(self._isolate(work, reads, writes), reads=reads, writes=writes)
        else:
            self.inner.launch(work, reads=reads, writes=writes)

    def launch_kernels(self, submit: Callable[[], None]) -> None:
        """As the stream within."""
        self._count()
        self.inner.launch_kernels(submit)

    def copy(self, dst: Int64Array, src: Int64Array, num_bytes: Int64Array) -> None:
        """As the stream within."""
        self._count()
        self.inner.copy(dst, src, num_bytes)

    def copy_pages(self, parts: PageParts, pairs: DeviceArray) -> None:
        """As the stream within."""
        self._count()
        self.inner.copy_pages(parts, pairs)

    def upload(self, dst: MemAddress, data: npt.NDArray[np.uint8]) -> None:
        """As the stream within."""
        self._count()
        self.inner.upload(dst, data)

    def record(self) -> Event:
        """As the stream within."""
        return self.inner.record()

    def wait(self, event: Event) -> None:
        """As the stream within."""
        self.inner.wait(event)

    def synchronize(self) -> None:
        """As the stream within, and a finding when a codec asks for it."""
        if self.is_in_codec_call:
            self.findings.append("the codec synchronises the stream: it must only enqueue")
        self.inner.synchronize()

    def _count(self) -> None:
        if not self.is_in_codec_call:
            self.findings.append(
                f"the codec uses stream {self.name!r} outside of a call that names it"
            )
        if self.submissions_until_rejection is not None:
            self.submissions_until_rejection -= 1
            if self.submissions_until_rejection <= 0:
                self.submissions_until_rejection = None
                raise SubmissionError(f"stream {self.name!r} was told to reject this")

    def _isolate(
        self, work: Callable[[], None], reads: Accesses, writes: Accesses
    ) -> Callable[[], None]:
        def run() -> None:
            readable, writable = self._masks(reads), self._masks(writes)
            arrays = [memory.array for memory in self._memories]
            before = [array.copy() for array in arrays]
            for array, mask in zip(arrays, readable, strict=True):
                array[~mask] = 0
            shown = [array.copy() for array in arrays]
            try:
                work()
            finally:
                for index, array in enumerate(arrays):
                    stray = np.flatnonzero((array != shown[index]) & ~writable[index])
                    if stray.size:
                        self.findings.append(
                            f"work writes {stray.size} bytes that it has not declared, the first "
                            f"at {self._memories[index].address + int(stray[0]):#x}"
                        )
                    array[~writable[index]] = before[index][~writable[index]]

        return run

    def _masks(self, accesses: Accesses) -> list[_Mask]:
        """By memory, which bytes are declared."""
        ranges = list(accesses() if callable(accesses) else accesses)
        return [_mask(memory, ranges) for memory in self._memories]


def _mask(memory: Memory, ranges: Sequence[ByteRange]) -> _Mask:
    mask = np.zeros(memory.num_bytes, np.bool_)
    for part in ranges:
        start = part.address - memory.address
        if 0 <= start < memory.num_bytes:
            mask[start : start + part.num_bytes] = True
    return mask
