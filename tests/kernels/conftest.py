"""Kernels run on the GPU where there is one, and else under Triton's interpreter."""

import os

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
