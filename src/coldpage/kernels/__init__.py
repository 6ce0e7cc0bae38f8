"""Triton kernels, each beside its plain reference."""
