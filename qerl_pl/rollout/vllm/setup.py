"""Prepare the start of vLLM: environment variables, process groups, the choice of kernels, checks and log lines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import distributed as dist

from qerl_pl.common.files import in_bytes
from qerl_pl.kernels import hopper
from qerl_pl.model.files import Checkpoint
from qerl_pl.policy.policy import Policy
from qerl_pl.quant.formats import Format
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.nf4 import NF4
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.quant.quantize import fused_groups
from qerl_pl.rollout.loopback import check_loopback
from qerl_pl.rollout.vllm import humming, patches

DEFAULT_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # vLLM's warnings are about servers; at INFO it also logs the chosen kernels
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_MOE_SKIP_PADDING": "0",  # the supported models have no experts; this saves two launches per decoding step
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer's sampler does not support a seed for each request
}
# Endings of the names of tensor scales in checkpoints of compressed-tensors and of ModelOpt.
TENSOR_SCALES = (".weight_global_scale", ".weight_scale_2")
TORCHS_PTXAS = Path(torch.__file__).parent / "bin/ptxas"  # CUDA's assembler, which Triton calls
# Files in vLLM's package with what ``native_linear`` and ``native_nvfp4_linears`` use: the base class of NVFP4 kernels,
# and the two callers of the function that chooses among them.
EXTENDED = (
    "model_executor/kernels/linear/nvfp4/base.py",
    "model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py",
    "model_executor/layers/quantization/modelopt.py",
)

ONE_COPY = True
"""Whether trainer and engine share one copy of the packed base weights if the native kernels are used."""


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads when it is imported; variables that are set already are kept.

    Raises:
        ValueError: a variable asks for a separate worker process, in which adapter and norms could not be written in
            place.
        OSError: this machine cannot connect to itself over the loopback interface.
    """
    check_loopback()
    found = os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if found != "0":
        raise ValueError(
            f"VLLM_ENABLE_V1_MULTIPROCESSING is {found!r}; vLLM has to run in the trainer's process: unset it"
        )
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # By default vLLM has a separate Triton cache for each of its configurations, so each new configuration would
    # compile all Triton kernels again.
    os.environ.setdefault("TRITON_CACHE_DIR", hopper.cache_folder())
    # Inductor sets this variable before it compiles its first kernel. Triton's cache has the version of ptxas in its
    # keys, so a start that finds its graphs compiled would otherwise not find the other Triton kernels of the first.
    if os.access(TORCHS_PTXAS, os.X_OK):
        os.environ.setdefault("TRITON_PTXAS_PATH", str(TORCHS_PTXAS))


@contextmanager
def among_ranks() -> Iterator[dict[str, Any]]:
    """Yield the arguments of ``vllm.LLM`` with which each rank gets its own engine, if the trainer has a process group.

    vLLM then uses the trainer's process group and creates groups of single ranks from it, which all ranks have to do at
    the same time. vLLM reads rank and GPU of a process from environment variables, which are set here and restored at
    the end of the context.
    """
    if not dist.is_initialized():
        yield {}
        return
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else 0
    wanted = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(gpu)}
    before = {name: os.environ[name] for name in wanted if name in os.environ}
    os.environ.update(wanted)
    try:
        yield {"distributed_executor_backend": "external_launcher"}
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)


def inspect_here(architectures: Sequence[str]) -> None:
    """Give vLLM the classes of models that it only knows by name, so that it reads their properties in this process.

    By default vLLM does so in another process, which imports vLLM again: about 12 s at the first start on a machine.
    vLLM stays responsible for names that it does not know.
    """
    from vllm import ModelRegistry

    for name in architectures:
        if (known := ModelRegistry.models.get(name)) is not None:
            ModelRegistry.register_model(name, known.load_model_cls())


def lacks(fmt: Format | None) -> bool:
    """Return whether vLLM 0.32 lacks kernels for a weight format (None: not quantised) with 16-bit activations on this
    machine.

    vLLM has no kernels for NF4. For MXFP4 it has kernels on CUDA GPUs older than Blackwell; on Blackwell its kernels
    quantise activations as well. For NVFP4 it has kernels on CUDA, and ``plugin`` adds kernels for a CPU.
    """
    from vllm.platforms import current_platform

    if fmt is None or fmt is NVFP4:
        return False
    return fmt is NF4 or not current_platform.is_cuda() or current_platform.has_device_capability(100)


def decoding_kernel(
    wanted: Literal["auto", "native", "humming"], fmt: Format | None, dtype: torch.dtype
) -> Literal["native", "humming"]:
    """Resolve the setting ``decoding_kernel``, which may be "auto", for a base's format (None: not quantised) and a
    compute dtype.

    The result "humming" means vLLM's own choice of kernels.
    """
    if wanted != "auto":
        return wanted
    return "humming" if decoding_lacks(fmt, dtype) else "native"


def decoding_lacks(fmt: Format | None, dtype: torch.dtype) -> list[str]:
    """List the requirements of the native decoding kernels that this machine, base or dtype does not meet, without
    importing vLLM."""
    vllm = find_spec("vllm")
    folders = [Path(folder) for folder in (vllm and vllm.submodule_search_locations) or ()]
    on_hopper = hopper.is_available(torch.device("cuda"))
    needs = {
        "a Hopper GPU (compute capability 9.0) and the package cuda-bindings": on_hopper,
        "NVRTC (the package nvidia-cuda-nvrtc)": hopper.has_compiler(),
        "a vLLM with NVFP4 linears": any(all((folder / file).exists() for file in EXTENDED) for folder in folders),
        "a base in NVFP4": fmt is NVFP4,
        "bfloat16 as compute dtype": dtype == torch.bfloat16,
    }
    return [what for what, found in needs.items() if not found]


def by_vllms_kernels(fmt: Format | None, kernel: Literal["native", "humming"]) -> bool:
    """Return whether vLLM's own kernels will compute the packed linears of a base on a GPU; False without such linears.

    Args:
        fmt: the base's format; None means not quantised.
        kernel: "native" or "humming", as ``decoding_kernel`` returns it.
    """
    return kernel == "humming" and fmt is not None and not lacks(fmt)


def log_any_order(fmt: Format | None, dtype: torch.dtype, kernel: Literal["native", "humming"]) -> None:
    """Log that equal calls of the engine may give different results on a GPU, and why, if vLLM's own kernels compute
    packed linears; otherwise log nothing.

    Linears that are not quantised are computed by cuBLAS, which adds in a fixed order, and so do the native kernels.
    Humming's kernels do not, and vLLM's other kernels for packed linears may not.

    Args:
        fmt, kernel: as in ``by_vllms_kernels``.
        dtype: the engine's compute dtype.
    """
    if fmt is None or not by_vllms_kernels(fmt, kernel):
        return
    missing = decoding_lacks(fmt, dtype)
    way = f"need {', and '.join(missing)}" if missing else "run if decoding_kernel is 'auto'"
    rank_zero_info(
        f"vLLM's own kernels compute this {fmt.name} base and may add in any order, so equal calls may sample other "
        f"tokens. The native kernels, which add in a fixed order, {way}"
    )


def log_unpacked(linears: Mapping[str, FrozenLinear], dtype: torch.dtype) -> None:
    """Log that vLLM holds the given packed linears in dequantised form, because it has no kernels for their format."""
    fmt = next(iter(linears.values())).fmt
    size = sum(linear.in_features * linear.out_features for linear in linears.values()) * dtype.itemsize
    rank_zero_info(
        f"vLLM has no kernels for {fmt.name} here: rollouts use the weights dequantised to "
        f"{str(dtype).removeprefix('torch.')}, {in_bytes(size)}"
    )


def destroy_groups() -> None:
    """Destroy vLLM's process groups that remain after a failed start."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


@contextmanager
def trainers_group(*, engines_own: bool) -> Iterator[None]:
    """Keep the trainer's default process group while vLLM destroys process groups within this context.

    Args:
        engines_own: whether the engine created the default group; if so, it is destroyed at the end of the context.
    """
    with nullcontext() if engines_own else patches.kept_process_group():
        yield
    if engines_own and dist.is_initialized():
        dist.destroy_process_group()


def log_starting() -> None:
    """Log that vLLM starts, and why this may take minutes."""
    rank_zero_info("vLLM starts. With a new model or new settings it compiles kernels first, which can take minutes")


def log_started(seconds: Mapping[str, float]) -> None:
    """Log how long the start took, by phase."""
    parts = ", ".join(f"{phase} {spent:.1f}" for phase, spent in seconds.items())
    rank_zero_info(f"vLLM started in {sum(seconds.values()):.1f} s: {parts}")


def log_kernels(linears: Mapping[str, int]) -> None:
    """Log the kernel classes with which vLLM computes linears, and the number of linears for each class."""
    kernels = ", ".join(f"{name} ({count})" for name, count in linears.items())
    rank_zero_info(f"vLLM computes its linears with {kernels}")


def check_fused_scales(base: str) -> None:
    """Refuse a checkpoint whose weights vLLM would scale wrongly on a GPU.

    On a GPU, vLLM fuses q/k/v and gate/up and uses the largest of their tensor scales for the fused matrix; if the
    scales differ, it only warns.

    Raises:
        ValueError: linears that vLLM fuses have different tensor scales.
    """
    checkpoint = Checkpoint(base)
    present = {name.rpartition(".")[0] for name in checkpoint.names()}
    for suffix in TENSOR_SCALES:
        linears = [name.removesuffix(suffix) for name in checkpoint.names() if name.endswith(suffix)]
        for group in fused_groups(linears, present).values():
            scales = [checkpoint.read(member + suffix).item() for member in group]
            if len(set(scales)) > 1:
                raise ValueError(
                    f"{base} has tensor scales {scales} for {group}; vLLM fuses these linears and needs one scale: "
                    "quantise the model with `python -m qerl_pl quantize`"
                )


def prepare_gpu(policy: Policy, dtype: torch.dtype, kernel: Literal["native", "humming"]) -> None:
    """Check the base's tensor scales before vLLM starts on a GPU. If vLLM's own kernels will compute packed linears,
    register Humming's operators, and log why these are not the native kernels.

    Args:
        policy: policy whose base is loaded.
        dtype: the engine's compute dtype.
        kernel: "native" or "humming", as ``decoding_kernel`` returns it.

    Raises:
        ValueError: fused linears of the base have different tensor scales.
    """
    check_fused_scales(policy.base)
    if by_vllms_kernels(policy.packed_format, kernel):
        humming.load_operators()
    log_any_order(policy.packed_format, dtype, kernel)
