"""Instances of one path: each for one process, and for one identity."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from coldpage.errors import ConfigurationError, StorageError
from coldpage.store import (
    InstanceDirectory,
    InstanceIdentity,
    default_instance_id,
    list_instances,
)
from coldpage.store.instance import IDENTITY_NAME, LOCK_NAME

_IDENTITY = InstanceIdentity(b"\x01" * 32, "raw:1:", "2 layers, f32")
_OTHERS = [
    dataclasses.replace(_IDENTITY, model_fingerprint=b"\x02" * 32),
    dataclasses.replace(_IDENTITY, codec="int8:1:"),
    dataclasses.replace(_IDENTITY, geometry="2 layers, bf16"),
]
_HOLD = """
import sys
from coldpage.store import InstanceDirectory, InstanceIdentity
identity = InstanceIdentity(b"\\x01" * 32, "raw:1:", "2 layers, f32")
held = InstanceDirectory.open(sys.argv[1], "a", identity)
print("open", flush=True)
sys.stdin.read()
"""


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_instance_has_a_private_directory_of_its_own(tmp_path: Path) -> None:
    with (
        InstanceDirectory.open(tmp_path / "new", "a", _IDENTITY) as first,
        InstanceDirectory.open(tmp_path / "new", "b", _IDENTITY) as second,
    ):
        assert first.path == tmp_path / "new/paged/instance-a"
        assert second.path == tmp_path / "new/paged/instance-b"
        for directory in (first.path.parent.parent, first.path.parent, first.path):
            assert _mode(directory) == 0o700
        assert {p.name: _mode(p) for p in first.path.iterdir()} == {
            LOCK_NAME: 0o600,
            IDENTITY_NAME: 0o600,
        }
        holder = json.loads((first.path / LOCK_NAME).read_text())
        assert holder["pid"] == os.getpid()
        assert set(holder) == {"pid", "started", "command"}


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/opt/venv/bin/coldpage", "serve", "--port", "0"], "coldpage serve --port 0"),
        (["/opt/engine.py", "serve", f'{{"save path": "{70 * "x"}"}}', "7"], "engine.py serve …"),
        ([""], "python"),
    ],
)
def test_a_holder_says_its_program_and_no_half_arguments(
    arguments: list[str], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with InstanceDirectory.open(tmp_path, "a", _IDENTITY):
        (info,) = list_instances(tmp_path)
    assert info.holder is not None
    assert info.holder.command == command


def test_a_holder_that_is_a_module_says_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec("coldpage.__main__", None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/lib/coldpage/__main__.py", "verify"])
    with InstanceDirectory.open(tmp_path, "a", _IDENTITY):
        (info,) = list_instances(tmp_path)
    assert info.holder is not None
    assert info.holder.command == "coldpage verify"


def test_a_second_opener_is_told_who_is_there(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    source = str(Path(__file__).parents[2] / "src")
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == "open\n"
        with pytest.raises(StorageError, match=f"in use by process {child.pid} .*started at 20"):
            InstanceDirectory.open(tmp_path, "a", _IDENTITY)
        (info,) = list_instances(tmp_path)
        assert info.is_locked
        assert info.holder is not None
        assert info.holder.pid == child.pid
        InstanceDirectory.open(tmp_path, "b", _IDENTITY).close()
        child.kill()  # what it held is free, with nobody to clean up
        child.wait()
    InstanceDirectory.open(tmp_path, "a", _IDENTITY).close()


def test_a_closed_instance_opens_again(tmp_path: Path) -> None:
    for _ in range(3):
        instance = InstanceDirectory.open(tmp_path, "a", _IDENTITY)
        with pytest.raises(StorageError, match="in use"):
            InstanceDirectory.open(tmp_path, "a", _IDENTITY)
        instance.close()
        instance.close()
    (info,) = list_instances(tmp_path)
    assert (info.instance_id, info.is_locked, info.holder) == ("a", False, None)
    assert info.identity is not None
    assert info.identity["codec"] == "raw:1:"


@pytest.mark.parametrize("other", _OTHERS)
def test_another_identity_is_refused_and_nothing_is_touched(
    tmp_path: Path, other: InstanceIdentity
) -> None:
    InstanceDirectory.open(tmp_path, "a", _IDENTITY).close()
    directory = tmp_path / "paged/instance-a"
    (directory / "pool-0.slots").write_bytes(b"precious")
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in directory.iterdir()}
    with pytest.raises(StorageError, match=r"differ\. Nothing was touched"):
        InstanceDirectory.open(tmp_path, "a", other)
    after = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in directory.iterdir()}
    assert after == before
    InstanceDirectory.open(tmp_path, "a", _IDENTITY).close()  # and the lock was given back


def test_the_refusal_says_what_differs(tmp_path: Path) -> None:
    InstanceDirectory.open(tmp_path, "a", _IDENTITY).close()
    expected = r"the geometry \('2 layers, f32' there, '2 layers, bf16' here\)"
    with pytest.raises(StorageError, match=expected) as raised:
        InstanceDirectory.open(tmp_path, "a", _OTHERS[2])
    assert "the codec" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 5000, "\xff"])
def test_a_damaged_identity_is_refused(tmp_path: Path, text: str) -> None:
    InstanceDirectory.open(tmp_path, "a", _IDENTITY).close()
    (tmp_path / "paged/instance-a" / IDENTITY_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(StorageError, match="damaged"):
        InstanceDirectory.open(tmp_path, "a", _IDENTITY)
    (info,) = list_instances(tmp_path)
    assert info.identity is None


@pytest.mark.parametrize(
    "instance_id", ["", "a/b", "..", "../x", "a b", "x" * 65, "a\n", "\0", "é"]
)
def test_an_id_stays_inside_the_path(tmp_path: Path, instance_id: str) -> None:
    root = tmp_path / "root"
    if instance_id == "..":  # harmless behind the prefix
        InstanceDirectory.open(root, instance_id, _IDENTITY).close()
        assert [p.name for p in (root / "paged").iterdir()] == ["instance-.."]
        return
    with pytest.raises(ConfigurationError, match="instance id"):
        InstanceDirectory.open(root, instance_id, _IDENTITY)
    assert list(tmp_path.iterdir()) == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "root/paged").mkdir(parents=True)
    (tmp_path / "root/paged/instance-a").symlink_to(elsewhere)
    with pytest.raises(StorageError, match="symbolic link"):
        InstanceDirectory.open(tmp_path / "root", "a", _IDENTITY)
    InstanceDirectory.open(tmp_path / "root", "b", _IDENTITY).close()
    lock = tmp_path / "root/paged/instance-b" / LOCK_NAME
    lock.unlink()
    lock.symlink_to(elsewhere / "victim")
    with pytest.raises(StorageError, match="can not be opened"):
        InstanceDirectory.open(tmp_path / "root", "b", _IDENTITY)
    assert list(elsewhere.iterdir()) == []
    assert [info.instance_id for info in list_instances(tmp_path / "root")] == ["b"]


def test_a_lock_on_a_removed_directory_is_worth_nothing(tmp_path: Path) -> None:
    """Who cleans up holds the lock while removing; the next opener makes it all new."""
    instance = InstanceDirectory.open(tmp_path, "a", _IDENTITY)
    shutil.rmtree(instance.path)
    again = InstanceDirectory.open(tmp_path, "a", _IDENTITY)
    assert (again.path / LOCK_NAME).exists()
    again.close()
    instance.close()


def test_the_default_id_follows_from_model_codec_and_types() -> None:
    ids = {default_instance_id(identity) for identity in (_IDENTITY, *_OTHERS)}
    assert len(ids) == 4
    assert default_instance_id(dataclasses.replace(_IDENTITY)) in ids
    shifted = InstanceIdentity(_IDENTITY.model_fingerprint, "raw:1:2", " layers, f32")
    assert default_instance_id(shifted) not in ids


def test_a_path_without_instances_has_none(tmp_path: Path) -> None:
    assert list_instances(tmp_path / "nothing") == []


@pytest.mark.parametrize("place", ["tier", "tier/paged", "tier/paged/instance-a"])
def test_a_file_in_the_place_of_a_directory_is_named(place: str, tmp_path: Path) -> None:
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    with pytest.raises(StorageError) as raised:
        InstanceDirectory.open(tmp_path / "tier", "a", _IDENTITY)
    assert str(raised.value) == (
        f"{file} is a file, and a directory is needed there: choose another path, or move the "
        "file away"
    )


def test_a_directory_is_known_by_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with InstanceDirectory.open("tier", "a", _IDENTITY) as held:
        assert held.path == tmp_path / "tier" / "paged" / "instance-a"
