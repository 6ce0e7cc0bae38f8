"""The HTTP process. It loads no model and imports neither torch nor transformers."""

from coldpage.server.app import create_app
from coldpage.server.engine_client import EngineClient, EngineState, StartListener
from coldpage.server.engine_process import ENGINE_COMMAND
from coldpage.server.metrics import ServerMetrics
from coldpage.server.serve import ServeOptions, ServeOutcome, bind, serve

__all__ = [
    "ENGINE_COMMAND",
    "EngineClient",
    "EngineState",
    "ServeOptions",
    "ServeOutcome",
    "ServerMetrics",
    "StartListener",
    "bind",
    "create_app",
    "serve",
]
