"""Frames over a Unix socket: an asyncio end for the HTTP process, a threaded one for the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import socket
import struct
import threading
from types import TracebackType
from typing import Final

import msgspec

from coldpage.engine.messages import MAX_FRAME_BYTES, Reply, Request, Shutdown

__all__ = ["EngineChannel", "FrameParser", "ServerChannel", "encode_frame"]

_LOG = logging.getLogger(__name__)
_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 256 * 1024
# Either queue full makes its producer wait: the socket then pushes back on the other process.
_INBOX_FRAMES: Final = 1024
_OUTBOX_FRAMES: Final = 4096
_FLUSH_TIMEOUT_S: Final = 5.0


def encode_frame(message: Request | Reply) -> bytes:
    """Length and payload of one message. Raises ``ValueError`` above ``MAX_FRAME_BYTES``."""
    payload = msgspec.msgpack.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes exceeds {MAX_FRAME_BYTES} bytes")
    return _LENGTH.pack(len(payload)) + payload


class FrameParser:
    """Cuts a byte stream into payloads, whatever the sizes of the reads."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that ``data`` completes. Raises ``ConnectionError`` on an absurd length."""
        self._pending += data
        payloads: list[bytes] = []
        start = 0
        while len(self._pending) - start >= _LENGTH.size:
            (num_bytes,) = _LENGTH.unpack_from(self._pending, start)
            if num_bytes > MAX_FRAME_BYTES:
                raise ConnectionError(f"the peer announces a frame of {num_bytes} bytes")
            stop = start + _LENGTH.size + num_bytes
            if stop > len(self._pending):
                break
            payloads.append(bytes(self._pending[start + _LENGTH.size : stop]))
            start = stop
        del self._pending[:start]
        return payloads


class ServerChannel:
    """The HTTP process's end. One task receives; any task of the same loop sends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = FrameParser()
        self._decoder = msgspec.msgpack.Decoder(Reply)

    async def receive(self) -> list[Reply]:
        """Waits for the next messages, at least one; an empty list when the engine has gone.

        Raises ``ConnectionError`` when the engine sends what is no message.
        """
        try:
            while data := await self._reader.read(_READ_BYTES):
                if payloads := self._parser.feed(data):
                    return [self._decoder.decode(payload) for payload in payloads]
        except ConnectionResetError:
            pass
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"the engine sent a malformed message: {error}") from error
        return []

    def send(self, request: Request) -> None:
        """Enqueues a message; does nothing when the engine has gone, which ``receive`` reports."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(request))

    def close(self) -> None:
        """Sends what is enqueued and closes, without waiting."""
        self._writer.close()


class EngineChannel:
    """The engine process's end. A reader and a writer thread own the socket, so that the thread
    which owns the cache never waits for it: only a full outbox makes ``send`` wait.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes the connected socket over."""
        self._sock = sock
        self._inbox: queue.Queue[Request] = queue.Queue(_INBOX_FRAMES)
        self._outbox: queue.Queue[bytes | None] = queue.Queue(_OUTBOX_FRAMES)
        self._closing = threading.Event()
        self._peer_gone = threading.Event()
        self._reader = threading.Thread(target=self._read, name="channel-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="channel-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    @classmethod
    def connect(cls, path: str) -> EngineChannel:
        """Connects to the listening HTTP process. Raises ``OSError``."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(path)
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    @property
    def peer_gone(self) -> bool:
        """Whether the HTTP process has closed its end; ``receive`` ends with a ``Shutdown``."""
        return self._peer_gone.is_set()

    def receive(self, timeout_s: float = 0.0) -> list[Request]:
        """All requests that have arrived, in order; waits up to ``timeout_s`` for the first one.

        When the HTTP process goes, a ``Shutdown`` follows the last request, once.
        """
        requests: list[Request] = []
        try:
            requests.append(self._inbox.get(block=timeout_s > 0.0, timeout=timeout_s or None))
            while True:
                requests.append(self._inbox.get_nowait())
        except queue.Empty:
            return requests

    def send(self, reply: Reply) -> None:
        """Enqueues a message; drops it when the HTTP process has gone."""
        if not self._peer_gone.is_set():
            self._outbox.put(encode_frame(reply))

    def close(self) -> None:
        """Sends what is enqueued, waiting ``_FLUSH_TIMEOUT_S`` at most, then closes. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        # Full: the HTTP process has stopped reading, and closing the socket ends the writer.
        with contextlib.suppress(queue.Full):
            self._outbox.put(None, timeout=_FLUSH_TIMEOUT_S)
        self._writer.join(_FLUSH_TIMEOUT_S)
        with contextlib.suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_RDWR)
        self._reader.join(_FLUSH_TIMEOUT_S)
        self._sock.close()

    def __enter__(self) -> EngineChannel:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> None:
        parser = FrameParser()
        decoder = msgspec.msgpack.Decoder(Request)
        try:
            while data := self._sock.recv(_READ_BYTES):
                for payload in parser.feed(data):
                    self._deliver(decoder.decode(payload))
        except (ConnectionResetError, BrokenPipeError):
            pass
        except (OSError, msgspec.MsgspecError) as error:
            # Nothing sensible can follow on this socket: the same as a peer that has gone.
            if not self._closing.is_set():
                _LOG.error("the HTTP process sent what is no message: %s", error)
        self._lose_peer()
        self._deliver(Shutdown())

    def _deliver(self, request: Request) -> None:
        while not self._closing.is_set():
            try:
                self._inbox.put(request, timeout=0.1)
                return
            except queue.Full:
                continue

    def _lose_peer(self) -> None:
        self._peer_gone.set()
        # Nobody reads any more: make room, so that no sender waits, and let the writer end.
        while True:
            try:
                self._outbox.get_nowait()
            except queue.Empty:
                break
        self._outbox.put(None)

    def _write(self) -> None:
        while (frame := self._outbox.get()) is not None:
            frames = [frame]
            ends = False
            while len(frames) < _OUTBOX_FRAMES:
                try:
                    more = self._outbox.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    ends = True
                    break
                frames.append(more)
            try:
                self._sock.sendall(b"".join(frames))
            except OSError:
                self._lose_peer()
                return
            if ends:
                return
