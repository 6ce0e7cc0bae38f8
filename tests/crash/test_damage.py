"""Slots that are not what was written last to their place are misses, never data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from coldpage.store.format import HeaderCodec, parse_header
from tests.crash.small_tier import (
    HEADER_BYTES,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    TOKENS_PER_BLOCK,
    SmallTier,
)

# Many slots with one flipped bit each stand for one slot with each of its bits flipped in turn.
NUM_SLOTS = 1024
# Where a whole slot is, so that the disk does not look broken.
WHOLE_EVERY = 8


def tokens_of(conversation: int, num_blocks: int) -> np.ndarray:
    return np.arange(num_blocks * TOKENS_PER_BLOCK, dtype=np.int32) + 100_000 * (conversation + 1)


def pages_of(conversation: int, num_blocks: int) -> np.ndarray:
    rng = np.random.default_rng(conversation)
    return rng.integers(0, 256, (num_blocks, PAYLOAD_BYTES), np.uint8)


def with_flips(slots: np.ndarray, bits: np.ndarray, places: np.ndarray) -> np.ndarray:
    """A copy with bit ``bits[i]`` of slot ``places[i]`` flipped."""
    damaged = slots.copy()
    damaged[places, bits // 8] ^= (1 << (bits % 8)).astype(np.uint8)
    return damaged


def rounds_of(bits: np.ndarray, places: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, bits.size, places.size):
        some = bits[start : start + places.size]
        yield some, places[: some.size]


@pytest.mark.crash
def test_each_flipped_bit_of_a_slot_is_detected_when_it_is_read(tmp_path: Path) -> None:
    tokens, pages = tokens_of(0, NUM_SLOTS), pages_of(0, NUM_SLOTS)
    tier = SmallTier(tmp_path / "tier", NUM_SLOTS)
    tier.write(tokens, pages)
    tier.flush()
    known = tier.known_slots()
    tier.close()
    slots, index = tier.slots(), tier.index_path.read_bytes()
    assert sorted(known) == list(range(NUM_SLOTS))
    tier.open()
    assert tier.read(tokens, pages) == []
    tier.close()
    keys = [bytes(key) for key in tier_keys(tokens, tier)]
    block_of = np.array([keys.index(bytes(known[slot])) for slot in range(NUM_SLOTS)])
    places = np.delete(np.arange(NUM_SLOTS), np.arange(0, NUM_SLOTS, WHOLE_EVERY))
    num_flips = 0
    for bits, damaged in rounds_of(np.arange(8 * (HEADER_BYTES + PAYLOAD_BYTES)), places):
        tier.put(with_flips(slots, bits, damaged))
        tier.index_path.write_bytes(index)
        tier.open()
        assert tier.read(tokens, pages) == sorted(block_of[damaged].tolist())
        tier.close()
        num_flips += bits.size
    assert num_flips == 8 * (HEADER_BYTES + PAYLOAD_BYTES)
    # What fills the payload's last sector is nobody's.
    bits = 8 * (HEADER_BYTES + PAYLOAD_BYTES) + np.arange(places.size)
    tier.put(with_flips(slots, bits, places))
    tier.index_path.write_bytes(index)
    tier.open()
    assert tier.read(tokens, pages) == []
    tier.close()


def tier_keys(tokens: np.ndarray, tier: SmallTier) -> tuple[bytes, ...]:
    """The keys of a conversation's blocks, by the manager itself."""
    tier.open()
    cache = tier.manager.create_kv_cache(tokens)
    keys = cache.block_keys
    cache.close()
    tier.close()
    return keys


@pytest.mark.crash
def test_each_flipped_bit_of_a_header_is_detected_by_a_scan(tmp_path: Path) -> None:
    # Of one block each: none leads to another.
    tier = SmallTier(tmp_path / "tier", NUM_SLOTS)
    for conversation in range(NUM_SLOTS):
        tier.write(tokens_of(conversation, 1), pages_of(conversation, 1))
    tier.flush()
    tier.close()
    slots = tier.slots()
    places = np.arange(1, NUM_SLOTS)
    for bits, damaged in rounds_of(np.arange(8 * HEADER_BYTES), places):
        tier.put(with_flips(slots, bits, damaged))
        tier.index_path.unlink(missing_ok=True)
        tier.open()
        assert sorted(tier.known_slots()) == sorted({*range(NUM_SLOTS)} - {*damaged.tolist()})
        tier.close()


NUM_BLOCKS = 8


def reopened(tier: SmallTier, slots: np.ndarray, index: bytes | None) -> None:
    """Open the tier with other slots; with the index that names what was there, or by a scan."""
    tier.put(slots)
    if index is None:
        tier.index_path.unlink(missing_ok=True)
    else:
        tier.index_path.write_bytes(index)
    tier.open()


def written(path: Path, model: bytes, conversation: int) -> tuple[SmallTier, np.ndarray, list[int]]:
    """A closed tier with one conversation, its slots, and the slot of each block."""
    tier = SmallTier(path, NUM_BLOCKS, model=model)
    tier.write(tokens_of(conversation, NUM_BLOCKS), pages_of(conversation, NUM_BLOCKS))
    tier.flush()
    slot_of_key = {bytes(key): slot for slot, key in tier.known_slots().items()}
    tier.close()
    keys = tier_keys(tokens_of(conversation, NUM_BLOCKS), tier)
    return tier, tier.slots(), [slot_of_key[bytes(key)] for key in keys]


def known_length(tier: SmallTier, conversation: int) -> int:
    cache = tier.manager.create_kv_cache(tokens_of(conversation, NUM_BLOCKS))
    num_blocks = cache.history_length // TOKENS_PER_BLOCK
    cache.close()
    return num_blocks


@pytest.mark.crash
def test_two_whole_slots_in_each_others_places_are_no_data(tmp_path: Path) -> None:
    tier, slots, slot_of = written(tmp_path / "tier", b"small", 0)
    index = tier.index_path.read_bytes()
    here, there = slot_of[2], slot_of[5]
    slots[[here, there]] = slots[[there, here]]
    reopened(tier, slots, index)
    assert tier.read(tokens_of(0, NUM_BLOCKS), pages_of(0, NUM_BLOCKS)) == [2, 5]
    tier.close()
    reopened(tier, slots, None)
    assert known_length(tier, 0) == 2
    tier.close()


@pytest.mark.crash
def test_a_slot_of_another_model_is_no_data(tmp_path: Path) -> None:
    tier, slots, slot_of = written(tmp_path / "tier", b"small", 0)
    _, others, slot_of_other = written(tmp_path / "other", b"other", 0)
    assert slot_of == slot_of_other
    index = tier.index_path.read_bytes()
    slots[slot_of[3]] = others[slot_of[3]]
    reopened(tier, slots, index)
    assert tier.read(tokens_of(0, NUM_BLOCKS), pages_of(0, NUM_BLOCKS)) == [3]
    tier.close()
    reopened(tier, slots, None)
    assert known_length(tier, 0) == 3
    tier.close()


@pytest.mark.crash
@pytest.mark.parametrize("change", [{"model_fingerprint": b"o" * 32}, {"codec": "concat v2"}])
def test_a_slot_that_differs_in_nothing_but_what_made_it_is_no_data(
    change: dict[str, object], tmp_path: Path
) -> None:
    tier, slots, slot_of = written(tmp_path / "tier", b"small", 0)
    index, slot = tier.index_path.read_bytes(), slot_of[3]
    header, payload = np.split(slots[slot], [HEADER_BYTES])
    parsed = parse_header(header)
    assert parsed is not None
    identity, found = parsed
    payload[0] ^= 1
    checksum = xxhash.xxh3_64_intdigest(payload[:PAYLOAD_BYTES].tobytes())
    codec = HeaderCodec(dataclasses.replace(identity, **change))  # type: ignore[arg-type]
    codec.pack(header, slot, found.write_number, checksum, found.name)
    reopened(tier, slots, index)
    assert tier.read(tokens_of(0, NUM_BLOCKS), pages_of(0, NUM_BLOCKS)) == [3]
    tier.close()
    reopened(tier, slots, None)
    assert known_length(tier, 0) == 3
    tier.close()


@pytest.mark.crash
def test_an_older_copy_of_a_slot_is_no_data(tmp_path: Path) -> None:
    tier = SmallTier(tmp_path / "tier", NUM_BLOCKS)
    first, second = (
        (tokens_of(number, NUM_BLOCKS), pages_of(number, NUM_BLOCKS)) for number in range(2)
    )
    tier.write(*first)
    tier.flush()
    older = tier.slots()
    tier.write(*second)  # takes the slots of the first
    tier.flush()
    newer = tier.slots()
    assert (older != newer).any(axis=1).all()
    known = tier.known_slots()
    # Push it out of the hot level.
    filler = tier.manager.create_kv_cache()
    assert filler.resume() and filler.resize(NUM_BLOCKS * TOKENS_PER_BLOCK)
    filler.close()
    cache = tier.manager.create_kv_cache(second[0])
    (block,) = [i for i, key in enumerate(cache.block_keys) if bytes(key) == bytes(known[4])]
    cache.close()
    newer[4] = older[4]
    tier.put(newer)
    assert tier.read(*second) == [block]  # in the process that wrote both
    tier.close()


@pytest.mark.crash
def test_an_older_copy_of_a_slot_is_not_what_the_index_names(tmp_path: Path) -> None:
    tier = SmallTier(tmp_path / "tier", NUM_BLOCKS)
    first, second = (
        (tokens_of(number, NUM_BLOCKS), pages_of(number, NUM_BLOCKS)) for number in range(2)
    )
    tier.write(*first)
    tier.flush()
    older = tier.slots()
    tier.write(*second)
    tier.flush()
    known = tier.known_slots()
    tier.close()
    newer, index = tier.slots(), tier.index_path.read_bytes()
    keys = tier_keys(second[0], tier)
    block = keys.index(known[4])
    newer[4] = older[4]
    reopened(tier, newer, index)
    assert tier.read(*second) == [block]
    tier.close()
    # A scan takes it for what it is: a page of the first, whole, with nothing that leads to it.
    reopened(tier, newer, None)
    assert known_length(tier, 1) == block
    assert known_length(tier, 0) in (0, 1)
    tier.close()


def test_the_slots_are_as_these_tests_think(tmp_path: Path) -> None:
    tier, slots, slot_of = written(tmp_path / "tier", b"small", 0)
    assert slots.shape == (NUM_BLOCKS, SLOT_BYTES)
    payload = slots[slot_of, HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]
    assert np.array_equal(payload, pages_of(0, NUM_BLOCKS))
    assert tier.index_path.exists()
