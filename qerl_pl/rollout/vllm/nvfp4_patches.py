"""Run-time patches of vLLM's NVFP4 linears; ``patches.py`` says how patches are written and lists them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

import torch

from qerl_pl.rollout.vllm.replacing import replace, replaced


@contextmanager
def native_nvfp4_linears(kernel: Callable[[], Any], update: Callable[..., Any]) -> Iterator[None]:
    """Use this project's kernel class for NVFP4 linears with 16-bit activations that vLLM loads within this context.

    Symptom: with few sequences, NVFP4 decodes no faster than bf16, and equal calls may sample different tokens.
    Cause: vLLM chooses from a fixed list of its own kernel classes, and its LoRA layers add the adapter afterwards.
    Versions: vLLM 0.32. Upstream: none known.

    Args:
        kernel: makes the kernel object of one linear.
        update: replaces ``_apply_sync`` of vLLM's LoRA layers permanently, and calls it for linears that the native
            kernels do not compute.
    """
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    scheme, modelopt = _nvfp4_modules()
    before = scheme.init_nvfp4_linear_kernel

    def init(use_a16: bool = False) -> Any:
        return kernel() if use_a16 else before(use_a16=use_a16)

    replace(BaseLinearLayerWithLoRA, "_apply_sync", update, takes=("self", "x", "bias"))
    name, takes = "init_nvfp4_linear_kernel", ("use_a16",)
    with replaced(scheme, name, init, takes=takes), replaced(modelopt, name, init, takes=takes):
        yield


@contextmanager
def packed_weights_on_host() -> Iterator[None]:
    """Make vLLM create the packed weights of NVFP4 linears in host memory within this context.

    Symptom: an engine that is going to use the trainer's copy of the base needs memory for a second copy at its start.
    Cause: vLLM allocates the weights of all linears on the GPU before it reads them from the checkpoint.
    Versions: vLLM 0.32. Upstream: none known.
    """
    scheme, modelopt = _nvfp4_modules()

    def on_host(owner: Any, *takes: str) -> AbstractContextManager[None]:
        create = owner.create_weights

        def create_weights(*args: Any, **kwargs: Any) -> None:
            with torch.device("cpu"):
                create(*args, **kwargs)

        return replaced(owner, "create_weights", create_weights, takes=("self", "layer", *takes))

    sizes = ("output_partition_sizes", "input_size_per_partition", "params_dtype", "weight_loader")
    with (
        on_host(scheme.CompressedTensorsW4A4Fp4, *sizes),
        on_host(modelopt.KNvfp4Static, "role", "ctx", "shapes", "wl"),
    ):
        yield


def _nvfp4_modules() -> tuple[Any, Any]:
    """Import vLLM's modules of NVFP4 linears: for checkpoints of compressed-tensors, and of ModelOpt."""
    layers = "vllm.model_executor.layers.quantization"
    scheme = import_module(f"{layers}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4")
    return scheme, import_module(f"{layers}.modelopt")
