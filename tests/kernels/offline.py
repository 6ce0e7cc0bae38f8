"""What launchers would give a GPU: their kernels are compiled for one, and nothing is launched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

# A driver that knows a GPU of which there need be none. Tensors of the host stand for its own.
_BEFORE = """
import json
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from coldpage.kernels.kv_types import BF16, Q8_0, TURBO4, page_views

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

driver.set_active(Driver())
compiled = []
run = JITFunction.run

def compile_only(self, *args, grid, warmup, **settings):
    compiled.append(run(self, *args, grid=grid, warmup=True, **settings))

JITFunction.run = compile_only

def pages(kv_type, is_value=False, kv_heads=8, head_dim=128, tokens_per_block=16, num_slots=4):
    num_bytes = kv_heads * tokens_per_block * kv_type.vector_bytes(head_dim)
    pool = torch.zeros(num_slots, 3 * num_bytes, dtype=torch.uint8)[:, num_bytes:-num_bytes]
    return page_views(
        pool, kv_type, tokens_per_block, kv_heads, head_dim, is_value=is_value)

"""
_AFTER = """
print(json.dumps([[k.asm["ttgir"], k.asm["ptx"]] for k in {id(k): k for k in compiled}.values()]))
"""


class Code(NamedTuple):
    """What Triton made of a kernel for a Hopper GPU."""

    layouts: str  # Triton's own form, which says what each thread has of a tile
    ptx: str

    @property
    def memory_and_dot_instructions(self) -> Counter[str]:
        """Those of PTX, by name."""
        return Counter(re.findall(r"\b(?:ld|st)\.global\S*|\b(?:wg)?mma\S*", self.ptx))

    @property
    def threads_of_byte_stores(self) -> list[tuple[int, int]]:
        """How many threads of a warp lie along each dimension of a tile of bytes that is stored."""
        stores = re.findall(r"tt\.store .*x!tt\.ptr<i8>, (#\w+)>", self.layouts)
        lines = (re.search(rf"^{name} = .*", self.layouts, re.M) for name in stores)
        sizes = [re.search(r"threadsPerWarp = \[(\d+), (\d+)\]", line[0]) for line in lines if line]
        return [(int(size[1]), int(size[2])) for size in sizes if size]


def compiled_kernels(launches: str, tmp_path: Path) -> list[Code]:
    """Each distinct kernel that ``launches`` (Python) launches, in the order of their first."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE + launches + _AFTER],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Code(*found) for found in json.loads(done.stdout)]


def memory_and_dot_instructions(launches: str, tmp_path: Path) -> list[Counter[str]]:
    """Of the code of each distinct kernel that ``launches`` launches."""
    return [code.memory_and_dot_instructions for code in compiled_kernels(launches, tmp_path)]
