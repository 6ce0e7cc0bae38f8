"""Where a model computes, and that it computes exactly there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import torch

from coldpage.device.opening import AUTO_DEVICE, cuda_index, open_device
from coldpage.errors import DeviceError, ModelError

if TYPE_CHECKING:
    from coldpage.device.base import Device

__all__ = ["choose_device", "choose_dtype", "compute_exactly", "free_gpu_bytes", "page_device"]

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_device(name: str) -> torch.device:
    """The device that a user names; ``auto`` is the first GPU where torch can use one, else the
    CPU. Raises ConfigurationError for what is no device, DeviceError for a GPU that is not there.
    """
    index = cuda_index(name)
    if name == "cpu" or (name == AUTO_DEVICE and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = 0 if index is None else index
    if index >= num_gpus:
        found = "no GPU" if num_gpus == 0 else f"{num_gpus} GPU(s)"
        raise DeviceError(f"{name} can not be used: torch {torch.__version__} finds {found} here")
    return torch.device("cuda", index)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 where the device multiplies it in hardware, else float32.

    Raises ModelError for a name that is none of ``auto``, ``bfloat16`` and ``float32``.
    """
    if name == "auto":
        if device.type == "cuda":
            is_fast = torch.cuda.get_device_capability(device) >= (8, 0)
        else:
            is_fast = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return torch.bfloat16 if is_fast else torch.float32
    if name not in _DTYPES:
        raise ModelError(f"the dtype {name!r} is not supported: use auto, bfloat16 or float32")
    return _DTYPES[name]


def compute_exactly(device: torch.device) -> None:
    """Has float32 products of this process computed in float32: a GPU would cut the factors to 10
    bits where TF32 was switched on.

    Equal steps then give equal bits, with nothing else switched on: one stream runs them all, for
    which cuBLAS promises it, and no operator of a model's forward pass adds in an order of chance.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")


def free_gpu_bytes(device: torch.device) -> int:
    """What is free on the GPU now, whoever uses the rest."""
    torch.cuda.empty_cache()  # what loading left behind is free too
    num_bytes: int = torch.cuda.mem_get_info(device)[0]
    return num_bytes


@contextlib.contextmanager
def page_device(device: torch.device) -> Iterator[Device]:
    """The device whose memory holds the pages of a model there; closed at the end, so after the
    manager. Raises DeviceError.
    """
    with contextlib.closing(open_device(str(device))) as pages:
        yield pages
