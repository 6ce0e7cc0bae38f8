"""A codec that a manager has taken: consumed, configured once, and its answers checked and kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from coldpage.codecs.base import CodecErrors, ColdPageCodec, PoolGroupDesc
from coldpage.codecs.concat import create_default_cold_page_codec
from coldpage.errors import CodecConsumedError, CodecError, ConfigurationError
from coldpage.store.format import MAX_CODEC_BYTES
from coldpage.types import LifeCycleId, PageIndexLocation, PoolGroupIndex, is_whole_number

__all__ = [
    "ConfiguredCodec",
    "check_format",
    "close_codec",
    "codec_identity",
    "configure_taken",
    "statistics_names",
    "take_codec",
]

_logger = logging.getLogger(__name__)


def _format_of(codec: ColdPageCodec) -> tuple[object, ...]:
    return (
        codec.codec_id,
        codec.version,
        codec.parameters,
        codec.is_lossless,
        codec.needs_positions,
    )


def codec_identity(codec: ColdPageCodec) -> str:
    """For keys and files: the same only for codecs that read each other's pages."""
    return f"{codec.codec_id}/{codec.version}/{codec.parameters}"


def take_codec(codec: ColdPageCodec | None, max_page_kernel_bytes: int = 0) -> ColdPageCodec:
    """Consume ``codec``, or make a default one for a device with this ``max_page_kernel_bytes``.
    Nothing else may use it after this call.

    Raises CodecConsumedError when something has, ConfigurationError when it is no codec.
    """
    if codec is None:
        codec = create_default_cold_page_codec(max_page_kernel_bytes)
    if not isinstance(codec, ColdPageCodec):
        raise ConfigurationError(
            f"{codec!r} is no codec: pass an instance of a subclass of ColdPageCodec, "
            "or None for the default"
        )
    if codec.is_consumed:
        raise CodecConsumedError(
            f"codec {_id_of(codec)} belongs to another manager already: "
            "make a new one for each manager"
        )
    codec.is_consumed = True
    return codec


def close_codec(codec: ColdPageCodec) -> None:
    """Close it. What that raises is logged and ends nothing: whoever closes a codec is done with
    it, and has others to close or something else to say.
    """
    try:
        codec.close()
    except (Exception, SystemExit) as error:
        _logger.warning(
            "codec %s failed in close, and may hold on to what it has: %r", _id_of(codec), error
        )


def check_format(codec: ColdPageCodec) -> None:
    """The names of the cold format, which go into keys and files. Raises CodecError."""
    codec_id = getattr(codec, "codec_id", None)
    if not isinstance(codec_id, str) or not codec_id or "/" in codec_id:
        raise CodecError(
            f"codec {type(codec).__name__} has the codec_id {codec_id!r}: "
            "give it a name, in one or more characters other than '/'"
        )
    if not is_whole_number(codec.version):
        raise CodecError(
            f"codec {codec_id} has the version {codec.version!r}: "
            "count the versions of its format in whole numbers"
        )
    if not isinstance(codec.parameters, str):
        raise CodecError(
            f"codec {codec_id} has the parameters {codec.parameters!r}: "
            "write what changes its bytes as a string, empty for nothing"
        )
    _check_length(codec)


def _check_length(codec: ColdPageCodec) -> None:
    """A header on disk has so much room."""
    try:
        num_bytes = len(codec_identity(codec).encode())
    except UnicodeEncodeError:
        raise CodecError(
            f"codec {codec.codec_id!r} has a codec_id or parameters that are no Unicode text: "
            "use characters that UTF-8 can write"
        ) from None
    if num_bytes > MAX_CODEC_BYTES:
        raise CodecError(
            f"codec {codec.codec_id[:64]} has a codec_id, version and parameters of {num_bytes:,} "
            f"bytes together, of which a disk tier can keep {MAX_CODEC_BYTES:,}: "
            "put a hash of the parameters there"
        )


def _package_of(codec: ColdPageCodec) -> str:
    modules = (of.__module__ for of in type(codec).__mro__)
    # A class that was made by a call of ``type`` has the module of its metaclass.
    module = next(module for module in modules if module != "abc")
    return module.partition(".")[0]


def _id_of(codec: ColdPageCodec) -> str:
    """For messages, also of a codec without a proper name."""
    return str(getattr(codec, "codec_id", type(codec).__name__))


class ConfiguredCodec:
    """A codec with its answers, by life cycle. Immutable.

    Making one calls ``configure``, asks about every life cycle, and raises CodecError when an
    answer breaks the contract. It never closes the codec, whose owner does.
    """

    codec: ColdPageCodec
    identity: str  # for keys: the same only for codecs that read each other's pages
    name: str  # for people: id, version and parameters
    needs_positions: bool
    cold_page_bytes: tuple[int, ...]
    representative: npt.NDArray[np.int16]
    locations: tuple[PageIndexLocation, ...]
    any_device_indices: bool
    max_cold_page_bytes: int

    def __init__(self, codec: ColdPageCodec, pool_groups: Sequence[PoolGroupDesc]) -> None:
        hot_group_of = _hot_groups(pool_groups)
        self.codec = codec
        check_format(codec)
        is_format = _format_of(codec)
        self._ask(lambda: codec.configure(pool_groups), "configure")
        if _format_of(codec) != is_format:
            raise CodecError(
                f"codec {codec.codec_id} changed its format in configure (it was {is_format}, it "
                f"is {_format_of(codec)}): set codec_id, version, parameters, is_lossless and "
                "needs_positions before it is given to a manager"
            )
        # Fixed from here on, whatever becomes of the codec's attributes.
        self.identity = codec_identity(codec)
        self.name = f"{codec.codec_id} v{codec.version} {codec.parameters}".rstrip()
        # For people, with where to look for it.
        self.name_and_package = f"codec {self.name} (package {_package_of(codec)})"
        self.needs_positions = codec.needs_positions
        life_cycles = [LifeCycleId(lc) for lc in range(len(hot_group_of))]
        self.cold_page_bytes = tuple(self._ask_size(lc) for lc in life_cycles)
        self.locations = tuple(self._ask_location(lc) for lc in life_cycles)
        firsts = [self._ask_representative(lc, len(life_cycles)) for lc in life_cycles]
        for member, first in enumerate(firsts):
            self._check_class(member, first, firsts, hot_group_of)
        self.representative = np.array(firsts, np.int16)
        self.representative.flags.writeable = False
        self.any_device_indices = PageIndexLocation.DEVICE in self.locations
        self.max_cold_page_bytes = max(self.cold_page_bytes)

    def measured_errors(self) -> tuple[CodecErrors, ...]:
        """What the codec says that it has lost. Raises CodecError when it says no such thing."""
        errors = self._ask(self.codec.measured_errors, "measured_errors")
        if not isinstance(errors, tuple) or not all(isinstance(it, CodecErrors) for it in errors):
            raise CodecError(
                f"codec {self.codec.codec_id} says {errors!r} of what it has lost: "
                "return a tuple of CodecErrors from measured_errors"
            )
        return errors

    def _ask(self, question: Callable[[], object], what: str) -> object:
        try:
            return question()
        except CodecError:
            raise
        except (Exception, SystemExit) as error:
            raise CodecError(f"codec {self.codec.codec_id} failed in {what}: {error!r}") from error

    def _ask_size(self, life_cycle: LifeCycleId) -> int:
        size = self._ask(
            lambda: self.codec.query_cold_page_bytes(life_cycle),
            f"query_cold_page_bytes of life cycle {life_cycle}",
        )
        if not is_whole_number(size):
            raise CodecError(
                f"codec {self.codec.codec_id} has a cold page of {size!r} bytes for life cycle "
                f"{life_cycle}: return a whole number from query_cold_page_bytes"
            )
        if size <= 0:
            raise CodecError(
                f"codec {self.codec.codec_id} has a cold page of {size} bytes for life cycle "
                f"{life_cycle}: return its fixed, positive size from query_cold_page_bytes"
            )
        return int(size)

    def _ask_location(self, life_cycle: LifeCycleId) -> PageIndexLocation:
        location = self._ask(
            lambda: self.codec.query_page_index_location(life_cycle),
            f"query_page_index_location of life cycle {life_cycle}",
        )
        if not isinstance(location, PageIndexLocation):
            raise CodecError(
                f"codec {self.codec.codec_id} wants the page indices of life cycle {life_cycle} at "
                f"{location!r}: return a PageIndexLocation from query_page_index_location"
            )
        return location

    def _ask_representative(self, life_cycle: LifeCycleId, num_life_cycles: int) -> int:
        first = self._ask(
            lambda: self.codec.get_batching_layer_group_id(life_cycle),
            f"get_batching_layer_group_id of life cycle {life_cycle}",
        )
        batches = f"codec {self.codec.codec_id} batches life cycle {life_cycle} as {first!r}"
        if not is_whole_number(first):
            raise CodecError(
                f"{batches}, which is no life cycle: "
                "return one from get_batching_layer_group_id, or the argument to batch nothing"
            )
        if first < 0:
            raise CodecError(
                f"{batches}, which says that it failed: "
                "return the smallest life cycle of the class from get_batching_layer_group_id"
            )
        if first >= num_life_cycles:
            raise CodecError(
                f"{batches}, which configure has not named: "
                f"return one of the {num_life_cycles} life cycles from get_batching_layer_group_id"
            )
        return int(first)

    def _check_class(
        self, member: int, first: int, firsts: Sequence[int], hot_group_of: Sequence[PoolGroupIndex]
    ) -> None:
        """A representative stands for itself, is the smallest of its class, and like all of it."""
        batches = f"codec {self.codec.codec_id} batches life cycle {member} as {first}"
        if first > member:
            raise CodecError(
                f"{batches}, which is greater: "
                "return the smallest life cycle of the class from get_batching_layer_group_id"
            )
        if firsts[first] != first:
            raise CodecError(
                f"{batches}, and that one as {firsts[first]}: "
                "return the same life cycle for the whole class from get_batching_layer_group_id"
            )
        if hot_group_of[first] != hot_group_of[member]:
            raise CodecError(
                f"{batches}, which lies in another hot pool group: "
                "batch only life cycles that configure describes in one group"
            )
        sizes = self.cold_page_bytes[first], self.cold_page_bytes[member]
        if sizes[0] != sizes[1]:
            raise CodecError(
                f"{batches}, whose cold pages have {sizes[0]} bytes and not {sizes[1]}, "
                "so that they lie in another cold pool group: batch only life cycles of one size"
            )
        places = self.locations[first], self.locations[member]
        if places[0] is not places[1]:
            raise CodecError(
                f"{batches}, whose page indices it wants in {places[0].value} and not in "
                f"{places[1].value} memory: batch only life cycles with one index location"
            )


def configure_taken(codec: ColdPageCodec, pool_groups: Sequence[PoolGroupDesc]) -> ConfiguredCodec:
    """Consume ``codec`` for ``pool_groups``. Whoever closes the result's ``codec`` owns it.

    Raises as ``take_codec`` does; and CodecError where the codec refuses the pool groups, when it
    is closed.
    """
    taken = take_codec(codec)
    try:
        return ConfiguredCodec(taken, pool_groups)
    except BaseException:
        close_codec(taken)
        raise


def _hot_groups(pool_groups: Sequence[PoolGroupDesc]) -> list[PoolGroupIndex]:
    """The hot pool group of each life cycle; what the caller promises is asserted."""
    group_of: dict[int, PoolGroupIndex] = {}
    for index, group in enumerate(pool_groups):
        assert group.pool_group_index == index, "pool groups come in index order"
        for life_cycle in group.life_cycles:
            assert life_cycle.life_cycle_id not in group_of, "a life cycle has one hot pool group"
            group_of[life_cycle.life_cycle_id] = group.pool_group_index
    assert group_of and sorted(group_of) == list(range(len(group_of))), "life cycles have no gaps"
    return [group_of[life_cycle] for life_cycle in range(len(group_of))]


def statistics_names(codecs: Sequence[ConfiguredCodec]) -> list[str]:
    """What statistics call each of them: its id, or its whole name where others have that id."""
    ids = [configured.codec.codec_id for configured in codecs]
    return [
        codec_id if ids.count(codec_id) == 1 else configured.name
        for codec_id, configured in zip(ids, codecs, strict=True)
    ]
