"""The commands as a user types them: each mistake is one sentence and status 2."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from coldpage.cli.commands import coldpage
from coldpage.cli.serve_command import ServeFlags, StartReport, settings_of
from coldpage.engine.messages import EngineReady, EngineSettings
from coldpage.engine.model.random_model import write_random_model
from coldpage.engine.settings import DemoOptions, Injection, VerifyOptions
from coldpage.errors import ConfigurationError, DeviceError, ModelError

REPOSITORY = Path(__file__).resolve().parents[2]
MIB = 1024**2


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m coldpage`` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-m", "coldpage", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=30
    )


def test_the_library_alone_says_what_the_command_needs() -> None:
    code = "import sys; sys.modules['click'] = None; import coldpage.cli; coldpage.cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "coldpage: the command needs click, which is not installed: "
        "install coldpage with its extra 'serve'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hot", "5x"), "unknown unit"),
        (("--hot", "0"), "--hot can not be left out"),
        (("--host", "12"), "has no unit"),
        (("--hot", "90%", "--host", "20%"), "together exceed"),
        (("--disk", "/proc/pages:1GiB"), "can not write to /proc/pages"),
        (("--disk", "/tmp:900TiB"), "are free there"),
        (("--save-dir", "/proc/saved", "--disk", "none"), "--save-dir: can not write to /proc"),
        (("no/such/model",), "there is no model at no/such/model"),
        (("~nosuchuser/x",), "~nosuchuser/x: there is no home directory"),
        (("--disk", "~nosuchuser/x:1GiB"), "~nosuchuser/x: there is no home directory"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(coldpage, ["serve", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("coldpage: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert result.stdout == ""


def test_the_whole_program_says_it_the_same_way() -> None:
    result = run("serve", "--hot", "5x")
    assert result.returncode == 2
    assert result.stderr == (
        "coldpage: '5x' has the unknown unit 'x'; use KiB, MiB, GiB, TiB or %\n"
    )


def test_the_version_is_shown() -> None:
    result = CliRunner().invoke(coldpage, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("coldpage, version 0.")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--cache-type-k", "turbo4"], "hot pages of keys as turbo4"),
        (
            ["--cache-type-v", "q8_0", "--disk-codec", "int8"],
            "codec int8 can not pack hot pages with keys as f32 and values as q8_0, which are "
            "packed already: use the codec concat, or other cache types",
        ),
        (["--host-codec", "k8v4"], "codec k8v4 can not pack the values of layer 0: heads have 16"),
    ],
)
def test_types_that_a_model_can_not_have_are_one_sentence(
    flags: list[str], sentence: str, tmp_path: Path
) -> None:
    write_random_model(tmp_path / "model")
    arguments = ["verify", str(tmp_path / "model"), "--device", "cpu", *flags]
    result = CliRunner().invoke(coldpage, arguments)
    assert result.exit_code == 2
    *stages, line = result.stderr.splitlines()
    assert stages[0] == "loading the model"
    assert line.startswith(f"coldpage: {sentence}")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--host-codec", "int5"], "there is no codec 'int5': choose one of concat, int8, fp8"),
        (["--disk-codec", "int8,one=concat"], "'one=concat' is not GROUP=NAME"),
        (["--disk-codec", "int8,1=gzip"], "'gzip' is none of them"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "demo", "verify"])
def test_a_codec_that_is_none_is_named(command: str, flags: list[str], sentence: str) -> None:
    result = CliRunner().invoke(coldpage, [command, *flags])
    assert result.exit_code == 2
    assert f"Invalid value for '{flags[0]}'" in result.stderr
    assert sentence in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--disk", "none", "--disk-codec", "turbo4"],
            "--disk-codec turbo4: there is no disk tier (--disk none): leave one of them out",
        ),
        (
            ["--host", "none", "--disk", "none", "--host-codec", "turbo4"],
            "--host-codec turbo4: there is no host tier (--host none) and no disk tier "
            "(--disk none): leave one of them out",
        ),
        (
            ["--host", "0", "--host-codec", "turbo4", "--disk-codec", "int8"],
            "--host-codec turbo4: there is no host tier (--host none): leave one of them out",
        ),
    ],
)
def test_a_codec_of_a_tier_that_is_left_out_is_refused_before_anything_is_loaded(
    flags: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coldpage.server.serve", lambda *_: pytest.fail("the engine was started"))
    result = CliRunner().invoke(coldpage, ["serve", "--port", "0", "--device", "cpu", *flags])
    assert (result.exit_code, result.stderr) == (2, f"coldpage: {sentence}\n")


def test_a_host_codec_goes_for_the_disk_where_there_is_no_host_tier(tmp_path: Path) -> None:
    flags = ServeFlags(
        device="cpu", host="none", disk=f"{tmp_path}:1MiB", host_codec="turbo4", save_dir="none"
    )
    assert settings_of(flags).host_codec == "turbo4"


def test_the_help_has_the_codecs_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coldpage.cli.codec_flags.codec_names", lambda: ("concat", "theirs"))
    result = CliRunner().invoke(coldpage, ["serve", "--help"])
    text = " ".join(result.output.split())
    assert "Codecs: concat, theirs. The built-in ones but concat hold more" in text
    assert "such as turbo4 or int8,1=concat" in text
    assert "such as --host-codec concat --disk-codec turbo4" in text


def test_calibrate_reads_a_text_and_says_where_the_result_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_random_model(tmp_path / "model")
    text = tmp_path / "text.txt"
    command = ["calibrate", str(tmp_path / "model"), "--device", "cpu", "--dtype", "float32"]
    for content, sentence in (
        (None, f"--text {text} can not be read: No such file or directory\n"),
        (b"\xff\xfe", f"--text {text} is not UTF-8 at byte 0\n"),
        (b"too short", "the text has "),
    ):
        if content is not None:
            text.write_bytes(content)
        result = CliRunner().invoke(coldpage, [*command, "--text", str(text)])
        assert result.exit_code == 2
        assert result.stderr.startswith(f"coldpage: {sentence}")
        assert result.stderr.count("\n") == 1
    text.write_text("one two three " * 300)
    result = CliRunner().invoke(coldpage, [*command, "--text", str(text)])
    assert result.exit_code == 0, result.stderr
    *_, summary, stored = result.output.splitlines()
    assert "calibrating model: 0 of " in result.output
    assert summary.startswith("model, float32: means of the keys of ")
    assert "3 layers turn keys" in summary
    path = Path(stored.removeprefix("Stored in "))
    assert path.parent == tmp_path / "coldpage" / "models"
    assert path.is_file()


@pytest.mark.parametrize("command", ["serve", "demo", "verify", "inspect", "clean", "calibrate"])
def test_help_has_an_example(command: str) -> None:
    result = CliRunner().invoke(coldpage, [command, "--help"])
    assert result.exit_code == 0
    assert f"\n    coldpage {command}\n" in result.output


def test_flags_become_the_engines_settings(tmp_path: Path) -> None:
    disk, model = tmp_path / "pages", tmp_path / "model"
    model.mkdir()
    flags = ServeFlags(
        model=str(model),
        hot="64MiB",
        host="16MiB",
        disk=f"{disk}:32MiB",
        block_tokens=32,
        dtype="float32",
        cache_type_k="q8_0",
        cache_type_v="turbo4",
        host_codec="turbo3",
        disk_codec="int8,0=concat",
        num_recent_blocks=4,
        max_batch=3,
        max_waiting=5000,
        pool_ratio="0.7, 0.3",
        instance_id="mine",
        disk_admission="second-use",
        disk_ttl=2.0,
        save_dir=str(tmp_path / "saved"),
        shutdown_budget=3.0,
    )
    settings = settings_of(flags)
    assert (settings.hot_bytes, settings.host_bytes) == (64 * MIB, 16 * MIB)
    assert (settings.disk_path, settings.disk_bytes) == (str(disk), 32 * MIB)
    assert disk.is_dir()
    assert settings.model == str(model)
    assert (settings.tokens_per_block, settings.dtype) == (32, "float32")
    assert (settings.cache_type_k, settings.cache_type_v) == ("q8_0", "turbo4")
    assert (settings.host_codec, settings.disk_codec) == ("turbo3", "int8,0=concat")
    assert settings.num_recent_blocks == 4
    assert (settings.max_batch, settings.max_waiting) == (3, 5000)
    assert settings.pool_ratio == (0.7, 0.3)
    assert (settings.instance_id, settings.shutdown_budget_s) == ("mine", 3.0)
    assert (settings.disk_admission, settings.disk_ttl_s) == ("second-use", 7200.0)
    assert settings.save_path == str(tmp_path / "saved")
    assert (tmp_path / "saved").stat().st_mode & 0o777 == 0o700


def test_without_flags_the_bundled_model_gets_all_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = settings_of(ServeFlags())
    assert settings.model is None
    assert (settings.host_codec, settings.disk_codec) == ("concat", None)
    assert settings.num_recent_blocks == 0
    assert min(settings.hot_bytes, settings.host_bytes, settings.disk_bytes) > 0
    assert settings.disk_path == str(tmp_path / "coldpage" / "disk")
    assert settings.save_path == str(tmp_path / "coldpage" / "saved")


@pytest.mark.parametrize(("hot", "fraction"), [(None, 0.8), ("90%", 0.9), ("900TiB", None)])
def test_a_gpu_holds_the_hot_tier_beside_the_machines_memory(
    monkeypatch: pytest.MonkeyPatch, hot: str | None, fraction: float | None
) -> None:
    monkeypatch.setattr("coldpage.cli.serve_command.has_gpu_driver", lambda: True)
    for device in ("auto", "cuda:3"):
        settings = settings_of(
            ServeFlags(device=device, hot=hot, host="64MiB", disk="none", save_dir="none")
        )
        assert settings.device == device
        assert settings.gpu_hot_fraction == fraction
        assert (settings.hot_bytes == 900 * 2**40) == (fraction is None)
        assert settings.host_bytes == 64 * MIB


@pytest.mark.parametrize("codecs", ["", "host int8 (0.508 of a hot page)"])
def test_the_start_says_how_cold_pages_are_packed(codecs: str) -> None:
    output = io.StringIO()
    report = StartReport(Console(file=output, width=80), EngineSettings(hot_bytes=1), "http://x")
    report.ready(EngineReady("tiny", 256, 16, "float32", (), codecs=codecs))
    assert ("Cold pages" in output.getvalue()) == bool(codecs)
    assert f"\nCold pages: {codecs}.\n" in output.getvalue() or not codecs


def test_without_a_driver_the_hot_tier_is_in_the_machines_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coldpage.cli.serve_command.has_gpu_driver", lambda: False)
    settings = settings_of(ServeFlags(hot="64MiB", disk="none", save_dir="none"))
    assert (settings.hot_bytes, settings.gpu_hot_fraction) == (64 * MIB, None)
    with pytest.raises(ConfigurationError, match="together exceed"):
        settings_of(ServeFlags(hot="900TiB", disk="none", save_dir="none"))
    with pytest.raises(DeviceError, match=r"cuda:1 can not be used: .* no NVIDIA driver"):
        settings_of(ServeFlags(device="cuda:1", disk="none", save_dir="none"))


def test_the_http_process_has_no_torch_in_it() -> None:
    program = (
        "import sys; from coldpage.cli.serve_command import ServeFlags, StartReport, settings_of;"
        "settings_of(ServeFlags(disk='none', save_dir='none')); print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, text=True, env=environment, timeout=30) == "False\n"


def test_a_model_is_given_or_made() -> None:
    result = CliRunner().invoke(coldpage, ["verify", "--random-model", str(REPOSITORY)])
    assert result.exit_code == 2
    assert result.stderr == "coldpage: give a MODEL or --random-model, not both\n"


def test_no_disk_needs_no_directory(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    settings = settings_of(ServeFlags(disk=f"{path}:0", save_dir="none"))
    assert (settings.disk_path, settings.disk_bytes) == (None, 0)
    assert settings.save_path is None
    assert not path.exists()


def test_demo_and_verify_hand_their_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # Those two run for minutes on a real model; here only the way there is looked at.
    seen: list[DemoOptions | VerifyOptions] = []

    def status_3(options: DemoOptions | VerifyOptions, console: object) -> int:
        seen.append(options)
        return 3

    def fails(options: DemoOptions | VerifyOptions, console: object) -> int:
        raise ModelError("the model can not be loaded")

    for name, place in (("demo", "demo"), ("verify", "proof.verify")):
        module = types.ModuleType(f"coldpage.engine.{place}")
        module.__dict__[f"run_{name}"] = status_3
        monkeypatch.setitem(sys.modules, module.__name__, module)
    runner = CliRunner()
    made = ["--device", "cuda:1", "--random-model"]
    flags = ["--conversations", "4", "--rounds", "2", "--tokens", "100", "--block-tokens", "8"]
    assert (
        runner.invoke(coldpage, ["demo", "--device", "cpu", "--dtype", "float32", *flags]).exit_code
        == 3
    )
    codecs = ["--host-codec", "int8", "--disk-codec", "turbo4", "--recent-blocks", "3"]
    assert (
        runner.invoke(coldpage, ["verify", "--inject", "flip", *made, *codecs, *flags]).exit_code
        == 3
    )
    common = {
        "num_conversations": 4,
        "num_rounds": 2,
        "conversation_tokens": 100,
        "tokens_per_block": 8,
    }
    assert seen == [
        DemoOptions(device="cpu", dtype="float32", **common),
        VerifyOptions(
            has_random_model=True,
            device="cuda:1",
            host_codec="int8",
            disk_codec="turbo4",
            num_recent_blocks=3,
            injection=Injection.FLIP,
            **common,
        ),
    ]
    sys.modules["coldpage.engine.proof.verify"].__dict__["run_verify"] = fails
    result = runner.invoke(coldpage, ["verify"])
    assert result.exit_code == 2
    assert result.stderr == "coldpage: the model can not be loaded\n"
