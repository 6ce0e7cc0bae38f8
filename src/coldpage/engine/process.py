"""The engine process: ``python -m coldpage.engine.process --socket PATH --settings JSON``.

The main thread loads the model, owns the manager and runs the loop. Exit status: 0 after a clean
stop (``Shutdown``, SIGTERM, or the HTTP process has gone), 1 after a failure while serving, 2 when
the engine could not start, which a ``StartFailed`` explains in one sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

import msgspec

from coldpage.config import (
    CacheTierConfig,
    DeviceTierConfig,
    DiskAdmission,
    DiskTierConfig,
    HostTierConfig,
)
from coldpage.engine.admission import EngineLimits
from coldpage.engine.assembly import build_manager, served_model, with_hot_types
from coldpage.engine.forward.runner import ModelRunner
from coldpage.engine.intake import Intake
from coldpage.engine.loop import EngineLoop
from coldpage.engine.messages import (
    EngineFailed,
    EngineReady,
    EngineSettings,
    Loading,
    StartFailed,
)
from coldpage.engine.model.cold_codecs import ColdCodecs, make_cold_codecs
from coldpage.engine.model.model import LoadedModel, load_model
from coldpage.engine.model.placement import (
    choose_device,
    choose_dtype,
    free_gpu_bytes,
    page_device,
)
from coldpage.engine.scheduler import Scheduler
from coldpage.engine.session_control import SessionControl
from coldpage.engine.telemetry import tier_stats
from coldpage.engine.text import IncrementalText, tokenizer_fingerprint
from coldpage.engine.transport import EngineChannel
from coldpage.errors import ColdpageError, ConfigurationError, DeviceError
from coldpage.manager import KVCacheManager
from coldpage.snapshot import Origin

__all__ = ["cache_tiers", "main"]

_EXIT_FAILED: Final = 1
_EXIT_NOT_STARTED: Final = 2
_PROGRESS_PERIOD_S: Final = 0.2
# A graph takes about a second to make: those of larger batches are made when they are needed.
_MAX_PREPARED_ROWS: Final = 32

_LOG = logging.getLogger(__name__)


def cache_tiers(settings: EngineSettings, codecs: ColdCodecs) -> tuple[CacheTierConfig, ...]:
    """The tiers that the settings ask for, with these codecs. Raises ConfigurationError."""
    tiers: list[CacheTierConfig] = [DeviceTierConfig(settings.hot_bytes)]
    if settings.host_bytes:
        tiers.append(HostTierConfig(settings.host_bytes, codecs.host))
    if settings.disk_bytes:
        if settings.disk_path is None:
            raise ConfigurationError("the disk tier has a size and no path: give it a directory")
        tiers.append(
            DiskTierConfig(
                settings.disk_path,
                settings.disk_bytes,
                codecs.disk,
                instance_id=settings.instance_id,
                write_behind=True,
                time_to_live_s=settings.disk_ttl_s,
                admission=DiskAdmission(settings.disk_admission),
            )
        )
    return tuple(tiers)


class _Terminated(BaseException):
    """The start is given up. Not a SystemExit, which may be a codec's own doing."""


class _Termination:
    """What SIGTERM does: unwinds the start, or stops the loop between two steps."""

    def __init__(self) -> None:
        self.loop: EngineLoop | None = None

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        if self.loop is None:
            raise _Terminated
        self.loop.request_stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an engine process to its end; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m coldpage.engine.process")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--settings", required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    termination = _Termination()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, termination)
    try:
        with EngineChannel.connect(options.socket) as channel:
            try:
                settings = msgspec.json.decode(options.settings, type=EngineSettings)
                _start_and_serve(settings, channel, termination)
            except _FailedError:
                return _EXIT_FAILED
            except _NotStarted as failure:
                channel.send(StartFailed(str(failure)))
                return _EXIT_NOT_STARTED
    except _Terminated:
        return 0
    return 0


class _NotStarted(Exception):
    """The engine can not start; the text is for people."""


class _FailedError(Exception):
    """The engine could not go on, which has been logged and said."""


def _start_and_serve(
    settings: EngineSettings, channel: EngineChannel, termination: _Termination
) -> None:
    def progress(sentence: str) -> None:
        if channel.peer_gone:  # nobody waits for this engine any more
            raise _Terminated
        channel.send(Loading(sentence))

    with contextlib.ExitStack() as stack:
        try:
            model, manager, codecs = _build(settings, progress, stack)
        except Exception as error:
            if not isinstance(error, ColdpageError):
                _LOG.exception("the engine can not start")
            raise _NotStarted(_sentence(error)) from error
        try:
            scheduler = _scheduler(settings, model, manager, progress)
            control = SessionControl(
                scheduler,
                manager,
                save_path=settings.save_path,
                origin=Origin(tokenizer_fingerprint(model.tokenizer), model.form),
            )
        except ColdpageError as error:
            raise _NotStarted(_sentence(error)) from error
        loop = EngineLoop(scheduler, manager, channel.send, control)
        _serve(channel, model, manager, loop, termination, codecs)
        scheduler.close()
        _flush(manager, settings.shutdown_budget_s)


def _build(
    settings: EngineSettings, progress: Callable[[str], None], stack: contextlib.ExitStack
) -> tuple[LoadedModel, KVCacheManager, str]:
    """The model, a manager that ``stack`` closes, with the device that holds its pages, and how
    its cold pages are packed."""
    device = choose_device(settings.device)
    model = load_model(settings.model, choose_dtype(settings.dtype, device), progress, device)
    model = with_hot_types(
        model, settings.cache_type_k, settings.cache_type_v, settings.tokens_per_block
    )
    codecs = make_cold_codecs(
        model, settings.tokens_per_block, settings.host_codec, settings.disk_codec, progress
    )
    # On a GPU they are compiled at their first page, and where nothing is packed there are none.
    compiles = device.type == "cpu" and codecs.are_compiled
    progress(
        "making room for the cache"
        + (" and compiling codecs, which takes up to a minute the first time" if compiles else "")
    )
    if device.type == "cuda" and settings.gpu_hot_fraction is not None:
        hot_bytes = int(settings.gpu_hot_fraction * free_gpu_bytes(device))
        settings = msgspec.structs.replace(settings, hot_bytes=hot_bytes)
    tiers = cache_tiers(settings, codecs)
    manager = build_manager(
        model,
        tiers,
        settings.tokens_per_block,
        device=stack.enter_context(page_device(device)),
        pool_ratio=settings.pool_ratio,
        on_progress=_SlotProgress(progress),
        num_recent_blocks=settings.num_recent_blocks,
    )
    described = codecs.describe(
        has_host=settings.host_bytes > 0,
        has_disk=settings.disk_bytes > 0,
        num_recent_blocks=settings.num_recent_blocks,
    )
    return model, stack.enter_context(manager), described


def _scheduler(
    settings: EngineSettings,
    model: LoadedModel,
    manager: KVCacheManager,
    progress: Callable[[str], None],
) -> Scheduler:
    limits = EngineLimits(
        max_batch=settings.max_batch,
        # Those that will fill the batch pass through the queue too.
        max_waiting=settings.max_batch + settings.max_waiting,
    )
    limits.check(manager.tokens_per_block)
    served = served_model(
        model,
        manager,
        lambda stop, prompt: IncrementalText(model.tokenizer, stop, prompt.tolist()),
    )
    runner = ModelRunner(model, manager, max_decode_rows=settings.max_batch)
    runner.prepare(
        min(settings.max_batch, _MAX_PREPARED_ROWS),
        lambda size: progress(f"making the CUDA graph of a batch of {size}"),
    )
    return Scheduler(runner, manager, served, limits)


def _serve(
    channel: EngineChannel,
    model: LoadedModel,
    manager: KVCacheManager,
    loop: EngineLoop,
    termination: _Termination,
    codecs: str,
) -> None:
    """Raises _FailedError."""
    termination.loop = loop
    channel.send(
        EngineReady(
            model_name=model.name,
            context_tokens=model.context_tokens,
            tokens_per_block=manager.tokens_per_block,
            dtype=str(model.dtype).removeprefix("torch."),
            tiers=tier_stats(manager),
            instance_id=", ".join(manager.instance_ids),
            device=str(model.model.device),
            cache_types="" if model.hot_types.is_plain(model.dtype) else str(model.hot_types),
            codecs=codecs,
        )
    )
    intake = Intake(channel, model, loop.commands)
    try:
        loop.run()
    except Exception as error:
        _LOG.error("the engine stops: %s", _cause_of(error), exc_info=_root(error))
        channel.send(EngineFailed(_cause_of(error)))
        intake.close()
        # Before the manager is closed, which may wait for a slow disk: clients wait for this.
        loop.fail_open_requests(500, "engine_error", f"The engine failed ({type(error).__name__}).")
        channel.close()
        raise _FailedError from error
    finally:
        intake.close()


class _SlotProgress:
    """Tells people about slots that are looked at, not too often."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._next_s = 0.0

    def __call__(self, num_done: int, num_slots: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s or num_done == num_slots:
            self._next_s = now_s + _PROGRESS_PERIOD_S
            self._progress(f"finding what the disk tier holds: {num_done:,} of {num_slots:,} slots")


def _flush(manager: KVCacheManager, budget_s: float) -> None:
    """Have the next start find what is cached, as far as the time allows."""
    if not manager.instance_ids:
        return
    started_s = time.monotonic()
    num_left = manager.flush(budget_s)
    took_s = time.monotonic() - started_s
    if num_left:
        _LOG.warning(
            "%d cached pages were not written to disk within %.1f s: they are computed again when "
            "they are needed",
            num_left,
            took_s,
        )
    else:
        _LOG.info("everything cached is on disk (%.1f s)", took_s)


def _root(error: BaseException) -> BaseException:
    """Of work that failed on a device what it raised: who noticed that tells nothing."""
    while isinstance(error, DeviceError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _cause_of(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, ColdpageError) else f"{type(error).__name__}: {text}"


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ColdpageError):
        return text
    return f"The engine can not start ({type(error).__name__}): {text or 'no details'}"


if __name__ == "__main__":
    sys.exit(main())
