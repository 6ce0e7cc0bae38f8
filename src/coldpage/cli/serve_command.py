"""``coldpage serve``: settings from flags, and what is printed while the server starts."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.status import Status
from rich.table import Table

from coldpage.cli.codec_flags import check_codec_tiers
from coldpage.cli.failure import end_with
from coldpage.cli.machine import (
    default_disk_directory,
    default_save_directory,
    expand_user,
    free_bytes_for,
    has_gpu_driver,
    memory_bytes,
    prepare_directory,
)
from coldpage.cli.sizes import (
    AbsoluteSize,
    DiskChoice,
    format_bytes,
    parse_disk,
    parse_ratio,
    parse_size,
)
from coldpage.cli.tiers import plan_beside_gpu, plan_disk, plan_memory
from coldpage.device.opening import AUTO_DEVICE
from coldpage.engine.messages import EngineReady, EngineSettings
from coldpage.errors import DeviceError, ModelError

__all__ = ["ServeFlags", "StartReport", "check_model", "run_serve", "settings_of"]


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """The flags as given; sizes are still text, and None is a default that fits the machine."""

    model: str | None = None
    hot: str | None = None
    host: str | None = None
    disk: str | None = None
    block_tokens: int = 16
    device: str = "auto"
    dtype: str = "auto"
    cache_type_k: str = "auto"
    cache_type_v: str = "auto"
    host_codec: str = "concat"
    disk_codec: str | None = None
    num_recent_blocks: int = 0
    bind: str = "127.0.0.1"
    port: int = 8080
    max_batch: int = 8
    max_waiting: int = 64
    pool_ratio: str | None = None
    instance_id: str | None = None
    disk_admission: str = "always"
    disk_ttl: float | None = None  # hours
    save_dir: str | None = None
    shutdown_budget: float = 10.0


def check_model(model: str | None) -> str | None:
    """The model's absolute path. Raises ``ColdpageError`` when there is nothing of that name."""
    if model is None:
        return None
    path = expand_user(model)
    if not path.exists():
        raise ModelError(
            f"there is no model at {model}: give a Hugging Face directory or a .gguf file"
        )
    return str(path.absolute())


def _disk_tier(choice: DiskChoice, instance_id: str | None) -> tuple[str | None, int]:
    if choice.size == AbsoluteSize(0):
        return None, 0
    named = None if choice.path is None else expand_user(choice.path).absolute()
    path = named or default_disk_directory()
    prepare_directory(path, "--disk")
    return str(path), plan_disk(choice.size, free_bytes_for(path, instance_id))


def _save_path(flag: str | None) -> str | None:
    if flag is not None and flag.strip().lower() == "none":
        return None
    path = default_save_directory() if flag is None else expand_user(flag).absolute()
    prepare_directory(path, "--save-dir")
    return str(path)


def _may_have_gpu(device: str) -> bool:
    """Raises ``DeviceError`` where the GPU asked for can not be there. Which it is the engine finds
    out: this process is to have no torch in it.
    """
    if device == "cpu":
        return False
    has_driver = has_gpu_driver()
    if device != AUTO_DEVICE and not has_driver:
        raise DeviceError(f"{device} can not be used: this machine has no NVIDIA driver")
    return has_driver


def settings_of(flags: ServeFlags) -> EngineSettings:
    """The engine's settings; makes the directories. Raises ``ColdpageError``."""
    model = check_model(flags.model)
    hot = None if flags.hot is None else parse_size(flags.hot)
    host = None if flags.host is None else parse_size(flags.host)
    gpu_hot_fraction: float | None = None
    if _may_have_gpu(flags.device):
        hot_bytes, gpu_hot_fraction, host_bytes = plan_beside_gpu(hot, host, memory_bytes())
    else:
        hot_bytes, host_bytes = plan_memory(hot, host, memory_bytes())
    choice = DiskChoice(None, None) if flags.disk is None else parse_disk(flags.disk)
    check_codec_tiers(
        flags.host_codec,
        flags.disk_codec,
        has_host=host_bytes > 0,
        has_disk=choice.size != AbsoluteSize(0),
    )
    disk_path, disk_bytes = _disk_tier(choice, flags.instance_id)
    return EngineSettings(
        hot_bytes=hot_bytes,
        gpu_hot_fraction=gpu_hot_fraction,
        host_bytes=host_bytes,
        disk_path=disk_path,
        disk_bytes=disk_bytes,
        model=model,
        device=flags.device,
        dtype=flags.dtype,
        cache_type_k=flags.cache_type_k,
        cache_type_v=flags.cache_type_v,
        host_codec=flags.host_codec,
        disk_codec=flags.disk_codec,
        num_recent_blocks=flags.num_recent_blocks,
        tokens_per_block=flags.block_tokens,
        max_batch=flags.max_batch,
        max_waiting=flags.max_waiting,
        pool_ratio=None if flags.pool_ratio is None else parse_ratio(flags.pool_ratio),
        instance_id=flags.instance_id,
        disk_admission=flags.disk_admission,
        disk_ttl_s=None if flags.disk_ttl is None else 3600.0 * flags.disk_ttl,
        save_path=_save_path(flags.save_dir),
        shutdown_budget_s=flags.shutdown_budget,
    )


class StartReport:
    """Shows how the start goes, then what each tier holds and how to talk to the server."""

    def __init__(self, console: Console, settings: EngineSettings, url: str) -> None:
        self._console = console
        self._settings = settings
        self._url = url
        self._status: Status | None = None

    def loading(self, sentence: str) -> None:
        """A spinner in a terminal, a line elsewhere."""
        if not self._console.is_terminal:
            self._line(sentence)
        elif self._status is None:
            self._status = self._console.status(sentence)
            self._status.start()
        else:
            self._status.update(sentence)

    def close(self) -> None:
        """Ends the spinner. Idempotent."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def ready(self, ready: EngineReady) -> None:
        """The table, the address and a line to paste."""
        self.close()
        self._console.print(self._table(ready))
        if ready.codecs:
            self._line(f"Cold pages: {ready.codecs}.")
        if ready.instance_id:
            self._line(
                f"Instance {ready.instance_id}: the next start with this id goes on with it."
            )
        if self._settings.save_path is not None:
            self._line(f"Sessions are saved in {self._settings.save_path}.")
        body = {
            "model": ready.model_name,
            "messages": [{"role": "user", "content": "What is a cache?"}],
            "max_tokens": 64,
        }
        self._line(f"Serving {ready.model_name} at {self._url}/v1 (Ctrl-C stops it). Try:")
        self._line(
            f"  curl {self._url}/v1/chat/completions -H 'Content-Type: application/json'"
            f" -d {shlex.quote(json.dumps(body))}"
        )

    def _line(self, text: str) -> None:
        # A line to paste must come out as it is: no wrapping, no markup.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _table(self, ready: EngineReady) -> Table:
        is_on_gpu = ready.device != "cpu"
        places = {
            "hot": f"memory of {ready.device}" if is_on_gpu else "memory that attention reads",
            "host": "memory",
        }
        if self._settings.disk_path is not None:
            places["disk"] = self._settings.disk_path
        types = f" with {ready.cache_types}" if ready.cache_types else ""
        table = Table(
            title=f"{ready.model_name}, {ready.dtype}{types},"
            f" context {ready.context_tokens:,} tokens, {ready.tokens_per_block} tokens a block"
        )
        table.add_column("tier")
        table.add_column("size", justify="right")
        table.add_column("tokens", justify="right")
        table.add_column("place", overflow="fold")
        for tier in ready.tiers:
            size, tokens = format_bytes(tier.total_bytes), f"{tier.capacity_tokens:,}"
            table.add_row(tier.name, size, tokens, places.get(tier.name, ""))
        return table


def _url(sock: socket.socket, host: str) -> str:
    port = sock.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_serve(
    flags: ServeFlags, console: Console, engine_command: Sequence[str] | None = None
) -> None:
    """Serves until it is stopped. Raises ``ColdpageError``, or ends the command with a sentence."""
    settings = settings_of(flags)
    # Only now: the flags are checked before anything that takes time is imported.
    from coldpage.server import ENGINE_COMMAND, ServeOptions, bind, serve

    try:
        sock = bind(flags.bind, flags.port)
    except OSError as error:
        end_with(str(error.strerror))
    report = StartReport(console, settings, _url(sock, flags.bind))
    report.loading("Starting the engine process.")
    try:
        options = ServeOptions(settings)
        outcome = serve(options, report, sock, engine_command or ENGINE_COMMAND)
    finally:
        report.close()
    if outcome.exit_code != 0:
        end_with(outcome.sentence, outcome.exit_code)
