"""What the command line asks of the demonstration and of the verification run."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

__all__ = ["CACHE_TYPES", "DemoOptions", "Injection", "VerifyOptions"]

# How keys and values can be kept hot, for commands that start without torch: ``auto``, the model's
# own type, and the names of kernels.kv_types.
CACHE_TYPES: Final = ("auto", "f32", "f16", "bf16", "q8_0", "turbo4")


class Injection(enum.Enum):
    """Damage done on purpose, to show that it is detected and repaired."""

    NONE = "none"  # an ordinary run
    FLIP = "flip"  # one bit of one blob on disk is flipped
    FULL = "full"  # the coldest level is too small for what is sent to it


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """``coldpage demo``: conversations that take turns on a hot level which holds a few of them.

    ``model`` None is the bundled model. The cache types are CACHE_TYPES, the codecs what
    ``create_codec`` takes; ``disk_codec`` None is as the host tier. ``num_recent_blocks`` stay
    whole at the end of a conversation. ``disk_directory`` None is a temporary directory, removed
    afterwards.
    """

    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    cache_type_k: str = "auto"
    cache_type_v: str = "auto"
    host_codec: str = "concat"
    disk_codec: str | None = None
    num_recent_blocks: int = 0
    tokens_per_block: int = 16
    num_conversations: int = 8
    num_hot_conversations: int = 2
    num_rounds: int = 3
    conversation_tokens: int = 1500
    disk_directory: str | None = None


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """``coldpage verify``, in float32: a run under pressure, its replay without pressure and plain
    ``generate``, compared.

    ``model`` None is the bundled model; ``has_random_model``: a small one made for the run instead.
    The cache types are CACHE_TYPES, the codecs what ``create_codec`` takes, ``disk_codec`` None as
    the host tier; where those lose something ``generate`` says something else, so it is no
    witness, and ``num_recent_blocks`` stay whole at the end of a conversation. ``disk_directory``
    None is a temporary directory, removed afterwards.
    """

    model: str | None = None
    has_random_model: bool = False
    device: str = "auto"
    cache_type_k: str = "auto"
    cache_type_v: str = "auto"
    host_codec: str = "concat"
    disk_codec: str | None = None
    num_recent_blocks: int = 0
    tokens_per_block: int = 16
    num_conversations: int = 8
    num_hot_conversations: int = 2
    num_rounds: int = 3
    conversation_tokens: int = 1500
    injection: Injection = Injection.NONE
    disk_directory: str | None = None
