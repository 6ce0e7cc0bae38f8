"""The device seam: memory, streams, events, batched copies and file I/O.

Everything above this layer names memory by integer addresses and orders work by events, so the same
code runs on a GPU, in host memory and on the simulated device. On the host device an address is a
real address of this process.

Ordering rule: work on one stream runs in order; between streams, and between a stream and I/O, only
an event or a completion that was waited for orders anything.
"""

from __future__ import annotations

import abc
import enum
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.errors import DeviceError, SubmissionError
from coldpage.types import ByteRange, DeviceArray, Int64Array, MemAddress

__all__ = [
    "Accesses",
    "Completion",
    "Device",
    "DeviceBytes",
    "Event",
    "IoBatch",
    "IoExecutor",
    "IoJob",
    "Memory",
    "MemoryKind",
    "PageParts",
    "Stream",
    "work_error",
]


# Memory that gets ready tells nobody: whoever waits looks this often.
_READY_INTERVAL_S: Final = 0.01

Accesses = Sequence[ByteRange] | Callable[[], Sequence[ByteRange]]


class MemoryKind(enum.Enum):
    """What a memory is for; the host device gives ordinary RAM for both."""

    DEVICE = "device"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True, eq=False)
class PageParts:
    """How pages that are copied lie on both sides, as int64 columns [num_parts]: part ``p`` of the
    page in slot ``s`` is the ``num_bytes[p]`` bytes at ``base[p] + s * stride_bytes[p]``.
    """

    dst_base: Int64Array
    dst_stride_bytes: Int64Array
    src_base: Int64Array
    src_stride_bytes: Int64Array
    num_bytes: Int64Array

    def rows(self) -> Iterator[tuple[int, int, int, int, int]]:
        """The parts one by one: the columns' numbers, in their order."""
        columns = (
            self.dst_base,
            self.dst_stride_bytes,
            self.src_base,
            self.src_stride_bytes,
            self.num_bytes,
        )
        return zip(*(column.tolist() for column in columns), strict=True)


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes [num_rows, num_bytes] in memory that the host can not reach, rows ``stride_bytes``
    apart. Array libraries of the device take it without a copy: ``torch.as_tensor(bytes)``.
    """

    address: MemAddress
    num_rows: int
    num_bytes: int
    stride_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.num_rows, self.num_bytes),
            "strides": (self.stride_bytes, 1),
            "typestr": "|u1",
            "data": (int(self.address), False),
            "version": 3,
        }


class Completion(abc.ABC):
    """Something submitted earlier that is done or not: a stream event or an I/O batch."""

    @abc.abstractmethod
    def is_done(self) -> bool:
        """Whether the work has completed. Never blocks. Once True, stays True."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until the work has completed."""


class Event(Completion):
    """A point in a stream.

    Done when all work enqueued on the stream before ``record`` has completed.
    """


def work_error(stream_name: str, failure: BaseException) -> DeviceError:
    """What calls raise, from ``failure``, after work on the stream has raised that."""
    words = " ".join([repr(failure), *getattr(failure, "__notes__", ())])
    return DeviceError(f"work on stream {stream_name!r} failed: {words}")


class Stream(abc.ABC):
    """An in-order queue of asynchronous work.

    A call that raises SubmissionError may have enqueued a part of its work, unless it says
    otherwise. That part keeps its place in the order, so an event recorded afterwards fences both
    sides: whoever called waits for one before it gives sources or destinations to others. What the
    destinations hold counts for nothing.
    """

    name: str
    # Whether kernels of a GPU can be enqueued here.
    runs_kernels: bool = False
    # On whose behalf work is being launched, which the error of work that raises names.
    caller: str = ""

    @abc.abstractmethod
    def launch(
        self,
        work: Callable[[], None],
        *,
        reads: Accesses,
        writes: Accesses,
    ) -> None:
        """Enqueue ``work``, a function of the host, which touches exactly the ranges named: memory
        that the host can reach.

        Where they are known only once earlier work on the stream has run, such as addresses that
        lie in device memory, a function names them: a device that checks accesses calls it just
        before ``work`` runs, others never. Raises SubmissionError, enqueuing nothing.
        """

    def named(self, work: Callable[[], None]) -> Callable[[], None]:
        """``work``, with a note of the caller of now in whatever it raises."""
        caller = self.caller
        if not caller:
            return work

        def run() -> None:
            try:
                work()
            except BaseException as error:
                error.add_note(caller)
                raise

        return run

    def launch_kernels(self, submit: Callable[[], None]) -> None:
        """Call ``submit`` now, which enqueues kernels of a GPU on torch's current stream: that is
        this one until it returns, on this one's device. Only where ``runs_kernels``.

        Raises SubmissionError, also for whatever ``submit`` raises; then some of its kernels may
        have been enqueued.
        """
        raise SubmissionError(f"the device of stream {self.name!r} runs no kernels of a GPU")

    @abc.abstractmethod
    def copy(self, dst: Int64Array, src: Int64Array, num_bytes: Int64Array) -> None:
        """Enqueue copies ``dst[i] <- src[i]`` of ``num_bytes[i]`` bytes (addresses, all
        [num_copies]).

        The arrays are consumed before the call returns. Destinations must not overlap each other or
        any source. Raises SubmissionError; then some of the copies may have been enqueued.
        """

    @abc.abstractmethod
    def copy_pages(self, parts: PageParts, pairs: DeviceArray) -> None:
        """Enqueue the copy of whole pages: for each PAGE_INDEX_PAIR ``(dst, src)`` in device memory
        slot ``src`` becomes slot ``dst``, part by part.

        ``pairs`` are read when the work runs, and stay until then; ``pairs.host`` is consumed
        before the call returns. No destination overlaps another or any source. Raises
        SubmissionError; then a part of the pages may have been enqueued.

        With no pairs nothing is enqueued: what copies of such parts would else wait for at first,
        such as compiling, is done, and may block. Addresses of memory are to be given all the same.
        """

    @abc.abstractmethod
    def upload(self, dst: MemAddress, data: npt.NDArray[np.uint8]) -> None:
        """Enqueue the copy of ``data`` [num_bytes], ordinary memory of the host, to ``dst``.

        The array is consumed before the call returns; it need not be contiguous, and may be empty.
        Raises SubmissionError; then a part of the bytes may have been enqueued.
        """

    @abc.abstractmethod
    def record(self) -> Event:
        """An event for all work enqueued so far."""

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """Work enqueued after this call starts only when ``event`` is done.

        Does not block the caller.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block until all enqueued work has completed; when the device is closed, it has."""


class Memory(abc.ABC):
    """One allocation.

    Freed by ``free`` (or the device's ``close``), never by the garbage collector.
    """

    kind: MemoryKind
    address: MemAddress
    num_bytes: int
    max_bytes: int  # how far ``resize`` can go: ``num_bytes`` at first, unless it is growable

    @property
    def num_ready_bytes(self) -> int:
        """How much from the start on can be used now. A device may prepare a large memory in the
        background; then this grows, up to ``num_bytes``, at any time.
        """
        return self.num_bytes

    @property
    def is_host_reachable(self) -> bool:
        """Whether ``array`` works."""
        return True

    @property
    @abc.abstractmethod
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes as a writable array [num_bytes]; raises DeviceError where the host can not
        reach them. After a ``resize`` ask for it again.
        """

    @abc.abstractmethod
    def resize(self, num_bytes: int) -> None:
        """Grow or shrink in place: the address stays, and so does what both sizes share.

        What grows has undefined contents. Nothing may be in flight on what is cut off. Raises
        DeviceError, changing nothing, when there is not enough memory or ``num_bytes`` is over
        ``max_bytes``.
        """

    @abc.abstractmethod
    def free(self) -> None:
        """Give the memory back. The caller has synchronised everything that used it."""


@dataclass(frozen=True, slots=True)
class IoJob:
    """One I/O of one page, run on an I/O thread. ``run`` returns whether the page is good.

    ``run`` must not raise for expected failures (a wrong checksum, EIO): it returns False. It reads
    and writes memory exactly in the ranges named.
    """

    run: Callable[[], bool]
    reads: tuple[ByteRange, ...] = ()
    writes: tuple[ByteRange, ...] = ()


class IoBatch(Completion):
    """A batch of I/O jobs in flight; done when every job has ended, well or badly."""

    @property
    @abc.abstractmethod
    def ok(self) -> npt.NDArray[np.bool_]:
        """Per job, in submission order, whether it succeeded. Only when done."""


class IoExecutor(abc.ABC):
    """Runs I/O jobs asynchronously with a bounded number in flight."""

    @abc.abstractmethod
    def submit(self, jobs: Sequence[IoJob]) -> IoBatch:
        """Queue the jobs. Never blocks on I/O."""

    @abc.abstractmethod
    def close(self) -> None:
        """Finish what is queued, then stop."""


class Device(abc.ABC):
    """Makes memory and streams, and runs file I/O."""

    name: str
    io: IoExecutor
    # Parts of pages up to this size move faster by ``copy_pages`` than by ``copy``; 0: none do.
    max_page_kernel_bytes: int = 0

    @abc.abstractmethod
    def allocate(self, num_bytes: int, kind: MemoryKind, *, is_growable: bool = False) -> Memory:
        """Memory aligned to 4096 bytes. Growable memory has addresses set aside, so that it can be
        resized up to a ``max_bytes`` that the device chooses. Raises DeviceError when there is not
        enough.
        """

    @abc.abstractmethod
    def create_stream(self, name: str) -> Stream:
        """A new stream, ordered with no other."""

    def wait_until_ready(self, memory: Memory, timeout_s: float) -> bool:
        """Block until all bytes of the memory can be used; False when the time is over first. A
        device that knows that they never will be raises DeviceError at once.
        """
        deadline_s = time.monotonic() + timeout_s
        while memory.num_ready_bytes < memory.num_bytes:
            if time.monotonic() > deadline_s:
                return False
            self.wait_for_progress(_READY_INTERVAL_S)
        return True

    @abc.abstractmethod
    def wait_for_progress(self, timeout_s: float) -> None:
        """Block until some event or I/O batch may have completed since the last call, or the time
        is over.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Synchronise everything, stop the threads and free the memory. Idempotent."""
