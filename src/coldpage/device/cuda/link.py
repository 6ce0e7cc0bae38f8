"""Who carries pages across the link: the driver, the page kernel, or both.

The driver's copies use the link best when segments are large. Each costs it 0.5 us to submit and a
pause between two, so small segments are mostly for the kernel, whose packets carry less each; in
between both share the pages, and one fills the pauses of the other. That is so while the link is
busy one way: both ways at once the kernel's reads and writes are in each other's way, and the
driver's are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coldpage.device.cuda.driver import Driver
from coldpage.device.cuda.events import EventPool

__all__ = ["KERNEL_MAX_BYTES", "KernelShare", "LinkTraffic", "kernel_share"]


@dataclass(frozen=True, slots=True)
class KernelShare:
    """The fraction of the pages that the kernel copies, with so many programs; the driver takes the
    others meanwhile.
    """

    num_programs: int
    fraction: float


_DRIVER_ALONE: Final = KernelShare(0, 0.0)
# Up to so many bytes a segment: uploads (host to device), downloads. Measured on an H200, see
# docs/PERFORMANCE.md. More programs move no more, and take from decoding what they occupy.
_KERNEL_ALONE: Final = KernelShare(4, 1.0), KernelShare(3, 1.0)
_SHARES: Final = (
    (24 * 1024, *_KERNEL_ALONE),
    (48 * 1024, KernelShare(4, 0.7), KernelShare(3, 0.7)),
    (96 * 1024, KernelShare(2, 0.5), KernelShare(3, 0.65)),
    (192 * 1024, _DRIVER_ALONE, KernelShare(2, 0.65)),
)
# The same while pages go the other way too.
_BOTH_WAYS: Final = (
    (48 * 1024, *_KERNEL_ALONE),
    (96 * 1024, KernelShare(2, 0.5), KernelShare(3, 0.65)),
    (192 * 1024, _DRIVER_ALONE, _DRIVER_ALONE),
)
KERNEL_MAX_BYTES: Final = _SHARES[-1][0]


def kernel_share(segment_bytes: int, *, is_upload: bool, is_both_ways: bool) -> KernelShare:
    """The best found for pages whose smallest part has that size. Pure."""
    for max_bytes, upload, download in _BOTH_WAYS if is_both_ways else _SHARES:
        if segment_bytes <= max_bytes:
            return upload if is_upload else download
    # Whoever asks for larger pages this way wants the kernel.
    return _KERNEL_ALONE[0 if is_upload else 1]


class LinkTraffic:
    """Whether pages are on their way, up and down. The context is current in every call."""

    def __init__(self, driver: Driver, events: EventPool) -> None:
        self._driver = driver
        self._events = events
        self._last: dict[bool, int] = {}  # by direction: an event behind the last pages

    def is_busy(self, *, is_upload: bool) -> bool:
        """Whether the last pages that went this way may not have arrived."""
        last = self._last.get(is_upload)
        return last is not None and not self._driver.is_event_done(last)

    def sent(self, stream: int, *, is_upload: bool) -> None:
        """Note that pages go this way with what is on the stream so far."""
        if is_upload not in self._last:
            self._last[is_upload] = self._events.take()
        self._driver.call("cuEventRecord", self._last[is_upload], stream)

    def close(self) -> None:
        """Give the events back. Idempotent."""
        while self._last:
            self._events.give_back(self._last.popitem()[1])
