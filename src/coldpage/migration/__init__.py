"""Migration: moving pages between levels as a transaction."""

from coldpage.migration.codec_calls import CodecCalls
from coldpage.migration.codec_moves import NUM_SCRATCH_SLOTS, CodecMoves
from coldpage.migration.disk_moves import DiskMoves
from coldpage.migration.disk_transfers import Settlement

__all__ = ["NUM_SCRATCH_SLOTS", "CodecCalls", "CodecMoves", "DiskMoves", "Settlement"]
