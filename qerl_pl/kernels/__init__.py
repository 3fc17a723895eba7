"""GPU kernels in Triton that any GPU runs, each with a function in plain PyTorch that defines its result; see
``docs/kernels.md``."""
