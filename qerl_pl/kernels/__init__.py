"""GPU kernels in Triton and CUDA C++, each with a function in plain PyTorch that defines its result.

No other package holds GPU code. ``docs/kernels.md`` explains the weight layout, the schedules and the tuning.
"""
