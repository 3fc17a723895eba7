"""How vLLM is started for a policy: the environment variables that it reads and the arguments that it gets."""

from __future__ import annotations

import os
from typing import Any, get_args

import torch
from transformers import PretrainedConfig

from qerl_pl.policy.lora import PROJECTIONS
from qerl_pl.policy.policy import Policy
from qerl_pl.quant.files import Checkpoint
from qerl_pl.quant.quantize import fused_groups

DEFAULT_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are for servers; INFO shows, for instance, which kernels it chose
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # that sampler knows no per-request seeds
}
TENSOR_SCALES = (".weight_global_scale", ".weight_scale_2")  # of compressed-tensors and of ModelOpt
CPU_CACHE_LIMIT = 4 * 2**30


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads when it is imported; what the user set stays.

    Raises:
        ValueError: the user asks for a worker process, where neither adapter nor noise can be written in place.
    """
    found = os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if found != "0":
        raise ValueError(
            f"VLLM_ENABLE_V1_MULTIPROCESSING is {found!r}; vLLM has to run in the trainer's process: unset it"
        )
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def policy_arguments(policy: Policy, *, dtype: torch.dtype, max_model_len: int) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` that follow from the policy.

    Raises:
        ValueError: the adapter's rank is more than vLLM takes, or it is on other linears than those of the blocks.
    """
    from vllm.platforms import current_platform

    targets = set(policy.peft_config.target_modules or ())
    if targets - set(PROJECTIONS):
        raise ValueError(f"lora targets are {sorted(targets)}; adapters reach vLLM on {', '.join(PROJECTIONS)} alone")
    return {
        "model": policy.base,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_model_len,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling is what the caller says, not what the checkpoint's authors prefer
        "logprobs_mode": "processed_logprobs",
        "enable_lora": True,
        "max_lora_rank": accepted_rank(policy.peft_config.r),
        "max_loras": 1,
        "lora_target_modules": sorted(targets),
        "enable_sleep_mode": current_platform.is_sleep_mode_available(),
        "use_tqdm_on_load": False,
    }


def accepted_rank(rank: int) -> int:
    """The smallest rank that vLLM takes and the adapter fits in.

    Raises:
        ValueError: there is none.
    """
    from vllm.config.lora import MaxLoRARanks

    accepted = sorted(get_args(MaxLoRARanks))
    if rank > accepted[-1]:
        raise ValueError(f"lora rank is {rank}; vLLM takes at most {accepted[-1]}")
    return next(larger for larger in accepted if larger >= rank)


def check_fused_scales(base: str) -> None:
    """Refuse a checkpoint that vLLM would misread on a GPU.

    It fuses q/k/v and gate/up there, takes the largest of their tensor scales for all of them, and only warns.

    Raises:
        ValueError: linears that are fused have tensor scales of their own.
    """
    checkpoint = Checkpoint(base)
    for suffix in TENSOR_SCALES:
        linears = [name.removesuffix(suffix) for name in checkpoint.names() if name.endswith(suffix)]
        for group in fused_groups(linears).values():
            scales = [checkpoint.read(member + suffix).item() for member in group]
            if len(set(scales)) > 1:
                raise ValueError(
                    f"{base} has tensor scales {scales} for {group}; vLLM fuses these linears and needs one scale: "
                    "quantise the model with `python -m qerl_pl quantize`"
                )


def cpu_arguments(
    config: PretrainedConfig, *, dtype: torch.dtype, max_model_len: int, max_num_seqs: int
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` on a CPU: a cache for so many of the longest sequences, at most 4 GiB; whole prompts.

    vLLM 0.32 cannot split a prompt over two forward passes there when its request has a seed: it takes back the random
    number drawn at the split by an offset, which the generator of a CPU does not have.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize
    cache_bytes = min(max_num_seqs * max_model_len * token_bytes, CPU_CACHE_LIMIT)
    return {"kv_cache_memory_bytes": cache_bytes, "enable_chunked_prefill": False}
