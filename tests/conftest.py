"""Settings that every test runs under."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from coldpage.cli.machine import has_gpu_driver

# Tests of two files run at a time, on two cores: threads on top only fight each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A test must not reach a model hub: everything it needs is installed.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Kernels run on the GPU where there is one, and else under Triton's interpreter. Triton asks when
# it is first imported, which libraries may do at any time.
if not has_gpu_driver():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# deadline=None: a slow machine is not a failure, a hang is (pytest-timeout).
# print_blob: a failure prints what repeats it.
settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", settings.get_profile("default"), max_examples=5_000)
settings.load_profile("default")
