"""The codecs of one manager: one for all cold tiers, or one for some of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from coldpage.codecs import (
    CodecErrors,
    ColdPageCodec,
    ConfiguredCodec,
    PoolGroupDesc,
    close_codec,
    statistics_names,
    take_codec,
)
from coldpage.config import CacheTierConfig
from coldpage.device.base import Stream
from coldpage.errors import CodecError
from coldpage.manager.stats import CodecStats
from coldpage.prefix import EXACT_PROVENANCE

__all__ = ["TierCodecs"]

_logger = logging.getLogger(__name__)

# Of no codec: an identity begins with an id, which is not empty and has no slash.
_SINKS_APART: Final = b"/sinks apart"
# How many they are is not in it: the forms on disk are the same, and so is what they lose at worst.
_RECENT_APART: Final = b"/recent apart"


class TierCodecs:
    """Consumed when this is made, whatever comes of it, and closed with it."""

    def __init__(
        self,
        tiers: Sequence[CacheTierConfig],
        codec: ColdPageCodec | None,
        max_page_kernel_bytes: int = 0,
    ) -> None:
        """``codec`` is for the cold tiers that name none; None is the default codec, where one is
        needed. A manager without cold tiers has one too, so that a broken one shows. A default
        codec is for a device with this ``max_page_kernel_bytes``.

        Raises CodecConsumedError or ConfigurationError.
        """
        self._max_page_kernel_bytes = max_page_kernel_bytes
        self._own: list[object | None] = [tier.codec for tier in tiers]
        self._taken: list[ColdPageCodec] = []
        self._configured: dict[int, ConfiguredCodec] = {}  # by the id of the codec
        self._has_no_errors: set[str] = set()  # identities of those that failed to say them
        self._shared: ColdPageCodec | None = None
        error: BaseException | None = None
        if codec is not None or any(own is None for own in self._own[1:]) or len(tiers) == 1:
            error = self._take(codec)
            self._shared = self._taken[0] if self._taken else None
        for own in self._own:
            if own is not None and not any(own is taken for taken in self._taken):
                error = self._take(own) or error
        if error is not None:
            self.close()
            raise error

    def _take(self, codec: object | None) -> Exception | None:
        """Also after an error the others are consumed: what was given is given."""
        try:
            taken = take_codec(codec, self._max_page_kernel_bytes)  # type: ignore[arg-type]
            self._taken.append(taken)
        except Exception as error:
            return error
        return None

    @property
    def num_formats(self) -> int:
        """How many cold formats the tiers have between them. Asked before any codec is checked."""
        in_use = [self._of_tier(index) for index in range(1, len(self._own))]
        return len({f"{getattr(c, 'codec_id', None)}/{c.version}/{c.parameters}" for c in in_use})

    def configure(self, pool_groups: Sequence[PoolGroupDesc]) -> None:
        """Configure each and check its answers. Raises CodecError."""
        by_format: dict[str, ConfiguredCodec] = {}
        for codec in self._taken:
            configured = ConfiguredCodec(codec, pool_groups)
            # One format is one codec, however many objects make it: its pages are copied raw.
            first = by_format.setdefault(configured.identity, configured)
            if first.cold_page_bytes != configured.cold_page_bytes:
                raise CodecError(
                    f"two codecs are both called {configured.name} and differ in the size of their "
                    "cold pages: say in `parameters` what sets them apart"
                )
            self._configured[id(codec)] = first

    def prepare(self, stream: Stream) -> None:
        """Let each codec in use do what its first call would else wait for. Raises CodecError."""
        for configured in self.all:
            try:
                configured.codec.prepare(stream)
            except CodecError:
                raise
            except (Exception, SystemExit) as error:
                raise CodecError(f"codec {configured.name} failed in prepare: {error!r}") from error

    @property
    def all(self) -> tuple[ConfiguredCodec, ...]:
        """One for each format of the tiers. A codec that no tier uses is not among them."""
        in_use = [self.of_tier(index) for index in range(1, len(self._own))]
        return tuple({id(codec): codec for codec in in_use}.values())

    def of_tier(self, index: int) -> ConfiguredCodec:
        """The codec of a cold tier."""
        return self._configured[id(self._of_tier(index))]

    def _of_tier(self, index: int) -> ColdPageCodec:
        own = self._own[index]
        codec = self._shared if own is None else own
        assert isinstance(codec, ColdPageCodec), "what is no codec was refused"
        return codec

    def stats(self) -> tuple[CodecStats, ...]:
        """What the codecs in use say of what they lose. One that fails to is left out, and logged
        once: nobody's pages depend on it.
        """
        codecs = self.all
        found = [
            CodecStats(name, self._errors_of(configured))
            for name, configured in zip(statistics_names(codecs), codecs, strict=True)
        ]
        return tuple(stats for stats in found if stats.errors)

    def _errors_of(self, configured: ConfiguredCodec) -> tuple[CodecErrors, ...]:
        try:
            return configured.measured_errors()
        except CodecError as error:
            if configured.identity not in self._has_no_errors:
                self._has_no_errors.add(configured.identity)
                _logger.warning("%s (logged once: it is left out of statistics)", error)
            return ()

    def provenance(self, *, has_sinks_apart: bool, has_recent_apart: bool) -> bytes:
        """What a block may have been through: ``exact``, or the formats that lose something, and
        whether they were told which pages are of first blocks and of the newest, which they may
        keep whole.
        """
        lossy = sorted(c.identity for c in self.all if not c.codec.is_lossless)
        if not lossy:
            return EXACT_PROVENANCE
        names = [name.encode("utf-8", "surrogatepass") for name in lossy]
        if has_sinks_apart:
            names.append(_SINKS_APART)
        if has_recent_apart:
            names.append(_RECENT_APART)
        # Each with its length, so that no two lists read alike.
        return b"".join(len(name).to_bytes(8, "little") + name for name in names)

    def close(self) -> None:
        """Close each codec, in reverse order; one that fails to leaves none of the others open."""
        for codec in reversed(self._taken):
            close_codec(codec)
