"""An observer with a model of its own: which committed pages there are, and what has moved."""

from __future__ import annotations

from collections import Counter

from coldpage import KVCacheManager
from coldpage.events import level_names
from coldpage.manager import BlockStored, PageName, PagesDropped, PagesMoved
from coldpage.prefix import block_key
from coldpage.types import NO_PAGE, BlockKey, LayerGroupId

_Page = tuple[BlockKey, LayerGroupId]


class Watcher:
    """Believes nothing but events. ``problems`` says where they do not fit together."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.problems: list[str] = []
        self.num_events = 0
        self.num_dropped = 0
        self._manager = manager
        self._names = level_names([tier.tier for tier in manager.config.cache_tiers])
        self._known: set[_Page] = set()  # stored at any time
        self._usable: set[_Page] = set()  # and not dropped since
        self._moved: Counter[str] = Counter()
        manager.add_observer(self)

    def on_stored(self, event: BlockStored) -> None:
        self.num_events += 1
        if block_key(event.parent_key, event.tokens) != event.block_key:
            self.problems.append("a block was stored under another key than its contents have")
        if len(event.tokens) != self._manager.tokens_per_block:
            self.problems.append(f"a block of {len(event.tokens)} tokens was stored")
        pages = {(event.block_key, group) for group in event.layer_group_ids}
        if len(pages) != len(event.layer_group_ids) or not pages:
            self.problems.append(f"stored in layer groups {event.layer_group_ids}")
        if pages & self._usable:
            self.problems.append("a page was stored again that had not been dropped")
        self._known |= pages
        self._usable |= pages

    def on_moved(self, event: PagesMoved) -> None:
        self.num_events += 1
        self._moved[f"{self._names[event.source]}-{self._names[event.target]}"] += len(event.pages)
        self._check_known(event.pages, "moved")

    def on_dropped(self, event: PagesDropped) -> None:
        self.num_events += 1
        self.num_dropped += len(event.pages)
        if not event.cause:
            self.problems.append("pages were dropped without a cause")
        self._check_known(event.pages, "dropped")
        for page in event.pages:
            if page.block_key is not None:
                self._usable.discard((page.block_key, page.layer_group_id))

    def _check_known(self, pages: tuple[PageName, ...], what: str) -> None:
        for page in pages:
            name = (page.block_key, page.layer_group_id)
            if page.block_key is not None and name not in self._known:
                self.problems.append(f"a page of a block that was never stored was {what}")

    def check(self) -> None:
        """What was stored and not dropped can be reused, and the manager counts the same moves."""
        tree, table = self._manager._tree, self._manager._storage.table
        nodes = list(tree._by_key.values())
        keys = list(tree._by_key)
        for group in range(len(self._manager.layout.layer_groups)):
            pages = tree._pages[group, nodes]
            is_good = (pages != NO_PAGE) & ~table.is_missing[pages]
            good = {key for key, here in zip(keys, is_good.tolist(), strict=True) if here}
            lost = {key for key, own in self._usable if own == group} - good
            if lost:
                self.problems.append(f"{len(lost)} stored blocks have vanished without an event")
        if self._moved != self._manager._storage.events.moved_pages:
            self.problems.append("events and counters disagree on what has moved")
