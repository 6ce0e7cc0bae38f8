"""Storage: the levels, who may stay on which, and what makes room for what."""

from coldpage.storage.escalation import Losable
from coldpage.storage.storage import Storage

__all__ = ["Losable", "Storage"]
