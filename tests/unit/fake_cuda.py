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
INVALID_VALUE = 1
_NAMES = {OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY", INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE"}
# The default stream by its two handles: it takes no batches.
_LEGACY_STREAMS = (None, 0, 1)


class _Function:
    """A function as ctypes has it: something callable that takes attributes."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> int:
        return self._call(*arguments)


class FakeCuda:
    """``fail(name, after=n)`` makes the n-th call from now on, counted from 0, return an error, and
    as many behind it as ``times`` says.

    ``_do_NAME`` is what a function does when it does not fail. It is looked up at each call, so a
    test can replace it at any time. Handles that were destroyed must not be used any more: there a
    driver may crash.
    """

    def __init__(self, version: int = 13000) -> None:
        self.calls: Counter[str] = Counter()
        self.arguments: dict[str, list[tuple[Any, ...]]] = {}
        self.done_events: set[int] = set()
        self.registered: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.handles: set[int] = set()
        self.modules: set[int] = set()
        self.context_depth = 0
        self.num_contexts = 0
        self._destroyed: set[int] = set()
        self._recorded: dict[int, set[int]] = {}  # events by stream
        self._version = version
        self._failures: dict[str, range] = {}
        self._numbers = itertools.count(0x1000)
        self._addresses = itertools.count(1 << 40, 1 << 40)
        count = 8 if version >= 13000 else 9
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * count)
        self._batch_copy = kind(self._call_batch_copy)

    def fail(self, name: str, *, after: int = 0, times: int = 1) -> None:
        first = self.calls[name] + after
        self._failures[name] = range(first, first + times)

    def _call_batch_copy(self, *arguments: Any) -> int:
        code = self._called("cuMemcpyBatchAsync", arguments)
        return code or (INVALID_VALUE if arguments[-1] in _LEGACY_STREAMS else 0)

    def __getattr__(self, name: str) -> _Function:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            code = self._called(name, arguments)
            body = None if code else getattr(self, f"_do_{name}", None)
            return code if body is None else body(*arguments) or 0

        function = _Function(call)
        setattr(self, name, function)
        return function

    def _called(self, name: str, arguments: tuple[Any, ...]) -> int:
        is_failing = self.calls[name] in self._failures.get(name, ())
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
        self.num_contexts += 1

    def _do_cuDevicePrimaryCtxRelease_v2(self, device: int) -> None:
        assert self.num_contexts, "the context was released before"
        self.num_contexts -= 1

    def _do_cuCtxPushCurrent_v2(self, context: Any) -> None:
        assert self.num_contexts, "the context was released"
        self.context_depth += 1

    def _do_cuCtxPopCurrent_v2(self, place: Any) -> None:
        self.context_depth -= 1

    # ------------------------------------------------------------------ streams and events

    def _check(self, *handles: int) -> None:
        assert self._destroyed.isdisjoint(handles), "the handle was destroyed"

    def _do_cuStreamCreate(self, place: Any, flags: int) -> None:
        self._number(place)

    def _do_cuStreamSynchronize(self, stream: int) -> None:
        self._check(stream)
        self.done_events |= self._recorded.get(stream, set())

    def _do_cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        self._check(stream, event)

    def _do_cuStreamDestroy_v2(self, stream: int) -> None:
        self._check(stream)
        self._destroyed.add(stream)

    def _do_cuEventCreate(self, place: Any, flags: int) -> None:
        self._number(place)

    def _do_cuEventRecord(self, event: int, stream: int) -> None:
        self._check(event, stream)
        self.done_events.discard(event)
        for events in self._recorded.values():
            events.discard(event)
        self._recorded.setdefault(stream, set()).add(event)

    def _do_cuEventQuery(self, event: int) -> int:
        self._check(event)
        return 0 if event in self.done_events else NOT_READY

    def _do_cuEventSynchronize(self, event: int) -> None:
        self._check(event)
        self.done_events.add(event)

    def _do_cuEventDestroy_v2(self, event: int) -> None:
        self._check(event)
        self._destroyed.add(event)

    # ------------------------------------------------------------------ memory and kernels

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

    def _do_cuModuleLoadData(self, place: Any, image: bytes) -> None:
        self._number(place)
        self.modules.add(place._obj.value)

    def _do_cuModuleGetFunction(self, place: Any, module: Any, name: bytes) -> None:
        self._number(place)

    def _do_cuModuleUnload(self, module: Any) -> None:
        self.modules.remove(getattr(module, "value", module))

    def _do_cuLaunchKernel(self, function: Any, *rest: Any) -> None:
        assert function.value, "a kernel that was not found"
