"""Streams of a CUDA device."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Accesses, Event, PageParts, Stream
from coldpage.device.copies import CopyList, merge_copies, page_copies, run_copies
from coldpage.device.cuda.closing import run_all
from coldpage.device.cuda.copies import split_at, submit_copies
from coldpage.device.cuda.driver import LEGACY_STREAMS, DriverError, HostFunction
from coldpage.device.cuda.events import CudaEvent, HostWork, Timeline
from coldpage.device.cuda.link import KernelShare, kernel_share
from coldpage.device.cuda.runtime import CudaRuntime
from coldpage.errors import ClosedError, SubmissionError
from coldpage.types import PAGE_INDEX_PAIR, DeviceArray, Int64Array, MemAddress

__all__ = ["CudaStream"]

# Host functions on their way, by the number that the driver hands back.
_host_work: dict[int, HostWork] = {}
_work_numbers = itertools.count(1)


@HostFunction  # type: ignore[untyped-decorator]
def _run_host_work(number: int) -> None:
    _host_work.pop(number).run()


class CudaStream(Stream):
    """A stream of a device, its own or somebody else's.

    A host function that raises poisons the stream: host functions behind it do not run, its events
    raise, and every later call raises DeviceError from the exception. Copies behind it run.
    """

    runs_kernels = True

    def __init__(self, runtime: CudaRuntime, name: str, handle: int, *, is_owned: bool) -> None:
        self.name = name
        self.handle = handle
        self.timeline = Timeline(name, runtime.context, runtime.events)
        self._runtime = runtime
        self._driver = runtime.driver
        self._context = runtime.context
        self._is_owned = is_owned
        self._is_closed = False
        self._host_work: tuple[HostWork, ...] = ()
        self._lane: int | None = None
        self._torch_stream: Any = None

    # ------------------------------------------------------------------ work

    def launch(self, work: Callable[[], None], *, reads: Accesses, writes: Accesses) -> None:
        """Enqueue ``work``; a thread of the driver runs it. It must call nothing of CUDA, and
        reaches page-locked memory only. Nobody checks its accesses.
        """
        self._check()
        host_work = HostWork(self.named(work), self._host_work)
        number = next(_work_numbers)
        _host_work[number] = host_work
        try:
            with self._context:
                self._driver.call("cuLaunchHostFunc", self.handle, _run_host_work, number)
        except DriverError as error:
            del _host_work[number]
            raise self._rejected("a host function", str(error)) from error
        self._host_work = (host_work,)

    def launch_kernels(self, submit: Callable[[], None]) -> None:
        """Call ``submit`` while this is torch's current stream."""
        self._check()
        with self._context, self._kernels_of("a launch of kernels"), self._torch():
            submit()

    def copy(self, dst: Int64Array, src: Int64Array, num_bytes: Int64Array) -> None:
        """Enqueue the copies, in batches of the driver; those between two places of the host as a
        host function, since the driver would make the caller wait for their turn.
        """
        assert dst.shape == src.shape == num_bytes.shape, "three [num_copies] arrays"
        self._check()
        registrar = self._runtime.registrar
        is_on_host = registrar.are_pinned(dst) & registrar.are_pinned(src)
        if is_on_host.any():
            kept = dst[is_on_host], src[is_on_host], num_bytes[is_on_host]
            self.launch(lambda: run_copies(kept), reads=(), writes=())
            dst, src, num_bytes = (column[~is_on_host] for column in (dst, src, num_bytes))
        if dst.size:
            copies = dst, src, num_bytes
            self._submit("a copy", lambda: self._submit_copies(copies, self.handle))

    def _submit_copies(self, copies: CopyList, stream: int) -> None:
        copies = merge_copies(*copies)
        copies = split_at(copies, self._runtime.registrar.boundaries)
        dst, src, sizes = (np.ascontiguousarray(column, np.int64) for column in copies)
        if sizes.size:
            submit_copies(self._driver, (dst, src, sizes), stream)

    def copy_pages(self, parts: PageParts, pairs: DeviceArray) -> None:
        """Enqueue a kernel that copies the pages; the driver takes its share of them meanwhile
        where that is faster and ``pairs.host`` is known.
        """
        self._check()
        if not pairs.size:
            with self._context:
                self._launch_kernel(parts, pairs.address, 0, 1)
            return
        self._submit("a copy of pages", lambda: self._copy_pages(parts, pairs))

    def _copy_pages(self, parts: PageParts, pairs: DeviceArray) -> None:
        is_upload = self._runtime.registrar.is_pinned(MemAddress(int(parts.src_base[0])))
        traffic = self._runtime.traffic
        share = kernel_share(
            int(parts.num_bytes.min()),
            is_upload=is_upload,
            is_both_ways=traffic.is_busy(is_upload=not is_upload),
        )
        host = pairs.host
        if host is None:
            share = KernelShare(max(share.num_programs, 1), 1.0)
        num_kernel = int(share.fraction * pairs.size)
        lane = self.handle
        if 0 < num_kernel < pairs.size:
            lane = self._side_lane()
            self._order(self.handle, lane)
        try:
            # The kernel first: it moves already while the driver's copies are being submitted.
            if num_kernel:
                self._launch_kernel(parts, pairs.address, num_kernel, share.num_programs)
            if num_kernel < pairs.size:
                assert host is not None and host.dtype == PAGE_INDEX_PAIR
                rest = host[num_kernel:].view(PAGE_INDEX_PAIR)
                self._submit_copies(page_copies(parts, rest), lane)
        finally:
            if lane != self.handle:
                self._join(lane)
        traffic.sent(self.handle, is_upload=is_upload)

    def _join(self, lane: int) -> None:
        """Later work comes after what is on the lane, also where that is only a part."""
        try:
            self._order(lane, self.handle)
        except DriverError:
            # Nobody would wait for what is there already, so that is done here.
            self._driver.call("cuStreamSynchronize", lane)
            raise

    def _side_lane(self) -> int:
        """A stream beside this one, for copies that run while a kernel does."""
        if self._lane is None:
            self._lane = self._driver.create_stream()
        return self._lane

    def _order(self, first: int, then: int) -> None:
        """What comes on stream ``then`` starts after what is on stream ``first``."""
        event = self._runtime.events.take()
        try:
            self._driver.call("cuEventRecord", event, first)
            self._driver.call("cuStreamWaitEvent", then, event, 0)
        finally:
            # The wait keeps what the event is now, so the handle is free again.
            self._runtime.events.give_back(event)

    def _launch_kernel(
        self, parts: PageParts, pairs: MemAddress, num_pages: int, num_programs: int
    ) -> None:
        with self._kernels_of("the kernel of a copy of pages"):
            self._run_kernel(parts, pairs, num_pages, num_programs)

    def _run_kernel(
        self, parts: PageParts, pairs: MemAddress, num_pages: int, num_programs: int
    ) -> None:
        with self._torch():
            from coldpage.kernels.page_copy import PagePart, copy_part

            for part in parts.rows():
                copy_part(int(pairs), num_pages, PagePart(*part), num_programs)

    @contextlib.contextmanager
    def _kernels_of(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # torch and triton have no exception of their own for it
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise self._rejected(what, text) from error

    @contextlib.contextmanager
    def _torch(self) -> Iterator[None]:
        """This is torch's current stream within."""
        # torch and triton load here, with the first kernel, and not with the device.
        import torch

        index = self._runtime.index
        if self._torch_stream is None:
            if self.handle in LEGACY_STREAMS:  # torch knows it by neither handle
                self._torch_stream = torch.cuda.default_stream(index)
            else:
                self._torch_stream = torch.cuda.ExternalStream(self.handle, device=index)  # type: ignore[no-untyped-call]
        with torch.cuda.device(index), torch.cuda.stream(self._torch_stream):
            yield

    def upload(self, dst: MemAddress, data: npt.NDArray[np.uint8]) -> None:
        """Enqueue the copy of the array as it is now."""
        assert data.dtype == np.uint8 and data.ndim == 1, "bytes [num_bytes]"
        self._check()
        if data.size:
            kept, is_to_host = np.ascontiguousarray(data), self._runtime.registrar.is_pinned(dst)
            upload = self._runtime.uploader.upload
            self._submit("an upload", lambda: upload(dst, kept, self.handle, is_to_host=is_to_host))

    def _submit(self, what: str, submit: Callable[[], None]) -> None:
        try:
            with self._context:
                submit()
        except DriverError as error:
            raise self._rejected(what, str(error)) from error

    def _rejected(self, what: str, why: str) -> SubmissionError:
        return SubmissionError(f"{what} was rejected on stream {self.name!r}: {why}")

    # ------------------------------------------------------------------ order

    def record(self) -> CudaEvent:
        """An event for all work enqueued so far."""
        self._check()
        self._host_work = tuple(work for work in self._host_work if not work.is_fine)
        with self._context:
            return self.timeline.record(self.handle, self._host_work)

    def wait(self, event: Event) -> None:
        """Hold later work until ``event`` is done."""
        assert isinstance(event, CudaEvent), "an event of a CUDA device"
        self._check()
        self.timeline.raise_failure(event.host_work)
        if event.handle is None or event.timeline is self.timeline:
            return
        with self._context:
            self._driver.call("cuStreamWaitEvent", self.handle, event.handle, 0)
        running = tuple(work for work in event.host_work if not work.is_fine)
        self._host_work = (*self._host_work, *running)

    def synchronize(self) -> None:
        """Block until all enqueued work has completed, as it has once the device is closed. Raises
        DeviceError when some failed.
        """
        if not self._is_closed:
            with self._context:
                self._driver.call("cuStreamSynchronize", self.handle)
        self.timeline.raise_failure(self._host_work)

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the stream {self.name!r} is closed")
        self.timeline.raise_failure(self._host_work)

    def raise_unheard_failure(self) -> None:
        """Raise DeviceError when a host function failed here and no call has told so."""
        if not self.timeline.num_failures_told:
            self.timeline.raise_failure(self._host_work)

    def close(self) -> None:
        """Finish what is enqueued; a stream of its own is gone then. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        destroyed = [lane for lane in (self._lane,) if lane is not None]
        if self._is_owned:
            destroyed.append(self.handle)
        with self._context:
            run_all(
                [
                    partial(self._driver.call, "cuStreamSynchronize", self.handle),
                    self.timeline.close,
                    *(partial(self._driver.call, "cuStreamDestroy_v2", it) for it in destroyed),
                ]
            )
