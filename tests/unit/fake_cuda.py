"""A stand-in for libcuda: it hands out numbers, counts calls, and fails where it is told to.

Nothing is copied: it is for what a device does around its calls, which no GPU that works would
show.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

NOT_READY = 600
OUT_OF_MEMORY = 2
_NAMES = {OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY"}


class _Function:
    """A function as ctypes has it: something callable that takes attributes."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> int:
        return self._call(*arguments)


class FakeCuda:
    """``fail(name, after=n)`` makes the n-th call from now on, counted from 0, return an error."""

    def __init__(self, version: int = 13000) -> None:
        self.calls: Counter[str] = Counter()
        self.arguments: dict[str, list[tuple[Any, ...]]] = {}
        self.done_events: set[int] = set()
        self.registered: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.handles: set[int] = set()
        self.context_depth = 0
        self._version = version
        self._failures: dict[str, int] = {}
        self._numbers = itertools.count(0x1000)
        self._addresses = itertools.count(1 << 40, 1 << 40)
        count = 8 if version >= 13000 else 9
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * count)
        self._batch_copy = kind(lambda *args: self._called("cuMemcpyBatchAsync", args))

    def fail(self, name: str, *, after: int = 0) -> None:
        self._failures[name] = self.calls[name] + after

    def __getattr__(self, name: str) -> _Function:
        if not name.startswith("cu"):
            raise AttributeError(name)
        body = getattr(self, f"_do_{name}", lambda *args: None)

        def call(*arguments: Any) -> int:
            code = self._called(name, arguments)
            if not code:
                code = body(*arguments) or 0
            return code

        function = _Function(call)
        setattr(self, name, function)
        return function

    def _called(self, name: str, arguments: tuple[Any, ...]) -> int:
        is_failing = self._failures.get(name) == self.calls[name]
        self.calls[name] += 1
        self.arguments.setdefault(name, []).append(arguments)
        return OUT_OF_MEMORY if is_failing else 0

    def _number(self, place: Any) -> None:
        place._obj.value = next(self._numbers)

    def _do_cuDriverGetVersion(self, place: Any) -> None:
        place._obj.value = self._version

    def _do_cuDeviceGetCount(self, place: Any) -> None:
        place._obj.value = 2

    def _do_cuDeviceGetName(self, buffer: Any, size: int, device: int) -> None:
        buffer.value = b"Fake GPU"

    def _do_cuDeviceGetAttribute(self, place: Any, attribute: int, device: int) -> None:
        place._obj.value = 1

    def _do_cuDeviceTotalMem_v2(self, place: Any, device: int) -> None:
        place._obj.value = 1 << 36

    def _do_cuMemGetAllocationGranularity(self, place: Any, properties: Any, option: int) -> None:
        place._obj.value = 2 << 20

    def _do_cuGetErrorName(self, code: Any, place: Any) -> int:
        place._obj.value = _NAMES.get(code.value)
        return 0 if code.value in _NAMES else 1

    def _do_cuGetProcAddress_v2(
        self, name: bytes, place: Any, version: int, flags: Any, status: Any
    ) -> None:
        place._obj.value = ctypes.cast(self._batch_copy, ctypes.c_void_p).value

    def _do_cuDevicePrimaryCtxRetain(self, place: Any, device: int) -> None:
        self._number(place)

    def _do_cuCtxPushCurrent_v2(self, context: Any) -> None:
        self.context_depth += 1

    def _do_cuCtxPopCurrent_v2(self, place: Any) -> None:
        self.context_depth -= 1

    def _do_cuStreamCreate(self, place: Any, flags: int) -> None:
        self._number(place)

    def _do_cuEventCreate(self, place: Any, flags: int) -> None:
        self._number(place)

    def _do_cuEventQuery(self, event: int) -> int:
        return 0 if event in self.done_events else NOT_READY

    def _do_cuMemAddressReserve(self, place: Any, *rest: Any) -> None:
        place._obj.value = next(self._addresses)

    def _do_cuMemCreate(self, place: Any, *rest: Any) -> None:
        self._number(place)
        self.handles.add(place._obj.value)

    def _do_cuMemRelease(self, handle: Any) -> None:
        self.handles.remove(getattr(handle, "value", handle))

    def _do_cuMemMap(self, address: int, num_bytes: int, *rest: Any) -> None:
        self.mapped[address] = num_bytes

    def _do_cuMemUnmap(self, address: int, num_bytes: int) -> None:
        assert self.mapped.pop(address) == num_bytes

    def _do_cuMemHostRegister_v2(self, address: int, num_bytes: int, flags: int) -> None:
        self.registered[address] = num_bytes

    def _do_cuLaunchHostFunc(self, stream: int, function: Any, number: int) -> None:
        function(number)

    def _do_cuMemHostUnregister(self, address: int) -> None:
        del self.registered[address]
