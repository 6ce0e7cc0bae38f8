"""Routes about named sessions: by slot id as llama-server has them, and by name."""

from __future__ import annotations

import enum
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from coldpage.engine.messages import SessionAction, SessionCommand, SessionDone
from coldpage.server.engine_client import EngineClient
from coldpage.server.session_schema import (
    EraseAnswer,
    FileRequest,
    ForkAnswer,
    ForkRequest,
    RestoreAnswer,
    RestoreTimings,
    SaveAnswer,
    SaveTimings,
    SlotReport,
    SlotTier,
)

__all__ = ["session_routes"]

_SlotId = Annotated[int, Path(ge=0, lt=2**31, description="as GET /slots tells it")]
_Name = Annotated[str, Path(min_length=1, max_length=256)]
_Salt = Annotated[
    str | None, Query(min_length=1, max_length=256, description="the salt of the sessions")
]
_Responses = dict[int | str, dict[str, Any]]


class _SlotAction(enum.StrEnum):
    SAVE = "save"
    RESTORE = "restore"
    ERASE = "erase"


def _request_id() -> str:
    return f"session-{uuid.uuid4().hex}"


def _file_answer(
    action: SessionAction, filename: str, done: SessionDone
) -> SaveAnswer | RestoreAnswer:
    if action is SessionAction.SAVE:
        return SaveAnswer(
            id_slot=done.slot_id,
            session=done.session,
            filename=filename,
            n_saved=done.num_tokens,
            n_written=done.num_bytes,
            timings=SaveTimings(save_ms=done.duration_ms),
        )
    return RestoreAnswer(
        id_slot=done.slot_id,
        session=done.session,
        filename=filename,
        n_restored=done.num_tokens,
        n_read=done.num_bytes,
        timings=RestoreTimings(restore_ms=done.duration_ms),
    )


def _erase_answer(done: SessionDone) -> EraseAnswer:
    return EraseAnswer(id_slot=done.slot_id, session=done.session, n_erased=done.num_tokens)


def _reports(done: SessionDone) -> list[SlotReport]:
    def tier(blocks: dict[str, int]) -> SlotTier:
        hot, cold = blocks.get("hot", 0), blocks.get("disk", 0)
        warm = sum(blocks.values()) - hot - cold
        return SlotTier(
            blocks_hot=hot,
            blocks_warm=warm,
            blocks_cold=cold,
            fingerprints=done.fingerprints,  # type: ignore[arg-type]
        )

    return [
        SlotReport(
            id=slot.slot_id,
            name=slot.name,
            n_tokens=slot.num_tokens,
            is_processing=slot.is_processing,
            tier=tier(slot.blocks),
        )
        for slot in done.slots
    ]


def session_routes(client: EngineClient, errors: _Responses) -> APIRouter:
    """All of them, over one engine; ``errors`` describes what each may answer besides."""
    router = APIRouter(tags=["sessions"])
    _add_slot_routes(router, client, errors)
    _add_name_routes(router, client, errors)
    return router


def _add_slot_routes(router: APIRouter, client: EngineClient, errors: _Responses) -> None:
    @router.get("/slots", operation_id="list_slots", responses=errors)
    async def list_slots() -> list[SlotReport]:
        """Every named session, by slot id. An id is given when a name is first used, the lowest
        free one, and stays until the session is deleted, pushed out by others, or the server stops.
        """
        return _reports(await client.ask(SessionCommand(_request_id(), SessionAction.LIST)))

    @router.post("/slots/{slot_id}", operation_id="change_slot", responses=errors)
    async def change_slot(
        slot_id: _SlotId, action: _SlotAction, body: FileRequest | None = None
    ) -> SaveAnswer | RestoreAnswer | EraseAnswer:
        """Saves a session to a file, restores it from one, or erases what is cached of it. An id
        that nobody has is restored as the session that was saved.
        """
        filename = "" if body is None else body.filename
        wanted = SessionAction(action.value)
        command = SessionCommand(_request_id(), wanted, slot_id=slot_id, filename=filename)
        done = await client.ask(command)
        if wanted is SessionAction.ERASE:
            return _erase_answer(done)
        return _file_answer(wanted, filename, done)


def _add_name_routes(router: APIRouter, client: EngineClient, errors: _Responses) -> None:
    async def with_file(action: SessionAction, name: str, body: FileRequest) -> SessionDone:
        salt = body.cache_salt or ""
        return await client.ask(
            SessionCommand(_request_id(), action, session=name, salt=salt, filename=body.filename)
        )

    @router.get("/sessions", operation_id="list_sessions", responses=errors)
    async def list_sessions(cache_salt: _Salt = None) -> list[SlotReport]:
        """The named sessions under one salt, or under none."""
        command = SessionCommand(
            _request_id(), SessionAction.LIST, session="", salt=cache_salt or ""
        )
        return _reports(await client.ask(command))

    @router.post("/sessions/{name}/save", operation_id="save_session", responses=errors)
    async def save_session(name: _Name, body: FileRequest) -> SaveAnswer:
        """Saves a session to a file, which is replaced whole."""
        done = await with_file(SessionAction.SAVE, name, body)
        answer = _file_answer(SessionAction.SAVE, body.filename, done)
        assert isinstance(answer, SaveAnswer)
        return answer

    @router.post("/sessions/{name}/restore", operation_id="restore_session", responses=errors)
    async def restore_session(name: _Name, body: FileRequest) -> RestoreAnswer:
        """Makes a session of a saved one, in place of what it was."""
        done = await with_file(SessionAction.RESTORE, name, body)
        answer = _file_answer(SessionAction.RESTORE, body.filename, done)
        assert isinstance(answer, RestoreAnswer)
        return answer

    @router.post("/sessions/{name}/fork", operation_id="fork_session", responses=errors)
    async def fork_session(name: _Name, body: ForkRequest) -> ForkAnswer:
        """Makes a second session with the same history, at no cost."""
        command = SessionCommand(
            _request_id(),
            SessionAction.FORK,
            session=name,
            salt=body.cache_salt or "",
            new_session=body.session,
        )
        done = await client.ask(command)
        return ForkAnswer(id_slot=done.slot_id, session=done.session, n_tokens=done.num_tokens)

    @router.delete("/sessions/{name}", operation_id="delete_session", responses=errors)
    async def delete_session(name: _Name, cache_salt: _Salt = None) -> EraseAnswer:
        """Erases a session and gives its slot id back."""
        command = SessionCommand(
            _request_id(), SessionAction.DELETE, session=name, salt=cache_salt or ""
        )
        return _erase_answer(await client.ask(command))
