"""Benchmarks: each row beside its rival or its physical limit in the same run."""
