"""Attention over hot pages, and the index tensors that say which."""
