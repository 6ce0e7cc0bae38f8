"""``coldpage bench attention``: what attention over pages costs."""

from coldpage.bench.attention.run import PARTS, AttentionBenchOptions, run_attention

__all__ = ["PARTS", "AttentionBenchOptions", "run_attention"]
