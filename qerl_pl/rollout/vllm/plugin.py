"""vLLM's entry point for this project (group ``vllm.general_plugins``): what its CPU and CUDA platforms lack.

vLLM calls ``register`` in each of its processes when the package is installed; the engine calls it too, because an
entry point needs installed metadata.
"""

from __future__ import annotations

from qerl_pl.rollout.vllm import patches

_registered = False


def register() -> None:
    """Apply the patches of the whole process, and on a CPU add NVFP4 with 16-bit activations.

    A second call changes nothing.

    Raises:
        RuntimeError: this vLLM is not one that the patches are for.
    """
    from vllm.platforms import current_platform

    global _registered
    patches.apply_all()
    if current_platform.is_cpu() and not _registered:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from qerl_pl.rollout.vllm.cpu import NVFP4Config

        register_quantization_config("compressed-tensors")(NVFP4Config)
        _registered = True
