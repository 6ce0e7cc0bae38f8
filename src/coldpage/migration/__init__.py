"""Migration: moving pages between levels as a transaction."""

from coldpage.migration.codec_moves import CodecMoves
from coldpage.migration.disk_moves import DiskMoves, Settlement

__all__ = ["CodecMoves", "DiskMoves", "Settlement"]
