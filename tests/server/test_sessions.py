"""Sessions by slot id and by name, on the real model: listed, saved, restored, erased, forked."""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from coldpage.engine.model.model import LoadedModel, load_model
from tests.server.running_server import RunningServer, wait_until

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

READY_S = 240.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where sessions are saved."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, saved: Path) -> Iterator[RunningServer]:
    """A server with room for about 1,200 tokens in hot memory."""
    disk = f"{tmp_path_factory.mktemp('disk')}:256MiB"
    flags = {"hot": "56MiB", "host": "56MiB", "disk": disk, "dtype": "float32"}
    with RunningServer(is_scripted=False, save_dir=str(saved), **flags) as running:
        yield running.wait_ready(READY_S)


@pytest.fixture
def http(shared: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, timeout=READY_S) as client:
        yield client


def complete(
    http: httpx.Client, prompt: list[int], session: str | None = None, num: int = 4, **more: Any
) -> tuple[str, int]:
    """The text, and the prompt tokens that were reused."""
    body = {"prompt": prompt, "max_tokens": num, "temperature": 0, "ignore_eos": True, **more}
    answer = http.post("/v1/completions", json={**body, "session": session})
    assert answer.status_code == 200, answer.text
    fields = answer.json()
    return fields["choices"][0]["text"], fields["usage"]["prompt_tokens_details"]["cached_tokens"]


def slot_of(http: httpx.Client, name: str) -> dict[str, Any]:
    (slot,) = (slot for slot in http.get("/slots").json() if slot["name"] == name)
    return dict(slot)


def tokens(seed: int, num: int) -> list[int]:
    return [1000 + (7 * i + 131 * seed + i * i * seed) % 20_000 for i in range(num)]


def test_a_saved_session_survives_its_erasure(http: httpx.Client, model: LoadedModel) -> None:
    prompt = tokens(1, 250)
    complete(http, prompt, "saved")
    slot = slot_of(http, "saved")
    assert slot["n_tokens"] == 250 + 3  # the last answered token has not been computed
    assert not slot["is_processing"]
    tier = slot["tier"]
    assert tier["blocks_hot"] + tier["blocks_warm"] + tier["blocks_cold"] == 16
    assert sorted(tier["fingerprints"]) == ["codec", "dtype", "model", "provenance", "tokenizer"]
    assert bytes.fromhex(tier["fingerprints"]["provenance"]) == b"exact"
    place = f"/slots/{slot['id']}"
    saved = http.post(f"{place}?action=save", json={"filename": "one.bin"}).json()
    assert saved["id_slot"] == slot["id"]
    assert saved["filename"] == "one.bin"
    assert saved["n_saved"] == 253
    assert saved["timings"]["save_ms"] > 0
    erased = http.post(f"{place}?action=erase").json()
    assert erased == {"id_slot": slot["id"], "session": "saved", "n_erased": 253}
    assert slot_of(http, "saved")["n_tokens"] == 0
    restored = http.post(f"{place}?action=restore", json={"filename": "one.bin"}).json()
    assert restored["n_restored"] == 253
    assert restored["n_read"] == saved["n_written"] > 253 * 23_040 * 2
    assert restored["timings"]["restore_ms"] > 0
    # What it went on with before is what it goes on with now, and nothing of it is computed again.
    ids = [*prompt, *greedy(model, prompt, 3)]
    text, cached = complete(http, [*ids, 77, 78], "saved", 4)
    assert cached == restored["n_restored"] == len(ids)
    unsaved, _ = complete(http, [*ids, 77, 78], None, 4, cache_salt="apart")
    assert text == unsaved


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(None, torch.float32)


def greedy(model: LoadedModel, prompt: list[int], num: int) -> list[int]:
    """What plain transformers goes on with."""
    ids = torch.tensor([prompt])
    out = model.model.generate(  # type: ignore[misc]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num,
        min_new_tokens=num,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def test_files_and_their_directory_are_private(http: httpx.Client, saved: Path) -> None:
    complete(http, tokens(2, 40), "private")
    assert http.post("/sessions/private/save", json={"filename": "private"}).status_code == 200
    assert stat.S_IMODE(saved.stat().st_mode) == 0o700
    assert stat.S_IMODE((saved / "private").stat().st_mode) == 0o600


def test_a_session_is_saved_and_restored_by_name(http: httpx.Client) -> None:
    prompt = tokens(3, 100)
    complete(http, prompt, "by name")
    answer = http.post("/sessions/by%20name/save", json={"filename": "named"}).json()
    assert (answer["session"], answer["n_saved"]) == ("by name", 103)
    assert http.delete("/sessions/by%20name").json()["n_erased"] == 103
    assert "by name" not in [slot["name"] for slot in http.get("/slots").json()]
    assert complete(http, [*prompt, 5, 6])[1] == 0  # erased is erased
    answer = http.post("/sessions/another/restore", json={"filename": "named"}).json()
    assert (answer["session"], answer["n_restored"]) == ("another", 103)
    assert complete(http, [*prompt, 5, 6], "another")[1] == 100


def test_a_fork_goes_on_apart(http: httpx.Client) -> None:
    prompt = tokens(4, 90)
    complete(http, prompt, "trunk")
    answer = http.post("/sessions/trunk/fork", json={"session": "branch"})
    assert answer.json()["n_tokens"] == 93
    assert answer.json()["id_slot"] != slot_of(http, "trunk")["id"]
    for name in ("trunk", "branch"):
        assert complete(http, [*prompt, 8, 9], name)[1] == 90
    again = http.post("/sessions/trunk/fork", json={"session": "branch"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "session_exists")


def test_a_salt_keeps_sessions_apart(http: httpx.Client) -> None:
    prompt = tokens(5, 60)
    complete(http, prompt, "salted", cache_salt="pepper")
    assert "salted" not in [one["name"] for one in http.get("/sessions").json()]
    names = [one["name"] for one in http.get("/sessions?cache_salt=pepper").json()]
    assert names == ["salted"]
    file = {"filename": "salted.bin"}
    assert http.post("/sessions/salted/save", json=file).status_code == 404
    own = {**file, "cache_salt": "pepper"}
    assert http.post("/sessions/salted/save", json=own).status_code == 200
    refused = http.post("/sessions/salted/restore", json=file)
    assert refused.status_code == 400
    assert "under another salt" in refused.json()["error"]["message"]
    assert http.post("/sessions/salted/restore", json=own).json()["n_restored"] == 63


NAMES = ("", ".", "..", ".hidden", "a/b", "../up", "/etc/passwd", "a\\b", "nul\0", "n\n", "x" * 201)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("action", ["save", "restore"])
def test_no_file_name_leaves_the_directory(
    http: httpx.Client, saved: Path, name: str, action: str
) -> None:
    complete(http, tokens(6, 20), "names")
    before = sorted(path.name for path in saved.parent.iterdir())
    place = f"/slots/{slot_of(http, 'names')['id']}?action={action}"
    answer = http.post(place, json={"filename": name})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_filename")
    assert sorted(path.name for path in saved.parent.iterdir()) == before


def test_symbolic_links_are_not_followed(http: httpx.Client, saved: Path, tmp_path: Path) -> None:
    complete(http, tokens(7, 20), "links")
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (saved / "link").symlink_to(target)
    (saved / "directory").mkdir(exist_ok=True)
    for name in ("link", "directory"):
        for action in ("save", "restore"):
            answer = http.post(f"/sessions/links/{action}", json={"filename": name})
            assert answer.status_code == 400, answer.text
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/slots/9999?action=save", {"filename": "x"}, 404, "slot_not_found"),
        ("POST", "/slots/9999?action=erase", None, 404, "slot_not_found"),
        ("POST", "/slots/9999?action=restore", {"filename": "none"}, 404, "file_not_found"),
        ("POST", "/slots/0?action=dance", {"filename": "x"}, 400, "invalid_value"),
        ("POST", "/slots/-1?action=save", {"filename": "x"}, 400, "invalid_value"),
        ("POST", "/slots/0", {"filename": "x"}, 400, "invalid_value"),
        ("POST", "/sessions/nobody/save", {"filename": "x"}, 404, "session_not_found"),
        ("POST", "/sessions/nobody/restore", {"filename": "none"}, 404, "file_not_found"),
        ("POST", "/sessions/nobody/fork", {"session": "x"}, 404, "session_not_found"),
        ("POST", "/sessions/nobody/fork", {"session": ""}, 400, "invalid_value"),
        ("DELETE", "/sessions/nobody", None, 404, "session_not_found"),
    ],
)
def test_what_can_not_be_done_is_a_sentence(
    http: httpx.Client, method: str, path: str, body: Any, status: int, code: str
) -> None:
    answer = http.request(method, path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert error["message"].endswith(".")
    assert "\n" not in error["message"]


def test_a_damaged_file_is_refused_and_the_session_stays(http: httpx.Client, saved: Path) -> None:
    prompt = tokens(8, 50)
    complete(http, prompt, "damage")
    http.post("/sessions/damage/save", json={"filename": "damage"})
    data = bytearray((saved / "damage").read_bytes())
    data[-5] ^= 4
    (saved / "damaged").write_bytes(data)
    http.delete("/sessions/damage")
    complete(http, tokens(9, 70), "other")
    answer = http.post("/sessions/other/restore", json={"filename": "damaged"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "snapshot_refused")
    assert "does not match its checksum" in answer.json()["error"]["message"]
    (saved / "short").write_bytes(data[:-1])
    answer = http.post("/sessions/other/restore", json={"filename": "short"})
    assert "is truncated" in answer.json()["error"]["message"]
    assert slot_of(http, "other")["n_tokens"] == 73


def test_a_session_in_use_is_left_alone(http: httpx.Client, shared: RunningServer) -> None:
    complete(http, tokens(10, 30), "busy")
    http.post("/sessions/busy/save", json={"filename": "busy"})
    place = f"/slots/{slot_of(http, 'busy')['id']}"
    body = {"prompt": tokens(10, 40), "max_tokens": 120, "ignore_eos": True, "stream": True}
    thread = threading.Thread(
        target=lambda: httpx.post(
            f"{shared.url}/v1/completions", json={**body, "session": "busy"}, timeout=READY_S
        ).read()
    )
    thread.start()
    wait_until(lambda: slot_of(http, "busy")["is_processing"])
    for answer in (
        http.post(f"{place}?action=save", json={"filename": "busy"}),
        http.post(f"{place}?action=restore", json={"filename": "busy"}),
        http.post(f"{place}?action=erase"),
        http.post("/sessions/busy/fork", json={"session": "x"}),
        http.delete("/sessions/busy"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_busy")
    thread.join()
    assert http.post(f"{place}?action=erase").json()["n_erased"] == 40 + 119


def test_saved_under_one_model_it_goes_on_under_other_tiers(
    http: httpx.Client, saved: Path, tmp_path: Path
) -> None:
    prompt = tokens(11, 200)
    complete(http, prompt, "moving")
    http.post("/sessions/moving/save", json={"filename": "moving"})
    whole, _ = complete(http, [*prompt, 3], None, 6, cache_salt="fresh")
    flags = {"hot": "40MiB", "host": "none", "dtype": "float32", "save_dir": str(saved)}
    with (
        RunningServer(is_scripted=False, **flags).wait_ready(READY_S) as other,
        httpx.Client(base_url=other.url, timeout=READY_S) as there,
    ):
        answer = there.post("/slots/3?action=restore", json={"filename": "moving"}).json()
        assert (answer["id_slot"], answer["session"]) == (3, "moving")
        assert answer["n_restored"] == 203
        assert complete(there, [*prompt, 3], "moving", 6) == (whole, 200)
        clash = there.post("/slots/4?action=restore", json={"filename": "moving"})
        assert (clash.status_code, clash.json()["error"]["code"]) == (409, "slot_conflict")
    flags["dtype"] = "bfloat16"
    with RunningServer(is_scripted=False, **flags).wait_ready(READY_S) as other:
        answer = httpx.post(f"{other.url}/slots/0?action=restore", json={"filename": "moving"})
        assert answer.status_code == 400
        assert "float32 there, bfloat16 here" in answer.json()["error"]["message"]


def test_a_server_without_a_directory_saves_nothing() -> None:
    flags = {"hot": "40MiB", "dtype": "float32"}
    with (
        RunningServer(is_scripted=False, **flags).wait_ready(READY_S) as server,
        httpx.Client(base_url=server.url, timeout=READY_S) as http,
    ):
        complete(http, tokens(12, 20), "any")
        answer = http.post("/sessions/any/save", json={"filename": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "saving_disabled")
