"""CUDA kernels of this project for NVFP4 on Hopper GPUs ("native kernels"), and changes of vLLM that only make it
faster. The program also works without this folder; only ``qerl_pl.native`` imports it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from qerl_pl.hopper import driver
from qerl_pl.quant.nvfp4 import NVFP4

# Files of vLLM without which this folder cannot add a class of NVFP4 kernels to vLLM: the first defines the base class
# of such classes, and the other two choose among them.
EXTENDED = (
    "model_executor/kernels/linear/nvfp4/base.py",
    "model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py",
    "model_executor/layers/quantization/modelopt.py",
)


def lacks(fmt: Any, dtype: torch.dtype) -> list[str]:
    """List the requirements of this project's CUDA kernels that are not met: a Hopper GPU, the packages cuda-bindings,
    nvidia-cuda-nvrtc and vLLM, a base model in NVFP4 (``fmt`` is its format) and bfloat16 as compute dtype (``dtype``).
    The list is empty if the kernels can run."""
    vllm = find_spec("vllm")
    folders = [Path(folder) for folder in (vllm and vllm.submodule_search_locations) or ()]
    on_hopper = driver.is_available(torch.device("cuda"))
    needs = {
        "a Hopper GPU (compute capability 9.0) and the package cuda-bindings": on_hopper,
        "NVRTC (the package nvidia-cuda-nvrtc)": driver.has_compiler(),
        "a vLLM with NVFP4 linears": any(all((folder / file).exists() for file in EXTENDED) for folder in folders),
        "a base in NVFP4": fmt is NVFP4,
        "bfloat16 as compute dtype": dtype == torch.bfloat16,
    }
    return [what for what, is_met in needs.items() if not is_met]
