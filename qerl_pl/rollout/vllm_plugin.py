"""vLLM's entry point for this project (group ``vllm.general_plugins``): what its CPU and CUDA platforms lack.

vLLM calls ``register`` in each of its processes when the package is installed; the engine calls it too, because an
entry point needs installed metadata. The parts themselves are in ``vllm_cpu``, ``vllm_cuda``, ``vllm_humming`` and
``vllm_sampler``, which are imported where they are needed.
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
    module = "vllm_cpu" if current_platform.is_cpu() else "vllm_cuda"
    wrapper = f"qerl_pl.rollout.{module}.adapter_kernels"
    if current_platform.get_punica_wrapper() == wrapper:
        return
    if current_platform.is_cpu():
        from vllm.model_executor.layers.quantization import register_quantization_config

        from qerl_pl.rollout.vllm_cpu import NVFP4Config

        register_quantization_config("compressed-tensors")(NVFP4Config)
    else:
        from qerl_pl.rollout import vllm_humming, vllm_sampler

        vllm_humming.install()
        vllm_sampler.install()
    # The platform names its adapter kernels in this method; it is the only place that vLLM asks.
    platform = type(current_platform)
    platform.get_punica_wrapper = classmethod(lambda cls: wrapper)  # pyright: ignore[reportAttributeAccessIssue]
