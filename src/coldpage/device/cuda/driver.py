"""The CUDA driver through ctypes: the calls that the device needs, each return code checked.

ctypes rather than a binding package, because it hands numpy arrays to the batched copy as they are
and needs nothing that a driver does not bring along.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from types import TracebackType
from typing import Any, Final

from coldpage.errors import ClosedError, DeviceError

__all__ = [
    "BATCH_COPY_VERSION",
    "LEGACY_STREAMS",
    "AllocationProperties",
    "Context",
    "Driver",
    "DriverError",
    "HostFunction",
    "MemcpyAttributes",
    "SrcAccessOrder",
    "load_library",
]

# The driver version from which copies can be submitted in one batch.
BATCH_COPY_VERSION: Final = 12080
_CUDA_13: Final = 13000

# The legacy default stream, by its two handles: 0 and CU_STREAM_LEGACY.
LEGACY_STREAMS: Final = frozenset({0, 1})

_NOT_READY: Final = 600
HostFunction = ctypes.CFUNCTYPE(None, c_void_p)

_STREAM_NON_BLOCKING: Final = 1
_EVENT_DISABLE_TIMING: Final = 2
_HOST_REGISTER_PORTABLE_MAPPED: Final = 1 | 2
_LOCATION_DEVICE: Final = 1
_ALLOCATION_PINNED: Final = 1
_ACCESS_READ_WRITE: Final = 3
_GRANULARITY_MINIMUM: Final = 0
_SYMBOL_FOUND: Final = 0


class DriverError(DeviceError):
    """A driver call failed. ``name`` is the driver's name of the error."""

    def __init__(self, call: str, name: str, description: str) -> None:
        super().__init__(f"the CUDA driver refused {call}: {name} ({description})")
        self.name = name


class SrcAccessOrder:
    """When a copy may read its source."""

    STREAM: Final = 1  # in stream order
    DURING_API_CALL: Final = 2  # before the call returns


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("src_access_order", c_int),
        ("src_location_hint", _Location),
        ("dst_location_hint", _Location),
        ("flags", c_uint),
    )

    PREFER_OVERLAP_WITH_COMPUTE: Final = 1


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp: plain memory of one device."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", _Location),
        ("win32_handle_metadata", c_void_p),
        ("flags", _AllocationFlags),
    )

    @classmethod
    def of_device(cls, index: int) -> AllocationProperties:
        """Memory of device ``index``."""
        return cls(type=_ALLOCATION_PINNED, location=_Location(_LOCATION_DEVICE, index))


class _AccessDesc(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


_Ptr: Final = c_uint64  # CUdeviceptr
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpyAsync": (_Ptr, _Ptr, c_size_t, c_void_p),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemAddressReserve": (POINTER(_Ptr), c_size_t, c_size_t, _Ptr, c_uint64),
    "cuMemAddressFree": (_Ptr, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(AllocationProperties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (_Ptr, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (_Ptr, c_size_t),
    "cuMemSetAccess": (_Ptr, c_size_t, POINTER(_AccessDesc), c_size_t),
    "cuLaunchHostFunc": (c_void_p, HostFunction, c_void_p),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuLaunchKernel": (
        c_void_p,
        *(c_uint,) * 7,
        c_void_p,
        POINTER(c_void_p),
        c_void_p,
    ),
}


def load_library() -> Any:
    """libcuda. Raises DeviceError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(
            f"there is no CUDA driver on this machine ({error}): use the host device"
        ) from error


class Driver:
    """The loaded driver. Every method raises DriverError with the driver's name of the error.

    ``library`` stands in for libcuda in tests.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = load_library() if library is None else library
        self._functions: dict[str, Any] = {}
        for name, signature in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = signature, c_int
            self._functions[name] = function
        self.call("cuInit", 0)
        version = c_int()
        self.call("cuDriverGetVersion", byref(version))
        self.version = version.value
        self._batch_copy = self._find_batch_copy()

    def call(self, name: str, *arguments: object) -> None:
        """Call a driver function by name."""
        code = self._functions[name](*arguments)
        if code:
            raise self._error(name, code)

    def _error(self, call: str, code: int) -> DriverError:
        texts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            found = getattr(self._library, name)(c_int(code), byref(text))
            texts.append(text.value.decode() if not found and text.value else f"error {code}")
        return DriverError(call, texts[0], texts[1])

    # ------------------------------------------------------------------ devices

    def device_count(self) -> int:
        """How many devices there are."""
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return count.value

    def device_name(self, device: int) -> str:
        """The product name."""
        buffer = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", buffer, len(buffer), device)
        return buffer.value.decode()

    def device_attribute(self, device: int, attribute: int) -> int:
        """A CUdevice_attribute."""
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), attribute, device)
        return value.value

    def total_bytes(self, device: int) -> int:
        """All memory of the device."""
        value = c_size_t()
        self.call("cuDeviceTotalMem_v2", byref(value), device)
        return value.value

    # ------------------------------------------------------------------ streams and events

    def create_stream(self) -> int:
        """A stream that does not synchronise with the legacy default stream."""
        handle = c_void_p()
        self.call("cuStreamCreate", byref(handle), _STREAM_NON_BLOCKING)
        assert handle.value is not None
        return handle.value

    def create_event(self) -> int:
        """An event without timing."""
        handle = c_void_p()
        self.call("cuEventCreate", byref(handle), _EVENT_DISABLE_TIMING)
        assert handle.value is not None
        return handle.value

    def is_event_done(self, event: int) -> bool:
        """Whether the work before the event has completed."""
        code = self._functions["cuEventQuery"](event)
        if code == _NOT_READY:
            return False
        if code:
            raise self._error("cuEventQuery", code)
        return True

    # ------------------------------------------------------------------ copies

    def _find_batch_copy(self) -> Callable[..., None] | None:
        """cuMemcpyBatchAsync in the form that this driver has, without its outdated result."""
        if self.version < BATCH_COPY_VERSION:
            return None
        wanted = _CUDA_13 if self.version >= _CUDA_13 else BATCH_COPY_VERSION
        address, status = c_void_p(), c_int()
        find = self._library.cuGetProcAddress_v2
        code = find(b"cuMemcpyBatchAsync", byref(address), wanted, c_uint64(0), byref(status))
        if code or status.value != _SYMBOL_FOUND or not address.value:
            return None
        tail = (c_void_p,) if wanted >= _CUDA_13 else (c_void_p, c_void_p)
        prototype = ctypes.CFUNCTYPE(
            c_int, *(c_void_p,) * 3, c_size_t, c_void_p, c_void_p, c_size_t, *tail
        )
        function = prototype(address.value)

        def copy(*arguments: object) -> None:
            if wanted < _CUDA_13:
                failed = c_size_t()
                arguments = (*arguments[:-1], byref(failed), arguments[-1])
            code = function(*arguments)
            if code:
                raise self._error("cuMemcpyBatchAsync", code)

        return copy

    def forbid_batch_copy(self) -> None:
        """Do as a driver that has no batched copies."""
        self._batch_copy = None

    def has_batch_copy(self, stream: int) -> bool:
        """Whether ``copy_batch`` works on the stream: the driver takes none on the legacy default
        stream.
        """
        return self._batch_copy is not None and stream not in LEGACY_STREAMS

    def copy_batch(
        self, dst: int, src: int, num_bytes: int, count: int, order: int, stream: int
    ) -> None:
        """Enqueue ``count`` copies. ``dst``, ``src`` and ``num_bytes`` are addresses of arrays of
        64-bit addresses and sizes, which the call consumes.
        """
        assert self._batch_copy is not None
        attributes = MemcpyAttributes(
            src_access_order=order, flags=MemcpyAttributes.PREFER_OVERLAP_WITH_COMPUTE
        )
        first = c_size_t(0)
        self._batch_copy(dst, src, num_bytes, count, byref(attributes), byref(first), 1, stream)

    # ------------------------------------------------------------------ memory

    def granularity_bytes(self, properties: AllocationProperties) -> int:
        """What sizes and places of mapped memory are multiples of."""
        value = c_size_t()
        self.call(
            "cuMemGetAllocationGranularity", byref(value), byref(properties), _GRANULARITY_MINIMUM
        )
        return value.value

    def reserve_addresses(self, num_bytes: int) -> int:
        """Addresses without memory."""
        address = c_uint64()
        self.call("cuMemAddressReserve", byref(address), num_bytes, 0, 0, 0)
        return address.value

    def map_memory(self, address: int, num_bytes: int, properties: AllocationProperties) -> int:
        """Memory at reserved addresses; returns its handle. All or nothing."""
        handle = c_uint64()
        self.call("cuMemCreate", byref(handle), num_bytes, byref(properties), 0)
        try:
            self.call("cuMemMap", address, num_bytes, 0, handle, 0)
        except DriverError:
            self.call("cuMemRelease", handle)
            raise
        access = _AccessDesc(properties.location, _ACCESS_READ_WRITE)
        try:
            self.call("cuMemSetAccess", address, num_bytes, byref(access), 1)
        except DriverError:
            self.unmap_memory(address, num_bytes)
            self.release_memory(handle.value)
            raise
        return handle.value

    def unmap_memory(self, address: int, num_bytes: int) -> None:
        """Take what ``map_memory`` made from its addresses."""
        self.call("cuMemUnmap", address, num_bytes)

    def release_memory(self, handle: int) -> None:
        """Give back what ``map_memory`` made, once it was unmapped."""
        self.call("cuMemRelease", handle)

    def register_host(self, address: int, num_bytes: int) -> None:
        """Page-lock and map ordinary memory. Blocks while its pages are brought in."""
        self.call("cuMemHostRegister_v2", address, num_bytes, _HOST_REGISTER_PORTABLE_MAPPED)


class Context:
    """The primary context of a device: the one that the CUDA runtime, and so torch, uses.

    ``with context:`` makes it current on this thread for as long, and leaves the thread's own
    choice of a device as it was. Raises ClosedError once it was released.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._device = device
        handle = c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", byref(handle), device)
        self._handle = handle
        self._is_released = False

    def __enter__(self) -> None:
        if self._is_released:  # where it is not there any more the driver may crash
            raise ClosedError("the CUDA device is closed")
        self._driver.call("cuCtxPushCurrent_v2", self._handle)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def release(self) -> None:
        """Let go of it. Idempotent."""
        if self._is_released:
            return
        self._is_released = True
        self._driver.call("cuDevicePrimaryCtxRelease_v2", self._device)
