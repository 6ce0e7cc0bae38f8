"""Devices: memory, streams, events, copies and file I/O behind one seam."""
