"""The page copy kernel against its reference, and what it compiles to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.kernels.conftest import HAS_GPU

ROOT = Path(__file__).parents[2]
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the interpreter is off beside a GPU")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


class Shape(NamedTuple):
    num_bytes: int
    dst_stride: int
    src_stride: int
    offset: int = 0
    num_pages: int = 9


SHAPES = [
    Shape(4096, 4096, 4096, num_pages=37),
    Shape(65536 + 16, 65536 + 16, 70000 + 16 * 3),
    Shape(100, 128, 112),
    Shape(100_003, 100_003, 100_003, num_pages=3),
    Shape(1, 1, 1, num_pages=50),
    Shape(1, 7, 3, num_pages=50),
    Shape(16, 16, 16, num_pages=700),
    Shape(48, 64, 48, offset=8),
    Shape(6, 6, 10, offset=2, num_pages=300),
    Shape(4099, 4104, 4099, offset=1),
    Shape(131_072, 131_072, 131_072, num_pages=2),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_programs", [1, 5, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.num_bytes}+{s.offset}")
def test_pages_are_where_the_reference_puts_them(
    device: str, shape: Shape, num_programs: int
) -> None:
    from coldpage.kernels.page_copy import PagePart, copy_part, copy_part_reference

    generator = torch.Generator().manual_seed(shape.num_bytes)
    num_slots = 2 * shape.num_pages + 1
    src, dst = (
        torch.randint(
            0, 256, (stride * num_slots + 64,), dtype=torch.uint8, generator=generator
        ).to(device)
        for stride in (shape.src_stride + shape.num_bytes, shape.dst_stride + shape.num_bytes)
    )
    pairs = torch.stack(
        [torch.randperm(num_slots, generator=generator)[: shape.num_pages] for _ in range(2)], 1
    ).to(torch.int32)
    expected = dst.cpu().clone()
    part = PagePart(
        dst.data_ptr() + shape.offset,
        shape.dst_stride,
        src.data_ptr() + shape.offset,
        shape.src_stride,
        shape.num_bytes,
    )
    on_device = pairs.to(device)
    copy_part(on_device.data_ptr(), shape.num_pages, part, num_programs)
    copy_part_reference(expected[shape.offset :], src.cpu()[shape.offset :], pairs, part)
    assert torch.equal(dst.cpu(), expected)


_PRELUDE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
TARGET = GPUTarget("cuda", 90, 32)
"""

_COMPILE = """
from triton.compiler import ASTSource
from coldpage.kernels.page_copy import _copy_kernel as kernel
names = kernel.arg_names
constants = {"UNIT": tl.int32, "ALIGNMENT": 16, "VECTOR": 4, "TILE_VECTORS": 2048, "TILE_PAGES": 1}
signature = {n: "constexpr" if n in constants else "i64" if n[-4:] == "base" else "i32"
             for n in names}
signature["pairs"] = "i64"
source = ASTSource(
    kernel, signature, {(names.index(n),): value for n, value in constants.items()}, {}
)
compiled = triton.compile(source, target=TARGET, options={"num_warps": 16})
print(compiled.asm["ptx"])
"""

# Triton asks the hook before it compiles; one that says True is all that there is of compiling.
_COUNT_COMPILED = """
from triton.runtime import driver
from coldpage.kernels.page_copy import PagePart, copy_part

class Machine:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return TARGET

driver.set_active(Machine())
keys = set()
triton.knobs.runtime.jit_cache_hook = lambda *, key, **rest: keys.add(key) or True
ALIGNED, BASE = (1 << 40), (1 << 41)

def count(num_bytes, pairs, num_pages, dst=BASE, src=ALIGNED, num_programs=4):
    copy_part(pairs, num_pages, PagePart(dst, num_bytes, src, num_bytes, num_bytes), num_programs)
    print(len(keys), end=" ")

for pairs in (ALIGNED, ALIGNED + 8, ALIGNED + 512):
    for num_pages in (16, 1, 17, 4096, 3):
        count(16384, pairs, num_pages)
count(16384, ALIGNED, 16, num_programs=1)
count(16384, ALIGNED, 16, dst=BASE + 16, src=ALIGNED + 48)
print()
keys.clear()
for dst, src in ((BASE + 4, ALIGNED), (BASE, ALIGNED + 4), (BASE + 4, ALIGNED + 4)):
    count(4100, ALIGNED, 16, dst, src)
"""


def _run_without_interpreter(source: str, tmp_path: Path) -> str:
    """What the script prints. It is for a GPU that need not be there."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "TRITON_CACHE_DIR": str(tmp_path)}
    # Triton reads the source of what it compiles, so it has to be a file.
    script = tmp_path / "run_it.py"
    script.write_text(_PRELUDE + source)
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_another_count_or_place_compiles_nothing(tmp_path: Path) -> None:
    """The first copy of pages of a size pays for all: a compilation takes 0.3 s and more."""
    large, odd = _run_without_interpreter(_COUNT_COMPILED, tmp_path).splitlines()
    assert large.split() == ["1"] * 17
    assert odd.split() == ["1"] * 3


def test_a_pair_is_one_load_and_data_moves_in_vectors(tmp_path: Path) -> None:
    found = _run_without_interpreter(_COMPILE, tmp_path)
    loads = re.findall(r"\bld\.global\.\S+", found)
    stores = re.findall(r"\bst\.global\.\S+", found)
    # Both indices of a page in one 64-bit load; then 16 bytes a thread, four at a time.
    assert loads == ["ld.global.b64", *["ld.global.v4.b32"] * 4]
    assert stores == ["st.global.v4.b32"] * 4
