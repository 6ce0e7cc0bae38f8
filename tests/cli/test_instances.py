"""What ``inspect`` says of a disk tier's instances, and what ``clean`` removes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coldpage import (
    AttentionLayerConfig,
    BufferConfig,
    DeviceTierConfig,
    DiskTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
)
from coldpage.cli.commands import coldpage
from coldpage.testing.pattern_engine import PatternEngine
from coldpage.types import LayerId

MIB = 1 << 20
BLOCK = 4
LAYERS = (
    AttentionLayerConfig(LayerId(0), (BufferConfig("key", 4096),)),
    AttentionLayerConfig(LayerId(1), (BufferConfig("key", 4096),), 9),
)


def manager_at(path: Path, instance_id: str) -> KVCacheManager:
    tiers = DeviceTierConfig(MIB), DiskTierConfig(str(path), MIB, instance_id=instance_id)
    return KVCacheManager(KVCacheManagerConfig(BLOCK, tiers, LAYERS, 1.0, b"model" * 6 + b"xx"))


def fill(manager: KVCacheManager, num_tokens: int) -> None:
    """One conversation, all of it on disk."""
    sequence = PatternEngine(manager).create()
    assert sequence.resume()
    assert sequence.step(list(range(num_tokens)))
    sequence.cache.close()
    assert manager.flush(10.0) == 0


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """``open`` has 5 blocks of 20 tokens and is in use, ``closed`` has 3, ``empty`` nothing."""
    with manager_at(tmp_path, "closed") as manager:
        fill(manager, 14)
    manager_at(tmp_path, "empty").close()
    with manager_at(tmp_path, "open") as manager:
        fill(manager, 20)
        yield tmp_path


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(coldpage, [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def reports(place: Path) -> dict[str, dict[str, Any]]:
    return {one["instance_id"]: one for one in json.loads(run("inspect", place, "--json"))}


def states(place: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of all files, to see that nothing was touched."""
    files = (file for file in place.rglob("*") if file.is_file())
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def test_inspect_counts_what_is_there(place: Path) -> None:
    before = states(place)
    found = reports(place)
    assert states(place) == before
    assert set(found) == {"closed", "empty", "open"}
    closed, empty, opened = found["closed"], found["empty"], found["open"]
    assert (closed["num_blocks"], closed["num_tokens"]) == (3, 12)
    assert (opened["num_blocks"], opened["num_tokens"]) == (5, 20)
    assert (empty["num_blocks"], empty["num_tokens"], empty["oldest"]) == (0, 0, "")
    assert closed["model"] == (b"model" * 2).hex()[:16]
    assert closed["codec"].startswith("concat/1")
    assert closed["locked_by"] == ""
    assert opened["locked_by"].startswith(f"process {os.getpid()} (")
    assert opened["num_damaged"] == 0  # headers were read
    assert closed["num_damaged"] is None  # an index was
    assert closed["oldest"].startswith("20")
    assert closed["disk_bytes"] > 0


def test_inspect_ends_a_codec_without_parameters_where_it_ends(place: Path) -> None:
    assert reports(place)["closed"]["codec"] == "concat/1/"
    (line,) = {line for line in run("inspect", place).splitlines() if "concat" in line}
    assert line.split("|")[0].split("│")[0].strip() == "concat/1"


def test_index_and_headers_say_the_same(place: Path) -> None:
    directory = place / "paged" / "instance-closed"
    by_index = reports(place)["closed"]
    (directory / "index.bin").unlink()
    by_headers = reports(place)["closed"]
    assert by_headers["num_damaged"] == 0
    # What a window has left behind may still be there in headers.
    assert by_headers == by_index | {"num_damaged": 0, "num_pages": by_headers["num_pages"]}


def test_damaged_slots_are_counted(place: Path) -> None:
    directory = place / "paged" / "instance-closed"
    (directory / "index.bin").unlink()
    num_good = reports(place)["closed"]["num_pages"]
    for pool in directory.glob("pool-*.slots"):
        data = bytearray(pool.read_bytes())
        last = data.rindex(b"CPGS")
        data[last + 100] ^= 1
        pool.write_bytes(data)
    found = reports(place)["closed"]
    num_pools = len(list(directory.glob("pool-*.slots")))
    assert (found["num_damaged"], found["num_pages"]) == (num_pools, num_good - num_pools)


def test_the_table_is_for_people(place: Path) -> None:
    text = run("inspect", place)
    for word in ("instance", "closed", "blocks", "tokens", "open in", f"process {os.getpid()}"):
        assert word in text


def test_an_unreadable_identity_is_unknown(place: Path) -> None:
    (place / "paged" / "instance-closed" / "identity.json").write_text("{")
    found = reports(place)["closed"]
    assert (found["model"], found["num_blocks"]) == ("", 3)


def test_clean_removes_nothing_unless_told(place: Path) -> None:
    before = states(place)
    text = run("clean", place)
    assert states(place) == before
    assert text.count("would go") == 2
    assert f"instance-open: in use by process {os.getpid()}" in text
    assert "nothing was removed" in text


def test_clean_removes_what_nobody_has_open(place: Path) -> None:
    text = run("clean", place, "--yes")
    assert text.count("removed ") == 2
    assert [d.name for d in (place / "paged").iterdir()] == ["instance-open"]


def test_clean_removes_only_the_one_named(place: Path) -> None:
    run("clean", place, "--yes", "--instance-id", "empty")
    names = {directory.name for directory in (place / "paged").iterdir()}
    assert names == {"instance-open", "instance-closed"}


def test_clean_keeps_what_is_not_coldpages(place: Path) -> None:
    (place / "paged" / "instance-closed" / "photos").mkdir()
    result = CliRunner().invoke(coldpage, ["clean", str(place), "--yes"])
    assert result.exit_code == 2
    assert "photos is not of coldpage: nothing was removed" in result.stderr
    assert (place / "paged" / "instance-closed" / "identity.json").exists()


@pytest.mark.parametrize("command", ["inspect", "clean"])
def test_a_path_that_is_not_there_is_one_sentence(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(coldpage, [command, str(tmp_path / "gone")])
    assert result.exit_code == 2
    assert result.stderr == f"coldpage: there is no directory {tmp_path / 'gone'}\n"


def test_no_instances_is_no_failure(tmp_path: Path) -> None:
    assert "no instances" in run("inspect", tmp_path)
    assert json.loads(run("inspect", tmp_path, "--json")) == []
