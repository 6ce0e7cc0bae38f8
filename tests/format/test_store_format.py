"""Files of every version are read, and those of the newest are written again byte for byte."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash

from coldpage.device.file import BlockFile
from coldpage.device.io import ThreadedIo
from coldpage.device.progress import Progress
from coldpage.errors import StorageError
from coldpage.snapshot.format import HEAD_BYTES
from coldpage.store import InstanceDirectory, SlotFile, recover, slot_bytes_of
from coldpage.store.sidecar import ENTRY, SIDECAR_NAME
from coldpage.types import PageClass
from tests.format.golden_tier import (
    FILE,
    FIRST_WRITE,
    INSTANCE,
    NAMES,
    SLOTS,
    payload,
    write_tier,
)

_GOLDEN = Path(__file__).parent / "golden" / "v2"
_DOCUMENT = Path(__file__).parents[2] / "docs" / "FORMAT.md"
_FILES = ("pool-0.slots", "index.bin", "identity.json")


def _number(data: bytes, offset: int, num_bytes: int) -> int:
    return int.from_bytes(data[offset : offset + num_bytes], "little")


def test_the_newest_version_is_written_byte_for_byte(tmp_path: Path) -> None:
    write_tier(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(_FILES)
    for name in _FILES:
        assert (tmp_path / name).read_bytes() == (_GOLDEN / name).read_bytes(), name


@pytest.mark.parametrize("has_index", [True, False])
def test_files_of_this_version_are_read(tmp_path: Path, has_index: bool) -> None:
    for name in _FILES:
        if has_index or name != SIDECAR_NAME:
            shutil.copy(_GOLDEN / name, tmp_path)
    file = BlockFile(tmp_path / "pool-0.slots", 3 * slot_bytes_of(FILE))
    slots, io = SlotFile(file, 3, FILE), ThreadedIo(Progress(), 1)
    found = recover(tmp_path, [slots], INSTANCE.digest, io)
    assert found.is_from_sidecar == has_index
    assert found.num_damaged == 0
    assert found.index.entries["slot"].tolist() == list(SLOTS)
    assert found.index.entries["write_number"].tolist() == [FIRST_WRITE, FIRST_WRITE + 1]
    for row, (name, given) in enumerate(zip(found.index.names(), NAMES, strict=True)):
        assert (name.key, name.parent_key, name.ordinal) == (
            given.key,
            given.parent_key,
            given.ordinal,
        )
        assert (name.layer_group_id, name.page_class) == (given.layer_group_id, given.page_class)
        assert name.tokens.tolist() == given.tokens.tolist()
        out = np.zeros(FILE.payload_bytes, np.uint8)
        where = np.array([SLOTS[row]], np.int32)
        (job,) = slots.read_jobs(where, np.array([out.ctypes.data]), [given.key])
        assert job.run()
        assert np.array_equal(out, payload(row))
    io.close()
    slots.close()


def test_a_header_is_as_documented() -> None:
    """Read with the offsets of docs/FORMAT.md alone."""
    data = (_GOLDEN / "pool-0.slots").read_bytes()
    assert len(data) == 3 * 8192
    assert not any(data[8192:16384])
    for row, slot in enumerate(SLOTS):
        raw, name = data[8192 * slot : 8192 * (slot + 1)], NAMES[row]
        assert raw[0:4] == b"CPGS"
        assert [_number(raw, at, 4) for at in (4, 8, 12)] == [2, 4096, 4]
        assert [_number(raw, at, 8) for at in (16, 24, 32)] == [100, slot, FIRST_WRITE + row]
        assert _number(raw, 40, 8) == xxhash.xxh3_64_intdigest(raw[4096:4196])
        assert raw[48:80] == FILE.model_fingerprint
        assert raw[80:112] == name.key
        assert raw[112:144] == name.parent_key
        assert _number(raw, 144, 2) == name.layer_group_id
        assert _number(raw, 146, 2) == (1 if name.page_class is PageClass.SINK else 0)
        codec = FILE.codec.encode()
        sizes = [len(name.tokens), name.ordinal, len(codec)]
        assert [_number(raw, at, 4) for at in (148, 152, 156)] == sizes
        tokens = [_number(raw, 160 + 4 * i, 4) for i in range(4)]
        assert tokens == name.tokens.tolist() + [0] * (4 - len(name.tokens))
        assert raw[176 : 176 + len(codec)] == codec
        assert not any(raw[176 + len(codec) : 4088])
        assert _number(raw, 4088, 8) == xxhash.xxh3_64_intdigest(raw[:4088])
        assert raw[4096:4196] == payload(row).tobytes()
        assert not any(raw[4196:])


def test_the_index_is_as_documented() -> None:
    data = (_GOLDEN / "index.bin").read_bytes()
    assert [_number(data, at, 4) for at in (0, 4, 40, 44)] == [0x58444943, 1, 4, 2]
    assert data[:4] == b"CIDX"
    hasher = hashlib.sha256()
    for part in (INSTANCE.model_fingerprint, INSTANCE.codec.encode(), INSTANCE.geometry.encode()):
        hasher.update(len(part).to_bytes(8, "little") + part)
    assert data[8:40] == hasher.digest()
    assert len(data) == 48 + 2 * 104 + 2 * 4 * 4 + 8
    for row, name in enumerate(NAMES):
        entry = data[48 + 104 * row : 48 + 104 * (row + 1)]
        is_sink = int(name.page_class is PageClass.SINK)
        assert [_number(entry, at, 2) for at in (0, 2, 4, 6)] == [
            0,
            name.layer_group_id,
            is_sink,
            0,
        ]
        sizes = [len(name.tokens), name.ordinal, SLOTS[row]]
        assert [_number(entry, at, 4) for at in (8, 12, 16)] == sizes
        assert int.from_bytes(entry[20:24], "little", signed=True) == -row
        numbers = [FIRST_WRITE + row, FIRST_WRITE + 10 - row]
        assert [_number(entry, at, 8) for at in (24, 32)] == numbers
        assert (entry[40:72], entry[72:104]) == (name.key, name.parent_key)
        at = 48 + 2 * 104 + 16 * row
        tokens = [_number(data, at + 4 * i, 4) for i in range(4)]
        assert tokens == name.tokens.tolist() + [0] * (4 - len(name.tokens))
    assert _number(data, len(data) - 8, 8) == xxhash.xxh3_64_intdigest(data[:-8])


def test_the_identity_is_as_documented(tmp_path: Path) -> None:
    text = (_GOLDEN / "identity.json").read_text(encoding="utf-8")
    assert json.loads(text) == {
        "format": 2,
        "model_fingerprint": bytes(range(32)).hex(),
        "codec": "golden:3:é",
        "geometry": "1 layer of 100 bytes, f32",
        "coldpage": "0.1.0",
    }
    directory = tmp_path / "paged" / "instance-x"
    directory.mkdir(parents=True)
    (directory / "identity.json").write_text(text, encoding="utf-8")
    InstanceDirectory.open(tmp_path, "x", INSTANCE).close()
    newer = text.replace('"format": 2', '"format": 3')
    (directory / "identity.json").write_text(newer, encoding="utf-8")
    with pytest.raises(StorageError, match=r"the format \(3 there, 2 here\)"):
        InstanceDirectory.open(tmp_path, "x", INSTANCE)


def test_the_documents_tables_leave_no_byte_out() -> None:
    """Each row begins where the one before ends, as far as they are plain numbers."""
    text = _DOCUMENT.read_text(encoding="utf-8")
    tables = re.findall(r"\| offset \| bytes \| field \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", text)
    assert len(tables) == 4
    ends = []
    for table in tables:
        end = 0
        for offset, num_bytes in re.findall(r"^\| (\d+) \| (\d+) \|", table, re.MULTILINE):
            assert int(offset) == end
            end += int(num_bytes)
        ends.append(end)
    assert ends == [160, 48, ENTRY.itemsize, HEAD_BYTES]
