"""Run-time patches of vLLM that only make it faster, and that are applied only to tested versions of vLLM. Patches
without which results would be wrong are in ``rollout/vllm/patches.py``, which also says how a patch is written."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from qerl_pl.rollout.vllm.replacing import expect, replace, replace_once, replaced


def parallel_token_scores() -> None:
    """Compute the log-probabilities of sampled tokens in parallel over the vocabulary.

    Symptom: with log-probabilities on, which RL needs, sampling takes a large part of a decoding step.
    Cause: vLLM runs one Triton program per sequence, which reads the logits three times, block after block.
    Versions: vLLM 0.32. Upstream: no issue known.
    """
    from qerl_pl.hopper.sampler import sampled_scores

    sampler: Any = import_module("vllm.v1.worker.gpu.sample.sampler")
    takes = ("logits", "num_logprobs", "sampled_token_ids", "cu_num_logits")
    replace_once(sampler, "compute_topk_scores", lambda _: sampled_scores, takes=takes)


def state_at_fixed_addresses() -> None:
    """Keep vLLM's tables with the state of sequences, such as their temperatures, at fixed addresses in GPU memory, and
    copy them from the host only if they have changed.

    Symptom: in each decoding step the host copies 16 small tables, nearly always unchanged, and kernels read them from
        host memory. Since the tables' addresses change, these kernels cannot be in a CUDA graph.
    Cause: vLLM writes each table alternately to one of two buffers in the host's memory.
    Versions: vLLM 0.32. Upstream: no issue known.
    """
    from qerl_pl.hopper.sampler import copy_if_changed

    table: Any = import_module("vllm.v1.worker.gpu.buffer_utils").UvaBackedTensor
    replace_once(table, "copy_to_uva", lambda _: copy_if_changed, takes=("self", "n"))


def graphs_with_adapter() -> None:
    """Capture CUDA graphs only for forward passes with the adapter; passes without it, which are few, run without a
    graph.

    Symptom: when the kernels have been compiled before, capturing graphs takes most of the engine's start, and graphs
        that no rollout uses take memory.
    Cause: vLLM captures each graph twice, with and without an adapter, whatever ``cudagraph_specialize_lora`` says.
    Versions: vLLM 0.32. Upstream: no issue known.
    """
    runner: Any = import_module("vllm.v1.worker.gpu.model_runner")
    replace_once(
        runner,
        "get_lora_capture_cases",
        lambda cases: lambda *configs: [number for number in cases(*configs) if number > 0] or [0],
        takes=("lora_config", "compilation_config"),
    )


def warmup_without_unused_kernels() -> None:
    """Before rollouts, compile only those kernels of vLLM's sampler that rollouts use by default.

    Symptom: the first start on a machine spends 12 s on kernels that most runs never call: top-p, top-k, min-p,
    penalties, logit biases, bad words. A run that needs one of them compiles it in its first rollout.
    Cause: vLLM warms its sampler up with parameters that call all of its kernels.
    Versions: vLLM 0.32. Upstream: no issue known.
    """
    from vllm import SamplingParams

    def used_by_rollouts() -> SamplingParams:
        return SamplingParams(temperature=0.9, seed=0, logprobs=0)

    replace(SamplingParams, "for_sampler_warmup", staticmethod(used_by_rollouts), takes=())


@contextmanager
def native_nvfp4_linears(kernel: Callable[[], Any], update: Callable[..., Any]) -> Iterator[None]:
    """Make vLLM compute, by this project's kernel class, the NVFP4 linear layers with 16-bit activations that it loads
    within this context.

    Symptom: with few sequences, NVFP4 decodes no faster than bf16, and equal calls may sample different tokens.
    Cause: vLLM chooses from a fixed list of its own kernel classes, and its LoRA layers add the adapter afterwards.
    Versions: vLLM 0.32. Upstream: no issue known.

    ``kernel`` creates the kernel object of one linear layer. ``update`` computes a linear layer together with its LoRA
    adapter; it replaces ``_apply_sync`` of vLLM's LoRA layers permanently, and calls the replaced method for other
    kernel classes.
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
    """Make vLLM, within this context, allocate the 4-bit weights of NVFP4 linear layers in host memory, where they take
    no physical memory until they are written.

    Symptom: an engine that will use the trainer's copy of the base model first puts a second copy into GPU memory.
    Cause: vLLM allocates the weights of all linear layers on the GPU before it reads them from the checkpoint.
    Versions: vLLM 0.32. Upstream: no issue known.
    """
    scheme, modelopt = _nvfp4_modules()

    sizes = ("output_partition_sizes", "input_size_per_partition", "params_dtype", "weight_loader")
    first, second, name = scheme.CompressedTensorsW4A4Fp4, modelopt.KNvfp4Static, "create_weights"
    with (
        replaced(first, name, _on_host(first.create_weights), takes=("self", "layer", *sizes)),
        replaced(second, name, _on_host(second.create_weights), takes=("self", "layer", "role", "ctx", "shapes", "wl")),
    ):
        yield


@contextmanager
def native_nvfp4_experts(install: Callable[[Any, Any], bool]) -> Iterator[None]:
    """Make vLLM compute, by this project's kernel class, the NVFP4 experts that it loads within this context, and
    allocate their weights in host memory, where they take no physical memory until they are written.

    Symptom: trainer and vLLM each have a copy of the experts, which are nearly all weights of a mixture-of-experts
    model.
    Cause: vLLM allocates the experts' weights on the GPU, reads them, and rearranges them for one of its own kernels.
    Versions: vLLM 0.32. Upstream: no issue known.

    ``install`` is called with vLLM's quantisation method and each MoE layer, after loading; it returns False if vLLM is
    to convert the layer's weights itself.
    """
    layers = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
    method = import_module(f"{layers}.compressed_tensors_moe_w4a4_nvfp4").CompressedTensorsW4A4Nvfp4MoEMethod
    convert = method.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if not install(self, layer):
            convert(self, layer)

    sizes = ("num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype")
    with (
        replaced(method, "process_weights_after_loading", process_weights_after_loading, takes=("self", "layer")),
        replaced(method, "create_weights", _on_host(method.create_weights), takes=("self", "layer", *sizes)),
    ):
        yield


def _on_host(create: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of vLLM that creates the weights of a layer, so that it allocates them in host memory."""

    def create_weights(*args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            create(*args, **kwargs)

    return create_weights


def _nvfp4_modules() -> tuple[Any, Any]:
    """Import the modules of vLLM that define NVFP4 linear layers, for compressed-tensors and for ModelOpt."""
    layers = "vllm.model_executor.layers.quantization"
    scheme = import_module(f"{layers}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4")
    return scheme, import_module(f"{layers}.modelopt")


def cache_of_unchanged_blocks(
    manager: Any, allocate_slots: Callable[..., Any], cache_blocks: Callable[..., Any]
) -> None:
    """Skip the calls of vLLM's scheduler to the KV-cache manager for tokens that neither need a new block of the KV
    cache nor fill one.

    Symptom: with 128 or more sequences of a small model, the CPU takes as long for a decoding step as the GPU.
    Cause: for each token vLLM checks whether its request needs a new block, and whether it has filled one.
    Versions: vLLM 0.32. Upstream: no issue known.

    The methods of ``manager``, the ``KVCacheManager`` of one engine, are replaced.
    """
    replace(manager, "allocate_slots", allocate_slots, takes=("request", "num_new_tokens"))
    replace(manager, "cache_blocks", cache_blocks, takes=("request", "num_computed_tokens"))


def graphs_of_decoding_steps(runner: Any, graphs: Any) -> None:
    """Run the kernels that vLLM launches before and after the model's CUDA graph as CUDA graphs, too.

    Symptom: with few sequences, the GPU waits for the host, which takes 2 to 4 ms for a decoding step.
    Cause: outside of the model's graph vLLM launches about 30 kernels per step, one after another.
    Versions: vLLM 0.32. Upstream: no issue known.

    The methods of ``runner``, the ``GPUModelRunner`` of one engine, are replaced by those of ``graphs``, a
    ``decoding_graphs.DecodingGraphs``.
    """
    inputs = ("scheduler_output", "batch_req_state", "batch_desc", "num_active_loras")
    updated = ("idx_mapping", "sampled_tokens", "num_sampled", "num_rejected", "query_start_loc")
    replace(runner, "prepare_inputs", graphs.prepare_inputs, takes=inputs)
    replace(runner, "prepare_attn", graphs.prepare_attn, takes=("input_batch",))
    replace(runner, "sample", graphs.sample, takes=("hidden_states", "input_batch", "grammar_output"))
    replace(runner, "postprocess_sampled", graphs.postprocess_sampled, takes=updated)
    metadata = ("input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups", "kv_cache_config")
    replace(runner.model_state, "prepare_attn", graphs.build_metadata, takes=metadata)


def speculation_without_other_tokens(runner: Any, verifier: Any, drafts: Any) -> None:
    """Make vLLM accept a drafted token only if it equals the token that would be sampled at its position without
    drafts, and take drafts from other completions of the prompt, too.

    Symptom: with vLLM's verification, drafts decide which tokens are sampled; vLLM drafts from a sequence's text only.
    Cause: vLLM accepts or rejects a draft by a further random number, and replaces a rejected one by another token.
    Versions: vLLM 0.32. Upstream: https://github.com/vllm-project/vllm/pull/47386 states the rule that is used here.

    Args:
        runner: the ``GPUModelRunner`` of one engine.
        verifier: a ``speculation.EqualDrafts``.
        drafts: a ``speculation.GroupDrafts``, whose methods replace vLLM's.
    """
    verified = ("logits", "input_batch", "draft_logits", "invalid_drafts")
    expect(type(runner.rejection_sampler), "__call__", ("self", *verified))
    runner.rejection_sampler = verifier
    added = ("req_id", "prompt_len", "all_token_ids", "num_computed_tokens", "max_tokens")
    replace(runner.req_states, "add_request", drafts.add_request, takes=added)
    proposed = ("input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states")
    sampled = ("num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds")
    replace(runner.speculator, "propose", drafts.propose, takes=(*proposed, *sampled))


PATCHES: tuple[Callable[..., Any], ...] = (
    parallel_token_scores,
    state_at_fixed_addresses,
    graphs_with_adapter,
    warmup_without_unused_kernels,
    native_nvfp4_linears,
    packed_weights_on_host,
    native_nvfp4_experts,
    cache_of_unchanged_blocks,
    graphs_of_decoding_steps,
    speculation_without_other_tokens,
)
