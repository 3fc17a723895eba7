"""All GPU code: Triton and CUDA C++ kernels, each beside the plain PyTorch that says what it computes."""
