"""Triton kernels, each beside its reference."""
