"""vLLM's entry point for this project (group ``vllm.general_plugins``): what its CPU platform lacks.

vLLM calls ``register`` in each of its processes when the package is installed; the engine calls it too, because an
entry point needs installed metadata. The parts themselves are in ``vllm_cpu``, which is imported where they are needed.
"""

from __future__ import annotations

_WRAPPER = "qerl_pl.rollout.vllm_cpu.adapter_kernels"


def register() -> None:
    """Add NVFP4 with 16-bit activations and fast adapters to vLLM on a CPU. A second call changes nothing.

    Other platforms have kernels of their own and are left alone.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or current_platform.get_punica_wrapper() == _WRAPPER:
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from qerl_pl.rollout.vllm_cpu import NVFP4Config

    register_quantization_config("compressed-tensors")(NVFP4Config)
    # The platform names its adapter kernels in this method; it is the only place that vLLM asks.
    platform = type(current_platform)
    platform.get_punica_wrapper = classmethod(lambda cls: _WRAPPER)  # pyright: ignore[reportAttributeAccessIssue]
