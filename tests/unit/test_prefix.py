"""The prefix tree against a dictionary of prefixes, and the keys of blocks."""

from __future__ import annotations

import hashlib
import itertools
import struct
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coldpage.config import ReuseScope
from coldpage.layout import LifeCycle
from coldpage.page import PageTable
from coldpage.prefix import EXACT_PROVENANCE, PrefixTree, block_key, root_key
from coldpage.store import BLANK_KEY
from coldpage.types import (
    NO_PAGE,
    BlockKey,
    BlockOrdinal,
    Int32Array,
    LayerGroupId,
    LifeCycleId,
    PageClass,
    PoolGroupIndex,
    Priority,
)

# Two layer groups, each with a life cycle for sinks and one for the body.
_LIFE_CYCLES = tuple(
    LifeCycle(LifeCycleId(2 * group + i), LayerGroupId(group), page_class, PoolGroupIndex(0), ())
    for group in range(2)
    for i, page_class in enumerate((PageClass.SINK, PageClass.BODY))
)
_NUM_LAYER_GROUPS = 2
_PER_BLOCK = 2
_ROOT = root_key(b"model", ReuseScope(), EXACT_PROVENANCE)

# A prefix: its blocks, each one number that stands for the block's tokens.
_Prefix = tuple[int, ...]


def _tokens(block: int) -> Int32Array:
    return np.array([block, block + 1], np.int32)


def _keys(prefix: _Prefix) -> list[BlockKey]:
    keys = [_ROOT]
    for block in prefix:
        keys.append(block_key(keys[-1], _tokens(block)))
    return keys


@dataclass
class _Node:
    pages: list[int] = field(default_factory=lambda: [NO_PAGE] * _NUM_LAYER_GROUPS)
    # Whether the prefix one block shorter was known when this one came, and so stays known.
    keeps_parent: bool = False


class _Machine(RuleBasedStateMachine):
    """Commits chains and forgets pages in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(num_levels=1)
        self.tree = PrefixTree(self.table, _LIFE_CYCLES, _PER_BLOCK)
        self.nodes: dict[_Prefix, _Node] = {}
        self.asked: set[_Prefix] = {()}
        self.made: list[int] = []

    prefixes = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
    # Which layer groups the committing sequence has pages in, block by block.
    has_page = st.lists(st.booleans(), min_size=2 * 5, max_size=2 * 5)

    @rule(prefix=prefixes, has_page=has_page, start=st.integers(0, 4))
    def commit(self, prefix: _Prefix, has_page: list[bool], start: int) -> None:
        keys = _keys(prefix)
        self.asked.add(prefix)
        for depth in range(min(start, len(prefix) - 1), len(prefix)):
            pages = np.zeros(_NUM_LAYER_GROUPS, np.int32)
            for layer_group in range(_NUM_LAYER_GROUPS):
                if has_page[2 * depth + layer_group]:
                    pages[layer_group] = self._new_page(2 * layer_group + (depth > 0), depth)
            taken = self.tree.insert(keys[depth], keys[depth + 1], _tokens(prefix[depth]), pages)
            assert sorted(taken.tolist()) == self._insert(prefix[: depth + 1], pages.tolist())

    def _new_page(self, life_cycle: int, ordinal: int) -> int:
        cycles, ordinals = np.array([life_cycle], np.int16), np.array([ordinal], np.int32)
        page = int(self.table.create(cycles, ordinals, Priority(1))[0])
        self.made.append(page)
        return page

    def _insert(self, prefix: _Prefix, pages: list[int]) -> list[int]:
        node = self.nodes.setdefault(prefix, _Node(keeps_parent=prefix[:-1] in self.nodes))
        taken = []
        for layer_group, page in enumerate(pages):
            if page != NO_PAGE and node.pages[layer_group] == NO_PAGE:
                node.pages[layer_group] = page
                taken.append(page)
        self._prune()
        return sorted(taken)

    def _prune(self) -> None:
        """Until nothing changes, drop what has no page and keeps no longer prefix reachable."""
        while True:
            kept = {p[:-1] for p, node in self.nodes.items() if node.keeps_parent}
            dead = [p for p, n in self.nodes.items() if not any(n.pages) and p not in kept]
            if not dead:
                return
            for prefix in dead:
                del self.nodes[prefix]

    def _held(self) -> list[tuple[_Prefix, int]]:
        return [(p, g) for p, n in sorted(self.nodes.items()) for g in (0, 1) if n.pages[g]]

    @precondition(lambda self: self._held())
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """As the storage does it: the columns first, then one call for all of them."""
        held = st.sampled_from(self._held())
        some = data.draw(st.lists(held, unique=True, min_size=1))
        pages = np.array([self.nodes[p].pages[g] for p, g in some], np.int32)
        nodes, life_cycles = self.table.node[pages].copy(), self.table.life_cycle[pages].copy()
        self.table.node[pages] = 0
        self.tree.remove(nodes, life_cycles)
        for prefix, layer_group in some:
            self.nodes[prefix].pages[layer_group] = NO_PAGE
        self._prune()

    @precondition(lambda self: self._held())
    @rule(data=st.data(), is_missing=st.booleans())
    def lose_or_recompute(self, data: st.DataObject, is_missing: bool) -> None:
        prefix, layer_group = data.draw(st.sampled_from(self._held()))
        self.table.is_missing[self.nodes[prefix].pages[layer_group]] = is_missing

    @invariant()
    def they_agree(self) -> None:
        self.tree.check_integrity()
        assert self.tree.num_blocks == len(self.nodes)
        for prefix in self.asked:
            expected = []
            for depth in range(1, len(prefix) + 1):
                if prefix[:depth] not in self.nodes:
                    break
                pages = self.nodes[prefix[:depth]].pages
                expected.append([NO_PAGE if self.table.is_missing[p] else p for p in pages])
            found = self.tree.find(_keys(prefix)[1:])
            assert found.dtype == np.int32
            assert found.T.tolist() == expected
        for layer_group in range(_NUM_LAYER_GROUPS):
            held = [n.pages[layer_group] for n in self.nodes.values()]
            assert sorted(self.tree.pages_of(LayerGroupId(layer_group)).tolist()) == sorted(
                page for page in held if page != NO_PAGE
            )

    @invariant()
    def a_page_knows_its_key_and_only_while_it_is_committed(self) -> None:
        key_of = {
            page: _keys(prefix)[-1]
            for prefix, node in self.nodes.items()
            for page in node.pages
            if page != NO_PAGE
        }
        for page in self.made:
            assert self.tree.key_of(page) == key_of.get(page)
        assert self.tree.key_of(NO_PAGE) is None

    @invariant()
    def a_page_is_named_by_its_prefix(self) -> None:
        held = self._held()
        pages = np.array([self.nodes[p].pages[g] for p, g in held], np.int32)
        for (prefix, group), name in zip(held, self.tree.names(pages), strict=True):
            keys = _keys(prefix)
            assert (name.key, name.parent_key) == (keys[-1], keys[-2])
            assert name.tokens.tolist() == _tokens(prefix[-1]).tolist()
            assert (name.layer_group_id, name.ordinal) == (group, len(prefix) - 1)
            assert name.page_class is (PageClass.SINK if len(prefix) == 1 else PageClass.BODY)

    @precondition(lambda self: self._held())
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """Some pages are found again, in any order: those that a first block leads to are back."""
        held = data.draw(st.permutations(self._held()))
        held = held[: data.draw(st.integers(1, len(held)))]
        index = self.tree.index_of(np.array([self.nodes[p].pages[g] for p, g in held], np.int32))
        table = PageTable(num_levels=1)
        tree = PrefixTree(table, _LIFE_CYCLES, _PER_BLOCK)
        life_cycles = [2 * g + (len(p) > 1) for p, g in held]
        ordinals = np.array([len(p) - 1 for p, _ in held], np.int32)
        pages = table.create(np.array(life_cycles, np.int16), ordinals, Priority(1))
        is_taken = tree.restore(index, pages)
        tree.check_integrity()
        found = {prefix for prefix, _ in held}
        for (prefix, group), page, is_back in zip(held, pages.tolist(), is_taken, strict=True):
            is_whole = all(prefix[:depth] in found for depth in range(1, len(prefix)))
            assert is_back == is_whole
            if is_back:
                assert tree.find(_keys(prefix)[1:])[group, -1] == page
                (name,) = tree.names(np.array([page], np.int32))
                assert name.tokens.tolist() == _tokens(prefix[-1]).tolist()


_Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
test_the_tree_is_a_dictionary_of_prefixes = _Machine.TestCase


def _tree_and_pages(num_pages: int) -> tuple[PageTable, PrefixTree, np.ndarray]:
    table = PageTable(num_levels=1)
    pages = table.create(np.zeros(num_pages, np.int16), np.zeros(num_pages, np.int32), Priority(1))
    return table, PrefixTree(table, _LIFE_CYCLES[:1], _PER_BLOCK), pages


def test_a_page_that_another_block_holds_is_not_taken_again() -> None:
    _, tree, pages = _tree_and_pages(1)
    keys = _keys((1, 2))
    assert tree.insert(keys[0], keys[1], _tokens(1), pages).tolist() == pages.tolist()
    assert tree.insert(keys[1], keys[2], _tokens(2), pages).tolist() == []
    assert tree.find(keys[1:]).tolist() == [pages.tolist()]
    tree.check_integrity()


def test_thousands_of_blocks_come_and_go_and_rows_are_used_again() -> None:
    table, tree, pages = _tree_and_pages(3000)
    keys = _keys(tuple(range(3000)))
    for _ in range(2):
        for depth in range(3000):
            tree.insert(keys[depth], keys[depth + 1], _tokens(depth), pages[depth : depth + 1])
        assert tree.find(keys[1:]).tolist() == [pages.tolist()]
        tree.check_integrity()
        nodes = table.node[pages].copy()
        assert nodes.max() == 3000
        table.node[pages] = 0
        tree.remove(nodes, table.life_cycle[pages])
        assert tree.num_blocks == 0
        assert tree.find(keys[1:]).shape == (1, 0)


def test_sinks_and_body_of_a_layer_group_share_its_row() -> None:
    table = PageTable(num_levels=1)
    tree = PrefixTree(table, _LIFE_CYCLES, _PER_BLOCK)
    assert tree.find([]).shape == (_NUM_LAYER_GROUPS, 0), "a row a layer group, not a life cycle"
    keys = _keys((1, 2))
    pages = table.create(np.array([0, 2, 1, 3], np.int16), np.zeros(4, np.int32), Priority(1))
    tree.insert(keys[0], keys[1], _tokens(1), pages[:2])
    tree.insert(keys[1], keys[2], _tokens(2), pages[2:])
    assert tree.find(keys[1:]).tolist() == [[pages[0], pages[2]], [pages[1], pages[3]]]
    assert tree.pages_of(LayerGroupId(1)).tolist() == [pages[1], pages[3]]
    nodes = table.node[pages].copy()
    table.node[pages[1:3]] = 0
    tree.remove(nodes[1:3], table.life_cycle[pages[1:3]])
    assert tree.find(keys[1:]).tolist() == [[pages[0], NO_PAGE], [NO_PAGE, pages[3]]]
    tree.check_integrity()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("a node", "a page does not know its node"),
        ("a page", "a node does not know its page"),
        ("a layer group", "a page of another layer group"),
        ("a child", "children are counted wrong"),
    ],
)
def test_damage_is_noticed(damage: str, sentence: str) -> None:
    table = PageTable(num_levels=1)
    tree = PrefixTree(table, _LIFE_CYCLES, _PER_BLOCK)
    pages = table.create(np.array([0, 1, 2], np.int16), np.zeros(3, np.int32), Priority(1))
    keys = _keys((1, 2))
    tree.insert(keys[0], keys[1], _tokens(1), np.array([pages[0], NO_PAGE], np.int32))
    tree.insert(keys[1], keys[2], _tokens(2), np.array([pages[1], NO_PAGE], np.int32))
    tree.check_integrity()
    if damage == "a node":
        table.node[pages[0]] = table.node[pages[1]]
    elif damage == "a page":
        table.node[pages[2]] = table.node[pages[1]]
    elif damage == "a layer group":
        table.life_cycle[pages[1]] = 3
    else:
        tree._num_children[table.node[pages[1]]] += 1
    with pytest.raises(AssertionError, match=sentence):
        tree.check_integrity()


def test_what_is_not_committed_has_no_name() -> None:
    _, tree, pages = _tree_and_pages(1)
    (name,) = tree.names(pages)
    assert (name.key, name.parent_key, name.tokens.size) == (BLANK_KEY, BLANK_KEY, 0)
    assert (name.page_class, name.ordinal) == (PageClass.SINK, BlockOrdinal(0))


def test_a_second_page_of_a_block_is_not_restored() -> None:
    table, tree, pages = _tree_and_pages(2)
    keys = _keys((1,))
    tree.insert(keys[0], keys[1], _tokens(1), pages[:1])
    assert tree.restore(tree.index_of(pages[:1]), pages[1:]).tolist() == [False]
    assert tree.find(keys[1:]).tolist() == [[pages[0]]]
    assert table.node[pages[1]] == 0


# ---------------------------------------------------------------------- keys

_TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(parent=st.binary(min_size=32, max_size=32), tokens=_TOKENS)
def test_a_block_key_is_the_hash_of_parent_and_tokens(parent: bytes, tokens: list[int]) -> None:
    expected = hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()
    assert block_key(BlockKey(parent), tokens) == expected
    for dtype in (np.int32, np.int64, ">i4", "<u4"):
        assert block_key(BlockKey(parent), np.array(tokens, dtype)) == expected
    strided = np.array([*itertools.chain.from_iterable((t, 7) for t in tokens)], np.int32)[::2]
    assert block_key(BlockKey(parent), strided) == expected


@given(a=_TOKENS, b=_TOKENS)
def test_a_chain_is_its_tokens_block_by_block(a: list[int], b: list[int]) -> None:
    key = block_key(block_key(_ROOT, a), b)
    assert (key == block_key(block_key(_ROOT, b), a)) == (a == b)
    assert key != block_key(_ROOT, a + b)


_FIELDS = st.tuples(st.binary(max_size=4), st.text("ab", max_size=3), st.text("ab", max_size=3))


@settings(max_examples=200)
@given(one=_FIELDS, other=_FIELDS, provenances=st.tuples(*[st.sampled_from([b"exact", b"ab"])] * 2))
def test_roots_are_equal_only_when_every_field_is(
    one: tuple[bytes, str, str], other: tuple[bytes, str, str], provenances: tuple[bytes, bytes]
) -> None:
    roots = [
        root_key(model, ReuseScope(adapter, salt), provenance)
        for (model, adapter, salt), provenance in zip((one, other), provenances, strict=True)
    ]
    assert (roots[0] == roots[1]) == ((one, provenances[0]) == (other, provenances[1]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((b"m", "ab", "c", b"exact"), (b"m", "a", "bc", b"exact")),
        ((b"m", "ab", "", b"exact"), (b"m", "", "ab", b"exact")),
        ((b"ma", "b", "", b"exact"), (b"m", "ab", "", b"exact")),
        ((b"m", "", "e", b"xact"), (b"m", "", "", b"exact")),
        ((b"m", "", "", b"exact"), (b"m", "", "", b"int4 v1")),
        ((b"m", "", "", b"exact"), (b"n", "", "", b"exact")),
        # The same character composed and decomposed: two adapters for all that we know.
        ((b"m", "\u00e9", "", b"exact"), (b"m", "e\u0301", "", b"exact")),
        # JSON can carry half a surrogate pair, which is no text.
        ((b"m", "", "\ud800", b"exact"), (b"m", "", "\ud801", b"exact")),
    ],
)
def test_no_boundary_between_fields_can_be_moved(
    one: tuple[bytes, str, str, bytes], other: tuple[bytes, str, str, bytes]
) -> None:
    roots = [root_key(m, ReuseScope(a, s), p) for m, a, s, p in (one, other)]
    assert len(roots[0]) == len(roots[1]) == 32
    assert roots[0] != roots[1]


def test_a_root_is_the_same_in_every_process() -> None:
    """What is on disk is found by it after a restart."""
    assert (
        root_key(b"m", ReuseScope("a", "s"), b"exact").hex()
        == "2cf1f93f933190a7b9b9e1873dca51bbcd01f5acacfe75b6c480f1dac9fb4f57"
    )
