"""The radix tree of committed blocks: equal prefixes find each other's pages by content.

A block's key is a SHA-256 chain over its parent's key and its tokens, so one dictionary of keys is
the tree. The root of the chain holds the model, the scope and the provenance: what differs in one
of them never matches.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from coldpage.config import ReuseScope
from coldpage.layout import LifeCycle
from coldpage.page import PageTable
from coldpage.store import BLANK_KEY, BlobName, SlotIndex
from coldpage.store.format import PAGE_CLASSES
from coldpage.store.sidecar import ENTRY
from coldpage.types import NO_PAGE, BlockKey, BlockOrdinal, Int32Array, LayerGroupId

__all__ = [
    "EXACT_PROVENANCE",
    "MAX_RECENT_KEYS",
    "PrefixTree",
    "RecentKeys",
    "block_key",
    "root_key",
]

# Of blocks that no codec which loses something can have touched.
EXACT_PROVENANCE: Final = b"exact"
# Some megabytes: a million tokens of blocks of 16.
MAX_RECENT_KEYS: Final = 65_536
_INITIAL_NODES: Final = 1024
_NO_NODE: Final = 0  # row 0 is never a node
_TOKEN_DTYPE: Final = np.dtype("<i4")


def root_key(model_fingerprint: bytes, scope: ReuseScope, provenance: bytes) -> BlockKey:
    """The parent of every first block. Each field goes in with its length, so no two roots read
    alike.
    """
    digest = hashlib.sha256(b"coldpage block key 1")
    # Half a surrogate pair is no valid text, and no reason to fail: it is a scope of its own.
    adapter, salt = (name.encode("utf-8", "surrogatepass") for name in (scope.adapter, scope.salt))
    for part in (model_fingerprint, adapter, salt, provenance):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return BlockKey(digest.digest())


def block_key(parent: BlockKey, tokens: npt.ArrayLike) -> BlockKey:
    """SHA-256 over the parent's key and the tokens as 4-byte little-endian integers."""
    data = np.asarray(tokens, _TOKEN_DTYPE).tobytes()
    return BlockKey(hashlib.sha256(parent + data).digest())


class RecentKeys:
    """The block keys met last, a bounded number of them."""

    def __init__(self) -> None:
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def saw(self, key: BlockKey) -> bool:
        """Whether the key was met not long ago; it has been now."""
        is_known = key in self._keys
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > MAX_RECENT_KEYS:
            self._keys.popitem(last=False)
        return is_known


def _as_column(keys: Sequence[BlockKey], rows: Int32Array) -> npt.NDArray[np.void]:
    """Some of the keys, as the column of an index."""
    return np.frombuffer(b"".join([keys[row] for row in rows.tolist()]), "V32")


class PrefixTree:
    """Which page holds which committed block, by layer group. Rows are nodes; a page belongs to one
    node.
    """

    def __init__(
        self, table: PageTable, life_cycles: Sequence[LifeCycle], tokens_per_block: int
    ) -> None:
        self._table = table
        self._page_classes = [lc.page_class for lc in life_cycles]
        self._layer_group_of = np.array([lc.layer_group_id for lc in life_cycles], np.int16)
        num_layer_groups = int(self._layer_group_of.max()) + 1
        self._by_key: dict[BlockKey, int] = {}
        self._keys: list[BlockKey] = [BlockKey(b"")]
        # The key before each: of the parent block, or the root that the chain began with.
        self._parent_keys: list[BlockKey] = [BlockKey(b"")]
        self._tokens: Int32Array = np.zeros((_INITIAL_NODES, tokens_per_block), np.int32)
        self._pages: Int32Array = np.zeros((num_layer_groups, _INITIAL_NODES), np.int32)
        self._parent: Int32Array = np.zeros(_INITIAL_NODES, np.int32)
        self._num_children: Int32Array = np.zeros(_INITIAL_NODES, np.int32)
        self._free: list[int] = []

    @property
    def num_blocks(self) -> int:
        """Committed blocks that the tree knows, pages or not."""
        return len(self._by_key)

    def find(self, keys: Sequence[BlockKey]) -> Int32Array:
        """The pages along a chain of keys: [num_layer_groups, num_found], up to the first unknown
        key. An entry is NO_PAGE where the block has no usable page in that layer group.
        """
        nodes: list[int] = []
        for key in keys:
            node = self._by_key.get(key, _NO_NODE)
            if node == _NO_NODE:
                break
            nodes.append(node)
        pages = self._pages[:, nodes]
        return np.where(self._table.is_missing[pages], NO_PAGE, pages)

    def insert(
        self, parent: BlockKey, key: BlockKey, tokens: Int32Array, pages: Int32Array
    ) -> Int32Array:
        """Commit one full block; ``pages`` is [num_layer_groups], NO_PAGE where the sequence has
        none.

        Returns the pages that the tree took: where it has a page for the block already, that one
        stays and the caller's remains private to it.
        """
        node = self._by_key.get(key, _NO_NODE)
        if node == _NO_NODE:
            node = self._new_node(parent, key, tokens)
        column = self._pages[:, node]
        is_taken = (column == NO_PAGE) & (pages != NO_PAGE)
        is_taken &= self._table.node[pages] == _NO_NODE
        column[is_taken] = pages[is_taken]
        taken: Int32Array = pages[is_taken]
        self._table.node[taken] = node
        if not column.any():
            self._prune(node)
        return taken

    def _new_node(self, parent_key: BlockKey, key: BlockKey, tokens: Int32Array) -> int:
        if self._free:
            node = self._free.pop()
            self._keys[node], self._parent_keys[node] = key, parent_key
        else:
            node = len(self._keys)
            self._keys.append(key)
            self._parent_keys.append(parent_key)
            if node >= self._parent.size:
                self._grow()
        self._by_key[key] = node
        self._tokens[node] = tokens
        parent = self._parent[node] = self._by_key.get(parent_key, _NO_NODE)
        if parent != _NO_NODE:
            self._num_children[parent] += 1
        return node

    def _grow(self) -> None:
        old = self._parent.size
        self._pages = np.pad(self._pages, ((0, 0), (0, old)))
        self._parent = np.pad(self._parent, (0, old))
        self._num_children = np.pad(self._num_children, (0, old))
        self._tokens = np.pad(self._tokens, ((0, old), (0, 0)))

    def names(self, pages: Int32Array) -> list[BlobName]:
        """What each page holds, for whoever stores it; without a key where it is not committed."""
        nodes, ordinals = self._table.node[pages].tolist(), self._table.ordinal[pages].tolist()
        life_cycles = self._table.life_cycle[pages].tolist()
        return [
            BlobName(
                self._keys[node] if node else BLANK_KEY,
                self._parent_keys[node] if node else BLANK_KEY,
                LayerGroupId(int(self._layer_group_of[life_cycle])),
                self._page_classes[life_cycle],
                BlockOrdinal(ordinal),
                self._tokens[node] if node else self._tokens[_NO_NODE, :0],
            )
            for node, life_cycle, ordinal in zip(nodes, life_cycles, ordinals, strict=True)
        ]

    def index_of(self, pages: Int32Array) -> SlotIndex:
        """What committed pages hold, a row for each; where they are is not filled in."""
        nodes, life_cycles = self._table.node[pages], self._table.life_cycle[pages]
        assert nodes.all(), "a page that is not committed has no name"
        entries = np.zeros(pages.size, ENTRY)
        entries["key"] = _as_column(self._keys, nodes)
        entries["parent_key"] = _as_column(self._parent_keys, nodes)
        entries["layer_group"] = self._layer_group_of[life_cycles]
        classes = np.array([PAGE_CLASSES.index(c) for c in self._page_classes], np.uint16)
        entries["page_class"] = classes[life_cycles]
        entries["ordinal"] = self._table.ordinal[pages]
        entries["num_tokens"] = self._tokens.shape[1]
        return SlotIndex(entries, self._tokens[nodes])

    def restore(self, index: SlotIndex, pages: Int32Array) -> npt.NDArray[np.bool_]:
        """Put full blocks that were found again back into the tree: ``pages[i]`` holds what row
        ``i`` of the index says.

        Returns which were taken, [num_pages]; not those whose blocks no match can reach, because
        one before them is gone, and not a second page of one block and layer group.
        """
        order = np.argsort(index.entries["ordinal"], kind="stable")
        nodes = self._restore_nodes(index, order)
        order, nodes = order[nodes != _NO_NODE], nodes[nodes != _NO_NODE]
        layer_groups = index.entries["layer_group"][order].astype(np.int64)
        _, first = np.unique(layer_groups * self._parent.size + nodes, return_index=True)
        first = first[self._pages[layer_groups[first], nodes[first]] == NO_PAGE]
        taken = order[first]
        self._pages[layer_groups[first], nodes[first]] = pages[taken]
        self._table.node[pages[taken]] = nodes[first]
        is_taken = np.zeros(pages.size, np.bool_)
        is_taken[taken] = True
        return is_taken

    def use_with_children(self, pages: Int32Array) -> None:
        """Where nothing but the order of writing is known: a block has been used whenever one after
        it was, or it would be given up first, and the others with it.
        """
        table = self._table
        nodes = table.node[pages]
        use = np.zeros(self._parent.size, np.int64)
        use_ns = np.zeros(self._parent.size, np.int64)
        np.maximum.at(use, nodes, table.last_use[pages])
        np.maximum.at(use_ns, nodes, table.last_use_ns[pages])
        ordinals = table.ordinal[pages]
        for ordinal in range(int(ordinals.max(initial=0)), 0, -1):
            here = np.unique(nodes[ordinals == ordinal])
            np.maximum.at(use, self._parent[here], use[here])
            np.maximum.at(use_ns, self._parent[here], use_ns[here])
        table.last_use[pages], table.last_use_ns[pages] = use[nodes], use_ns[nodes]

    def _restore_nodes(self, index: SlotIndex, order: npt.NDArray[np.intp]) -> Int32Array:
        """The node of each row, made where there was none; _NO_NODE where none can be. A loop over
        100,000 rows is what opening takes long for, so it does no more than it must.
        """
        columns = (index.entries[name][order].tolist() for name in ("key", "parent_key", "ordinal"))
        by_key, nodes, parents, num_old = self._by_key, [], [], len(self._keys)
        first_rows: list[int] = []
        keys, parent_keys = self._keys, self._parent_keys
        for row, (key, parent_key, ordinal) in enumerate(zip(*columns, strict=True)):
            node = by_key.get(key, _NO_NODE)
            if node == _NO_NODE:
                parent = by_key.get(parent_key, _NO_NODE)
                if parent != _NO_NODE or not ordinal:
                    node = by_key[key] = len(keys)
                    keys.append(key)
                    parent_keys.append(parent_key)
                    parents.append(parent)
                    first_rows.append(row)
            nodes.append(node)
        while len(keys) > self._parent.size:
            self._grow()
        new = slice(num_old, len(keys))
        self._tokens[new] = index.tokens[order[first_rows]]
        self._parent[new] = parents
        counts = np.bincount(np.array(parents, np.int64), minlength=self._parent.size)
        counts[_NO_NODE] = 0
        self._num_children += counts.astype(np.int32)
        return np.array(nodes, np.int32)

    def remove(self, nodes: Int32Array, life_cycles: npt.NDArray[np.int16]) -> None:
        """The pages of these life cycles in these nodes have vanished."""
        self._pages[self._layer_group_of[life_cycles], nodes] = NO_PAGE
        for node in nodes.tolist():
            self._prune(node)

    def _prune(self, node: int) -> None:
        """Remove the node, and its ancestors, as far as they hold neither pages nor children."""
        while node != _NO_NODE and self._keys[node]:
            if self._num_children[node] or self._pages[:, node].any():
                return
            parent = int(self._parent[node])
            del self._by_key[self._keys[node]]
            self._keys[node] = self._parent_keys[node] = BlockKey(b"")
            self._free.append(node)
            if parent != _NO_NODE:
                self._num_children[parent] -= 1
            node = parent

    def key_of(self, page: int) -> BlockKey | None:
        """The key of the committed block that a page belongs to; None when it belongs to none."""
        node = int(self._table.node[page])
        return None if node == _NO_NODE else self._keys[node]

    def pages_of(self, layer_group_id: LayerGroupId) -> Int32Array:
        """Every page that the tree holds in a layer group."""
        row = self._pages[layer_group_id]
        held: Int32Array = row[row != NO_PAGE]
        return held

    def check_integrity(self) -> None:
        """Assert that pages and nodes name each other and that children are counted right."""
        layer_groups, nodes = np.nonzero(self._pages)
        pages = self._pages[layer_groups, nodes]
        assert bool((self._table.node[pages] == nodes).all()), "a page does not know its node"
        assert bool((self._layer_group_of[self._table.life_cycle[pages]] == layer_groups).all()), (
            "a page of another layer group"
        )
        assert int(np.count_nonzero(self._table.node)) == pages.size, (
            "a node does not know its page"
        )
        live = np.array(list(self._by_key.values()), np.int32)
        children = np.bincount(self._parent[live], minlength=self._parent.size)
        children[_NO_NODE] = 0
        assert bool((children == self._num_children).all()), "children are counted wrong"
