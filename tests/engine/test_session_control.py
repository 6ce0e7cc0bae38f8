"""Session commands between steps: they wait for room, never disturb what runs, and are answered."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from coldpage.config import ReuseScope
from coldpage.engine import session_control
from coldpage.engine.messages import Failed, SessionAction, SessionCommand, SessionDone
from coldpage.engine.session_control import SessionControl
from coldpage.engine.sessions import SessionKey, SessionStore
from tests.engine.pattern_runner import VOCAB

BLOCK = 4


def prompt(num: int, seed: int = 0) -> list[int]:
    return [(7 * n + 13 * seed + n * n * seed) % VOCAB for n in range(num)]


def save(name: str = "one") -> SessionCommand:
    return SessionCommand("s", SessionAction.SAVE, session=name, filename=name)


def answer_of(control: SessionControl, command: SessionCommand) -> SessionDone | Failed:
    control.submit(command)
    (answer,) = control.advance()
    return answer


def control_of(rig: Any, directory: Path) -> SessionControl:
    return SessionControl(rig.scheduler, rig.manager, save_path=str(directory))


def test_a_save_waits_for_room(new_rig: Any, tmp_path: Path) -> None:
    rig = new_rig(20)
    control = control_of(rig, tmp_path)
    rig.submit("a", prompt(40), 4, session="one")
    rig.run()
    rig.submit("b", prompt(48, seed=3), 12)  # its 12 blocks and more are locked
    rig.run_until(lambda: len(rig.tokens["b"]) >= 3)
    control.submit(save())
    assert control.advance() == []
    rig.run()
    (done,) = control.advance()
    assert isinstance(done, SessionDone)
    assert done.num_tokens == 43
    assert (tmp_path / "one").stat().st_size == done.num_bytes


def test_a_save_does_not_wait_for_ever(
    new_rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_control, "_ROOM_DEADLINE_S", 0.05)
    rig = new_rig(20)
    control = control_of(rig, tmp_path)
    rig.submit("a", prompt(40), 4, session="one")
    rig.run()
    rig.submit("b", prompt(48, seed=3), 12)
    rig.run_until(lambda: len(rig.tokens["b"]) >= 3)
    control.submit(save())
    assert control.advance() == []
    time.sleep(0.06)
    (failed,) = control.advance()
    assert isinstance(failed, Failed)
    assert (failed.status, failed.code) == (503, "hot_level_full")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "mkdir"])
def test_without_space_a_save_says_what_to_do(
    new_rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    rig = new_rig(60)
    control = control_of(rig, tmp_path / "saved")
    rig.submit("a", prompt(40), 4, session="one")
    rig.run()

    def fail(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        failed = answer_of(control, save())
    assert isinstance(failed, Failed)
    assert (failed.status, failed.code) == (507, "save_failed")
    assert failed.sentence == (
        f"The session can not be saved in {tmp_path / 'saved'} ({os.strerror(number)}): free"
        " space there, or start the server with another --save-dir."
    )
    assert list(tmp_path.rglob("*.new")) == []
    assert isinstance(answer_of(control, save()), SessionDone)  # nothing of the session is lost


def test_a_save_that_fails_otherwise_is_an_error_of_the_server(
    new_rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new_rig(60)
    control = control_of(rig, tmp_path)
    rig.submit("a", prompt(40), 4, session="one")
    rig.run()

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    failed = answer_of(control, save())
    assert isinstance(failed, Failed)
    assert (failed.status, failed.code) == (500, "save_failed")
    assert failed.sentence.endswith("can not be written (Input/output error)")


def test_what_waits_is_refused_at_the_end(new_rig: Any, tmp_path: Path) -> None:
    control = control_of(new_rig(), tmp_path)
    control.submit(save())
    (failed,) = control.abort_all(503, "shutting_down", "The engine is shutting down.")
    assert (failed.request_id, failed.status) == ("s", 503)
    assert control.advance() == []


def test_a_restored_session_goes_on_as_if_it_had_stayed(new_rig: Any, tmp_path: Path) -> None:
    rig = new_rig(60)
    control = control_of(rig, tmp_path)
    rig.submit("a", prompt(40), 4, session="one")
    rig.run()
    said = [*prompt(40), *rig.tokens["a"]]
    assert isinstance(answer_of(control, save()), SessionDone)
    erased = answer_of(control, SessionCommand("e", SessionAction.ERASE, slot_id=0))
    assert isinstance(erased, SessionDone)
    assert (erased.slot_id, erased.num_tokens) == (0, 43)
    rig.submit("gone", said[:20], 1)
    rig.run()
    assert sum(rig.ends["gone"].usage.cached_tokens_by_tier.values()) == 0
    command = SessionCommand("r", SessionAction.RESTORE, slot_id=0, filename="one")
    restored = answer_of(control, command)
    assert isinstance(restored, SessionDone)
    rig.submit("b", [*said, 1, 2], 6, session="one")
    rig.run()
    usage = rig.ends["b"].usage
    assert sum(usage.cached_tokens_by_tier.values()) == restored.num_tokens == 43


def test_with_sliding_windows_a_session_comes_back(new_rig: Any, tmp_path: Path) -> None:
    rig = new_rig(60, has_sliding_window=True)
    control = control_of(rig, tmp_path)
    rig.submit("a", prompt(60), 4, session="one")
    rig.run()
    said = [*prompt(60), *rig.tokens["a"]]
    assert isinstance(answer_of(control, save()), SessionDone)
    answer_of(control, SessionCommand("d", SessionAction.DELETE, session="one"))
    command = SessionCommand("r", SessionAction.RESTORE, session="one", filename="one")
    restored = answer_of(control, command)
    assert isinstance(restored, SessionDone)
    assert restored.num_tokens == 63
    rig.submit("b", [*said, 1, 2], 6, session="one")
    rig.run()
    assert sum(rig.ends["b"].usage.cached_tokens_by_tier.values()) == 63


def test_slot_ids_are_stable_and_the_lowest_free() -> None:
    store = SessionStore(2)
    keys = [SessionKey(ReuseScope(), name) for name in "abc"]
    assert [store.number(key) for key in keys] == [0, 1, 2]
    store.remove(keys[1])
    assert store.number(keys[2]) == 2
    assert store.number(SessionKey(ReuseScope(salt="x"), "a")) == 1
    assert store.number(SessionKey(ReuseScope(), "d"), 7) == 7
    assert store.key_of(7) == SessionKey(ReuseScope(), "d")
    assert store.key_of(6) is None


def test_slot_ids_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coldpage.engine.sessions._SPARE_NUMBERS", 3)
    store = SessionStore(2)
    for n in range(20):
        store.number(SessionKey(ReuseScope(), str(n)))
    assert len(store.numbers) == 5
    assert max(store.numbers.values()) <= 5
