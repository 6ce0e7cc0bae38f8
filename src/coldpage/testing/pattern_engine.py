"""The content-pattern engine: a model whose K and V are a known pattern, so that every byte can be
checked.

What position ``p`` of a sequence holds is derived from the reuse scope, every token up to ``p``,
the layer and the role, as real K and V are; and from the holes before it that attention skipped
when it was written. Work on a stream is launched with the exact bytes it
touches; without a stream the calling thread touches them, and tells the simulated device so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.config import AttentionLayerConfig, BufferConfig, ReuseScope
from coldpage.device.base import DeviceBytes, Stream
from coldpage.device.simulated import SimulatedDevice
from coldpage.errors import OutOfPagesError
from coldpage.manager import KVCacheManager
from coldpage.page import DEFAULT_PRIORITY
from coldpage.sequence import KVCache, KVCacheStatus, OnMissing
from coldpage.types import (
    NO_SLOT,
    BlockOrdinal,
    ByteRange,
    Int32Array,
    LayerGroupId,
    MemAddress,
    Priority,
)

__all__ = ["Bytes", "PatternEngine", "PatternSequence", "pattern_bytes"]

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX: Final = 0xBF58476D1CE4E5B9
# Findings kept; one is enough to fail, a few show the shape of the fault.
_MAX_PROBLEMS: Final = 20

Bytes = npt.NDArray[np.uint8]


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX) & _MASK
    return value ^ (value >> 31)


def _root(scope: ReuseScope) -> int:
    digest = hashlib.sha256(f"{scope.adapter}\0{scope.salt}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _taint(holes: Sequence[BlockOrdinal]) -> int:
    """What holes before a position change in it; 0 where there are none."""
    if not holes:
        return 0
    digest = hashlib.sha256(repr(holes).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def pattern_bytes(chain: npt.NDArray[np.uint64], salt: int, num_bytes: int) -> Bytes:
    """The bytes of positions with these chain values in the buffer of ``salt``: uint8 [num_tokens,
    num_bytes].
    """
    words = np.arange(-(-num_bytes // 8), dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(salt)
    mixed = (chain[:, None] + words[None, :]) * np.uint64(_MIX)
    mixed ^= mixed >> np.uint64(29)
    return np.ascontiguousarray(mixed).view(np.uint8)[:, :num_bytes]


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One (layer, role) over the hot pool."""

    name: str
    layer: AttentionLayerConfig
    layer_group_id: LayerGroupId
    array: Bytes  # [num_slots, buffer_bytes]
    token_bytes: int
    salt: int

    def range_of(self, slot: int, first: int, num_tokens: int) -> ByteRange:
        """The bytes of tokens ``first`` and following of the block in ``slot``."""
        address = self.array.ctypes.data + slot * self.array.strides[0] + first * self.token_bytes
        return ByteRange(MemAddress(address), num_tokens * self.token_bytes)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Positions of one block in one buffer, and what they hold."""

    buffer: _Buffer
    ordinal: BlockOrdinal
    slot: int
    first_token: int  # in the block
    expected: Bytes  # [num_tokens, token_bytes]

    @property
    def where(self) -> str:
        """For people."""
        return f"block {self.ordinal} of {self.buffer.name}"

    @property
    def place(self) -> Bytes:
        """The bytes themselves, a view."""
        width = self.buffer.token_bytes
        start = self.first_token * width
        return self.buffer.array[self.slot, start : start + len(self.expected) * width]

    @property
    def bytes_touched(self) -> ByteRange:
        """The same as a range of addresses."""
        return self.buffer.range_of(self.slot, self.first_token, len(self.expected))


class PatternEngine:
    """Drives the caches of one manager. ``problems`` holds what was wrong, in sentences; a test
    asserts it is empty after all streams have been synchronised.

    ``view`` is what survives of bytes: both sides go through it before they are compared. None is
    for lossless codecs.
    """

    def __init__(
        self, manager: KVCacheManager, *, view: Callable[[Bytes], Bytes] | None = None
    ) -> None:
        self.manager = manager
        self.problems: list[str] = []
        self._view = view
        self._device = manager.device
        self.refresh()

    def refresh(self) -> None:
        """Ask for the hot pools again: to be called after each ``resize`` of the hot level."""
        self.buffers = [
            self._buffer(layer, buffer)
            for layer in self.manager.config.layers
            for buffer in layer.buffers
        ]
        self.layer_groups = sorted({buffer.layer_group_id for buffer in self.buffers})

    def _buffer(self, layer: AttentionLayerConfig, buffer: BufferConfig) -> _Buffer:
        per_block = self.manager.tokens_per_block
        assert buffer.num_bytes % per_block == 0, "a buffer holds the same bytes for each token"
        name = f"layer {layer.layer_id} {buffer.role}"
        array = self.manager.hot_array(layer.layer_id, buffer.role)
        if isinstance(array, DeviceBytes):
            assert isinstance(self._device, SimulatedDevice), "patterns are written by the host"
            array = self._device.reveal(array)
        return _Buffer(
            name,
            layer,
            self.manager.layer_group_of(layer.layer_id),
            array,
            buffer.num_bytes // per_block,
            int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"),
        )

    def create(
        self,
        tokens: Sequence[int] = (),
        *,
        scope: ReuseScope | None = None,
        priority: Priority = DEFAULT_PRIORITY,
        on_missing: OnMissing = OnMissing.RECOMPUTE,
    ) -> PatternSequence:
        """A new suspended sequence with what the manager could reuse of ``tokens``."""
        scope = scope or ReuseScope()
        cache = self.manager.create_kv_cache(
            tokens, scope=scope, priority=priority, on_missing=on_missing
        )
        return PatternSequence(self, cache, scope, list(tokens[: cache.history_length]))

    def report(self, problem: str) -> None:
        """Note that something was wrong. Called from stream threads too."""
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)

    def read(self, pieces: Sequence[_Piece], stream: Stream | None) -> None:
        """Compare the pieces with memory, now or when the stream gets there."""
        if not pieces:
            return

        def compare() -> None:
            for piece in pieces:
                found, expected = piece.place.reshape(piece.expected.shape), piece.expected
                if self._view is not None:
                    found, expected = self._view(found), self._view(expected)
                if not np.array_equal(found, expected):
                    wrong = np.flatnonzero((found != expected).any(axis=1))
                    tokens = (wrong + piece.first_token).tolist()
                    self.report(f"{piece.where}, slot {piece.slot}: wrong bytes of {tokens}")

        self._run(compare, stream, reads=[piece.bytes_touched for piece in pieces])

    def write(self, pieces: Sequence[_Piece], stream: Stream | None) -> None:
        """Fill the pieces' memory with what they hold, now or when the stream gets there."""
        if not pieces:
            return

        def fill() -> None:
            for piece in pieces:
                piece.place[:] = piece.expected.ravel()

        self._run(fill, stream, writes=[piece.bytes_touched for piece in pieces])

    def _run(
        self,
        work: Callable[[], None],
        stream: Stream | None,
        reads: Sequence[ByteRange] = (),
        writes: Sequence[ByteRange] = (),
    ) -> None:
        if stream is not None:
            stream.launch(work, reads=reads, writes=writes)
            return
        if isinstance(self._device, SimulatedDevice):
            self._device.host_access(reads=reads, writes=writes)
        work()


class PatternSequence:
    """A cache with the tokens that its pages must hold, and the stream that works on them."""

    def __init__(
        self, engine: PatternEngine, cache: KVCache, scope: ReuseScope, tokens: list[int]
    ) -> None:
        self.cache = cache
        self.scope = scope
        self.stream: Stream | None = None
        self.tokens: list[int] = []  # of every position that has been written
        self._engine = engine
        self._chain: list[int] = []
        # By layer group what each position was made from: the chain, and the holes there were.
        self._sources: dict[LayerGroupId, list[int]] = {g: [] for g in engine.layer_groups}
        self._set_tokens(0, tokens)

    @property
    def is_active(self) -> bool:
        """Whether the pages are locked hot."""
        return self.cache.status is KVCacheStatus.ACTIVE

    def _set_tokens(self, start: int, tokens: Sequence[int]) -> None:
        del self.tokens[start:], self._chain[start:]
        value = self._chain[-1] if start else _root(self.scope)
        for token in tokens:
            value = _mix((value ^ (token + 1)) * _GOLDEN & _MASK)
            self._chain.append(value)
        self.tokens += tokens
        taint = _taint(self.cache.holes()) if tokens and start else 0
        for sources in self._sources.values():
            sources[start:] = [value ^ taint for value in self._chain[start:]]

    def _recomputed(self, ordinal: BlockOrdinal, layer_groups: set[LayerGroupId]) -> None:
        """The block has been written again, with the holes that there are now."""
        per_block = self._engine.manager.tokens_per_block
        block = slice(ordinal * per_block, min((ordinal + 1) * per_block, len(self.tokens)))
        taint = _taint([hole for hole in self.cache.holes() if hole < ordinal])
        for group in layer_groups:
            self._sources[group][block] = [value ^ taint for value in self._chain[block]]

    # ------------------------------------------------------------------ what an engine does

    def resume(self, stream: Stream | None = None) -> bool:
        """Lock the pages; then wait for ``cache.is_ready()``. False when there is no room."""
        try:
            if not self.cache.resume(stream):
                return False
        except OutOfPagesError:
            return False
        self.stream = stream
        return True

    def write(self, tokens: Sequence[int]) -> None:
        """The next positions after the history, which a resize has granted. May raise
        SubmissionError, having written nothing.
        """
        start = self.cache.history_length
        assert start + len(tokens) <= self.cache.capacity, "not granted"
        self._set_tokens(start, tokens)
        pieces = list(self._pieces(start, start + len(tokens)))
        for piece in pieces:
            if piece.slot == NO_SLOT:
                self._engine.report(f"{piece.where}: granted for writing, and it is not hot")
                return
        try:
            self._engine.write(pieces, self.stream)
        except Exception:
            self.forget_from(start)
            raise

    def step(self, tokens: Sequence[int], *, num_committed: int | None = None) -> bool:
        """Resize, wait, recompute, check, write and commit (or only note as history) ``tokens``;
        False when there is no room.
        """
        start = self.cache.history_length
        try:
            if not self.cache.resize(start + len(tokens)):
                return False
        except OutOfPagesError:
            return False
        self.cache.synchronize()
        self.recompute()
        self.check()
        self.write(tokens)
        stop = start + len(tokens) if num_committed is None else num_committed
        if stop > self.cache.num_committed_tokens:
            self.cache.commit(self.tokens[self.cache.num_committed_tokens : stop])
        if self.cache.history_length < start + len(tokens):
            return self.cache.resize(self.cache.capacity, start + len(tokens))
        return True

    def recompute(self) -> list[BlockOrdinal]:
        """Write every missing block that has its pages, in ascending order, and report it filled.
        May raise SubmissionError.
        """
        filled: list[BlockOrdinal] = []
        missing = self._missing()
        for ordinal in self.cache.missing_blocks():
            lacking = {group for group, blocks in missing.items() if ordinal in blocks}
            slots = [int(self.cache.page_indices(group)[ordinal]) for group in lacking]
            if NO_SLOT in slots:
                continue  # the next resize gives it pages
            self._recomputed(ordinal, lacking)
            pieces = [
                piece
                for piece in self._block_pieces(ordinal)
                if piece.buffer.layer_group_id in lacking
            ]
            self._engine.write(pieces, self.stream)
            self.cache.fill_missing([ordinal])
            filled.append(ordinal)
        return filled

    def fork(self) -> PatternSequence:
        """A second sequence with the same history."""
        cache, history = self.cache.fork(), self.cache.history_length
        other = PatternSequence(self._engine, cache, self.scope, self.tokens[:history])
        other._sources = {group: s[:history] for group, s in self._sources.items()}
        return other

    def truncate(self, num_tokens: int) -> None:
        """Forget positions from ``num_tokens`` on."""
        self.cache.truncate(num_tokens)
        self.forget_from(num_tokens)

    def forget_from(self, num_tokens: int) -> None:
        """Note that a resize has taken back what was written from ``num_tokens`` on."""
        self._set_tokens(num_tokens, [])

    # ------------------------------------------------------------------ checking

    def check(self) -> None:
        """Check the numbers, and read every page of the ready cache that the manager offers and
        that is neither missing nor a hole. May raise SubmissionError.
        """
        cache, report = self.cache, self._engine.report
        history = cache.history_length
        if not cache.num_committed_tokens <= history <= cache.capacity:
            report(f"committed {cache.num_committed_tokens}, history {history}, {cache.capacity}")
        if cache.tokens.tolist() != self.tokens[: cache.num_committed_tokens]:
            report(f"the committed tokens are {cache.tokens.tolist()}, not {self.tokens}")
        pieces: list[_Piece] = []
        missing, holes = self._missing(), self._holes()
        for piece in self._pieces(0, history):
            layer_group, ordinal = piece.buffer.layer_group_id, piece.ordinal
            if ordinal in missing[layer_group]:
                continue
            if ordinal in holes[layer_group]:
                if piece.slot != NO_SLOT:
                    report(f"{piece.where}: a hole, and it has hot slot {piece.slot}")
            elif piece.slot != NO_SLOT:
                pieces.append(piece)
            elif self._is_visible(piece.buffer.layer, ordinal):
                report(f"{piece.where}: attention needs the block, and it is not hot")
        self._engine.read(pieces, self.stream)

    def _is_visible(self, layer: AttentionLayerConfig, ordinal: int) -> bool:
        """Whether a query after the history sees a position of the block."""
        if layer.sliding_window_tokens is None:
            return True
        per_block = self._engine.manager.tokens_per_block
        first, last = ordinal * per_block, (ordinal + 1) * per_block - 1
        oldest = self.cache.history_length - layer.sliding_window_tokens + 1
        return first < layer.num_sink_tokens or last >= oldest

    def _missing(self) -> dict[LayerGroupId, set[BlockOrdinal]]:
        groups = self._engine.layer_groups
        return {group: set(self.cache.missing_blocks(group)) for group in groups}

    def _holes(self) -> dict[LayerGroupId, set[BlockOrdinal]]:
        return {group: set(self.cache.holes(group)) for group in self._engine.layer_groups}

    def _block_pieces(self, ordinal: BlockOrdinal) -> Iterator[_Piece]:
        """The written positions of a block."""
        start = ordinal * self._engine.manager.tokens_per_block
        stop = start + self._engine.manager.tokens_per_block
        return self._pieces(start, min(stop, self.cache.history_length))

    def _pieces(self, start: int, stop: int) -> Iterator[_Piece]:
        """Positions [start, stop), cut at the ends of blocks, in every buffer."""
        per_block = self._engine.manager.tokens_per_block
        sources = {g: np.array(s[start:stop], np.uint64) for g, s in self._sources.items()}
        for buffer in self._engine.buffers:
            slots: Int32Array = self.cache.page_indices(buffer.layer_group_id)
            contents = pattern_bytes(
                sources[buffer.layer_group_id], buffer.salt, buffer.token_bytes
            )
            for ordinal in range(start // per_block, -(-stop // per_block)):
                first = max(start, ordinal * per_block)
                last = min(stop, (ordinal + 1) * per_block)
                yield _Piece(
                    buffer,
                    BlockOrdinal(ordinal),
                    int(slots[ordinal]),
                    first - ordinal * per_block,
                    contents[first - start : last - start],
                )
