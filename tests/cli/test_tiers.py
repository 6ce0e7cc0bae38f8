"""Tiers that fit the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldpage.cli.machine import (
    default_disk_directory,
    free_bytes_for,
    memory_bytes,
    prepare_directory,
)
from coldpage.cli.sizes import AbsoluteSize, RelativeSize
from coldpage.cli.tiers import plan_beside_gpu, plan_disk, plan_memory
from coldpage.errors import ConfigurationError
from coldpage.store import InstanceDirectory, InstanceIdentity

GIB = 1024**3


def test_small_machines_give_a_part_and_large_ones_a_bound() -> None:
    assert plan_memory(None, None, 10 * GIB) == (GIB, 2 * GIB)
    assert plan_memory(None, None, 2000 * GIB) == (4 * GIB, 32 * GIB)
    assert plan_disk(None, 10 * GIB) == GIB
    assert plan_disk(None, 2000 * GIB) == 8 * GIB


def test_what_is_asked_for_is_given() -> None:
    assert plan_memory(RelativeSize(0.5), AbsoluteSize(0), 10 * GIB) == (5 * GIB, 0)
    assert plan_memory(AbsoluteSize(GIB), RelativeSize(0.25), 8 * GIB) == (GIB, 2 * GIB)
    assert plan_disk(RelativeSize(1.0), 10 * GIB) == 10 * GIB
    assert plan_disk(AbsoluteSize(0), 10 * GIB) == 0


def test_beside_a_gpu_the_memory_is_the_host_tiers_alone() -> None:
    assert plan_beside_gpu(None, None, 10 * GIB) == (GIB, 0.8, 2 * GIB)
    assert plan_beside_gpu(RelativeSize(0.5), None, 10 * GIB) == (5 * GIB, 0.5, 2 * GIB)
    whole = RelativeSize(1.0)
    assert plan_beside_gpu(AbsoluteSize(99 * GIB), whole, 10 * GIB) == (99 * GIB, None, 10 * GIB)
    with pytest.raises(ConfigurationError, match="--hot can not be left out"):
        plan_beside_gpu(AbsoluteSize(0), None, 10 * GIB)
    with pytest.raises(ConfigurationError, match=r"--host 9\.0 GiB exceeds the 8\.0 GiB"):
        plan_beside_gpu(None, AbsoluteSize(9 * GIB), 8 * GIB)


@given(ram_bytes=st.integers(GIB, 2**45))
def test_defaults_leave_most_memory_alone(ram_bytes: int) -> None:
    hot_bytes, host_bytes = plan_memory(None, None, ram_bytes)
    assert 0 < hot_bytes <= host_bytes
    assert hot_bytes + host_bytes <= 0.3 * ram_bytes


def test_a_machine_can_not_give_what_it_has_not() -> None:
    with pytest.raises(ConfigurationError, match=r"--hot 6\.0 GiB and --host 3\.0 GiB .* 8\.0 GiB"):
        plan_memory(AbsoluteSize(6 * GIB), AbsoluteSize(3 * GIB), 8 * GIB)
    with pytest.raises(ConfigurationError, match=r"asks for 9\.0 GiB, and only 8\.0 GiB"):
        plan_disk(AbsoluteSize(9 * GIB), 8 * GIB)


def test_the_hot_tier_can_not_be_left_out() -> None:
    with pytest.raises(ConfigurationError, match="--hot can not be left out"):
        plan_memory(AbsoluteSize(0), None, 8 * GIB)


def test_the_machine_says_what_it_has() -> None:
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory_bytes() <= total_bytes


def test_the_disk_tier_lives_under_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_disk_directory() == Path("/somewhere/.cache/coldpage/disk")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_disk_directory() == Path("/cache/coldpage/disk")


def test_a_new_directory_is_its_owners_only(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    prepare_directory(path, "--disk")
    assert path.stat().st_mode & 0o777 == 0o700
    assert list(path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_directory_that_can_not_be_is_explained(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigurationError, match="--disk: can not write to"):
        prepare_directory(tmp_path / name, "--disk")


def test_what_an_earlier_run_left_counts_as_free(tmp_path: Path) -> None:
    before, size = free_bytes_for(tmp_path), 256 * 1024**2
    identity = InstanceIdentity(b"model" * 6 + b"xx", "concat/1/", "any")
    # Far more than other programs write in the meantime, on a file system of any use.
    with InstanceDirectory.open(tmp_path, "mine", identity) as instance:
        for name in ("pool-0.slots", "film.mkv"):
            with open(instance.path / name, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        # Somebody has it open: it stays.
        assert abs(before - 2 * size - free_bytes_for(tmp_path)) < size // 2
    assert abs(before - size - free_bytes_for(tmp_path)) < size // 2
    assert abs(before - size - free_bytes_for(tmp_path, "mine")) < size // 2
    assert abs(before - 2 * size - free_bytes_for(tmp_path, "other")) < size // 2


def test_a_directory_that_can_not_be_listed_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--disk: can not look into .*gone: No such file"):
        free_bytes_for(tmp_path / "gone")
