"""What every codec promises, as tests: subclass ``CodecConformance`` and run it with pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest

from coldpage.codecs.base import ColdPageCodec, LifeCycleDesc
from coldpage.device.base import Device
from coldpage.device.host import HostDevice
from coldpage.device.simulated import SimulatedDevice
from coldpage.errors import CodecError, SubmissionError
from coldpage.testing.codec_rig import NUM_SLOTS, CodecRig, HotGroupShape, Indices
from coldpage.types import LifeCycleId

__all__ = ["DEVICES", "CodecConformance", "RigMaker"]

DEVICES: Final = ("host", "simulated")

_Bytes = npt.NDArray[np.uint8]

# Layer groups 0 and 2 share three pools; group 1 has one pool.
_GROUPS: Final = (HotGroupShape((512, 256, 128), (0, 2)), HotGroupShape((1024,), (1,)))
_ODD_GROUPS: Final = (HotGroupShape((7, 1, 13), (0,)), HotGroupShape((33,), (1, 2)))


class RigMaker:
    """Makes rigs of a kit's codec on one kind of device, and closes them."""

    def __init__(self, kit: CodecConformance, device_name: str) -> None:
        self._kit = kit
        self._device_name = device_name
        self._rigs: list[CodecRig] = []

    def __call__(
        self,
        shapes: Sequence[HotGroupShape] | None = None,
        *,
        has_sinks: bool = True,
        has_recent: bool = True,
    ) -> CodecRig:
        """A rig with a new codec; hot pool groups as the kit has them unless ``shapes`` are given,
        and every page class unless it is left out. Raises CodecError when the codec refuses them.
        """
        device = self._kit.make_device(self._device_name, len(self._rigs))
        try:
            rig = CodecRig(
                self._kit.make_codec(),
                device,
                self._kit.pool_groups if shapes is None else shapes,
                self._kit.make_contents,
                has_sinks=has_sinks,
                has_recent=has_recent,
            )
        except BaseException:
            device.close()
            raise
        self._rigs.append(rig)
        return rig

    def close(self) -> None:
        """Close every rig, which says what was found."""
        for rig in self._rigs:
            rig.close()


class CodecConformance:
    """Tests of one codec, on the host device and on the simulated one, or on others that a subclass
    makes. For example::

        class TestHalfCodec(CodecConformance):
            def make_codec(self):
                return HalfCodec()

            def make_contents(self, rng, num_bytes):  # any bits are not a number
                return rng.standard_normal(num_bytes // 4, np.float32).view(np.uint8)

            def check_restored(self, life_cycle, original, restored):
                floats = original.view(np.float32), restored.view(np.float32)
                np.testing.assert_allclose(*floats, rtol=1e-3, atol=1e-6)

    On the simulated device work sees only the bytes that it declares, and runs when the scheduler
    likes.
    """

    # Of a size that the codec can take; the layer groups are 0 and up, each in one place.
    pool_groups: Sequence[HotGroupShape] = _GROUPS
    # With odd sizes: the codec may refuse these.
    odd_pool_groups: Sequence[HotGroupShape] = _ODD_GROUPS
    # Names that ``make_device`` knows.
    devices: Sequence[str] = DEVICES

    def make_device(self, name: str, seed: int) -> Device:
        """A new device. The seed decides the order in which it runs things, where one can."""
        return SimulatedDevice(seed) if name == "simulated" else HostDevice()

    def make_codec(self) -> ColdPageCodec:
        """A new codec."""
        raise NotImplementedError("a kit says in make_codec which codec it is for")

    def make_contents(self, rng: np.random.Generator, num_bytes: int) -> _Bytes:
        """What hot pools hold, [num_bytes]: anything, unless the codec needs sense in it."""
        return rng.integers(0, 256, num_bytes, np.uint8)

    def check_restored(self, life_cycle: LifeCycleDesc, original: _Bytes, restored: _Bytes) -> None:
        """Assert that a hot page came back well enough; both [page_bytes], pools one after another.
        Asked of lossy codecs only.
        """
        raise NotImplementedError("a lossy codec's kit says in check_restored what is good enough")

    def _check_pages(
        self, rig: CodecRig, life_cycles: Sequence[LifeCycleDesc], was: _Bytes, now: _Bytes
    ) -> None:
        """Each row of ``now`` [num_pages, page_bytes] is the page in ``was``, or nearly so."""
        for lc, original, restored in zip(life_cycles, was, now, strict=True):
            if rig.configured.codec.is_lossless:
                assert np.array_equal(original, restored), "a page comes back with other bytes"
            else:
                self.check_restored(lc, original, restored)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test on all devices."""
        kit = type(self)
        if kit.make_codec is CodecConformance.make_codec:
            pytest.fail(
                f"{kit.__name__} has no make_codec: define it, so that it returns a new codec",
                pytrace=False,
            )
        if "make_rig" in metafunc.fixturenames:
            metafunc.parametrize("make_rig", self.devices, indirect=True)

    @pytest.fixture
    def make_rig(self, request: pytest.FixtureRequest) -> Iterator[RigMaker]:
        """Rigs on each device, closed and checked afterwards."""
        maker = RigMaker(self, request.param)
        yield maker
        maker.close()

    # Answers

    def test_answers_are_right_and_do_not_change(self, make_rig: RigMaker) -> None:
        rig = make_rig()
        codec, configured = rig.configured.codec, rig.configured
        for _ in range(2):
            for lc in reversed(rig.life_cycles):
                number = lc.life_cycle_id
                assert codec.query_cold_page_bytes(number) == configured.cold_page_bytes[number]
                representative = codec.get_batching_layer_group_id(number)
                assert representative == configured.representative[number]
                location = codec.query_page_index_location(number)
                assert location is configured.locations[number]

    def test_measured_errors_are_of_layer_groups(self, make_rig: RigMaker) -> None:
        rig = make_rig()
        lc = rig.life_cycles[-1]
        layer_groups = {it.layer_group_id for it in rig.life_cycles}
        for _ in range(2):
            for it in rig.configured.measured_errors():
                assert it.layer_group_id in layer_groups
                assert 0 <= it.num_not_finite <= it.num_samples
            self._round_trip(rig, lc, [3], [5], [22])

    # Bytes

    def test_pages_go_out_and_come_back(self, make_rig: RigMaker) -> None:
        self._round_trips(make_rig(has_sinks=False, has_recent=False))

    def test_pages_of_every_class_go_out_and_come_back(self, make_rig: RigMaker) -> None:
        self._round_trips(make_rig())

    def test_pools_of_odd_sizes(self, make_rig: RigMaker) -> None:
        try:
            rig = make_rig(self.odd_pool_groups)
        except CodecError as refusal:
            pytest.skip(f"the codec refuses them: {refusal}")
        for lc in rig.life_cycles:
            self._round_trip(rig, lc, [3, 0, 23], [5, 6, 1], [22, 2, 7])

    def test_life_cycles_of_a_class_share_a_call(self, make_rig: RigMaker) -> None:
        rig = make_rig()
        for first, members in _classes(rig).items():
            for left_out in range(len(members)):
                chosen = [lc for lc in members if lc is not members[left_out]] or members
                rng = np.random.default_rng(left_out)
                slots, again = rng.permutation(NUM_SLOTS), rng.permutation(NUM_SLOTS)
                owners = [chosen[int(slot) % len(chosen)] for slot in slots]
                ordinals = np.concatenate([rig.ordinals(lc.life_cycle_id, 1) for lc in owners])
                area = rig.new_area(first)
                original = rig.load(first, slots)
                rig.encode(first, area, slots[::-1], slots, ordinals)
                rig.finish()
                rig.refill(rig.hot_group_of[first])
                rig.decode(first, area, slots[again], slots[::-1][again], ordinals[again])
                rig.finish()
                self._check_pages(rig, owners, original, rig.load(first, slots))

    def test_life_cycles_of_a_class_encode_alike(self, make_rig: RigMaker) -> None:
        rig = make_rig()
        for first, members in _classes(rig).items():
            ordinals = rig.ordinals(first, 1)
            area = rig.new_area(first)
            original = rig.load(first, [4])
            for index, lc in enumerate(members):
                rig.encode(lc.life_cycle_id, area, [index], [4], ordinals)
            rig.finish()
            assert (area.pages[: len(members)] == area.pages[0]).all(), (
                f"life cycles {[lc.life_cycle_id for lc in members]} are one class and do not "
                "encode alike"
            )
            for index, lc in enumerate(reversed(members)):
                rig.decode(lc.life_cycle_id, area, [index + 5], [index], ordinals)
            rig.finish()
            slots = range(5, 5 + len(members))
            original = np.repeat(original, len(members), axis=0)
            self._check_pages(rig, members[::-1], original, rig.load(first, slots))

    def test_equal_pages_give_equal_blobs(self, make_rig: RigMaker) -> None:
        rig = make_rig()
        for lc in rig.life_cycles:
            number = lc.life_cycle_id
            ordinals = np.repeat(rig.ordinals(number, 1), 3)
            rig.store(number, [9, 2], rig.load(number, [14, 14]))
            areas = rig.new_area(number), rig.new_area(number)
            rig.encode(number, areas[0], [0, 1, 2], [14, 3, 9], ordinals)
            rig.encode(number, areas[1], [7], [2], ordinals[:1])
            rig.finish()
            blobs = areas[0].pages[0], areas[0].pages[2], areas[1].pages[7]
            assert all(np.array_equal(blob, blobs[0]) for blob in blobs), (
                f"a page of life cycle {number} has several cold forms: write all of its "
                f"{len(blobs[0])} bytes, from nothing but the page"
            )

    # Order. What holds for one class of pages holds for all: one is left out for the time it takes.

    def test_a_call_does_not_wait_and_nothing_happens_early(self, make_rig: RigMaker) -> None:
        rig = make_rig(has_recent=False)
        for lc in rig.life_cycles:
            number = lc.life_cycle_id
            area, ordinals = rig.new_area(number), rig.ordinals(number, 3)
            original = rig.load(number, [1, 2, 3])
            with rig.held() as check:
                rig.encode(number, area, [4, 5, 6], [1, 2, 3], ordinals)
                check()
            rig.finish()
            with rig.held() as check:
                rig.decode(number, area, [7, 8, 9], [4, 5, 6], ordinals)
                check()
            rig.finish()
            self._check_pages(rig, [lc] * len(original), original, rig.load(number, [7, 8, 9]))

    def test_calls_on_a_stream_run_in_order(self, make_rig: RigMaker) -> None:
        rig = make_rig(has_recent=False)
        for lc in rig.life_cycles:
            number = lc.life_cycle_id
            area, ordinals = rig.new_area(number), rig.ordinals(number, 2)
            original = rig.load(number, [0, 1])
            rig.encode(number, area, [3], [0], ordinals[:1])
            _move(rig, number, to=0, source=1)
            rig.encode(number, area, [5], [0], ordinals[1:])
            rig.decode(number, area, [7, 6], [5, 3], ordinals[::-1])
            rig.finish()
            self._check_pages(rig, [lc] * len(original), original, rig.load(number, [6, 7]))

    def test_each_call_uses_its_own_stream_and_base(self, make_rig: RigMaker) -> None:
        rig = make_rig(has_recent=False)
        other = rig.new_stream()
        for lc in rig.life_cycles:
            number = lc.life_cycle_id
            ordinals = rig.ordinals(number, 1)
            original = rig.load(number, [10])
            old, new = rig.new_area(number), rig.new_area(number)
            rig.encode(number, old, [0], [10], ordinals)
            rig.finish()
            before = rig.snapshot()
            rig.encode(number, new, [1], [10], ordinals, other)
            rig.finish(other)
            rig.check_only_cold_changed(before, new, [1])
            before = rig.snapshot()
            rig.decode(number, new, [11], [1], ordinals, other)
            rig.finish(other)
            rig.check_only_hot_changed(before, number, [11])
            self._check_pages(rig, [lc], original, rig.load(number, [11]))

    # Failure

    def test_a_rejected_submission_is_told_and_can_be_repeated(self, make_rig: RigMaker) -> None:
        rig = make_rig(has_recent=False)
        for lc in rig.life_cycles:
            self._reject_each(rig, lc)

    def _reject_each(self, rig: CodecRig, lc: LifeCycleDesc) -> None:
        number = lc.life_cycle_id
        area, ordinals = rig.new_area(number), rig.ordinals(number, 2)
        original = rig.load(number, [1, 2])
        for call in (
            lambda: rig.encode(number, area, [0, 1], [1, 2], ordinals),
            lambda: rig.decode(number, area, [3, 4], [0, 1], ordinals),
        ):
            hot = rig.load(number, range(NUM_SLOTS))
            nth = 1
            while _is_rejected(rig, call, nth):
                rig.finish()
                assert np.array_equal(rig.load(number, range(NUM_SLOTS)), hot), (
                    "a rejected call changes hot pages"
                )
                nth += 1
            rig.finish()
        self._check_pages(rig, [lc] * len(original), original, rig.load(number, [3, 4]))

    def _round_trips(self, rig: CodecRig) -> None:
        for number, lc in enumerate(rig.life_cycles):
            rng = np.random.default_rng(number)
            for count in (0, 1, 7, NUM_SLOTS):
                self._round_trip(rig, lc, *(rng.permutation(NUM_SLOTS)[:count] for _ in range(3)))

    def _round_trip(
        self,
        rig: CodecRig,
        lc: LifeCycleDesc,
        slots: Indices,
        indices: Indices,
        targets: Indices,
    ) -> None:
        """Hot ``slots`` -> cold ``indices`` -> hot ``targets``, and every other byte as it was."""
        number = lc.life_cycle_id
        area, ordinals = rig.new_area(number), rig.ordinals(number, len(slots))
        original = rig.load(number, slots)
        before = rig.snapshot()
        rig.encode(number, area, indices, slots, ordinals)
        rig.finish()
        rig.check_only_cold_changed(before, area, indices)
        rig.refill(rig.hot_group_of[number])
        before = rig.snapshot()
        backwards = slice(None, None, -1)
        rig.decode(number, area, targets[backwards], indices[backwards], ordinals[backwards])
        rig.finish()
        rig.check_only_hot_changed(before, number, targets)
        self._check_pages(rig, [lc] * len(original), original, rig.load(number, targets))


def _classes(rig: CodecRig) -> dict[LifeCycleId, list[LifeCycleDesc]]:
    """The members of each batching class by representative."""
    classes: dict[LifeCycleId, list[LifeCycleDesc]] = {}
    for lc in rig.life_cycles:
        first = LifeCycleId(int(rig.configured.representative[lc.life_cycle_id]))
        classes.setdefault(first, []).append(lc)
    return classes


def _is_rejected(rig: CodecRig, call: Callable[[], None], nth: int) -> bool:
    """Whether the call raises when its ``nth`` submission is rejected; False where it has fewer."""
    rig.stream.submissions_until_rejection = nth
    try:
        call()
    except SubmissionError:
        return True
    assert rig.stream.submissions_until_rejection is not None, (
        "the codec keeps quiet about a rejected submission"
    )
    rig.stream.submissions_until_rejection = None
    return False


def _move(rig: CodecRig, number: LifeCycleId, *, to: int, source: int) -> None:
    """Enqueue a hot slot's copy to another, as somebody who uses the same stream would."""
    pools = rig.groups[rig.hot_group_of[number]].pools
    dst, src = (
        [pool.base_address + slot * pool.slot_bytes for pool in pools] for slot in (to, source)
    )
    sizes = [pool.slot_bytes for pool in pools]
    rig.stream.inner.copy(*(np.array(column, np.int64) for column in (dst, src, sizes)))
