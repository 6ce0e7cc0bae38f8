"""``coldpage bench`` on the host, small: the table is there and the rows say what it says."""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from coldpage import KVCacheManager
from coldpage.bench import disk, resume
from coldpage.bench.arena import Arena, prepared
from coldpage.bench.page_moves import MovePath, PageMoves
from coldpage.cli.commands import coldpage
from coldpage.device.base import MemoryKind
from coldpage.device.host import HostDevice
from coldpage.device.simulated import SimulatedDevice
from tests.tidy.tree import REPOSITORY

KIB = 1024


def run(tmp_path: Path, command: str, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """What is printed, and the rows."""
    file = tmp_path / "rows.jsonl"
    flags = ["--device", "cpu", "--repeats", "2", "--json", str(file)]
    result = CliRunner().invoke(coldpage, ["bench", command, *flags, *arguments])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows
    for row in rows:
        check_row(row, command)
    return result.stdout, rows


def check_row(row: dict[str, Any], command: str) -> None:
    assert (row["benchmark"], row["device"], row["gpu"]) == (command, "host", "")
    assert row["name"] and row["config"] and row["rival"] and row["cpu"] and row["date"]
    for samples, median in (("ours_ms", "median_ms"), ("rival_ms", "rival_median_ms")):
        assert min(row[samples]) > 0.0
        assert row[median] == pytest.approx(statistics.median(row[samples]), abs=1e-5)
    ours, rival = statistics.median(row["ours_ms"]), statistics.median(row["rival_ms"])
    ratio = rival / ours if row["is_faster_better"] else ours / rival
    assert row["ratio"] == pytest.approx(ratio, abs=1e-3)


def test_migrate_measures_each_direction_of_each_page(tmp_path: Path) -> None:
    printed, rows = run(
        tmp_path, "migrate", "--bytes", "1MiB", "--segments", "4KiB,64KiB+16KiB+4KiB"
    )
    moves = [row for row in rows if row["name"] != "index upload"]
    assert [row["name"] for row in moves] == 2 * ["offload", "onboard", "both ways"]
    assert [row["notes"]["num_pages"] for row in moves] == 3 * [256] + 3 * [12]
    for row, page_bytes in zip(moves, 3 * [4 * KIB] + 3 * [84 * KIB], strict=True):
        num_bytes = row["notes"]["num_pages"] * page_bytes
        num_bytes *= 2 if row["name"] == "both ways" else 1
        gb_per_s = num_bytes / 1e6 / row["median_ms"]
        assert row["notes"]["gb_per_s"] == pytest.approx(gb_per_s, rel=0.01, abs=2e-3)
        assert len(row["ours_ms"]) == len(row["rival_ms"]) == 2
        assert row["config"].endswith(", driver")
    first = moves[0]
    line = next(line for line in printed.splitlines() if line.startswith(" 4 KiB "))
    cells = [cell.strip() for cell in line.split("│")]
    assert cells[:3] == ["4 KiB", "driver", "256"]
    assert cells[3] == f"{first['notes']['gb_per_s']:.1f}"
    assert cells[6] == f"{first['rival_median_ms'] / first['median_ms']:.2f}"
    assert [row["config"] for row in rows if row not in moves] == [
        "1,024 pairs, 8 KiB",
        "8,192 pairs, 64 KiB",
    ]


def test_migrate_takes_the_path_it_is_told(tmp_path: Path) -> None:
    flags = ("--bytes", "1MiB", "--segments", "16KiB", "--path", "kernel")
    printed, rows = run(tmp_path, "migrate", *flags)
    assert rows[0]["config"].endswith(", kernel")
    assert "kernel" in printed and "driver" not in printed


def test_moves_that_change_a_page_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    onboard = PageMoves._decode

    def shifted(self: PageMoves, hot: Any, cold: Any, stream: Any) -> None:
        onboard(self, hot, cold[::-1], stream)

    monkeypatch.setattr(PageMoves, "_decode", shifted)
    flags = ["--device", "cpu", "--bytes", "1MiB", "--segments", "4KiB"]
    result = CliRunner().invoke(coldpage, ["bench", "migrate", *flags])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "preparing memory",
        "coldpage: 64 of 64 pages of 4096 bytes came back changed",
    ]


def test_codecs_are_measured_by_hot_bytes_beside_a_copy_of_cold_ones(tmp_path: Path) -> None:
    printed, rows = run(tmp_path, "codecs", "--bytes", "4MiB", "--codecs", "concat,int8")
    assert [row["name"] for row in rows] == 2 * ["offload", "onboard"]
    assert [row["notes"]["cold_per_hot_byte"] for row in rows] == [1, 1, 0.5078, 0.5078]
    for row in rows:
        gb_per_s = (4 << 20) / 1e6 / row["median_ms"]
        assert row["notes"]["hot_gb_per_s"] == pytest.approx(gb_per_s, rel=0.01, abs=2e-2)
        limit = row["notes"]["cold_per_hot_byte"] * (4 << 20) / 1e6 / row["rival_median_ms"]
        assert row["notes"]["link_gb_per_s"] == pytest.approx(limit, rel=0.01, abs=2e-2)
    line = next(line for line in printed.splitlines() if line.startswith(" int8 "))
    assert [cell.strip() for cell in line.split("│")][1] == "0.508"


def test_a_codec_that_loses_too_much_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coldpage.bench.codecs._MAX_ERROR", 1e-3)
    flags = ["--device", "cpu", "--bytes", "4MiB", "--codecs", "int8"]
    result = CliRunner().invoke(coldpage, ["bench", "codecs", *flags])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "preparing memory",
        "coldpage: pages come back from int8 1% off what they were",
    ]


def test_what_is_measured_begins_when_memory_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(0, prepares_in_background=True)
    unprepared: list[int] = []

    def wait(timeout_s: float) -> None:
        unprepared.append(device.num_unprepared_bytes)
        device.prepare(40)

    monkeypatch.setattr(device, "wait_for_progress", wait)
    device.allocate(100, MemoryKind.PINNED)
    with prepared(device):
        device.allocate(10, MemoryKind.DEVICE)
        memory = device.allocate(100, MemoryKind.PINNED)
    assert memory.num_ready_bytes == 100
    assert unprepared == [200, 160, 120, 80, 40]
    device.allocate(10, MemoryKind.PINNED)  # nobody waits for what comes later
    device.close()


def test_a_path_follows_the_devices_advice_or_not() -> None:
    def path_of(path: MovePath, segment_bytes: int) -> MovePath:
        device = HostDevice()
        device.max_page_kernel_bytes = 512
        with contextlib.closing(device):
            moves = PageMoves(Arena(device, 4 * KIB), (segment_bytes,), path.codec(device))
            with contextlib.closing(moves):
                return moves.path

    assert path_of(MovePath.AUTO, 512) is MovePath.KERNEL
    assert path_of(MovePath.AUTO, 1024) is MovePath.DRIVER
    assert path_of(MovePath.DRIVER, 512) is MovePath.DRIVER
    assert path_of(MovePath.KERNEL, 1024) is MovePath.KERNEL


def test_manager_costs_are_beside_their_limits(tmp_path: Path) -> None:
    flags = ("--pages", "64", "--sequences", "3", "--context", "48")
    printed, rows = run(tmp_path, "manager", *flags)
    assert [row["config"] for row in rows] == [
        *(3 * ["64 pages of 1,024 bytes"]),
        "3 sequences of 48 tokens",
    ]
    for row in rows[:3]:
        assert row["notes"]["us_a_page"] == pytest.approx(1e3 * row["median_ms"] / 64, abs=1e-3)
        assert row["rival_ms"] == [64 * 5000 / 2048 / 1e3]
    us = rows[3]["notes"]["us_a_sequence"]
    assert us == pytest.approx(1e3 * rows[3]["median_ms"] / 3, abs=0.01)
    assert rows[3]["rival_ms"] == [3 * 0.02]
    (shown,) = re.findall(r"decode step: ([\d.]+) µs a sequence", printed)
    assert float(shown) == pytest.approx(us, abs=0.06)  # each of both is rounded


def test_disk_moves_pages_and_blobs_beside_plain_files(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    flags = ("--bytes", "1MiB", "--blocks", "64KiB", "--directory", str(directory))
    printed, rows = run(tmp_path, "disk", *flags)
    names = ["page writes", "page reads", "blob writes", "blob reads"]
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert row["config"] == "16 blocks of 64 KiB"
        mb_per_s = 1e3 * 16 * 64 * KIB / 1e6 / row["median_ms"]
        assert row["notes"]["mb_per_s"] == pytest.approx(mb_per_s, rel=0.01)
        assert f"{row['notes']['mb_per_s']:,.0f}" in printed
    # Both are beside the same plain writes.
    assert rows[0]["rival_ms"] == rows[2]["rival_ms"] != rows[1]["rival_ms"]
    assert list(directory.iterdir()) == []


def test_blocks_must_be_readable_past_the_page_cache(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--directory", str(tmp_path), "--blocks", "5000B"]
    result = CliRunner().invoke(coldpage, ["bench", "disk", *flags])
    assert result.exit_code == 2
    assert "use multiples of 4 KiB" in result.stderr


def test_pages_that_did_not_move_are_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "evict_all", lambda manager: None)
    flags = ["--device", "cpu", "--bytes", "128KiB", "--blocks", "64KiB"]
    command = ["bench", "disk", *flags, "--directory", str(tmp_path)]
    result = CliRunner().invoke(coldpage, command)
    assert result.exit_code == 2
    assert "of 2 pages to disk and back these moved: {}" in result.stderr


def test_resume_is_beside_the_link_and_the_prefill(tmp_path: Path) -> None:
    printed, rows = run(tmp_path, "resume", "--model", "tiny", "--tokens", "64")
    link, prefill = rows
    assert link["config"] == prefill["config"] == "tiny: 24 KiB in 4 pages"
    assert link["ours_ms"] == prefill["ours_ms"]
    assert (link["rival"], link["is_faster_better"]) == ("bytes / speed of one copy", False)
    assert (prefill["rival"], prefill["is_faster_better"]) == ("prefill of the same tokens", True)
    notes = link["notes"]
    assert (notes["num_tokens"], notes["num_bytes"]) == (64, 24 * KIB)
    assert 0.0 < notes["enqueue_ms"] < notes["call_ms"] < link["median_ms"]
    both_ms = notes["planning_ms"] + notes["copy_ms"]
    assert min(link["ours_ms"]) - 0.01 <= both_ms <= max(link["ours_ms"]) + 0.01
    per_s = prefill["notes"]["prefill_tokens_per_s"]
    assert per_s == pytest.approx(64e3 / prefill["rival_median_ms"], rel=0.01)
    shown = re.search(r"of that (\d+\.\d\d) ms until the first copy", " ".join(printed.split()))
    assert shown is not None and float(shown[1]) == pytest.approx(notes["planning_ms"], abs=0.006)


def test_resume_needs_no_model(tmp_path: Path) -> None:
    flags = ("--model", "smollm2", "--tokens", "32", "--no-prefill")
    _, rows = run(tmp_path, "resume", *flags)
    assert [row["config"] for row in rows] == ["SmolLM2-135M: 720 KiB in 2 pages"]


def test_a_session_that_comes_back_changed_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evict = resume.evict_all

    def damage(manager: KVCacheManager) -> None:
        evict(manager)
        # Below any checksum: what host memory holds is trusted.
        manager._storage.levels[1].groups[0].memory[0].view(0, 64)[:] ^= 1

    monkeypatch.setattr(resume, "evict_all", damage)
    flags = ["--device", "cpu", "--model", "tiny", "--tokens", "32", "--repeats", "1"]
    result = CliRunner().invoke(coldpage, ["bench", "resume", *flags])
    assert result.exit_code == 2
    assert "the resumed session gives other logits than before it left" in result.stderr


def test_attention_is_beside_contiguous_memory_and_copies(tmp_path: Path) -> None:
    flags = ("--types", "bf16,q8_0/turbo4", "--bytes", "64MiB")
    printed, rows = run(tmp_path, "attention", *flags)
    assert [row["name"] for row in rows] == [
        *(5 * ["decode"]),
        *(4 * ["prefill"]),
        *(2 * ["gather", "write, decoding", "write, prefill"]),
    ]
    first, packed = rows[:2]
    heads = "4 x 512 tokens, 32 / 8 heads of 128"
    assert [row["config"] for row in rows[:2]] == [f"{heads}, bf16", f"{heads}, q8_0 / turbo4"]
    # 2 bytes a number of K and of V; 34 bytes for 32 of K, and 66 for 128 of V.
    for row, token_bytes in ((first, 8 * 2 * 256), (packed, 8 * (136 + 66))):
        gb_per_s = 4 * 512 * token_bytes / 1e6 / row["median_ms"]
        assert row["notes"]["gb_per_s"] == pytest.approx(gb_per_s, rel=0.01, abs=0.06)
        times = first["median_ms"] / row["median_ms"]
        assert row["notes"]["times_bf16"] == pytest.approx(times, abs=2e-3)
    assert all("times_bf16" in row["notes"] for row in rows[:5])
    chunk = rows[5]
    assert chunk["ours_ms"] == rows[6]["ours_ms"] and chunk["rival"] != rows[6]["rival"]
    num_pairs = 64 * 448 + 64 * 65 // 2
    tflop_per_s = 4 * 32 * 128 * num_pairs / 1e9 / chunk["median_ms"]
    assert chunk["notes"]["tflop_per_s"] == pytest.approx(tflop_per_s, abs=0.006)
    written = rows[10]
    assert written["config"].startswith("64 tokens, ")
    gb_per_s = 64 * 8 * 2 * 2 * 256 / 1e6 / written["median_ms"]  # read and written
    assert written["notes"]["gb_per_s"] == pytest.approx(gb_per_s, rel=0.01, abs=0.06)
    line = next(line for line in printed.splitlines() if line.startswith(f" {heads}, q8_0"))
    cells = [cell.strip() for cell in line.split("│")]
    assert cells[2] == f"{packed['notes']['us']:,.1f}"
    assert cells[4] == f"{packed['notes']['times_bf16']:.2f}"
    assert cells[7] == f"{packed['rival_median_ms'] / packed['median_ms']:.2f}"


def test_attention_measures_the_part_that_was_named(tmp_path: Path) -> None:
    flags = ("--types", "bf16", "--only", "moves", "--bytes", "16MiB")
    _, rows = run(tmp_path, "attention", *flags)
    assert [row["name"] for row in rows] == ["gather", "write, decoding", "write, prefill"]


@pytest.mark.parametrize("part", ["decode", "prefill"])
def test_attention_of_other_numbers_is_no_result(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coldpage.bench.attention import decode, prefill
    from coldpage.bench.attention.layers import read_pages

    def shifted(pages: Any, slots: Any, out: Any) -> None:
        read_pages(pages, slots * 0, out)

    monkeypatch.setattr({"decode": decode, "prefill": prefill}[part], "read_pages", shifted)
    flags = ["--device", "cpu", "--repeats", "1", "--types", "bf16", "--only", part]
    result = CliRunner().invoke(coldpage, ["bench", "attention", *flags])
    assert result.exit_code == 2
    stage, sentence = result.stderr.splitlines()
    assert stage.startswith(f"{part}: ")
    assert "in bf16 is off by " in sentence


def test_decode_steps_are_beside_what_they_read(tmp_path: Path) -> None:
    flags = ("--model", "tiny", "--tokens", "64", "--batches", "1,3")
    printed, rows = run(tmp_path, "decode", *flags)
    assert [row["config"] for row in rows] == [
        f"tiny, {batch} x 64 tokens, K bf16, V bf16" for batch in (1, 3)
    ]
    assert {row["name"] for row in rows} == {"decode step, no graph"}
    # A layer's projections, its MLP and its norms; the last norm and the output embeddings.
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 2 * 64
    num_weights = 3 * layer + 64 + 320 * 64
    for row, batch in zip(rows, (1, 3), strict=True):
        notes = row["notes"]
        assert notes["read_bytes"] == 2 * num_weights + batch * 63.5 * 384
        limit_ms = notes["read_bytes"] / 1e6 / notes["copy_gb_per_s"]
        assert row["rival_median_ms"] == pytest.approx(limit_ms, rel=0.002)
        way = row["rival"].removeprefix("reading weights and cache at the speed of ")
        assert way in ("one copy", "8 copies", "a kernel")
        assert f"({way});" in " ".join(printed.split())
        assert notes["tokens_per_s"] == pytest.approx(1e3 * batch / row["median_ms"], rel=0.01)
        assert "host_ms" not in notes  # there the host computes too
    line = next(line for line in printed.splitlines() if line.startswith(" 3 x 64 tokens"))
    cells = [cell.strip() for cell in line.split("│")]
    assert cells[3] == f"{rows[1]['notes']['tokens_per_s']:,.0f}"
    assert cells[5] == f"{rows[1]['notes']['read_bytes'] / KIB:.4g} KiB"


def test_decode_takes_packed_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coldpage.bench import decode

    timed = SimpleNamespace(ms=lambda: 10.0)
    monkeypatch.setattr(decode, "_copy", lambda place: SimpleNamespace(name="it", timed=timed))
    flags = ("--model", "smollm2", "--tokens", "16", "--batches", "1", "--cache-type-v", "q8_0")
    _, (row,) = run(tmp_path, "decode", *flags)
    assert row["config"] == "SmolLM2-135M, 1 x 16 tokens, K bf16, V q8_0"
    # The copy of 64 MiB reads as much as it writes.
    assert row["rival_ms"] == 2 * [pytest.approx(row["notes"]["read_bytes"] / (128 << 20) * 10.0)]


def test_the_limit_of_decode_steps_is_the_fastest_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from coldpage.bench import decode

    ways = {"slow": lambda: time.sleep(0.02), "quick": lambda: time.sleep(0.001), "no": raise_error}
    monkeypatch.setattr(decode, "_copies", lambda source, target: ways)
    name, timed = decode._copy(torch.device("cpu"))
    assert name == "quick"
    assert 1.0 <= timed.ms() < 20.0


def raise_error() -> None:
    raise RuntimeError("not on this device")


def test_each_copy_of_the_limit_reads_and_writes_all() -> None:
    import torch

    from coldpage.bench import decode

    source = torch.randint(256, (4096,), dtype=torch.uint8)
    target = torch.empty_like(source)
    ways = decode._copies(source, target)
    assert list(ways) == ["one copy", "8 copies", "a kernel"]
    for name, copy in ways.items():
        target.copy_(source ^ 85)
        copy()
        expected = ~source if name == "a kernel" else source
        assert torch.equal(target, expected), name


def test_decode_steps_without_numbers_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from coldpage.bench import decode

    monkeypatch.setattr(decode, "fill_pages", lambda pages: pages.values.fill_(float("nan")))
    flags = ["--device", "cpu", "--model", "tiny", "--tokens", "32", "--batches", "1"]
    result = CliRunner().invoke(coldpage, ["bench", "decode", *flags])
    assert result.exit_code == 2
    assert "a decoding step gives logits that are no numbers" in result.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--tokens", "5000"), "5,000 tokens a sequence: the model takes 4,096 at most"),
        (("--batches", "1,257"), "257 sequences: a step takes 256 at most"),
        (("--batches", "1,0"), "'1,0': write numbers of sequences, such as 1,16,64"),
        (("--cache-type-k", "turbo4"), "are not supported for heads of 16 numbers"),
    ],
)
def test_decode_that_can_not_be_measured_is_one_sentence(
    flags: tuple[str, ...], sentence: str
) -> None:
    command = ["bench", "decode", "--device", "cpu", "--model", "tiny", *flags]
    result = CliRunner().invoke(coldpage, command)
    assert result.exit_code == 2
    assert sentence in result.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--types", "q5"), "'q5' is no cache type: use auto, f32, f16, bf16, q8_0, turbo4"),
        (("--bytes", "8MiB"), "need 16,777,216 bytes of memory and have 8,388,608: give more"),
    ],
)
def test_attention_that_can_not_be_measured_is_one_sentence(
    flags: tuple[str, ...], sentence: str
) -> None:
    command = ["bench", "attention", "--device", "cpu", "--repeats", "1", *flags]
    result = CliRunner().invoke(coldpage, command)
    assert result.exit_code == 2
    assert sentence in result.stderr.splitlines()[-1]
    assert result.stderr.count("coldpage: ") == 1


def test_what_a_benchmark_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coldpage.bench.attention", None)
    result = CliRunner().invoke(coldpage, ["bench", "attention", "--device", "cpu"])
    assert result.exit_code == 2
    assert "bench attention needs torch, triton and transformers" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--segments", "4KiB,x"), "'x' is not a size; write for example 512MiB, 8GiB or 25%"),
        (("--bytes", "50%"), "--bytes 50%: write a number of bytes, such as 64KiB"),
        (
            ("--bytes", "64KiB", "--segments", "32KiB+64KiB"),
            "a page of 96 KiB does not fit 64 KiB: move more bytes",
        ),
        (("--bytes", "8KiB", "--segments", "4KiB", "--json", "/proc/rows"), "can not write to"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    command = ["bench", "migrate", "--device", "cpu", "--repeats", "1", *arguments]
    result = CliRunner().invoke(coldpage, command)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_such_device_is_said_before_anything_runs() -> None:
    result = CliRunner().invoke(coldpage, ["bench", "migrate", "--device", "tpu"])
    assert result.exit_code == 2
    assert "'tpu' is no device: write auto, cpu, cuda or cuda:N" in result.stderr


@pytest.mark.parametrize("command", ["migrate", "disk", "resume", "manager", "attention", "decode"])
def test_help_has_an_example(command: str) -> None:
    result = CliRunner().invoke(coldpage, ["bench", command, "--help"])
    assert result.exit_code == 0
    assert f"\n    coldpage bench {command}\n" in result.output


def test_the_command_line_starts_with_little_installed(tmp_path: Path) -> None:
    # A machine with a GPU to be measured need not have what a server needs.
    code = (
        "import sys\n"
        "absent = 'msgspec fastapi pydantic uvicorn gguf accelerate jinja2 torch transformers'\n"
        "sys.modules.update(dict.fromkeys(absent.split()))\n"
        "from coldpage.cli.commands import coldpage\n"
        "flags = '--device cpu --repeats 1'.split()\n"
        "coldpage(['bench', 'manager', *flags, '--pages', '8', '--sequences', '1'],\n"
        "         standalone_mode=False)\n"
        "coldpage(['bench', 'disk', *flags, '--bytes', '64KiB', '--blocks', '64KiB',\n"
        f"          '--directory', {str(tmp_path)!r}], standalone_mode=False)\n"
        "coldpage(['bench', 'resume', *flags, '--model', 'tiny', '--tokens', '16',\n"
        "          '--no-prefill'], standalone_mode=False)\n"
        "coldpage(['bench', 'migrate', *flags, '--bytes', '64KiB', '--segments', '4KiB'],\n"
        "         standalone_mode=False)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PYTHONPATH": str(REPOSITORY / "src")},
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
def test_migrate_on_a_gpu_measures_both_paths_and_decoding(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    flags = ["--device", "cuda", "--repeats", "1", "--json", str(file)]
    flags += ["--bytes", "64MiB", "--segments", "4KiB,4MiB"]
    result = CliRunner().invoke(coldpage, ["bench", "migrate", *flags])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["device"] for row in rows} == {"cuda:0"}
    paths = [row["config"].rpartition(", ")[2] for row in rows[:6]]
    assert paths == 3 * ["kernel"] + 3 * ["driver"]
    beside = [row for row in rows if row["name"] == "decode beside moves"]
    assert len(beside) == 6
    assert all(row["notes"]["moved_gb_per_s"] > 0.0 for row in beside)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("command", "flags", "num_rows"),
    [
        ("disk", ("--bytes", "16MiB", "--blocks", "64KiB,2MiB"), 8),
        ("resume", ("--model", "tiny", "--tokens", "2048"), 2),
        ("manager", ("--pages", "64", "--sequences", "4", "--context", "64"), 4),
        ("attention", ("--types", "bf16,turbo4", "--bytes", "6GiB"), 21),
        ("decode", ("--model", "tiny", "--tokens", "64", "--batches", "1,3"), 4),
    ],
)
def test_the_others_on_a_gpu(
    tmp_path: Path, command: str, flags: tuple[str, ...], num_rows: int
) -> None:
    file = tmp_path / "rows.jsonl"
    where = ("--directory", str(tmp_path)) if command == "disk" else ()
    common = ("--device", "cuda", "--repeats", "1", "--json", str(file))
    result = CliRunner().invoke(coldpage, ["bench", command, *common, *flags, *where])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == num_rows
    assert all(min(*row["ours_ms"], *row["rival_ms"]) > 0.0 for row in rows)
