"""What a store of keyed blobs promises to an engine that mounts it."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from coldpage.device.base import Completion
from coldpage.store.format import BlobName
from coldpage.types import BlockKey, LayerGroupId

__all__ = ["FIRST_GROUP", "KeyedStore", "StoreTicket"]

# For engines that know of no layer groups.
FIRST_GROUP = LayerGroupId(0)


class StoreTicket(Completion):
    """A batch that was asked of a store. ``KeyedStore.poll`` settles it."""

    @property
    @abc.abstractmethod
    def ok(self) -> npt.NDArray[np.bool_]:
        """Per blob, in the order given, whether it was done. Raises UsageError before the ticket is
        done.
        """


class KeyedStore(abc.ABC):
    """Blobs of one size under keys that name their contents: two blobs under one key and layer
    group are equal. Bounded: to have room for new blobs it gives up those used longest ago.

    One thread owns it. Nothing blocks on I/O except ``flush``, ``close`` and
    ``StoreTicket.synchronize``. A failing disk is a row that is not ok, never an exception.
    """

    @abc.abstractmethod
    def put(self, names: Sequence[BlobName], payloads: npt.NDArray[np.uint8]) -> StoreTicket:
        """Keep ``payloads`` [n, payload_bytes], which stay untouched until the ticket is done.

        A row is ok when its blob survives a power cut from now on; not ok, and not found later,
        when there was no room for it, or the disk failed. A blob that is there already is not
        written again. Raises UsageError for what can not be put at all, having done nothing.
        """

    @abc.abstractmethod
    def get(
        self,
        keys: Sequence[BlockKey],
        out: npt.NDArray[np.uint8],
        *,
        layer_group_id: LayerGroupId = FIRST_GROUP,
    ) -> StoreTicket:
        """Fill ``out`` [n, payload_bytes], which nobody else uses until the ticket is done.

        A row is ok when it holds exactly what was put under its key; one that is not ok is a miss,
        and may hold anything.
        """

    @abc.abstractmethod
    def contains(
        self, keys: Sequence[BlockKey], *, layer_group_id: LayerGroupId = FIRST_GROUP
    ) -> npt.NDArray[np.bool_]:
        """Per key [n] whether ``get`` would try to read it now. A blob is found as soon as its
        write has ended, before it is durable.
        """

    @abc.abstractmethod
    def delete(
        self, keys: Sequence[BlockKey], *, layer_group_id: LayerGroupId = FIRST_GROUP
    ) -> StoreTicket:
        """Forget the blobs: they are not found from this call on, and a put of one that is in
        flight is not ok. A row is ok when no restart will find it again, also where nothing was
        there.
        """

    @abc.abstractmethod
    def poll(self) -> None:
        """Settle what has ended, start what is due. Never blocks. Call it often."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Block until every ticket is done."""

    @abc.abstractmethod
    def close(self) -> None:
        """Flush, and leave things so that the next opening is fast. Idempotent. Blocks."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
