"""The engine's process: started on a private socket, watched, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec

from coldpage.engine.messages import EngineSettings, Shutdown
from coldpage.engine.transport import ServerChannel

__all__ = ["ENGINE_COMMAND", "STOP_TIMEOUT_S", "EngineProcess"]

ENGINE_COMMAND: Final = (sys.executable, "-m", "coldpage.engine.process")
# What a clean stop takes besides writing what is cached to disk, which has a budget of its own.
STOP_TIMEOUT_S: Final = 10.0
_KILL_TIMEOUT_S: Final = 2.0
_ACCEPT_TIMEOUT_S: Final = 0.5
# A Unix socket address holds 107 characters, the name in the directory included.
_MAX_SOCKET_PATH_CHARS: Final = 107


class EngineProcess:
    """A running engine process. Made by ``running``, which also ends it."""

    def __init__(
        self, process: asyncio.subprocess.Process, connection: asyncio.Future[ServerChannel]
    ) -> None:
        self._process = process
        self._connection = connection
        # Before the model is served there is nothing to write back.
        self.stop_timeout_s = _KILL_TIMEOUT_S

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, command: Sequence[str], settings: EngineSettings
    ) -> AsyncIterator[EngineProcess]:
        """Starts ``command`` and listens for it in a 0700 directory; on leaving, it is stopped."""
        with _private_directory() as directory:
            path = os.path.join(directory, "engine.sock")
            connection: asyncio.Future[ServerChannel] = asyncio.get_running_loop().create_future()

            def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                if connection.done():
                    writer.close()
                else:
                    connection.set_result(ServerChannel(reader, writer))

            listener = await asyncio.start_unix_server(connected, path)
            process = await asyncio.create_subprocess_exec(
                *command,
                *("--socket", path, "--settings", msgspec.json.encode(settings).decode()),
                stdin=asyncio.subprocess.DEVNULL,
                # What a library prints in the engine belongs to the log, not to the output.
                stdout=sys.__stderr__,
                # A Ctrl-C in the terminal goes to this process alone, which stops the engine.
                start_new_session=True,
            )
            engine = cls(process, connection)
            try:
                yield engine
            finally:
                await engine._stop()
                listener.close()

    async def connected(self) -> ServerChannel | None:
        """Waits until the engine has connected; None when it exited before."""
        exited = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait((exited, self._connection), return_when=asyncio.FIRST_COMPLETED)
            # An exit may be noticed before a connection that was made earlier.
            await asyncio.wait((self._connection,), timeout=_ACCEPT_TIMEOUT_S)
        finally:
            exited.cancel()
        return self._connection.result() if self._connection.done() else None

    async def exit_sentence(self) -> str:
        """Waits for the end of a process that has hung up, and says how it ended."""
        try:
            code = await asyncio.wait_for(self._process.wait(), _KILL_TIMEOUT_S)
        except TimeoutError:
            return "hung up without exiting"
        if code >= 0:
            return f"exited with status {code}"
        name = signal.Signals(-code).name
        hint = ", maybe for want of memory" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"

    async def _stop(self) -> None:
        if self._connection.done():
            channel = self._connection.result()
            channel.send(Shutdown())
            await self._wait(self.stop_timeout_s)
            channel.close()
        for ending in (signal.SIGTERM, signal.SIGKILL):
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(ending)
                await self._wait(_KILL_TIMEOUT_S)

    async def _wait(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), timeout_s)


def _private_directory() -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="coldpage-")
    if len(directory.name) + len("/engine.sock") <= _MAX_SOCKET_PATH_CHARS:
        return directory
    directory.cleanup()
    return tempfile.TemporaryDirectory(prefix="coldpage-", dir="/tmp")
