"""Uploads of ordinary host memory: small arrays that the caller wants back at once.

The driver's batched copy can promise to have read its source when the call returns. Before it could
(12.8), on the legacy default stream, which takes no batches, and to destinations in host memory,
which it then writes at once instead of in stream order, the bytes travel as the parameters of a
kernel, some at a time, which a launch consumes.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_uint32, c_uint64, c_void_p
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.device.cuda.driver import Context, Driver, DriverError, SrcAccessOrder
from coldpage.types import MemAddress

__all__ = ["Uploader"]

# Parameters of a kernel may have 4 KiB on every device.
_SEGMENT_BYTES: Final = 4000
_NUM_THREADS: Final = 256
_KERNEL_NAME: Final = b"coldpage_upload"
_KERNEL: Final = f"""
.version 6.4
.target sm_52
.address_size 64
.visible .entry coldpage_upload(
    .param .u64 dst, .param .u32 num_bytes, .param .align 8 .b8 data[{_SEGMENT_BYTES}])
{{
    .reg .pred %done;
    .reg .b16 %byte;
    .reg .b32 %index, %stop;
    .reg .b64 %to, %from, %offset, %here;
    ld.param.u64 %to, [dst];
    cvta.to.global.u64 %to, %to;
    ld.param.u32 %stop, [num_bytes];
    mov.b64 %from, data;
    mov.u32 %index, %tid.x;
next:
    setp.ge.u32 %done, %index, %stop;
    @%done bra end;
    cvt.u64.u32 %offset, %index;
    add.s64 %here, %from, %offset;
    ld.param.u8 %byte, [%here];
    add.s64 %here, %to, %offset;
    st.global.u8 [%here], %byte;
    add.u32 %index, %index, {_NUM_THREADS};
    bra next;
end:
    ret;
}}
""".encode()


class Uploader:
    """Uploads of one context."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._module: int | None = None
        self._function = c_void_p()

    def upload(
        self, dst: MemAddress, data: npt.NDArray[np.uint8], stream: int, *, is_to_host: bool
    ) -> None:
        """Enqueue the copy of contiguous ``data`` [num_bytes], read before the call returns. A
        part may have been enqueued when it raises. The context is current.
        """
        if self._driver.has_batch_copy(stream) and not is_to_host:
            to, source, size = (
                np.array([value], np.int64) for value in (dst, data.ctypes.data, data.size)
            )
            places = to.ctypes.data, source.ctypes.data, size.ctypes.data
            self._driver.copy_batch(*places, 1, SrcAccessOrder.DURING_API_CALL, stream)
            return
        self._load()
        for start in range(0, data.size, _SEGMENT_BYTES):
            self._launch(MemAddress(dst + start), data[start : start + _SEGMENT_BYTES], stream)

    def _launch(self, dst: MemAddress, data: npt.NDArray[np.uint8], stream: int) -> None:
        segment = (ctypes.c_ubyte * _SEGMENT_BYTES)()
        ctypes.memmove(segment, data.ctypes.data, data.size)
        values = (c_uint64(dst), c_uint32(data.size), segment)
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        grid, block, shared_bytes = (1, 1, 1), (_NUM_THREADS, 1, 1), 0
        self._driver.call(
            "cuLaunchKernel", self._function, *grid, *block, shared_bytes, stream, pointers, None
        )

    def _load(self) -> None:
        """Have the kernel. All or nothing, so what failed once is tried again."""
        if self._module is not None:
            return
        module, function = c_void_p(), c_void_p()
        self._driver.call("cuModuleLoadData", byref(module), _KERNEL)
        try:
            self._driver.call("cuModuleGetFunction", byref(function), module, _KERNEL_NAME)
        except DriverError:
            self._driver.call("cuModuleUnload", module)
            raise
        self._module, self._function = module.value, function

    def close(self, context: Context) -> None:
        """Unload the kernel."""
        if self._module is not None:
            module, self._module = self._module, None
            with context:
                self._driver.call("cuModuleUnload", module)
