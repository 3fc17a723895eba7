"""Entry point (group ``vllm.general_plugins``) that adds this project's patches and weight formats to vLLM.

vLLM calls ``register`` in each of its processes if this package is installed; the rollout engine calls it as well.
"""

from qerl_pl import native
from qerl_pl.rollout.vllm import patches

_registered = False


def register() -> None:
    """Apply the patches of vLLM that stay in force; on a CPU, also add NVFP4 with 16-bit activations to its formats. A
    second call changes nothing. Raises RuntimeError if the patches do not fit the installed version of vLLM."""
    from vllm.platforms import current_platform

    global _registered
    patches.apply_all()
    if faster := native.for_vllm():
        faster.install()
    if current_platform.is_cpu() and not _registered:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from qerl_pl.rollout.vllm.cpu import NVFP4Config

        register_quantization_config("compressed-tensors")(NVFP4Config)
        _registered = True
