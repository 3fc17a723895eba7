"""Arguments of ``vllm.LLM`` that follow from the policy, its base model and this machine."""

from typing import Any, Literal, get_args

import torch
from transformers import PretrainedConfig

from qerl_pl.memory.parts import KV_BLOCK, kv_cache
from qerl_pl.memory.settings import DEFAULT_BATCHED_TOKENS, EngineMemory
from qerl_pl.memory.shape import config_shape
from qerl_pl.model.layers import num_recurrent_layers
from qerl_pl.policy.lora_experts import MULTIPLE
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.vllm import norms
from qerl_pl.rollout.vllm.setup import lacks, log_unpacked

CPU_CACHE_LIMIT, CPU_BLOCK = 4 * 2**30, 128
UNUSED_SHARE = 0.001


def llm_arguments(
    policy: Policy,
    memory: EngineMemory,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    kernel: Literal["native", "humming"],
    hooks: Any,
    recorder: Any,
    on_cpu: bool,
) -> dict[str, Any]:
    """Build the arguments of ``vllm.LLM`` that depend on the policy and the machine. If ``memory.kv_cache_bytes`` is
    None, ``platform_arguments`` chooses the size of the KV cache. ``hooks`` and ``recorder`` are arguments of
    ``loader.register_loader``, which is called here. Norms whose weights get noise (AQN) keep these weights in fp32,
    because 16-bit weights would round small noise away; logits are computed in fp32, as in the trainer."""
    from qerl_pl.rollout.vllm.loader import register_loader

    arguments = policy_arguments(policy, dtype=dtype, max_model_len=max_model_len, decoding_kernel=kernel)
    if not on_cpu:
        arguments["compilation_config"] = {
            "inductor_compile_config": inductor_settings(kernel, recurrent=num_recurrent_layers(policy.config) > 0)
        }
    linears = policy.packed_linears()
    unpacked, packed = (linears, {}) if lacks(policy.packed_format) else ({}, linears)
    arguments["load_format"] = register_loader(policy.embedding_weights(), unpacked, packed, hooks, recorder)
    arguments["hf_overrides"] = overrides = query_scaling(policy.config)
    if dtype != torch.float32:
        overrides["head_dtype"] = "float32"
    if unpacked:
        overrides["quantization_config"] = None
        log_unpacked(unpacked, dtype)
    # Norms that round the normalised input to 16 bits before they multiply by the weight ("norms" is in
    # ``elementwise``) need arguments that select an implementation for fp32 weights. Norms of other families multiply
    # first, and all of vLLM's implementations of these support fp32 weights.
    if "norms" in policy.family.elementwise:
        arguments |= norms.arguments(compiled=not (on_cpu or memory.enforce_eager))
    arguments |= platform_arguments(policy.config, memory, dtype=dtype, max_model_len=max_model_len, on_cpu=on_cpu)
    if memory.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = memory.kv_cache_bytes
    return arguments


def query_scaling(config: PretrainedConfig) -> dict[str, Any]:
    """Return the settings of Ministral 3's scaling of queries as overrides of the model's config; empty for other
    models. vLLM 0.32 reads them only from checkpoints in Mistral's own format, and would omit the scaling."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "llama_4_scaling_beta" not in rope:
        return {}
    original = rope["original_max_position_embeddings"]
    return {"llama_4_scaling": {"beta": rope["llama_4_scaling_beta"], "original_max_position_embeddings": original}}


def recurrent_arguments(config: PretrainedConfig) -> dict[str, Any]:
    """Build the arguments of ``vllm.LLM`` that models with recurrent layers need, and that override the user's
    settings; empty for other models. The prefix cache is off, because vLLM 0.32 stores recurrent states in it only at
    the ends of blocks of hundreds of tokens, and only if prompts are split into chunks. Prompts are computed by Triton
    kernels, because FlashInfer's, which vLLM would use on Hopper, are compiled during the first rollout."""
    if not num_recurrent_layers(config):
        return {}
    return {"enable_prefix_caching": False, "gdn_prefill_backend": "triton"}


def policy_arguments(
    policy: Policy, *, dtype: torch.dtype, max_model_len: int, decoding_kernel: Literal["native", "humming"]
) -> dict[str, Any]:
    """Build the arguments of ``vllm.LLM`` that depend on the policy, its base model and its adapter.

    ``decoding_kernel`` says which kernels multiply by NVFP4 weights: this project's ("native"), or those that vLLM
    chooses, such as the library Humming's ("humming"). Raises ValueError if the adapter's rank is larger than vLLM
    supports."""
    from vllm.platforms import current_platform

    from qerl_pl.rollout.vllm.experts import RANK

    return {
        "model": policy.base,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_model_len,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling defaults are vLLM's and not the checkpoint's
        "logprobs_mode": "processed_logprobs",
        "enable_lora": True,
        "max_lora_rank": accepted_rank(policy.peft_config.r),
        "max_loras": 1,
        "lora_target_modules": sorted(policy.peft_config.target_modules or ()) + ["experts"] * (policy.expert_rank > 0),
        # vLLM includes these values in the keys of its cache of compiled graphs, so a graph that was compiled with
        # other kernels is not used.
        "additional_config": {
            **({RANK: accepted_rank(max(MULTIPLE, policy.expert_rank))} if policy.expert_rank else {}),
            "adapter_kernels": "qerl_pl",
            "norms": "float32",
            "nvfp4_linears": "NativeLinear, gated" if decoding_kernel == "native" else "vLLM's",
        },
        "scheduler_cls": "qerl_pl.rollout.vllm.scheduler.RolloutScheduler",
        "enable_sleep_mode": current_platform.is_sleep_mode_available(),
        "use_tqdm_on_load": False,
    }


def inductor_settings(kernel: Literal["native", "humming"], *, recurrent: bool) -> dict[str, bool]:
    """Choose the settings of Inductor, torch's compiler, for the operations of vLLM's model that are neither linear
    layers nor attention, on a GPU. ``recurrent`` says whether some layers have a recurrent state."""
    # Choose the tile sizes of reductions by a fixed rule, which costs no measurable time. Inductor otherwise takes the
    # tile sizes that are fastest when a process first runs them, so the last bits of sums would differ between
    # processes.
    settings = {"deterministic": True}
    if kernel == "native" and not recurrent:
        # This project's CUDA kernels for linears ("native") let the next kernel on the CUDA stream start before they
        # end (programmatic dependent launch). With this option, kernels that Inductor generates do so too, which saves
        # time because a decoding step has hundreds of short kernels. Recurrent layers fill a tensor between two of
        # their kernels. The fill that Inductor generates does not wait for the first of the two kernels. The second
        # kernel waits for the fill only, so it could read what the first has not yet written. Models with recurrent
        # layers therefore do without this option.
        settings["triton.enable_pdl"] = True
    return settings


def accepted_rank(rank: int) -> int:
    """Return the smallest adapter rank supported by vLLM that is at least ``rank``. Raises ValueError if there is
    none."""
    from vllm.config.lora import MaxLoRARanks

    accepted = sorted(get_args(MaxLoRARanks))
    if rank > accepted[-1]:
        raise ValueError(f"model.lora.rank is {rank}; vLLM takes at most {accepted[-1]}")
    return next(larger for larger in accepted if larger >= rank)


def platform_arguments(
    config: PretrainedConfig, engine: EngineMemory, *, dtype: torch.dtype, max_model_len: int, on_cpu: bool
) -> dict[str, Any]:
    """Build the arguments of ``vllm.LLM`` for this platform, such as the size of the KV cache. The cache holds
    ``max_num_seqs`` sequences of the longest length, but takes at most half of the GPU's free memory, or 4 GiB on a
    CPU."""
    wanted = kv_cache(
        config_shape(config, None, dtype),
        dtype.itemsize,
        engine.kv_cache_dtype,
        block=engine.block_size or (CPU_BLOCK if on_cpu else KV_BLOCK),
        length=max_model_len,
        num_sequences=engine.max_num_seqs,
    )
    if on_cpu:
        # Prompts are not split into chunks: after each chunk of a request with a seed, vLLM 0.32 sets the random
        # generator's offset, which torch's CPU generator does not support.
        return {"kv_cache_memory_bytes": min(wanted, CPU_CACHE_LIMIT), "enable_chunked_prefill": False}
    free, _total = torch.cuda.mem_get_info()
    # Since the cache's size is given, ``gpu_memory_utilization`` only makes vLLM refuse a start if less memory is free.
    sizes = {"gpu_memory_utilization": UNUSED_SHARE, "max_num_batched_tokens": DEFAULT_BATCHED_TOKENS}
    return {"kv_cache_memory_bytes": min(wanted, free // 2), **sizes}
