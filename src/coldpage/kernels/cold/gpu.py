"""Hot pages to packed cold ones and back by a GPU, in one launch for all buffers of one format.

Kernels are in ``gpu_kernels``. They read one side and write the other, which is memory of the
device or of the host, mapped; nothing lies in between. Few programs suffice, so that others have
the rest of the GPU.
"""

from __future__ import annotations

from math import gcd
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from coldpage.kernels.cold.formats import ALIGNMENT_BYTES, ColdFormat, NumberType, PackedBuffers
from coldpage.kernels.cold.gpu_kernels import pack_block_kernel, pack_kernel, unpack_kernel
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

__all__ = ["PACK", "UNPACK", "GpuBuffers", "Launch", "pack_pages_gpu", "unpack_pages_gpu"]


class Launch(NamedTuple):
    """How a kernel works."""

    tile_numbers: int  # a power of two
    num_warps: int
    stages: int  # iterations of which reads are in flight, and the one that computes


PACK: Final = Launch(tile_numbers=8192, num_warps=4, stages=2)
UNPACK: Final = Launch(tile_numbers=8192, num_warps=4, stages=4)

_MIN_DOT_ROWS: Final = 16
# Rows that follow each other are of so many heads, and of tokens of one line of memory.
_MAX_CHANNEL_HEADS: Final = 4
_KINDS: Final = {
    ColdFormat.INT8: IS_INT8,
    ColdFormat.FP8: IS_FP8,
    ColdFormat.INT4_TOKEN: IS_INT4_TOKEN,
    ColdFormat.INT4_CHANNEL: IS_INT4_CHANNEL,
    ColdFormat.TURBO4: IS_TURBO4,
    ColdFormat.TURBO3: IS_TURBO3,
    ColdFormat.INT4_BLOCK: IS_INT4_BLOCK,
}
_NUMBERS: Final = {
    NumberType.BF16: (tl.bfloat16, torch.bfloat16),
    NumberType.F16: (tl.float16, torch.float16),
    NumberType.F32: (tl.float32, torch.float32),
}


class GpuBuffers:
    """Some buffers with what kernels want to know of them, in memory of ``device``. Copies from the
    host when it is made; kernels may use it until it is dropped and they have run."""

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
        frequencies = means = table  # where there are none, they are not read
        if buffers.frequencies is not None:
            frequencies = torch.from_numpy(buffers.frequencies.view(np.int32)).to(device)
        if buffers.means is not None:
            means = torch.from_numpy(buffers.means.astype(np.float32)).to(device)
        is_gpu = _is_gpu(device)
        self.num_buffers = len(table)
        self.cold_page_bytes = buffers.cold_page_bytes
        self.tables = table, frequencies, means
        self.number = _NUMBERS[buffers.shape.number_type][0]
        self.launches = pack, unpack
        self.tiles = _tiles(buffers, pack, is_gpu), _tiles(buffers, unpack, is_gpu)
        self.matrices = (
            _matrices(buffers, device, is_gpu) if buffers.cold_format.is_rotated else (table, table)
        )


def pack_pages_gpu(
    buffers: GpuBuffers,
    cold_base: int,
    pairs: int,
    num_pages: int,
    ordinals: int | None,
    num_programs: int,
) -> Any:
    """Enqueue on torch's current stream: hot slots of the index pairs (dst: cold page, src: hot
    slot) are packed, every byte of the packed buffers written. Returns what Triton compiled.

    ``pairs`` and ``ordinals`` are addresses of device memory; ordinals are wanted of buffers with
    frequencies. ``cold_base`` is device memory or mapped host memory.
    """
    is_block = buffers.tiles[0].kind == IS_INT4_BLOCK.value
    kernel = pack_block_kernel if is_block else pack_kernel
    return _launch(kernel, 0, buffers, cold_base, pairs, num_pages, ordinals, num_programs)


def unpack_pages_gpu(
    buffers: GpuBuffers,
    cold_base: int,
    pairs: int,
    num_pages: int,
    ordinals: int | None,
    num_programs: int,
) -> Any:
    """The inverse, of pairs (dst: hot slot, src: cold page)."""
    return _launch(unpack_kernel, 1, buffers, cold_base, pairs, num_pages, ordinals, num_programs)


def _launch(
    kernel: Any,
    way: int,
    buffers: GpuBuffers,
    cold_base: int,
    pairs: int,
    num_pages: int,
    ordinals: int | None,
    num_programs: int,
) -> Any:
    tiles, launch = buffers.tiles[way], buffers.launches[way]
    assert ordinals is not None or not tiles.has_frequencies
    alignment = gcd(tiles.cold_alignment, cold_base)
    if alignment < tiles.cold_alignment:
        tiles = _aligned(tiles, alignment)
    per_page = buffers.num_buffers * (1 if kernel is pack_block_kernel else tiles.num_tiles)
    num_programs = min(num_programs, num_pages * per_page)
    if num_programs == 0:
        return None
    return kernel[(num_programs,)](
        pairs,
        ordinals if tiles.has_frequencies else pairs,  # not read, but of one type
        num_pages,
        buffers.num_buffers,
        cold_base,
        buffers.cold_page_bytes,
        *buffers.tables,
        buffers.matrices[way],
        NUMBER=buffers.number,
        TILES=tiles,
        STAGES=launch.stages,
        num_warps=launch.num_warps,
    )


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _aligned(tiles: Tiles, cold_alignment: int) -> Tiles:
    assert cold_alignment % 4 == 0, "parameters are words"
    parameter_alignment = gcd(cold_alignment, tiles.code_bytes)
    return tiles._replace(cold_alignment=cold_alignment, parameter_alignment=parameter_alignment)


def _tiles(buffers: PackedBuffers, launch: Launch, is_gpu: bool) -> Tiles:
    cold_format, shape = buffers.cold_format, buffers.shape
    heads, tokens, head_dim, _ = shape
    width = triton.next_power_of_2(head_dim // 2)
    group = cold_format.group(shape)
    by_channel = cold_format is ColdFormat.INT4_CHANNEL
    groups = (
        (tokens if by_channel else head_dim) // group
        if cold_format is not ColdFormat.INT4_BLOCK
        else 1
    )
    rows = max(launch.tile_numbers // (2 * width), _MIN_DOT_ROWS)
    tile_tokens = triton.next_power_of_2(group if by_channel else tokens)
    if not by_channel:
        tile_tokens = min(tile_tokens, rows)
    tile_heads = min(triton.next_power_of_2(heads), max(1, rows // tile_tokens))
    if by_channel:
        tile_heads = min(tile_heads, _MAX_CHANNEL_HEADS)
    if cold_format.is_rotated:
        tile_tokens = max(tile_tokens, _MIN_DOT_ROWS // tile_heads)
    step = group if by_channel else tile_tokens
    token_tiles = triton.cdiv(tokens, step)
    is_whole = tokens % tile_tokens == 0 and heads % tile_heads == 0 and 2 * width == head_dim
    if by_channel:
        assert tile_tokens == group, "groups of channels are powers of two"
    num_parameters = cold_format.num_parameters(shape)
    code_bytes = cold_format.code_bytes(shape)
    cold = gcd(ALIGNMENT_BYTES, buffers.cold_page_bytes, *buffers.cold_offset_bytes.tolist())
    hot = gcd(ALIGNMENT_BYTES, *buffers.hot_base.tolist(), *buffers.hot_stride_bytes.tolist())
    tiles = Tiles(
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
        is_whole=is_whole,
        group=group,
        groups=groups,
        code_bytes=code_bytes,
        num_parameters=num_parameters,
        num_padding=(cold_format.buffer_bytes(shape) - code_bytes) // 2 - num_parameters,
        has_frequencies=buffers.frequencies is not None,
        has_means=buffers.means is not None,
        is_asm=is_gpu,
        hot_alignment=hot,
        cold_alignment=cold,
        parameter_alignment=0,
    )
    return _aligned(tiles, cold)


def _matrices(
    buffers: PackedBuffers, device: torch.device, is_gpu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotation of row vectors, times sqrt(group), and its inverse, times the same."""
    group = buffers.cold_format.group(buffers.shape)
    matrix = torch.from_numpy(signs(group)[:, None] * hadamard(group))
    pack = unpack = torch.float32
    if is_gpu:
        number_type = buffers.shape.number_type
        is_turned = buffers.frequencies is not None or buffers.means is not None
        # Turned f16 numbers may be larger than f16 ones.
        if not (is_turned and number_type is NumberType.F16):
            pack = _NUMBERS[number_type][1]
        unpack = torch.float16
    return matrix.to(device, pack), matrix.T.contiguous().to(device, unpack)
