"""Where kernels run."""

import torch

HAS_GPU = torch.cuda.is_available()
