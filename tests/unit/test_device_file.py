"""The block file: what it takes, gives and refuses."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from coldpage.device.file import DIRECT_ALIGNMENT, MAX_TRANSFERS, BlockFile
from coldpage.errors import StorageError

_BLOCK = DIRECT_ALIGNMENT


def _aligned(num_bytes: int, seed: int | None = None) -> npt.NDArray[np.uint8]:
    array = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    if seed is not None:
        array[:] = np.random.default_rng(seed).integers(0, 256, size=num_bytes)
    return array


class _ShortFile(BlockFile):
    """Moves at most this many bytes in one call."""

    limit = _BLOCK + 1000
    num_calls = 0

    def _read_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        self.num_calls += 1
        return min(super()._read_some(buffers, offset), self.limit)

    def _write_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        self.num_calls += 1
        first = buffers[0][: self.limit // _BLOCK * _BLOCK if self.is_direct else self.limit]
        return super()._write_some([first], offset)


class _BufferedFile(BlockFile):
    """A file system without O_DIRECT."""

    def _open(self, extra_flags: int) -> int:
        if extra_flags & os.O_DIRECT:
            raise StorageError("no O_DIRECT here")
        return super()._open(extra_flags)


@pytest.mark.parametrize("kind", [BlockFile, _BufferedFile, _ShortFile])
def test_what_is_written_is_read(tmp_path: Path, kind: type[BlockFile]) -> None:
    file = kind(tmp_path / "pool", 64 * _BLOCK)
    data = _aligned(40 * _BLOCK, seed=1)
    file.writev(8 * _BLOCK, [data[:_BLOCK], data[_BLOCK : 7 * _BLOCK].data, data[7 * _BLOCK :]])
    file.sync()
    back = _aligned(40 * _BLOCK)
    file.readv(8 * _BLOCK, [back[: 33 * _BLOCK], back[33 * _BLOCK :]])
    np.testing.assert_array_equal(back, data)
    outside = _aligned(8 * _BLOCK, seed=2)
    file.readv(0, [outside])
    assert not outside.any()
    file.close()
    assert (tmp_path / "pool").read_bytes()[8 * _BLOCK : 48 * _BLOCK] == data.tobytes()


def test_short_transfers_go_on_where_they_stopped(tmp_path: Path) -> None:
    file = _ShortFile(tmp_path / "pool", 64 * _BLOCK)
    buffer = _aligned(8 * _BLOCK)
    file.readv(0, [buffer])
    assert file.num_calls >= 7
    file.close()


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    file = BlockFile(tmp_path / "pool", 1500 * _BLOCK)
    data = _aligned(1500 * _BLOCK, seed=3)
    file.writev(0, [data[i * _BLOCK : (i + 1) * _BLOCK] for i in range(1500)])
    back = _aligned(1500 * _BLOCK)
    file.readv(0, [back])
    np.testing.assert_array_equal(back, data)
    file.close()


def test_the_file_is_private_sized_and_allocated(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(bytes(100 * _BLOCK))
    path.chmod(0o644)
    file = BlockFile(path, 64 * _BLOCK)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == 64 * _BLOCK
    assert status.st_blocks * 512 >= 64 * _BLOCK
    file.close()
    file.close()


def test_reopening_keeps_the_bytes(tmp_path: Path) -> None:
    data = _aligned(2 * _BLOCK, seed=4)
    for _ in range(2):
        file = BlockFile(tmp_path / "pool", 4 * _BLOCK)
        back = _aligned(2 * _BLOCK)
        file.readv(0, [back])
        file.writev(0, [data])
        file.close()
    np.testing.assert_array_equal(back, data)


def test_without_o_direct_it_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        file = _BufferedFile(tmp_path / "pool", 4 * _BLOCK)
    assert not file.is_direct
    assert [r.message for r in caplog.records if "no O_DIRECT" in r.message]
    assert len(caplog.records) == 1
    file.close()


def test_the_end_of_the_file_is_an_error(tmp_path: Path) -> None:
    file = BlockFile(tmp_path / "pool", 8 * _BLOCK)
    os.truncate(tmp_path / "pool", 4 * _BLOCK)
    with pytest.raises(OSError, match="stopped at byte 16,384") as raised:
        file.readv(2 * _BLOCK, [_aligned(4 * _BLOCK)])
    assert raised.value.errno == errno.EIO
    file.close()


def test_a_file_grows_and_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    file = BlockFile(path, 4 * _BLOCK)
    data = _aligned(4 * _BLOCK, seed=5)
    file.writev(0, [data])
    file.resize(64 * _BLOCK)
    assert file.num_bytes == path.stat().st_size == 64 * _BLOCK
    assert path.stat().st_blocks * 512 >= 64 * _BLOCK
    file.writev(60 * _BLOCK, [data])
    back = _aligned(64 * _BLOCK, seed=6)
    file.readv(0, [back])
    np.testing.assert_array_equal(back[: 4 * _BLOCK], data)
    assert not back[4 * _BLOCK : 60 * _BLOCK].any()
    np.testing.assert_array_equal(back[60 * _BLOCK :], data)
    file.resize(2 * _BLOCK)
    assert file.num_bytes == path.stat().st_size == 2 * _BLOCK
    assert path.stat().st_blocks * 512 < 60 * _BLOCK
    with pytest.raises(AssertionError, match="inside the file"):
        file.readv(2 * _BLOCK, [_aligned(_BLOCK)])
    file.resize(4 * _BLOCK)
    file.readv(0, [back[: 4 * _BLOCK]])
    np.testing.assert_array_equal(back[: 2 * _BLOCK], data[: 2 * _BLOCK])
    assert not back[2 * _BLOCK : 4 * _BLOCK].any()
    file.close()


def test_growing_too_far_changes_nothing(tmp_path: Path) -> None:
    file = BlockFile(tmp_path / "pool", 4 * _BLOCK)
    data = _aligned(4 * _BLOCK, seed=5)
    file.writev(0, [data])
    with pytest.raises(StorageError, match=r"no room for .* bytes .*make the disk tier smaller"):
        file.resize(1 << 50)
    assert file.num_bytes == (tmp_path / "pool").stat().st_size == 4 * _BLOCK
    back = _aligned(4 * _BLOCK)
    file.readv(0, [back])
    np.testing.assert_array_equal(back, data)
    file.close()


def test_space_that_was_taken_in_part_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the C library takes space by writing to each block of it."""
    file = BlockFile(tmp_path / "pool", 4 * _BLOCK)

    def fallocate(fd: int, offset: int, num_bytes: int) -> None:
        os.ftruncate(fd, offset + num_bytes // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(StorageError, match="free some space"):
        file.resize(64 * _BLOCK)
    assert file.num_bytes == (tmp_path / "pool").stat().st_size == 4 * _BLOCK
    file.close()


def test_an_io_error_is_passed_on(tmp_path: Path) -> None:
    class Broken(BlockFile):
        def _read_some(self, buffers: Sequence[memoryview], offset: int) -> int:
            raise OSError(errno.EIO, "broken")

    file = Broken(tmp_path / "pool", 8 * _BLOCK)
    with pytest.raises(OSError, match="broken"):
        file.readv(0, [_aligned(_BLOCK)])
    file.close()


class _CrowdedFile(BlockFile):
    """Each call waits until as many are under way as may be, and half of them fail."""

    num_inside = most_inside = 0
    crowd = threading.Barrier(MAX_TRANSFERS)
    lock = threading.Lock()

    def _read_some(self, buffers: Sequence[memoryview], offset: int) -> int:
        with self.lock:
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
        self.crowd.wait(timeout=30)
        time.sleep(0.02)  # one too many would come in meanwhile
        with self.lock:
            self.num_inside -= 1
        if offset % (2 * _BLOCK):
            raise OSError(errno.EIO, "a planned error")
        return super()._read_some(buffers, offset)


def test_as_many_transfers_as_allowed_run_at_once_and_no_more(tmp_path: Path) -> None:
    num_reads = 4 * MAX_TRANSFERS
    file = _CrowdedFile(tmp_path / "pool", num_reads * _BLOCK)
    failed: list[int] = []

    def read(block: int) -> None:
        try:
            file.readv(block * _BLOCK, [_aligned(_BLOCK)])
        except OSError:
            failed.append(block)

    threads = [threading.Thread(target=read, args=(block,)) for block in range(num_reads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(failed) == list(range(1, num_reads, 2)), "a turn comes back after a failure too"
    assert file.most_inside == MAX_TRANSFERS
    file.close()


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="does not exist: create it or choose another path"):
        BlockFile(tmp_path / "missing" / "pool", _BLOCK)


def test_too_much_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        StorageError, match=r"has no room for .* bytes .*make the disk tier smaller"
    ):
        BlockFile(tmp_path / "pool", 1 << 50)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_path_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="is not writable"):
        BlockFile(tmp_path / "pool", _BLOCK)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path, tmp_path / "link", Path("/dev/null")):
        with pytest.raises(StorageError, match="choose another path"):
            BlockFile(path, _BLOCK)
    assert not (tmp_path / "elsewhere").exists()
