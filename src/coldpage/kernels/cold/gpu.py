"""Hot pages to packed cold ones and back by a GPU: one launch for all buffers of one format.

The kernels (``gpu_kernels``) read one side and write the other, which is memory of the device or of
the host, mapped; nothing lies in between. Few programs suffice, so others have most of the GPU.
"""

from __future__ import annotations

from math import gcd
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from coldpage.kernels.cold.formats import (
    ALIGNMENT_BYTES,
    ColdFormat,
    KVShape,
    NumberType,
    PackedBuffers,
)
from coldpage.kernels.cold.gpu_kernels import (
    pack_block_kernel,
    pack_channels_kernel,
    pack_kernel,
    unpack_kernel,
)
from coldpage.kernels.cold.gpu_vectors import (
    IS_FP8,
    IS_INT4_BLOCK,
    IS_INT4_CHANNEL,
    IS_INT4_TOKEN,
    IS_INT8,
    IS_TURBO3,
    IS_TURBO4,
    Tiles,
)
from coldpage.kernels.cold.numbers import hadamard, signs

__all__ = [
    "NUMBER_TYPES",
    "PACK",
    "UNPACK",
    "GpuBuffers",
    "Launch",
    "pack_pages_gpu",
    "unpack_pages_gpu",
]


class Launch(NamedTuple):
    """How the programs of a kernel work."""

    tile_numbers: int  # a power of two
    num_warps: int
    stages: int  # tiles whose reads are on their way, and the one that is computed


# Hot reads take 1 us. Cold ones take 2 us over a link, which wants 110 KiB of them on their way.
PACK: Final = Launch(tile_numbers=8192, num_warps=4, stages=2)
UNPACK: Final = Launch(tile_numbers=8192, num_warps=4, stages=4)

_MIN_DOT_ROWS: Final = 16
_KINDS: Final = {
    ColdFormat.INT8: IS_INT8,
    ColdFormat.FP8: IS_FP8,
    ColdFormat.INT4_TOKEN: IS_INT4_TOKEN,
    ColdFormat.INT4_CHANNEL: IS_INT4_CHANNEL,
    ColdFormat.TURBO4: IS_TURBO4,
    ColdFormat.TURBO3: IS_TURBO3,
    ColdFormat.INT4_BLOCK: IS_INT4_BLOCK,
}
_PACK_KERNELS: Final = {
    ColdFormat.INT4_BLOCK: pack_block_kernel,
    ColdFormat.INT4_CHANNEL: pack_channels_kernel,
}
NUMBER_TYPES: Final[dict[NumberType, tuple[Any, torch.dtype]]] = {
    NumberType.BF16: (tl.bfloat16, torch.bfloat16),
    NumberType.F16: (tl.float16, torch.float16),
    NumberType.F32: (tl.float32, torch.float32),
}


class _Way(NamedTuple):
    """What packing, or unpacking, is launched with."""

    kernel: Any
    tiles: Tiles
    matrix: torch.Tensor
    launch: Launch


class GpuBuffers:
    """Buffers with what the kernels want to know of them, in memory of ``device``: copied there
    when it is made. Kernels may use it until it is dropped and they have run.
    """

    def __init__(
        self,
        buffers: PackedBuffers,
        device: torch.device,
        pack: Launch = PACK,
        unpack: Launch = UNPACK,
    ) -> None:
        refusal = buffers.cold_format.refusal(buffers.shape)
        assert refusal is None, refusal
        places = buffers.hot_base, buffers.hot_stride_bytes, buffers.cold_offset_bytes
        table = torch.from_numpy(np.stack(places, 1).astype(np.int64)).to(device)
        frequencies = means = table  # where there are none, none are read
        if buffers.frequencies is not None:
            frequencies = torch.from_numpy(buffers.frequencies.view(np.int32)).to(device)
        if buffers.means is not None:
            means = torch.from_numpy(buffers.means.astype(np.float32)).to(device)
        is_gpu = _is_gpu(device)
        there = back = table
        if buffers.cold_format.is_rotated:
            there, back = _matrices(buffers, device, is_gpu)
        kernel = _PACK_KERNELS.get(buffers.cold_format, pack_kernel)
        self.packing = _Way(kernel, _tiles(buffers, pack.tile_numbers, is_gpu), there, pack)
        tiles = _tiles(buffers, unpack.tile_numbers, is_gpu)
        self.unpacking = _Way(unpack_kernel, tiles, back, unpack)
        self.cold_page_bytes = buffers.cold_page_bytes
        self.tables = table, frequencies, means
        self.number = NUMBER_TYPES[buffers.shape.number_type][0]


def pack_pages_gpu(
    buffers: GpuBuffers,
    cold_base: int,
    pairs: int,
    num_pages: int,
    ordinals: int | None,
    num_programs: int,
) -> Any:
    """Enqueue on torch's current stream: hot slots are packed into cold pages by index pairs (dst:
    cold page, src: hot slot), every byte of their packed buffers. Returns what Triton compiled.

    ``pairs`` and ``ordinals`` are addresses of device memory; buffers with frequencies want
    ordinals. ``cold_base`` is an address of the device's memory or of mapped host memory.
    """
    return _launch(buffers, buffers.packing, cold_base, pairs, num_pages, ordinals, num_programs)


def unpack_pages_gpu(
    buffers: GpuBuffers,
    cold_base: int,
    pairs: int,
    num_pages: int,
    ordinals: int | None,
    num_programs: int,
) -> Any:
    """The inverse, of pairs (dst: hot slot, src: cold page)."""
    return _launch(buffers, buffers.unpacking, cold_base, pairs, num_pages, ordinals, num_programs)


def _launch(
    buffers: GpuBuffers,
    way: _Way,
    cold_base: int,
    pairs: int,
    num_pages: int,
    ordinals: int | None,
    num_programs: int,
) -> Any:
    tiles = way.tiles
    assert ordinals is not None or not tiles.has_frequencies
    num_buffers = len(buffers.tables[0])
    num_items = num_pages * num_buffers
    if way.kernel is not pack_block_kernel:
        num_items *= tiles.num_tiles
    assert num_items < 2**31
    if num_items == 0:
        return None
    return way.kernel[(min(num_programs, num_items),)](
        pairs,
        ordinals if tiles.has_frequencies else pairs,  # not read then, but of one type
        num_pages,
        num_buffers,
        cold_base,
        buffers.cold_page_bytes,
        *buffers.tables,
        way.matrix,
        NUMBER=buffers.number,
        TILES=_aligned(tiles, gcd(tiles.cold_alignment, cold_base)),
        STAGES=way.launch.stages,
        num_warps=way.launch.num_warps,
    )


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _tile_size(cold_format: ColdFormat, shape: KVShape, tile_numbers: int) -> tuple[int, int]:
    """Heads and tokens."""
    heads, tokens, head_dim, _ = shape
    rows = max(tile_numbers // triton.next_power_of_2(head_dim), _MIN_DOT_ROWS)
    most_heads = triton.next_power_of_2(heads)
    if cold_format is ColdFormat.INT4_CHANNEL:
        tile_tokens = triton.next_power_of_2(cold_format.group(shape))
    else:
        tile_tokens = min(triton.next_power_of_2(tokens), rows)
    tile_heads = min(most_heads, max(1, rows // tile_tokens))
    if cold_format.is_rotated:
        tile_tokens = max(tile_tokens, _MIN_DOT_ROWS // tile_heads)
    return tile_heads, tile_tokens


def _tiles(buffers: PackedBuffers, tile_numbers: int, is_gpu: bool) -> Tiles:
    cold_format, shape = buffers.cold_format, buffers.shape
    heads, tokens, head_dim, _ = shape
    tile_heads, tile_tokens = _tile_size(cold_format, shape, tile_numbers)
    token_tiles = triton.cdiv(tokens, tile_tokens)
    width = triton.next_power_of_2(head_dim // 2)
    group = cold_format.group(shape)
    grouped = tokens if cold_format is ColdFormat.INT4_CHANNEL else head_dim
    code_bytes, num_parameters = cold_format.code_bytes(shape), cold_format.num_parameters(shape)
    hot = gcd(ALIGNMENT_BYTES, *buffers.hot_base.tolist(), *buffers.hot_stride_bytes.tolist())
    cold = gcd(ALIGNMENT_BYTES, buffers.cold_page_bytes, *buffers.cold_offset_bytes.tolist())
    return Tiles(
        kind=_KINDS[cold_format].value,
        is_rotated=cold_format.is_rotated,
        heads=heads,
        tokens=tokens,
        half=head_dim // 2,
        width=width,
        tile_heads=tile_heads,
        tile_tokens=tile_tokens,
        token_tiles=token_tiles,
        num_tiles=token_tiles * triton.cdiv(heads, tile_heads),
        is_whole=(tokens % tile_tokens, heads % tile_heads, width) == (0, 0, head_dim // 2),
        group=group,
        groups=max(1, grouped // group),
        code_bytes=code_bytes,
        num_parameters=num_parameters,
        num_padding=(cold_format.buffer_bytes(shape) - code_bytes) // 2 - num_parameters,
        has_frequencies=buffers.frequencies is not None,
        has_means=buffers.means is not None,
        is_asm=is_gpu,
        hot_alignment=hot,
        cold_alignment=cold,
        parameter_alignment=0,  # see _aligned
    )


def _aligned(tiles: Tiles, cold_alignment: int) -> Tiles:
    assert cold_alignment % 4 == 0, "parameters are read by words"
    alignment = gcd(cold_alignment, tiles.code_bytes)
    return tiles._replace(cold_alignment=cold_alignment, parameter_alignment=alignment)


def _matrices(
    buffers: PackedBuffers, device: torch.device, is_gpu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotation of row vectors, times sqrt(group), and its inverse, times the same."""
    group = buffers.cold_format.group(buffers.shape)
    assert group == buffers.shape.head_dim or buffers.shape.head_dim // group in (2, 4)
    matrix = torch.from_numpy(signs(group)[:, None] * hadamard(group))
    # Triton's interpreter takes products of bf16 for products of their bits.
    there = back = torch.float32
    if is_gpu:
        number_type = buffers.shape.number_type
        is_turned = buffers.frequencies is not None or buffers.means is not None
        # Turned numbers may be larger than f16 ones.
        if not (is_turned and number_type is NumberType.F16):
            there = NUMBER_TYPES[number_type][1]
        back = torch.float16
    return matrix.to(device, there), matrix.T.contiguous().to(device, back)
