"""The code that a GPU gets for decode attention: compiled for one, and looked at."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import pytest

from tests.kernels.offline import Code, compiled_kernels

pytestmark = pytest.mark.timeout(400)  # all is compiled before the first test

MAX_SHARED_BYTES = 227 * 1024  # of a block, on Hopper
WIDE_BYTES = 16  # that one instruction loads at most
# Of a thread: what the limit on registers may leave for local memory.
MAX_LOCAL_BYTES = 32

PAIRS = [
    ("f32", "f32"),
    ("f16", "f16"),
    ("bf16", "bf16"),
    ("f16", "bf16"),
    ("q8_0", "q8_0"),
    ("turbo4", "turbo4"),
    ("q8_0", "turbo4"),
    ("turbo4", "bf16"),
]
# What takes most shared memory: the largest heads and blocks.
LARGE = ["f32", "f16", "bf16", "q8_0", "turbo4"]
# Where there are special cases: one scale a vector, heads that are no power of two, many queries.
SPECIAL = [("q8_0", 32, 16, 1, 1), ("bf16", 80, 16, 3, 3), ("turbo4", 64, 32, 1, 17)]

_LAUNCHES = f"""
import subprocess
from pathlib import Path
import triton.backends.nvidia
import coldpage.kernels.decode_attention as attention
from coldpage.kernels.decode_plan import AttentionOptions, DecodeBatch
from coldpage.kernels.kv_types import KV_TYPES

folder = Path(FOLDER)
attention._is_gpu = lambda tensor: True

def attend(key, value, head_dim=128, block=16, kv_heads=8, group=4, options=None, **wanted):
    keys, values = (
        pages(KV_TYPES[name], is_value, kv_heads, head_dim, block)
        for name, is_value in ((key, False), (value, True))
    )
    sizes = (4, 16), (4,), (64, 4), (5,), (65,)
    batch = DecodeBatch(*(torch.zeros(size, dtype=torch.int32) for size in sizes))
    query = torch.zeros(4, kv_heads * group, head_dim, dtype=torch.bfloat16)
    options = options or AttentionOptions(head_dim**-0.5)
    attention.decode_attention(query, keys, values, batch, options, **wanted)

for key, value in {PAIRS}:
    attend(key, value)
for name in {LARGE}:
    attend(name, name, 256, 32)
for name, *shape in {SPECIAL}:
    attend(name, name, *shape)
options = AttentionOptions(0.1, window=1, num_sink_tokens=1, softcap=9.0)
for name in "bf16", "q8_0", "turbo4":
    attend(name, name, options=options, sink_logits=torch.zeros(32), want_mass=True)

compiled = [kernel for kernel in compiled if kernel.metadata.name == "attend_items"]
tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
found = []
for kernel in compiled:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [tool, "--dump-resource-usage", cubin]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found.append((kernel.metadata.shared, usage))
(folder / "resources.json").write_text(json.dumps(found))
"""


class Kernel(NamedTuple):
    """One launch of ``attend_items``."""

    code: Code
    shared_bytes: int
    local_bytes: int  # of a thread

    @property
    def num_wide_loads(self) -> int:
        """Instructions that read 16 bytes at a time, past registers or into them."""
        wide = (
            r"cp\.async\.\w+\.shared\.global [^;]*?, 0x10, |ld\.global\.v4\.b32|ld\.global\.v2\.b64"
        )
        return len(re.findall(wide, self.code.ptx))

    @property
    def thread_bytes_of_loads(self) -> list[float]:
        """Of each load of a tile: the bytes that are a thread's."""
        layouts = self.code.layouts
        found = re.search(r'"ttg\.num-warps" = (\d+)', layouts)
        assert found is not None
        loads = re.findall(
            r"(?:tt\.load|ttg\.async_copy_global_to_local) .*"
            r"tensor<(\d+)x(\d+)x!tt\.ptr<[a-z]+(\d+)>, #\w+>",
            layouts,
        )
        threads = 32 * int(found[1])
        return [int(rows) * int(columns) * int(bits) / 8 / threads for rows, columns, bits in loads]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Of all the launches, in their order."""
    folder = tmp_path_factory.mktemp("decode")
    codes = compiled_kernels(_LAUNCHES.replace("FOLDER", repr(str(folder))), folder)
    resources = json.loads((folder / "resources.json").read_text())
    made = []
    for code, (shared_bytes, usage) in zip(codes, resources, strict=True):
        found = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", usage)
        assert found is not None, usage
        made.append(Kernel(code, shared_bytes, int(found[1]) + int(found[2])))
    return made


def test_every_pair_of_types_and_special_case_compiles(kernels: list[Kernel]) -> None:
    assert len(kernels) == len(PAIRS) + len(LARGE) + len(SPECIAL) + 3
    assert all(kernel.code.memory_and_dot_instructions for kernel in kernels)


def test_pages_are_read_16_bytes_at_a_time(kernels: list[Kernel]) -> None:
    for pair, kernel in zip(PAIRS, kernels[: len(PAIRS)], strict=True):
        sizes = kernel.thread_bytes_of_loads
        wide = [size for size in sizes if size >= WIDE_BYTES]
        # Only tiles of queries may be less than that for each thread; they are read once.
        assert len(wide) >= 2 * 2, (pair, sizes)
        assert kernel.num_wide_loads == sum(wide) / WIDE_BYTES, (pair, sizes)


@pytest.mark.parametrize(("name", "blocks", "part_bytes"), [("q8_0", 4, 32), ("turbo4", 2, 64)])
def test_a_warp_reads_values_of_one_page_at_a_time(
    kernels: list[Kernel], name: str, blocks: int, part_bytes: int
) -> None:
    layouts = kernels[PAIRS.index((name, name))].code.layouts
    tile = rf"tensor<{blocks}x{16 * part_bytes}x!tt\.ptr<i8>, (#\w+)>"
    names = set(re.findall(rf"ttg\.async_copy_global_to_local .*{tile}", layouts))
    assert names
    for layout in names:
        found = re.search(rf"^{layout} = .*threadsPerWarp = \[(\d+), (\d+)\]", layouts, re.M)
        assert found is not None
        assert (int(found[1]), int(found[2])) == (1, 32)


def test_registers_suffice_for_heads_of_128(kernels: list[Kernel]) -> None:
    spilled = {
        pair: kernel.local_bytes for pair, kernel in zip(PAIRS, kernels[: len(PAIRS)], strict=True)
    }
    assert max(spilled.values()) <= MAX_LOCAL_BYTES, spilled
    assert all(spilled[name, name] == 0 for name in ("f32", "q8_0", "turbo4")), spilled


def test_shared_memory_suffices(kernels: list[Kernel]) -> None:
    shared = [kernel.shared_bytes for kernel in kernels]
    assert min(shared) > 0 and max(shared) <= MAX_SHARED_BYTES, shared
