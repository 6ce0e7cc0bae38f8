"""The code that a GPU gets for packing and unpacking: compiled for one, and looked at."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import numpy as np
import pytest

from coldpage.kernels.cold.formats import FORMATS, ColdFormat
from coldpage.kernels.cold.gpu import UNPACK
from coldpage.kernels.cold.gpu_rotated import _MARKED_3, _NUMBERS_ASM, _SQUARE, _SQUARES_ASM
from coldpage.kernels.cold.numbers import MAGNITUDES
from tests.kernels.offline import Code, compiled_kernels

MAX_LOCAL_BYTES = 32  # of a thread
WAYS = ("pack", "unpack")
TILE_NUMBERS = 8192
VECTOR_BYTES = 16  # that one instruction moves at most
THREADS = 128  # of a program

_LAUNCHES = """
import subprocess
from pathlib import Path
import numpy as np
import triton.backends.nvidia
from coldpage.kernels.cold import gpu
from coldpage.kernels.cold.formats import FORMATS, PackedBuffers
from tests.kernels.cold_pages import LLAMA_8B

folder = Path(FOLDER)
gpu._is_gpu = lambda device: True
HERE = 1 << 40

def move(cold_format, calls):
    size, hot = cold_format.buffer_bytes(LLAMA_8B), LLAMA_8B.num_bytes
    places = np.array([HERE, HERE + hot]), np.array([2 * hot, 2 * hot]), np.array([0, size])
    frequencies, means = np.zeros((2, 64), np.uint32), np.zeros((2, 8, 128), np.float32)
    buffers = PackedBuffers(cold_format, LLAMA_8B, *places, 2 * size, frequencies, means)
    on_gpu = gpu.GpuBuffers(buffers, torch.device("cpu"))
    for call in calls:
        gpu.pack_pages_gpu(on_gpu, *call)
    for call in calls:
        gpu.unpack_pages_gpu(on_gpu, *call)

once = [(HERE, HERE, 100, HERE, 32)]
# Other places, numbers of pages and of programs.
more = [(HERE + 16, HERE + 8, n, HERE + 4, p) for n in (1, 16, 4097) for p in (1, 64)]
for cold_format in FORMATS.values():
    move(cold_format, once + more)

tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
found = []
for kernel in {id(kernel): kernel for kernel in compiled}.values():
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [tool, "--dump-resource-usage", cubin]
    found.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
(folder / "resources.json").write_text(json.dumps(found))
"""


class Kernel(NamedTuple):
    """One of a format and a way."""

    code: Code
    local_bytes: int  # of a thread

    def count(self, pattern: str) -> int:
        """Instructions."""
        return len(re.findall(pattern, self.code.ptx))


Kernels = dict[tuple[ColdFormat, str], Kernel]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """Those of all formats for keys with positions and means: one each way."""
    folder = tmp_path_factory.mktemp("cold")
    codes = compiled_kernels(_LAUNCHES.replace("FOLDER", repr(str(folder))), folder)
    resources = json.loads((folder / "resources.json").read_text())
    names = [(cold_format, way) for cold_format in FORMATS.values() for way in WAYS]
    # Were one compiled for a number of pages or a place, there would be more.
    assert len(codes) == len(names)
    made = {}
    for name, code, usage in zip(names, codes, resources, strict=True):
        found = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", usage)
        assert found is not None, usage
        made[name] = Kernel(code, int(found[1]) + int(found[2]))
    return made


def test_registers_suffice(kernels: Kernels) -> None:
    spilled = {name: kernel.local_bytes for name, kernel in kernels.items()}
    assert max(spilled.values()) <= MAX_LOCAL_BYTES, spilled


@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_codes_are_written_16_bytes_a_thread(kernels: Kernels, cold_format: ColdFormat) -> None:
    kernel = kernels[cold_format, "pack"]
    bits = 4 if cold_format is ColdFormat.TURBO3 else cold_format.bits  # a quarter is not there
    vectors = TILE_NUMBERS * bits // 8 // THREADS // VECTOR_BYTES
    assert kernel.count(r"st\.global\.v4\.b32") == vectors
    # Besides, parameters.
    assert kernel.count(r"st\.global\.") <= vectors + 2


@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_hot_numbers_move_16_bytes_a_thread(kernels: Kernels, cold_format: ColdFormat) -> None:
    vectors = TILE_NUMBERS * 2 // THREADS // VECTOR_BYTES
    unpack = kernels[cold_format, "unpack"]
    assert unpack.count(r"st\.global\.") == unpack.count(r"st\.global\.v4\.b32") == vectors
    pack = kernels[cold_format, "pack"]
    if cold_format is not ColdFormat.INT4_CHANNEL:
        assert pack.count(r"cp\.async\.cg\.shared\.global [^;]*?, 0x10, ") >= vectors


def test_a_thread_finds_the_limits_of_its_channels_alone(kernels: Kernels) -> None:
    pack = kernels[ColdFormat.INT4_CHANNEL, "pack"]
    assert '"tt.reduce"' in pack.code.layouts
    assert pack.count(r"shfl\.sync") == 0
    # A warp reads a row of 32 words.
    assert pack.count(r"ld\.global\.b32") >= TILE_NUMBERS * 2 // THREADS // 4


@pytest.mark.parametrize("cold_format", FORMATS.values())
def test_codes_are_read_some_tiles_ahead(kernels: Kernels, cold_format: ColdFormat) -> None:
    code = kernels[cold_format, "unpack"].code
    ahead = UNPACK.stages - 1
    columns = cold_format.bits * 16 if cold_format is not ColdFormat.TURBO3 else 64
    assert f"!ttg.memdesc<{ahead}x64x{columns}xi8," in code.layouts
    # Where a loop waits for one of them, others are on their way.
    loop = code.layouts[code.layouts.index("scf.for") :]
    waits = [int(num) for num in re.findall(r"ttg\.async_wait .*\{num = (\d+)", loop)]
    assert waits and waits[0] >= ahead - 1
    # No plain load in it that would be waited for at once.
    assert not re.search(r"tt\.load ", loop)


def test_tensor_cores_rotate(kernels: Kernels) -> None:
    is_rotated = {name: kernel.count(r"wgmma\.mma_async") > 0 for name, kernel in kernels.items()}
    assert is_rotated == {name: name[0].is_rotated for name in kernels}


def _permuted(low: int, high: int, selector: int) -> int:
    chosen = (low | high << 32).to_bytes(8, "little")
    result = 0
    for i in range(4):
        byte = chosen[selector >> 4 * i & 7]
        if selector >> 4 * i & 8:  # its highest bit everywhere
            byte = 255 * (byte >> 7)
        result |= byte << 8 * i
    return result


def _run_by_hand(asm: str, word: int, num_results: int) -> list[int]:
    """What PTX makes of a word: its first registers."""
    does = {
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
        "shr.u32": lambda a, b: a >> b,
        "prmt.b32": _permuted,
        "lop3.b32": lambda a, b, c, _: a ^ b & c,
    }
    registers = {f"${num_results}": word}
    for line in asm.strip("{}\n ").split(";")[1:-1]:
        name, rest = line.split(maxsplit=1)
        to, *sources = rest.split(", ")
        operands = [registers[it] if it in registers else int(it, 0) for it in sources]
        registers[to] = does[name](*operands)
    assert "0x78;" in asm or "lop3" not in asm  # that lop3 is the one above
    return [registers[f"${i}"] for i in range(num_results)]


def test_byte_permutations_look_codes_up() -> None:
    words = np.random.default_rng(0).integers(2**32, size=200, dtype=np.uint32)
    numbers = np.array(MAGNITUDES[ColdFormat.TURBO4])
    for word in words:
        codes = np.array([word]).view(np.uint8)
        halves = np.concatenate([codes & 15, codes >> 4])
        found = np.array(_run_by_hand(_NUMBERS_ASM.value, int(word), 4), np.uint32)
        expected = numbers[halves & 7] * np.where(halves & 8, -1, 1)
        assert np.array_equal(found.view(np.float16), expected.astype(np.float16))
        squares = np.array(_run_by_hand(_SQUARES_ASM.value, int(word), 8)) * _SQUARE.value
        assert squares == pytest.approx(numbers[halves & 7] ** 2, abs=1e-4)


def test_magnitudes_of_turbo3_carry_their_codes() -> None:
    marked = np.array(_MARKED_3.value, np.float32)
    assert marked == pytest.approx(MAGNITUDES[ColdFormat.TURBO3], rel=2**-21)
    assert (marked.view(np.int32) & 3).tolist() == [0, 1, 2, 3]
