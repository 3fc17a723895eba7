"""vLLM's entry point for this project (group ``vllm.general_plugins``): what its CPU and CUDA platforms lack.

vLLM calls ``register`` in each of its processes when the package is installed; the engine calls it too, because an
entry point needs installed metadata. The parts themselves are in ``cpu``, ``cuda``, ``humming`` and
``sampler``, which are imported where they are needed.
"""

from __future__ import annotations


def register() -> None:
    """Add fast adapters to vLLM; on a CPU NVFP4 with 16-bit activations; on CUDA fast log-probabilities and schedules.

    A second call changes nothing.

    Platforms other than CPU and CUDA have kernels of their own and are left alone.
    """
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        return
    module = "cpu" if current_platform.is_cpu() else "cuda"
    wrapper = f"qerl_pl.rollout.vllm.{module}.adapter_kernels"
    if current_platform.get_punica_wrapper() == wrapper:
        return
    if current_platform.is_cpu():
        from vllm.model_executor.layers.quantization import register_quantization_config

        from qerl_pl.rollout.vllm.cpu import NVFP4Config

        register_quantization_config("compressed-tensors")(NVFP4Config)
    else:
        from qerl_pl.rollout.vllm import humming, sampler

        humming.install()
        sampler.install()
    # The platform names its adapter kernels in this method; it is the only place that vLLM asks.
    platform = type(current_platform)
    platform.get_punica_wrapper = classmethod(lambda cls: wrapper)  # pyright: ignore[reportAttributeAccessIssue]
