"""Measurements beside the physical limit or a rival in the same run: ``coldpage bench``."""
