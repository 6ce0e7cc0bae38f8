"""How a quota is divided: weights by layer group, projected to the pool groups of each level.

The weights are shares of the hot bytes. A cold level keeps the proportions of slot counts that they
imply, whatever a cold page takes and whichever pool groups it shares. The arithmetic is exact: a
sum of rounded shares may come out a slot short.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final, NamedTuple

from coldpage.config import BatchDesc, KVCacheDesc
from coldpage.errors import ConfigurationError
from coldpage.layout.groups import ColdLayout, HotLayout, LayerGroup
from coldpage.types import HalfOpenRange, PageClass, PoolGroupIndex

__all__ = ["TYPICAL_SEQUENCE_TOKENS", "Partition", "slot_counts"]

# The length of the one sequence that divides a quota where nothing else is said.
TYPICAL_SEQUENCE_TOKENS: Final = 4096


class _Pages(NamedTuple):
    """The pages that a batch keeps in one layer group."""

    num_sink: int
    num_body: int
    num_recent: int

    @property
    def total(self) -> int:
        return self.num_sink + self.num_body + self.num_recent

    def share_of(self, page_class: PageClass, classes: Sequence[PageClass]) -> Fraction:
        """The part of the group's slots that one of its classes gets; never none."""
        num_pages = {
            PageClass.SINK: self.num_sink,
            PageClass.BODY: self.num_body,
            PageClass.RECENT: self.num_recent,
        }
        if PageClass.SINK not in classes:
            num_pages[PageClass.BODY] += self.num_sink
        kept = {it: max(1, num_pages[it]) for it in classes}
        return Fraction(kept[page_class], sum(kept.values()))


def _num_kept(start: int, stop: int, stale: HalfOpenRange) -> int:
    """How many of the blocks ``start <= i < stop`` are not stale."""
    overlap = HalfOpenRange(max(start, stale.start), min(stop, stale.stop))
    return max(0, stop - start) - len(overlap)


def _batch_pages(
    group: LayerGroup, batch: BatchDesc, tokens_per_block: int, num_recent_blocks: int
) -> _Pages:
    """Each sequence keeps the blocks of its capacity that are not stale at its history; the whole
    blocks of the system prompt are the same pages in all of them, and stay while one sees them.
    Beside the recent ones there is the block that is not full.
    """
    num_shared = batch.system_prompt_length // tokens_per_block
    sequences = [
        (-(-c.capacity // tokens_per_block), group.stale_blocks(c.history_length, tokens_per_block))
        for c in batch.kv_caches
    ]
    # All ranges start at one block and grow with the history, so the smallest is in every other.
    stale_for_all = min((stale for _, stale in sequences), key=lambda stale: stale.stop)

    def num_pages(start: int, stop: int) -> int:
        shared = _num_kept(start, min(stop, num_shared), stale_for_all)
        return shared + sum(
            _num_kept(max(start, num_shared), min(stop, num_blocks), stale)
            for num_blocks, stale in sequences
        )

    num_first, num_rest = num_pages(0, 1), num_pages(1, max(n for n, _ in sequences))
    num_recent = 0
    if num_recent_blocks:
        # Of the shared blocks those that are among the newest of the shortest sequence.
        newest_from = [max(1, n - num_recent_blocks - 1) for n, _ in sequences]
        num_recent = _num_kept(min(newest_from), num_shared, stale_for_all) + sum(
            _num_kept(max(start, num_shared), num_blocks, stale)
            for start, (num_blocks, stale) in zip(newest_from, sequences, strict=True)
        )
    return _Pages(num_first, num_rest - num_recent, num_recent)


class Partition:
    """How quotas are divided between layer groups, fixed at construction.

    The shares come from ``initial_pool_ratio``, hot bytes by layer group; else from the pages that
    ``typical_step`` keeps in each; else from the most that any of the ``constraints`` keeps there;
    else from one sequence of ``TYPICAL_SEQUENCE_TOKENS``. A group's share is
    divided between its page classes as the same batch has them; beside an
    ``initial_pool_ratio``, as the next of these sources has.

    Raises ConfigurationError when the ratio does not have one share a layer group.
    """

    layer_group_weights: tuple[Fraction, ...]  # of the hot bytes, by layer group; 1 in sum
    hot_floors: tuple[int, ...]  # slots by hot pool group: any of the constraints, and a block

    def __init__(
        self,
        layout: HotLayout,
        tokens_per_block: int,
        *,
        initial_pool_ratio: Sequence[float] | None = None,
        typical_step: BatchDesc | None = None,
        constraints: Sequence[BatchDesc] = (),
    ) -> None:
        def pages_of(batch: BatchDesc) -> list[_Pages]:
            recent = layout.num_recent_blocks
            groups = layout.layer_groups
            return [_batch_pages(group, batch, tokens_per_block, recent) for group in groups]

        self._layout = layout
        needs = [pages_of(batch) for batch in constraints]
        if typical_step is not None:
            candidates = [pages_of(typical_step)]
        else:
            one_sequence = KVCacheDesc(TYPICAL_SEQUENCE_TOKENS, TYPICAL_SEQUENCE_TOKENS)
            candidates = needs or [pages_of(BatchDesc((one_sequence,)))]
        pages = [
            max(of_group, key=lambda kept: kept.total) for of_group in zip(*candidates, strict=True)
        ]
        self.layer_group_weights = _normalised(
            _page_weights(layout, pages)
            if initial_pool_ratio is None
            else _given_weights(layout, initial_pool_ratio)
        )
        self._slot_weights = tuple(
            self.layer_group_weights[lc.layer_group_id]
            * pages[lc.layer_group_id].share_of(lc.page_class, layout.page_classes)
            / layout.page_bytes(lc.life_cycle_id)
            for lc in layout.life_cycles
        )
        self.hot_floors = tuple(
            _hot_floor(layout, PoolGroupIndex(index), needs)
            for index in range(len(layout.slot_bytes))
        )

    def hot_byte_weights(self) -> tuple[Fraction, ...]:
        """The share of the hot bytes by hot pool group; 1 in sum."""
        return tuple(
            sum(
                (
                    self.layer_group_weights[group]
                    for group in self._layout.layer_groups_of(PoolGroupIndex(index))
                ),
                Fraction(0),
            )
            for index in range(len(self._layout.slot_bytes))
        )

    def cold_byte_weights(
        self, cold: ColdLayout, slot_stride_bytes: Sequence[int]
    ) -> tuple[Fraction, ...]:
        """The share of a cold level's bytes by its pool groups; 1 in sum.

        ``slot_stride_bytes`` is what a slot really takes on the medium, by cold pool group.
        """
        weights = [Fraction(0)] * len(cold.slot_bytes)
        for pool_group, slot_weight in zip(cold.pool_group_of, self._slot_weights, strict=True):
            weights[pool_group] += slot_weight * slot_stride_bytes[pool_group]
        return _normalised(weights)


def _normalised(weights: Sequence[Fraction]) -> tuple[Fraction, ...]:
    total = sum(weights, Fraction(0))
    return tuple(weight / total for weight in weights)


def _group_page_bytes(layout: HotLayout) -> list[int]:
    """Bytes of a hot page by layer group: its classes have equal ones."""
    return [layout.page_bytes(lc.life_cycle_id) for lc in layout.life_cycles[:: layout.num_classes]]


def _page_weights(layout: HotLayout, pages: Sequence[_Pages]) -> list[Fraction]:
    """The bytes of the pages; at least of one, where all that a group has is stale."""
    return [
        Fraction(max(1, kept.total) * page_bytes)
        for kept, page_bytes in zip(pages, _group_page_bytes(layout), strict=True)
    ]


def _given_weights(layout: HotLayout, ratio: Sequence[float]) -> list[Fraction]:
    groups = layout.layer_groups
    if len(ratio) != len(groups):
        listed = "; ".join(f"{group.layer_group_id}: {_in_words(group)}" for group in groups)
        raise ConfigurationError(
            f"initial_pool_ratio has {len(ratio)} shares for {len(groups)} layer groups "
            f"({listed}): give one share for each, in this order"
        )
    return [Fraction(share) for share in ratio]


def _in_words(group: LayerGroup) -> str:
    first, num_layers = group.layer_ids[0], len(group.layer_ids)
    layers = f"layer {first}" if num_layers == 1 else f"{num_layers} layers from {first} on"
    window = group.sliding_window_tokens
    span = "no window" if window is None else f"a window of {window} tokens"
    sinks = f" and {group.num_sink_tokens} sink tokens" if group.num_sink_tokens else ""
    return f"{layers} with {span}{sinks}"


def _hot_floor(
    layout: HotLayout, pool_group: PoolGroupIndex, needs: Sequence[Sequence[_Pages]]
) -> int:
    groups = layout.layer_groups_of(pool_group)
    return max([len(groups), *(sum(pages[group].total for group in groups) for pages in needs)])


def slot_counts(
    quota_bytes: int,
    slot_bytes: Sequence[int],
    byte_weights: Sequence[Fraction | int | float],
    floors: Sequence[int],
    what: str,
) -> tuple[int, ...]:
    """Slots by pool group within the quota, in proportion to the weights.

    A group whose share is less than its floor gets the floor, and the others give way. Each of the
    others gets its share of the rest, rounded down, or up where the quota has room for it: those
    that lose most by rounding first. A group without weight gets its floor.

    ``what`` names the owner of the quota in the ConfigurationError that is raised when not even the
    floors fit.
    """
    needed = sum(floor * size for floor, size in zip(floors, slot_bytes, strict=True))
    if needed > quota_bytes:
        least = ", ".join(
            f"{floor:,} of {size:,} bytes" for floor, size in zip(floors, slot_bytes, strict=True)
        )
        raise ConfigurationError(
            f"{what} of {quota_bytes:,} bytes can not hold the pages it must ({least}): "
            f"give it at least {needed:,} bytes"
        )
    counts = list(floors)
    shares = _shares_above_floors(quota_bytes, slot_bytes, byte_weights, floors)
    for group, share in shares.items():
        counts[group] = int(share)
    left = quota_bytes - sum(c * size for c, size in zip(counts, slot_bytes, strict=True))
    for group in sorted(shares, key=lambda group: counts[group] - shares[group]):
        if counts[group] < shares[group] and slot_bytes[group] <= left:
            counts[group] += 1
            left -= slot_bytes[group]
    return tuple(counts)


def _shares_above_floors(
    quota_bytes: int,
    slot_bytes: Sequence[int],
    byte_weights: Sequence[Fraction | int | float],
    floors: Sequence[int],
) -> dict[int, Fraction]:
    """The shares, in slots, of the groups that do not stay at their floors."""
    weights = [Fraction(weight) for weight in byte_weights]
    assert min(weights, default=0) >= 0, f"negative weight in {byte_weights}"
    above = [group for group, weight in enumerate(weights) if weight > 0]
    while True:
        at_floors = sum(
            floors[group] * slot_bytes[group] for group in range(len(weights)) if group not in above
        )
        total = sum(weights[group] for group in above)
        shares = {
            group: (quota_bytes - at_floors) * weights[group] / (total * slot_bytes[group])
            for group in above
        }
        above = [group for group, share in shares.items() if share >= floors[group]]
        if len(above) == len(shares):
            return shares
