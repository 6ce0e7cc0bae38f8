"""The JSON bodies of the routes about sessions: what llama-server answers with, and names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "EraseAnswer",
    "FileRequest",
    "ForkAnswer",
    "ForkRequest",
    "RestoreAnswer",
    "RestoreTimings",
    "SaveAnswer",
    "SaveTimings",
    "SlotReport",
    "SlotTier",
]

_Salt = Annotated[str | None, Field(min_length=1, max_length=256)]
_Filename = Annotated[
    str, Field(max_length=256, description="a name in the save directory, no path")
]


class FileRequest(BaseModel):
    """Which file to save to or restore from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    filename: _Filename = ""
    cache_salt: _Salt = Field(None, description="the salt of the session, by name only")


class ForkRequest(BaseModel):
    """The name of the second session."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    session: Annotated[str, Field(min_length=1, max_length=256)]
    cache_salt: _Salt = None


class SaveTimings(BaseModel):
    """How long it took."""

    save_ms: float


class SaveAnswer(BaseModel):
    """A session was saved: tokens, and bytes of the file."""

    id_slot: int
    session: str
    filename: str
    n_saved: int
    n_written: int
    timings: SaveTimings


class RestoreTimings(BaseModel):
    """How long it took."""

    restore_ms: float


class RestoreAnswer(BaseModel):
    """A session was restored: the tokens that its next request need not compute, and the bytes of
    the file.
    """

    id_slot: int
    session: str
    filename: str
    n_restored: int
    n_read: int
    timings: RestoreTimings


class EraseAnswer(BaseModel):
    """What was cached of a session is gone, as far as no other session shares it."""

    id_slot: int
    session: str
    n_erased: int


class ForkAnswer(BaseModel):
    """The second session."""

    id_slot: int
    session: str
    n_tokens: int


class SlotTier(BaseModel):
    """Where a session's blocks are, by their coldest page: in memory that attention reads, in host
    memory, on disk. A saved file must agree with the fingerprints.
    """

    blocks_hot: int
    blocks_warm: int
    blocks_cold: int
    fingerprints: dict[Literal["model", "tokenizer", "dtype", "codec", "provenance"], str]


class SlotReport(BaseModel):
    """One named session."""

    id: int
    name: str
    n_tokens: int
    is_processing: bool
    tier: SlotTier
