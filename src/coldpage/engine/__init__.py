"""The inference engine: transformers models, unchanged, on the tiered cache. Importing this pulls
in no torch.
"""

import os

__all__: list[str] = []

# torch's OpenMP threads spin at every barrier while they wait for each other. Beside other work on
# the same cores the one waited for does not run, and a decode step of SmolLM2 on 2 cores took 810
# ms instead of 92. Waiting in the kernel after a short spin costs an idle machine next to nothing.
# Read when torch loads, so it must be set before; a user's own setting wins.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
