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
from coldpage.kernels.cold.gpu_three_bits import _NUMBERS_ASM as _NUMBERS_3_ASM
from coldpage.kernels.cold.numbers import MAGNITUDES
from tests.kernels.offline import Code, compiled_kernels

MAX_LOCAL_BYTES = 32  # of a thread
WAYS = ("pack", "unpack")
ONE_HEAD_WAYS = ("pack one head", "unpack one head")
TILE_NUMBERS = 8192
VECTOR_BYTES = 16  # that one instruction moves at most
THREADS = 128  # of a program

_LAUNCHES = """
import subprocess
from pathlib import Path
import numpy as np
import triton.backends.nvidia
from coldpage.kernels.cold import gpu
from coldpage.kernels.cold.formats import FORMATS, ColdFormat, PackedBuffers
from tests.kernels.cold_pages import LLAMA_8B

folder = Path(FOLDER)
gpu._is_gpu = lambda device: True
HERE = 1 << 40

def move(cold_format, shape, calls):
    size, hot = cold_format.buffer_bytes(shape), shape.num_bytes
    places = np.array([HERE, HERE + hot]), np.array([2 * hot, 2 * hot]), np.array([0, size])
    means = np.zeros((2, shape.num_kv_heads, 128), np.float32)
    frequencies = np.zeros((2, 64), np.uint32)
    buffers = PackedBuffers(cold_format, shape, *places, 2 * size, frequencies, means)
    on_gpu = gpu.GpuBuffers(buffers, torch.device("cpu"))
    for call in calls:
        gpu.pack_pages_gpu(on_gpu, *call)
    for call in calls:
        gpu.unpack_pages_gpu(on_gpu, *call)

once = [(HERE, HERE, 100, HERE, 32)]
# Other places, numbers of pages and of programs.
more = [(HERE + 16, HERE + 8, n, HERE + 4, p) for n in (1, 16, 4097) for p in (1, 64)]
for cold_format in FORMATS.values():
    move(cold_format, LLAMA_8B, once + more)
move(ColdFormat.TURBO3, LLAMA_8B._replace(num_kv_heads=1), once)

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
    """Those of all formats for keys with positions and means, one each way; and of turbo3 for
    pages with a single head."""
    folder = tmp_path_factory.mktemp("cold")
    codes = compiled_kernels(_LAUNCHES.replace("FOLDER", repr(str(folder))), folder)
    resources = json.loads((folder / "resources.json").read_text())
    names = [(cold_format, way) for cold_format in FORMATS.values() for way in WAYS]
    names += [(ColdFormat.TURBO3, way) for way in ONE_HEAD_WAYS]
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
    vectors = TILE_NUMBERS * cold_format.bits // 8 // THREADS // VECTOR_BYTES
    assert kernel.count(r"st\.global\.v4\.b32") == vectors
    halves = 0
    if cold_format is ColdFormat.TURBO3:
        # Of the second part there are half as many bytes as threads could write at once.
        halves = kernel.count(r"st\.global\.v2\.b32")
        assert halves == 1
    # Besides, parameters.
    assert kernel.count(r"st\.global\.") <= vectors + halves + 2


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
    parts = (32, 16) if cold_format is ColdFormat.TURBO3 else (cold_format.bits * 16,)
    _check_reads(kernels[cold_format, "unpack"].code, [f"64x{columns}xi8" for columns in parts])


def test_tiles_with_few_bytes_are_read_ahead_by_words(kernels: Kernels) -> None:
    """Fewer than four bytes a thread can not be."""
    _check_reads(kernels[ColdFormat.TURBO3, "unpack one head"].code, ["16x8xi32", "16x4xi32"])


def _check_reads(code: Code, parts: list[str]) -> None:
    ahead = UNPACK.stages - 1
    for part in parts:
        assert f"!ttg.memdesc<{ahead}x{part}," in code.layouts
    # Where a loop waits for one of them, others are on their way.
    loop = code.layouts[code.layouts.index("scf.for") :]
    waits = [int(num) for num in re.findall(r"ttg\.async_wait .*\{num = (\d+)", loop)]
    assert waits and waits[0] >= ahead - 1
    # No plain load in it that would be waited for at once.
    assert not re.search(r"tt\.load ", loop)


def test_tensor_cores_rotate(kernels: Kernels) -> None:
    names = [(cold_format, way) for cold_format in FORMATS.values() for way in WAYS]
    is_rotated = {name: kernels[name].count(r"wgmma\.mma_async") > 0 for name in names}
    assert is_rotated == {name: name[0].is_rotated for name in names}


def _permuted(low: int, high: int, selector: int) -> int:
    chosen = (low | high << 32).to_bytes(8, "little")
    result = 0
    for i in range(4):
        byte = chosen[selector >> 4 * i & 7]
        if selector >> 4 * i & 8:  # its highest bit everywhere
            byte = 255 * (byte >> 7)
        result |= byte << 8 * i
    return result


def _run_by_hand(asm: str, words: list[int], num_results: int) -> list[int]:
    """What PTX makes of words: its first registers."""
    does = {
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
        "shr.u32": lambda a, b: a >> b,
        "prmt.b32": _permuted,
        "lop3.b32": lambda a, b, c, _: a ^ b & c,
        "mad.lo.u32": lambda a, b, c: a * b + c & 0xFFFFFFFF,
    }
    registers = {f"${i}": word for i, word in enumerate(words, num_results)}
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
        found = np.array(_run_by_hand(_NUMBERS_ASM.value, [int(word)], 4), np.uint32)
        expected = numbers[halves & 7] * np.where(halves & 8, -1, 1)
        assert np.array_equal(found.view(np.float16), expected.astype(np.float16))
        squares = np.array(_run_by_hand(_SQUARES_ASM.value, [int(word)], 8)) * _SQUARE.value
        assert squares == pytest.approx(numbers[halves & 7] ** 2, abs=1e-4)


@pytest.mark.parametrize("quarter", range(2))
@pytest.mark.parametrize("eighth", range(4))
def test_byte_permutations_look_both_parts_of_a_code_up(quarter: int, eighth: int) -> None:
    magnitudes = np.array(MAGNITUDES[ColdFormat.TURBO3])
    for pair in np.random.default_rng(0).integers(2**32, size=(50, 2), dtype=np.uint32):
        shifts = 2 * quarter, eighth  # the same for four bytes
        words = [int(word) for word in pair] + [shift * 0x01010101 for shift in shifts]
        found = np.array(_run_by_hand(_NUMBERS_3_ASM.value, words, 4), np.uint32)
        bytes_ = pair.view(np.uint8).reshape(2, 4)
        two_bits, one_bit = (part >> shift for part, shift in zip(bytes_, shifts, strict=True))
        magnitude = magnitudes[np.concatenate([two_bits & 3, two_bits >> 4 & 3])]
        sign = np.concatenate([one_bit & 1, one_bit >> 4 & 1])
        expected = np.where(sign, -magnitude, magnitude).astype(np.float16)
        assert np.array_equal(found.view(np.float16), expected)


def test_magnitudes_of_turbo3_carry_their_codes() -> None:
    marked = np.array(_MARKED_3.value, np.float32)
    assert marked == pytest.approx(MAGNITUDES[ColdFormat.TURBO3], rel=2**-21)
    assert (marked.view(np.int32) & 3).tolist() == [0, 1, 2, 3]
