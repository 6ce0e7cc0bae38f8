"""One forward pass over the new tokens of many sequences."""
