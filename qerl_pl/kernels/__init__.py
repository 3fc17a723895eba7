"""GPU kernels in Triton, each with a function in plain PyTorch that defines its result; see ``docs/kernels.md``."""
