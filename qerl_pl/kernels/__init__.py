"""Triton kernels that have nothing to do with quantisation; each is held to a definition in plain torch."""
