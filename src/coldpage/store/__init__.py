"""A store of keyed blobs that survives restarts and crashes, with no engine and no manager."""

from coldpage.store.base import KeyedStore, StoreTicket
from coldpage.store.blob_store import BlobStore, StoreStats
from coldpage.store.durability import SyncBatcher, SyncPoint
from coldpage.store.format import BLANK_KEY, BlobName, FileIdentity
from coldpage.store.health import HealthState, TierHealth
from coldpage.store.instance import (
    InstanceDirectory,
    InstanceIdentity,
    InstanceInfo,
    default_instance_id,
    list_instances,
)
from coldpage.store.recovery import Recovered, recover
from coldpage.store.sidecar import SlotIndex, write_sidecar
from coldpage.store.slot_file import SlotFile, slot_bytes_of

__all__ = [
    "BLANK_KEY",
    "BlobName",
    "BlobStore",
    "FileIdentity",
    "HealthState",
    "InstanceDirectory",
    "InstanceIdentity",
    "InstanceInfo",
    "KeyedStore",
    "Recovered",
    "SlotFile",
    "SlotIndex",
    "StoreStats",
    "StoreTicket",
    "SyncBatcher",
    "SyncPoint",
    "TierHealth",
    "default_instance_id",
    "list_instances",
    "recover",
    "slot_bytes_of",
    "write_sidecar",
]
