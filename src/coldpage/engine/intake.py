"""From messages to commands, on a thread of its own: tokenizing never holds up a step."""

from __future__ import annotations

import copy
import dataclasses
import logging
import queue
import threading
import time
from typing import Final

import numpy as np

from coldpage.config import ReuseScope
from coldpage.engine.loop import Command
from coldpage.engine.messages import Cancel, Failed, Generate, Request, SessionCommand, Shutdown
from coldpage.engine.model.model import LoadedModel
from coldpage.engine.requests import GenerationRequest
from coldpage.engine.text import encode_chat, encode_text
from coldpage.engine.transport import EngineChannel
from coldpage.errors import ModelError
from coldpage.types import Int32Array

__all__ = ["Intake", "encode_prompt"]

_LOG = logging.getLogger(__name__)
_RECEIVE_TIMEOUT_S: Final = 0.2
_PUT_TIMEOUT_S: Final = 0.2
_JOIN_TIMEOUT_S: Final = 2.0


class Intake:
    """Takes requests off the channel until its ``Shutdown``, which it passes on, or ``close``."""

    def __init__(
        self, channel: EngineChannel, model: LoadedModel, commands: queue.Queue[Command]
    ) -> None:
        """Starts the thread. ``commands`` full makes it wait."""
        self._channel = channel
        # The loop decodes with the model's own tokenizer, and tokenizers are not for two threads.
        self._model = dataclasses.replace(model, tokenizer=copy.deepcopy(model.tokenizer))
        self._commands = commands
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop taking requests and end the thread."""
        self._is_closing.set()
        # A peer that has stopped reading may hold it in a send: closing the channel ends that.
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._is_closing.is_set():
            for message in self._channel.receive(_RECEIVE_TIMEOUT_S):
                command = self._command_for(message)
                if command is not None:
                    self._put(command)
                if isinstance(message, Shutdown):
                    return

    def _command_for(self, message: Request) -> Command | None:
        """None where the request has been refused."""
        if isinstance(message, Cancel | SessionCommand | Shutdown):
            return message
        received_at_s = time.monotonic()
        try:
            prompt = encode_prompt(self._model, message)
        except ModelError as error:
            self._refuse(message, 400, "invalid_prompt", str(error))
            return None
        except Exception as error:  # one bad prompt must not end the intake of all others
            _LOG.exception("a prompt could not be tokenized")
            sentence = f"The prompt could not be tokenized ({type(error).__name__}): {error}"
            self._refuse(message, 500, "engine_error", sentence)
            return None
        return GenerationRequest(
            request_id=message.request_id,
            prompt=prompt,
            sampling=message.sampling,
            received_at_s=received_at_s,
            session=message.session,
            scope=ReuseScope(salt=message.salt),
            retain=message.retain,
        )

    def _refuse(self, message: Generate, status: int, code: str, sentence: str) -> None:
        self._channel.send(Failed(message.request_id, status, sentence, code))

    def _put(self, command: Command) -> None:
        while not self._is_closing.is_set():
            try:
                self._commands.put(command, timeout=_PUT_TIMEOUT_S)
                return
            except queue.Full:
                continue


def encode_prompt(model: LoadedModel, message: Generate) -> Int32Array:
    """The prompt's tokens. Raises ModelError where the message has no prompt or none that works."""
    match message:
        case Generate(messages=tuple() as messages, text=None, token_ids=None):
            return encode_chat(model, messages)
        case Generate(messages=None, text=str() as text, token_ids=None):
            return encode_text(model, text)
        case Generate(messages=None, text=None, token_ids=tuple() as token_ids):
            try:
                return np.array(token_ids, dtype=np.int32)
            except OverflowError as error:
                raise ModelError("a token id does not fit 32 bits") from error
    raise ModelError("give exactly one of messages, a text and token ids")
