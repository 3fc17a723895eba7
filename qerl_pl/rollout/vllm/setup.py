"""Prepare the start of vLLM: environment variables, process groups, the choice of kernels, checks and log lines."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import distributed as dist
from transformers import PretrainedConfig

from qerl_pl import native
from qerl_pl.common.files import in_bytes
from qerl_pl.memory.shape import is_unpacked
from qerl_pl.model.files import Checkpoint
from qerl_pl.model.layers import head_dims
from qerl_pl.policy.policy import Policy
from qerl_pl.quant.formats import Format
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.selection import fused_groups
from qerl_pl.rollout.vllm import patches

DEFAULT_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # vLLM's warnings are about servers; at INFO it also logs the chosen kernels
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_MOE_SKIP_PADDING": "0",  # experts compute padding too; this saves two launches per decoding step
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer's sampler does not support a seed for each request
}
# Endings of the names of tensor scales in checkpoints of compressed-tensors and of ModelOpt.
TENSOR_SCALES = (".weight_global_scale", ".weight_scale_2")
TORCHS_PTXAS = Path(torch.__file__).parent / "bin/ptxas"  # CUDA's assembler, which Triton calls
LOOPBACK_S = 5.0  # until the check of the loopback interface fails; a working one answers in microseconds


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads when it is imported; variables that are set already are kept.
    Raises ValueError if a variable asks vLLM to run in a separate process, where the trainer could not write into
    vLLM's memory, and OSError if this machine cannot connect to itself over the loopback interface.
    """
    from qerl_pl.kernels.launching import cache_folder

    check_loopback()
    processes = os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if processes != "0":
        raise ValueError(
            f"VLLM_ENABLE_V1_MULTIPROCESSING is {processes!r}; vLLM has to run in the trainer's process: unset it"
        )
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # By default vLLM uses a separate Triton cache for each configuration of an engine, so every new configuration would
    # compile all Triton kernels again.
    os.environ.setdefault("TRITON_CACHE_DIR", cache_folder())
    # Inductor sets TRITON_PTXAS_PATH before it compiles its first kernel, and does not set it in a later start that
    # loads compiled graphs. Triton's cache has the version of ptxas in its keys, so the later start would not find the
    # Triton kernels that the first one has cached.
    if os.access(TORCHS_PTXAS, os.X_OK):
        os.environ.setdefault("TRITON_PTXAS_PATH", str(TORCHS_PTXAS))


def check_loopback() -> None:
    """Raise OSError if this machine cannot connect to itself at 127.0.0.1: torch's process groups would then hang for
    minutes before they fail."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=LOOPBACK_S).close()
    except OSError as error:
        raise OSError(
            f"this machine cannot connect to itself at 127.0.0.1 ({error.strerror or error}), as vLLM has to: bring "
            "the loopback interface up (ip link set lo up), or run the container with a network"
        ) from error


@contextmanager
def among_ranks() -> Iterator[dict[str, Any]]:
    """Yield the arguments of ``vllm.LLM`` with which each rank gets an engine of its own; empty without a process
    group. All ranks have to start vLLM at the same time, because it creates process groups from the trainer's. The
    environment variables from which vLLM reads rank and GPU are set within the context."""
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
    """Import and register the model classes of ``architectures``, so that vLLM reads their properties in this process.
    vLLM would otherwise start another process, which imports vLLM again and takes 12 s at the first start on a
    machine."""
    from vllm import ModelRegistry

    for name in architectures:
        if (known := ModelRegistry.models.get(name)) is not None:
            ModelRegistry.register_model(name, known.load_model_cls())


def lacks(fmt: Format | None) -> bool:
    """Return whether vLLM has no kernels on this machine that multiply 16-bit activations by weights of the format
    ``fmt`` (None for a base that is not quantised)."""
    from vllm.platforms import current_platform

    on_blackwell = bool(current_platform.has_device_capability(100))
    return is_unpacked(fmt, on_gpu=current_platform.is_cuda(), on_blackwell=on_blackwell)


def decoding_kernel(
    wanted: Literal["auto", "native", "humming"], fmt: Format | None, dtype: torch.dtype
) -> Literal["native", "humming"]:
    """Resolve the setting ``decoding_kernel``: "auto" becomes "native" if this project's CUDA kernels can run with the
    base's format and compute dtype, and else "humming" (the kernels that vLLM chooses). Does not import vLLM."""
    if wanted != "auto":
        return wanted
    return "humming" if native.lacks(fmt, dtype) else "native"


def check_kernel(kernel: Literal["native", "humming"], fmt: Format | None, dtype: torch.dtype) -> None:
    """Raise ValueError if ``kernel`` is "native" and this project's CUDA kernels cannot run."""
    if kernel == "native" and (missing := native.lacks(fmt, dtype)):
        raise ValueError(f"decoding_kernel is 'native', which needs {', and '.join(missing)}; set it to 'auto'")


def check_head_dims(config: PretrainedConfig) -> None:
    """Raise ValueError if vLLM's attention on a CPU does not support the dimension of the model's heads; vLLM itself
    would fail only in its first forward pass."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    known = CPUAttentionBackend.get_supported_head_sizes()
    if other := next((dim for dim in head_dims(config) if dim not in known), None):
        raise ValueError(
            f"the base has attention heads of dimension {other}, which vLLM does not compute on a CPU; expected one of "
            f"{', '.join(map(str, known))}: set model.engine to qerl_pl.rollout.hf.TransformersEngine, or use a GPU"
        )


def by_vllms_kernels(fmt: Format | None, kernel: Literal["native", "humming"]) -> bool:
    """Return whether vLLM's own kernels, and not this project's, compute linear layers with 4-bit weights on a GPU."""
    return kernel == "humming" and fmt is not None and not lacks(fmt)


def log_any_order(fmt: Format | None, dtype: torch.dtype, kernel: Literal["native", "humming"]) -> None:
    """Log that equal calls may sample different tokens, if vLLM's own kernels multiply by 4-bit weights on a GPU: those
    of Humming, and perhaps others, add partial sums in an order that varies."""
    if fmt is None or not by_vllms_kernels(fmt, kernel):
        return
    missing = native.lacks(fmt, dtype)
    way = f"need {', and '.join(missing)}" if missing else "run if decoding_kernel is 'auto'"
    rank_zero_info(
        f"vLLM's own kernels compute this {fmt.name} base and may add in any order, so equal calls may sample other "
        f"tokens. This project's kernels, which add in a fixed order, {way}"
    )


def log_unpacked(linears: Mapping[str, FrozenLinear], dtype: torch.dtype) -> None:
    """Log that vLLM holds 4-bit ``linears`` dequantised, because it has no kernels for their format."""
    fmt = next(iter(linears.values())).fmt
    size = sum(linear.in_features * linear.out_features for linear in linears.values()) * dtype.itemsize
    rank_zero_info(
        f"vLLM has no kernels for {fmt.name} here: rollouts use the weights dequantised to "
        f"{str(dtype).removeprefix('torch.')}, {in_bytes(size)}"
    )


@contextmanager
def trainers_group(*, engines_own: bool) -> Iterator[None]:
    """Keep the trainer's default process group within this context, in which vLLM shuts down and would destroy it; if
    the group is the engine's own, destroy it at the end instead."""
    with nullcontext() if engines_own else patches.kept_process_group():
        yield
    if engines_own and dist.is_initialized():
        dist.destroy_process_group()


def log_starting() -> None:
    """Log that vLLM starts, why this may take minutes, and why changes of vLLM for speed are off, if they are."""
    rank_zero_info("vLLM starts. With a new model or new settings it compiles kernels first, which can take minutes")
    if reason := native.why_off():
        rank_zero_info(f"rollouts run without this project's changes of vLLM for speed: {reason}")


def log_started(seconds: Mapping[str, float], linears: Mapping[str, int]) -> None:
    """Log the seconds of each phase of vLLM's start, and how many ``linears`` each kernel class computes."""
    kernels = ", ".join(f"{name} ({count} layers)" for name, count in linears.items())
    rank_zero_info(f"vLLM computes linear layers with the classes {kernels}")
    parts = ", ".join(f"{phase} {spent:.1f}" for phase, spent in seconds.items())
    rank_zero_info(f"vLLM started in {sum(seconds.values()):.1f} s: {parts}")


def check_fused_scales(base: str) -> None:
    """Raise ValueError for a checkpoint with different tensor scales for q, k and v, or gate and up: on a GPU, vLLM
    fuses these linear layers, uses the largest of their scales for all of them, and only warns."""
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
    """Prepare vLLM's kernels before it starts on a GPU: check the base's tensor scales, load Humming if it is used, and
    log if equal calls may give different results."""
    check_fused_scales(policy.base)
    by_humming = find_spec("humming") is not None and torch.cuda.get_device_capability() == (9, 0)
    if by_humming and by_vllms_kernels(policy.packed_format, kernel):
        # Registers Humming's operators with torch. Otherwise vLLM would load cached graphs that call these operators
        # before Humming registers them, fail, and compile the graphs again.
        import_module("humming.ops.utils").init_humming_launcher()
    log_any_order(policy.packed_format, dtype, kernel)
