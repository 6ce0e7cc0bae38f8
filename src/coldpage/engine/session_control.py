"""What can be done with named sessions besides talking: list, save, restore, erase, fork, delete.

All of it happens on the thread that owns the manager, between two steps. A save or a restore holds
the step up as long as it takes.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

from coldpage.config import ReuseScope
from coldpage.engine.admission import Refusal
from coldpage.engine.messages import Failed, SessionAction, SessionCommand, SessionDone, SlotInfo
from coldpage.engine.sessions import SessionKey
from coldpage.errors import ColdpageError, SnapshotError
from coldpage.sequence.inspection import blocks_by_level
from coldpage.snapshot import Origin, read_header, state_read, state_write
from coldpage.snapshot.new_file import NO_SPACE_ERRORS
from coldpage.snapshot.transfer import identity_of

if TYPE_CHECKING:
    from coldpage.engine.scheduler import Scheduler
    from coldpage.manager import KVCacheManager
    from coldpage.sequence import KVCache

__all__ = ["SessionControl", "refuse_filename"]

# A save waits this long for what runs to leave it room.
_ROOM_DEADLINE_S: Final = 10.0
# A new file has a longer name until it is finished.
_MAX_NAME_BYTES: Final = 200
_FORBIDDEN: Final = re.compile(r"[/\\\x00-\x1f\x7f]")
_MAX_SLOT_ID: Final = 1 << 20


class _Refused(Exception):
    """The command can not be obeyed; the argument is a Refusal."""

    def __init__(self, status: int, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.refusal = Refusal(status, code, sentence)


def refuse_filename(name: str) -> str | None:
    """Why a name can not be that of a saved session, in a sentence, or None."""
    if not name:
        return "The file name is empty."
    if _FORBIDDEN.search(name) or name.startswith("."):
        return (
            f"The file name {name!r} is refused: it must have no separators and no control"
            " characters, and must not begin with a dot."
        )
    try:
        num_bytes = len(os.fsencode(name))
    except UnicodeEncodeError:
        return "The file name holds a lone surrogate, which is no Unicode character."
    if num_bytes > _MAX_NAME_BYTES:
        return f"The file name has {num_bytes} bytes; at most {_MAX_NAME_BYTES} are supported."
    return None


def _unsaved(path: Path, error: OSError) -> _Refused:
    if error.errno not in NO_SPACE_ERRORS:
        return _Refused(500, "save_failed", " ".join(str(error).split()))
    sentence = (
        f"The session can not be saved in {path.parent} ({os.strerror(error.errno)}): free space"
        " there, or start the server with another --save-dir."
    )
    return _Refused(507, "save_failed", sentence)


class SessionControl:
    """Obeys session commands for one scheduler. ``save_path`` None: nothing is saved."""

    def __init__(
        self,
        scheduler: Scheduler,
        manager: KVCacheManager,
        *,
        save_path: str | None = None,
        origin: Origin | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._sessions = scheduler.sessions
        self._manager = manager
        self._directory = None if save_path is None else Path(save_path)
        self._origin = origin or Origin()
        self._tier_names = [level.name for level in manager.stats().levels]
        self._waiting: deque[tuple[SessionCommand, float]] = deque()

    def submit(self, command: SessionCommand) -> None:
        """Take a command; ``advance`` answers it."""
        self._waiting.append((command, time.monotonic()))

    def advance(self) -> list[SessionDone | Failed]:
        """Obey what can be obeyed now, in the order it came."""
        replies: list[SessionDone | Failed] = []
        for _ in range(len(self._waiting)):
            command, since_s = self._waiting.popleft()
            reply = self._obey(command, since_s)
            if reply is None:
                self._waiting.append((command, since_s))
            else:
                replies.append(reply)
        return replies

    def abort_all(self, status: int, code: str, sentence: str) -> list[SessionDone | Failed]:
        """Refuse all commands that wait."""
        waiting, self._waiting = self._waiting, deque()
        return [Failed(c.request_id, status, sentence, code) for c, _ in waiting]

    def _obey(self, command: SessionCommand, since_s: float) -> SessionDone | Failed | None:
        """None: not yet."""
        try:
            match command.action:
                case SessionAction.LIST:
                    return self._list(command)
                case SessionAction.SAVE:
                    return self._save(command, since_s)
                case SessionAction.RESTORE:
                    return self._restore(command)
                case SessionAction.FORK:
                    return self._fork(command)
                case SessionAction.ERASE | SessionAction.DELETE:
                    return self._erase(command)
        except _Refused as refused:
            refusal = refused.refusal
        except ColdpageError as error:
            refusal = Refusal(500, "engine_error", " ".join(str(error).split()))
        return Failed(command.request_id, refusal.status, refusal.sentence, refusal.code)

    # ------------------------------------------------------------------ finding

    def _key_of(self, command: SessionCommand) -> SessionKey:
        if command.slot_id is None:
            return SessionKey(ReuseScope(salt=command.salt), command.session or "")
        key = self._sessions.key_of(command.slot_id)
        if key is None:
            sentence = f"No session has the slot id {command.slot_id}; GET /slots lists those."
            raise _Refused(404, "slot_not_found", sentence)
        return key

    def _idle(self, command: SessionCommand) -> tuple[SessionKey, KVCache]:
        """The session, its cache not in use."""
        key = self._key_of(command)
        self._refuse_busy(key)
        kv_cache = self._sessions.get(key)
        if kv_cache is None:
            sentence = f"There is nothing in the session {key.name!r}."
            raise _Refused(404, "session_not_found", sentence)
        return key, kv_cache

    def _refuse_busy(self, key: SessionKey) -> None:
        if self._scheduler.live_in(key) is not None:
            sentence = f"A request is open in the session {key.name!r}: wait for its answer."
            raise _Refused(409, "session_busy", sentence)

    def _file(self, command: SessionCommand) -> Path:
        """Where the command's file is, in the directory and nowhere else."""
        if self._directory is None:
            sentence = "This server was started without a directory to save sessions in."
            raise _Refused(400, "saving_disabled", sentence)
        sentence = refuse_filename(command.filename) or ""
        path = self._directory / command.filename
        if not sentence and path.is_symlink():
            sentence = f"{command.filename!r} is a symbolic link, which is not followed."
        if not sentence and path.exists() and not path.is_file():
            sentence = f"{command.filename!r} is not a file."
        if sentence:
            raise _Refused(400, "invalid_filename", sentence)
        return path

    # ------------------------------------------------------------------ doing

    def _list(self, command: SessionCommand) -> SessionDone:
        slots = [
            self._describe(key, number)
            for key, number in sorted(self._sessions.numbers.items(), key=lambda item: item[1])
            if command.session is None or key.scope.salt == command.salt
        ]
        identity = identity_of(self._manager, self._origin)
        fingerprints = {
            "model": identity.model,
            "tokenizer": identity.tokenizer,
            "dtype": identity.dtype,
            "codec": identity.codec,
            "provenance": identity.provenance,
        }
        return SessionDone(command.request_id, slots=tuple(slots), fingerprints=fingerprints)

    def _describe(self, key: SessionKey, number: int) -> SlotInfo:
        live = self._scheduler.live_in(key)
        kv_cache = self._sessions.get(key) or (None if live is None else live.kv)
        counts = [0] * len(self._tier_names) if kv_cache is None else blocks_by_level(kv_cache)
        return SlotInfo(
            number,
            key.name,
            0 if kv_cache is None else kv_cache.history_length,
            live is not None,
            dict(zip(self._tier_names, counts, strict=True)),
        )

    def _save(self, command: SessionCommand, since_s: float) -> SessionDone | None:
        key, kv_cache = self._idle(command)
        path = self._file(command)
        started_s = time.perf_counter()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            num_bytes = state_write(
                self._manager, [kv_cache], path, origin=self._origin, labels=[key.name]
            )
        except (SnapshotError, OSError) as error:
            raise _unsaved(path, error) from error
        if num_bytes is None:
            if time.monotonic() - since_s < _ROOM_DEADLINE_S:
                return None
            sentence = "The hot level has no room for the session now; try again later."
            raise _Refused(503, "hot_level_full", sentence)
        num_tokens, lost = kv_cache.history_length, kv_cache.missing_blocks()
        if lost:  # a restore ends before them
            num_tokens = lost[0] * self._manager.tokens_per_block
        return SessionDone(
            command.request_id,
            self._sessions.number(key),
            key.name,
            num_tokens,
            num_bytes,
            1000.0 * (time.perf_counter() - started_s),
        )

    def _restore(self, command: SessionCommand) -> SessionDone:
        path = self._file(command)
        if not path.exists():
            sentence = f"There is no saved session {command.filename!r}."
            raise _Refused(404, "file_not_found", sentence)
        started_s = time.perf_counter()
        try:
            key = self._restored_key(command, path)
            self._refuse_busy(key)
            kv_caches = state_read(self._manager, path, origin=self._origin, scopes=(key.scope,))
        except SnapshotError as error:
            raise _Refused(400, "snapshot_refused", " ".join(str(error).split())) from error
        if len(kv_caches) != 1:
            for kv_cache in kv_caches:
                kv_cache.close()
            sentence = f"{command.filename!r} holds {len(kv_caches)} sequences, and not a session."
            raise _Refused(400, "snapshot_refused", sentence)
        number = self._sessions.number(key, command.slot_id)
        self._sessions.put(key, kv_caches[0])
        return SessionDone(
            command.request_id,
            number,
            key.name,
            kv_caches[0].history_length,
            path.stat().st_size,
            1000.0 * (time.perf_counter() - started_s),
        )

    def _restored_key(self, command: SessionCommand, path: Path) -> SessionKey:
        """Whose session it becomes: the slot id's, or, if nobody has that, the saved one's."""
        if command.slot_id is None or self._sessions.key_of(command.slot_id) is not None:
            return self._key_of(command)
        if not 0 <= command.slot_id <= _MAX_SLOT_ID:
            sentence = f"{command.slot_id} can be no slot id."
            raise _Refused(404, "slot_not_found", sentence)
        names = [one.label for one in read_header(path).sequences]
        key = SessionKey(ReuseScope(), next(iter(names), "") or f"slot {command.slot_id}")
        own = self._sessions.numbers.get(key)
        if own is not None:
            sentence = f"The saved session {key.name!r} has the slot id {own} here: use that."
            raise _Refused(409, "slot_conflict", sentence)
        return key

    def _fork(self, command: SessionCommand) -> SessionDone:
        key, kv_cache = self._idle(command)
        other = SessionKey(key.scope, command.new_session)
        if self._sessions.get(other) is not None or self._scheduler.live_in(other) is not None:
            sentence = f"There is a session {other.name!r} already: delete it or choose another."
            raise _Refused(409, "session_exists", sentence)
        fork = kv_cache.fork()
        self._sessions.put(other, fork)
        number = self._sessions.number(other)
        return SessionDone(command.request_id, number, other.name, fork.history_length)

    def _erase(self, command: SessionCommand) -> SessionDone:
        key = self._key_of(command)
        self._refuse_busy(key)
        if key not in self._sessions.numbers:
            sentence = f"There is no session {key.name!r}."
            raise _Refused(404, "session_not_found", sentence)
        number = self._sessions.number(key)
        kv_cache = self._sessions.get(key)
        num_tokens = 0
        if kv_cache is not None:
            num_tokens = kv_cache.history_length
            kv_cache.plan_drop()
        self._sessions.remove(key)
        if command.action is SessionAction.ERASE:
            self._sessions.number(key, number)
        return SessionDone(command.request_id, number, key.name, num_tokens)
