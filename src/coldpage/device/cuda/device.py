"""A CUDA device: its memory, its streams, and the limits of its driver."""

from __future__ import annotations

import time
from typing import Final

from coldpage.device.base import Device, Memory, MemoryKind
from coldpage.device.cuda.closing import run_all
from coldpage.device.cuda.driver import Context, Driver
from coldpage.device.cuda.events import EventPool
from coldpage.device.cuda.link import KERNEL_MAX_BYTES, LinkTraffic
from coldpage.device.cuda.memory import DeviceMemory
from coldpage.device.cuda.pinned import PinnedMemory, Registrar
from coldpage.device.cuda.runtime import CudaRuntime
from coldpage.device.cuda.stream import CudaStream
from coldpage.device.cuda.upload import Uploader
from coldpage.device.io import NUM_IO_THREADS, ThreadedIo
from coldpage.device.progress import Progress
from coldpage.errors import ClosedError, DeviceError

__all__ = ["CudaDevice"]

# CUdevice_attribute
_VIRTUAL_MEMORY_MANAGEMENT: Final = 102
_CAN_USE_HOST_POINTER: Final = 91

# The driver tells nobody when an event is reached: whoever waits looks this often.
_LOOK_INTERVAL_S: Final = 50e-6
# Nor does memory that gets ready, which takes longer.
_READY_INTERVAL_S: Final = 0.01


class CudaDevice(Device):
    """An NVIDIA GPU by its CUDA index. Owned by one thread.

    Parts of pages up to ``max_page_kernel_bytes`` are copied by a kernel (which needs torch and
    triton), larger ones by the driver; None is what was measured to be best. Raises DeviceError
    where there is no such GPU, or its driver lacks something.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        max_page_kernel_bytes: int | None = None,
        num_io_threads: int = NUM_IO_THREADS,
        driver: Driver | None = None,
        is_batched: bool = True,
    ) -> None:
        """``driver`` stands in for the machine's; ``is_batched`` False does without batched copies
        as on drivers before 12.8.
        """
        self.driver = Driver() if driver is None else driver
        if not is_batched:
            self.driver.forbid_batch_copy()
        count = self.driver.device_count()
        if not 0 <= index < count:
            raise DeviceError(f"there is no CUDA device {index}: this machine has {count}")
        self.name = f"cuda:{index}"
        self.index = index
        self.product_name = self.driver.device_name(index)
        self._require(_VIRTUAL_MEMORY_MANAGEMENT, "virtual memory management")
        self._require(_CAN_USE_HOST_POINTER, "host memory at the same address")
        self.max_page_kernel_bytes = (
            KERNEL_MAX_BYTES if max_page_kernel_bytes is None else max_page_kernel_bytes
        )
        context, events = Context(self.driver, index), EventPool(self.driver)
        self.runtime = CudaRuntime(
            index=index,
            driver=self.driver,
            context=context,
            events=events,
            uploader=Uploader(self.driver),
            registrar=Registrar(self.driver, context),
            traffic=LinkTraffic(self.driver, events),
        )
        self._progress = Progress()
        self.io: ThreadedIo = ThreadedIo(self._progress, num_io_threads)
        self._streams: list[CudaStream] = []
        self._memories: list[Memory] = []
        self._is_closed = False

    def _require(self, attribute: int, what: str) -> None:
        if not self.driver.device_attribute(self.index, attribute):
            raise DeviceError(f"{self.product_name} ({self.name}) has no {what}, which is needed")

    # ------------------------------------------------------------------ memory

    def allocate(self, num_bytes: int, kind: MemoryKind, *, is_growable: bool = False) -> Memory:
        """DEVICE memory, or PINNED host memory that gets ready in the background. What is growable
        can take all memory of the device, or of the host where it lends so many addresses.
        """
        self._check_open()
        assert num_bytes > 0, "an allocation needs at least one byte"
        if kind is MemoryKind.PINNED:
            memory: Memory = PinnedMemory(
                self.runtime.registrar, num_bytes, is_growable=is_growable
            )
        else:
            limit = self.driver.total_bytes(self.index)
            max_bytes = max(num_bytes, limit) if is_growable else num_bytes
            memory = DeviceMemory(
                self.driver, self.runtime.context, self.index, num_bytes, max_bytes
            )
        self._memories.append(memory)
        return memory

    def wait_until_ready(self, memory: Memory, timeout_s: float) -> bool:
        """Block until all bytes of the memory can be used; False when the time is over first.

        Raises DeviceError, naming the driver's reason, as soon as a piece could not be page-locked.
        """
        deadline_s = time.monotonic() + timeout_s
        while memory.num_ready_bytes < memory.num_bytes:
            if isinstance(memory, PinnedMemory):
                memory.raise_failure()
            rest_s = deadline_s - time.monotonic()
            if rest_s <= 0:
                return False
            self.wait_for_progress(min(_READY_INTERVAL_S, rest_s))
        return True

    # ------------------------------------------------------------------ streams

    def create_stream(self, name: str) -> CudaStream:
        """A new stream, which does not wait for the legacy default stream."""
        self._check_open()
        with self.runtime.context:
            handle = self.driver.create_stream()
        return self._keep(CudaStream(self.runtime, name, handle, is_owned=True))

    def wrap_stream(self, handle: int, name: str) -> CudaStream:
        """A stream that belongs to somebody else, such as ``torch.cuda.Stream.cuda_stream``, who
        keeps it until the device is closed.
        """
        self._check_open()
        return self._keep(CudaStream(self.runtime, name, handle, is_owned=False))

    def _keep(self, stream: CudaStream) -> CudaStream:
        self._streams.append(stream)
        return stream

    def wait_for_progress(self, timeout_s: float) -> None:
        """Block until an event or I/O may have completed since the last call, also if somebody
        else found the event done, or the time is over.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            # All are asked: what one call tells, the next must not tell again.
            if sum(stream.timeline.take_news() for stream in self._streams):
                return
            has_events = any(stream.timeline.has_events for stream in self._streams)
            rest_s = deadline_s - time.monotonic()
            if rest_s <= 0:
                return
            wait_s = min(_LOOK_INTERVAL_S, rest_s) if has_events else rest_s
            if self._progress.wait(wait_s):
                return

    def close(self) -> None:
        """Finish all work, stop the threads, free the memory. Idempotent.

        Raises the first failure of a part when all have been closed, else DeviceError when a host
        function failed and no call has told so yet.
        """
        if self._is_closed:
            return
        self._is_closed = True
        runtime = self.runtime
        run_all(
            [
                runtime.registrar.close,
                *(stream.close for stream in self._streams),
                self.io.close,
                *(memory.free for memory in self._memories),
                runtime.traffic.close,
                lambda: runtime.events.close(runtime.context),
                lambda: runtime.uploader.close(runtime.context),
                runtime.context.release,
                *(stream.raise_unheard_failure for stream in self._streams),
            ]
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the device is closed")
