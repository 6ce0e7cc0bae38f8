"""What the parts of one CUDA device share."""

from __future__ import annotations

from dataclasses import dataclass

from coldpage.device.cuda.driver import Context, Driver
from coldpage.device.cuda.events import EventPool
from coldpage.device.cuda.link import LinkTraffic
from coldpage.device.cuda.pinned import Registrar
from coldpage.device.cuda.upload import Uploader

__all__ = ["CudaRuntime"]


@dataclass(frozen=True, slots=True)
class CudaRuntime:
    """The driver, the device's context, and what is made once for it."""

    index: int
    driver: Driver
    context: Context
    events: EventPool
    uploader: Uploader
    registrar: Registrar
    traffic: LinkTraffic
