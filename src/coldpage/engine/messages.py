"""What the HTTP process and the engine process say to each other, over a local stream socket.

Each frame is a 4-byte little-endian length and one msgpack-encoded tagged struct. The HTTP process
sends ``Request`` messages, the engine process ``Reply`` messages, which carry the request's id.

The HTTP process listens and starts the engine as

    python -m coldpage.engine.process --socket PATH --settings JSON

where JSON is ``EngineSettings``. The engine connects at once, sends any number of ``Loading`` and
then either ``EngineReady`` or ``StartFailed`` (and exits). A request is answered by any number of
``Delta`` and exactly one ``Finished`` or ``Failed``. After a ``Cancel`` nothing more need come for
that request; what crosses it on the way is ignored. A ``SessionCommand`` is answered by one
``SessionDone`` or ``Failed``. On ``Shutdown`` the engine closes its cache,
closes the socket and exits with status 0.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

__all__ = [
    "MAX_FRAME_BYTES",
    "Cancel",
    "ChatMessage",
    "CodecErrorStats",
    "CodecFailureStats",
    "Delta",
    "EngineFailed",
    "EngineReady",
    "EngineSettings",
    "Failed",
    "Finished",
    "Generate",
    "Loading",
    "Reply",
    "Request",
    "SamplingParams",
    "SessionAction",
    "SessionCommand",
    "SessionDone",
    "Shutdown",
    "SlotInfo",
    "StartFailed",
    "Stats",
    "TierStats",
    "Usage",
]

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024


class EngineSettings(msgspec.Struct, frozen=True):
    """What the engine process is started with. No bytes for the host or disk tier: it is left out.

    ``model`` None is the bundled model; ``device`` is ``auto``, ``cpu``, ``cuda`` or ``cuda:N``;
    ``dtype`` is ``auto``, ``bfloat16`` or ``float32``; the cache types are how keys and values are
    kept hot (``engine.settings.CACHE_TYPES``); the codecs of the cold tiers are what
    ``create_codec`` takes, ``disk_codec`` None: as the host tier; those that lose something leave
    ``num_recent_blocks`` whole at the end of a sequence; on a GPU the hot tier gets
    ``gpu_hot_fraction`` of what is free there once the weights are loaded, None: ``hot_bytes`` too;
    ``max_batch`` bounds the sequences that decode together, ``max_waiting`` the requests that queue
    beyond a full batch. ``disk_path`` is an existing, writable directory whenever ``disk_bytes`` is
    positive. ``pool_ratio`` divides the hot bytes between the layer groups, in order of their ids.
    ``instance_id`` None follows from the model. ``disk_admission`` is the value of a DiskAdmission;
    pages on disk that nobody has used for ``disk_ttl_s`` are dropped, None: never. ``save_path``
    None: sessions can not be saved. ``shutdown_budget_s`` bounds the time in which a clean stop
    writes to disk what is only in memory.
    """

    hot_bytes: int
    gpu_hot_fraction: float | None = None
    host_bytes: int = 0
    disk_path: str | None = None
    disk_bytes: int = 0
    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    cache_type_k: str = "auto"
    cache_type_v: str = "auto"
    host_codec: str = "concat"
    disk_codec: str | None = None
    num_recent_blocks: int = 0
    tokens_per_block: int = 16
    max_batch: int = 8
    max_waiting: int = 64
    pool_ratio: tuple[float, ...] | None = None
    instance_id: str | None = None
    disk_admission: str = "always"
    disk_ttl_s: float | None = None
    save_path: str | None = None
    shutdown_budget_s: float = 10.0


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class SamplingParams(msgspec.Struct, frozen=True):
    """How to choose tokens. ``temperature`` 0 is greedy; ``max_tokens`` None: as many as fit."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Generate from a chat (``messages``), a text or token ids: one of the three is given."""

    request_id: str
    sampling: SamplingParams
    messages: tuple[ChatMessage, ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    session: str | None = None
    salt: str = ""
    retain: bool = False


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The client has gone; stop generating and free what the request holds."""

    request_id: str


class SessionAction(enum.Enum):
    """What can be done with sessions. All but LIST name one."""

    LIST = "list"
    SAVE = "save"  # to a file
    RESTORE = "restore"  # from a file
    ERASE = "erase"  # what is cached of it; it keeps its slot id
    FORK = "fork"  # a second session with the same history
    DELETE = "delete"  # erase it, and give its slot id back


class SessionCommand(msgspec.Struct, frozen=True, tag="session"):
    """Do something with a session, named by ``slot_id`` or by ``session`` and ``salt``."""

    request_id: str
    action: SessionAction
    slot_id: int | None = None
    session: str | None = None
    salt: str = ""
    filename: str = ""
    new_session: str = ""  # of a fork


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Close the cache and exit. The engine's end delivers it too when the HTTP process has gone."""


Request = Generate | Cancel | SessionCommand | Shutdown


class Usage(msgspec.Struct, frozen=True):
    """Counts of one request; reused prompt tokens by tier name (``hot``, ``host``, ``disk``)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens_by_tier: dict[str, int]
    time_to_first_token_ms: float
    restore_ms: float


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Start-up progress, for people."""

    sentence: str


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The settings or the model can not work: one sentence for people. The engine then exits."""

    sentence: str


class EngineFailed(msgspec.Struct, frozen=True, tag="engine_failed"):
    """The engine can not go on: one sentence for people. It then exits."""

    sentence: str


class TierStats(msgspec.Struct, frozen=True):
    """One level now."""

    name: str
    total_bytes: int
    used_bytes: int
    total_blocks: int
    used_blocks: int
    capacity_tokens: int
    quarantined_blocks: int = 0  # of slots that failed and are not used again, rounded up
    dropped_pages: int = 0  # lost for good while this level had the only copy, since the start
    state: str = "ok"  # of a disk that fails "read_only" or "off"


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and requests are served."""

    model_name: str
    context_tokens: int
    tokens_per_block: int
    dtype: str
    tiers: tuple[TierStats, ...]
    instance_id: str = ""  # of the disk tier; empty: there is none
    device: str = "cpu"  # or a GPU, such as cuda:0
    cache_types: str = ""  # how keys and values are kept hot; empty: in the model's own type
    codecs: str = ""  # how cold pages are packed; empty: they are copied


class Delta(msgspec.Struct, frozen=True, tag="delta"):
    """New text of one request."""

    request_id: str
    text: str


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Ends a request that went well. ``finish_reason`` is ``stop`` or ``length``."""

    request_id: str
    finish_reason: str
    usage: Usage


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Ends a request that could not be served; ``status`` is the HTTP status to answer with."""

    request_id: str
    status: int
    sentence: str
    code: str


class CodecErrorStats(msgspec.Struct, frozen=True):
    """What pages of one layer group lost by a codec, of those that were checked. Errors are
    relative: 0.01 is a hundredth of a page's length as a vector.
    """

    codec: str
    layer_group: int
    checked_pages: int
    not_finite_pages: int  # of the checked ones; the errors are those of the others
    mean_error: float
    max_error: float
    last_error: float


class CodecFailureStats(msgspec.Struct, frozen=True):
    """Calls of one method of a codec that raised."""

    codec: str
    call: str
    num_failures: int


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Sent about once a second: gauges and monotonic counters, by metric name and label values."""

    tiers: tuple[TierStats, ...]
    moves: dict[str, int]  # path such as "hot-host" -> pages
    moved_bytes: dict[str, int]
    hits_tokens: dict[str, int]  # tier name -> prompt tokens reused
    counters: dict[str, int]  # requests, prompt_tokens, generated_tokens, recomputed_blocks, ...
    running: int
    waiting: int
    sessions: int
    codec_errors: tuple[CodecErrorStats, ...] = ()
    codec_failures: tuple[CodecFailureStats, ...] = ()


class SlotInfo(msgspec.Struct, frozen=True):
    """One named session. Its blocks are counted by the tier of their coldest page."""

    slot_id: int
    name: str
    num_tokens: int
    is_processing: bool
    blocks: dict[str, int]  # tier name -> blocks


class SessionDone(msgspec.Struct, frozen=True, tag="session_done"):
    """A session command went well. ``num_tokens`` were saved, restored or erased, or are in the
    fork.
    """

    request_id: str
    slot_id: int = -1
    session: str = ""
    num_tokens: int = 0
    num_bytes: int = 0  # of the file
    duration_ms: float = 0.0
    slots: tuple[SlotInfo, ...] = ()  # of a list
    fingerprints: dict[str, str] = {}  # of a list: what a saved file must agree with


Reply = (
    Loading
    | StartFailed
    | EngineFailed
    | EngineReady
    | Delta
    | Finished
    | Failed
    | SessionDone
    | Stats
)
