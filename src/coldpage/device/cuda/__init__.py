"""The CUDA device. Importing it loads no driver; making a ``CudaDevice`` does."""

from coldpage.device.cuda.device import CudaDevice

__all__ = ["CudaDevice"]
