"""Run-time patches of vLLM, Humming and torch: all places where this project replaces an attribute of another package;
those of NVFP4 linears are in ``nvfp4_patches``.

vLLM has no setting or hook for these changes, so attributes of its modules and classes are replaced in this process; no
file of another package is changed. Each function below is one patch. Its docstring says which symptom occurs without
it, the cause, the versions that it was written for, and the upstream discussion. A patch raises an error with the
attribute's name if the attribute is gone or has another signature, so an engine with an incompatible version of vLLM
fails at its start. ``PATCHES`` lists the patches, and ``python -m qerl_pl doctor`` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import distributed as dist

from qerl_pl.rollout.vllm.nvfp4_patches import native_nvfp4_linears, packed_weights_on_host
from qerl_pl.rollout.vllm.replacing import expect, replace, replace_module, replace_once, replaced
from qerl_pl.rollout.vllm.stderr import without_lines


def apply_all() -> None:
    """Apply the patches that are in force for the whole process; a second call changes nothing.

    All other patches are in force for one engine, and are applied when it starts. On platforms other than CPU and CUDA
    nothing is patched.

    Raises:
        RuntimeError: an attribute is gone or has another signature.
    """
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        return
    fast_adapters()
    text_models_without_torchvision()
    if current_platform.is_cuda():
        humming_schedules()
        parallel_token_scores()
        state_at_fixed_addresses()
        graphs_with_adapter()
        warmup_without_unused_kernels()
    else:
        delta_nets_in_fp32()


def fast_adapters() -> None:
    """Use this project's LoRA kernels.

    Symptom: with LoRA a decoding step takes up to twice as long on CUDA, and on a CPU several times as long.
    Cause: vLLM's LoRA kernels support many adapters at once and take several launches per linear.
    Versions: vLLM 0.32. Upstream: none; the kernels' name is returned by a method of vLLM's platform, without a
    setting.
    """
    from vllm.platforms import current_platform

    wrapper = f"qerl_pl.rollout.vllm.{'cpu' if current_platform.is_cpu() else 'cuda'}.adapter_kernels"
    if current_platform.get_punica_wrapper() != wrapper:
        replace(type(current_platform), "get_punica_wrapper", classmethod(lambda cls: wrapper), takes=())


def parallel_token_scores() -> None:
    """Compute the log-probabilities of sampled tokens in parallel over the vocabulary.

    Symptom: with log-probabilities on, which RL needs, sampling takes a large part of a decoding step.
    Cause: vLLM runs one Triton program per sequence, which reads the logits three times, block after block.
    Versions: vLLM 0.32. Upstream: none known.
    """
    from qerl_pl.rollout.vllm.sampler import sampled_scores

    sampler: Any = import_module("vllm.v1.worker.gpu.sample.sampler")
    takes = ("logits", "num_logprobs", "sampled_token_ids", "cu_num_logits")
    replace_once(sampler, "compute_topk_scores", lambda own: sampled_scores, takes=takes)


def state_at_fixed_addresses() -> None:
    """Keep the tables of the sequences' state, such as temperatures, at fixed addresses in the GPU's memory, and copy
    them only if they have changed.

    Symptom: in each decoding step the host copies 16 small tables, nearly always unchanged, and kernels read them from
    the host's memory. Since their addresses change, these kernels cannot be in a CUDA graph.
    Cause: vLLM writes each table to one of two buffers in the host's memory, in turns.
    Versions: vLLM 0.32. Upstream: none known.
    """
    from qerl_pl.rollout.vllm.state_tables import copy_if_changed

    table: Any = import_module("vllm.v1.worker.gpu.buffer_utils").UvaBackedTensor
    replace_once(table, "copy_to_uva", lambda own: copy_if_changed, takes=("self", "n"))


def graphs_with_adapter() -> None:
    """Capture CUDA graphs only for passes with the adapter; other passes, which are few, run without a graph.

    Symptom: capturing graphs takes most of a later start, and graphs that no rollout uses take memory.
    Cause: vLLM captures each graph twice, with and without an adapter, whatever ``cudagraph_specialize_lora`` says.
    Versions: vLLM 0.32. Upstream: none known.
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
    Versions: vLLM 0.32. Upstream: none known.
    """
    from vllm import SamplingParams

    def used_by_rollouts() -> SamplingParams:
        return SamplingParams(temperature=0.9, seed=0, logprobs=0)

    replace(SamplingParams, "for_sampler_warmup", staticmethod(used_by_rollouts), takes=())


def humming_schedules() -> None:
    """Give Humming's GEMM faster tile sizes on Hopper (see ``humming.decoding_schedule``); without Humming do nothing.

    Symptom: 4-bit linears of a decoding step are slower than Humming's kernel could compute them.
    Cause: Humming's rule for tile sizes is not tuned for these shapes (docs/performance.md).
    Versions: humming-kernels 0.1. Upstream: none known.
    """
    if find_spec("humming") is None:
        return
    from qerl_pl.rollout.vllm.humming import HOPPER, schedules_on

    tune: Any = import_module("humming.tune")
    rule: Any = import_module("humming.tune.sm90").Sm90Heuristics
    expect(rule, "get_config", ("layer_config", "shape_m"))
    if tune.heuristics_map[HOPPER] is rule:
        tune.heuristics_map[HOPPER] = schedules_on(rule)


def delta_nets_in_fp32() -> None:
    """Compute gated delta nets (Qwen3.5) in fp32 on a CPU.

    Symptom: "CPU GDN attention requires BF16." with the first prompt in fp32.
    Cause: vLLM's CPU kernels for these layers exist in bf16 only.
    Versions: vLLM 0.32. Upstream: none known.
    """
    from qerl_pl.rollout.vllm.cpu_delta_net import with_fp32

    ops: Any = import_module("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention")
    replace_once(ops, "cpu_gdn_attention_core", with_fp32, takes=("mixed_qkv", "b", "a", "core_attn_out", "layer_name"))


def text_models_without_torchvision() -> None:
    """Let vLLM import the text model of Qwen3.5 where torchvision is not installed; with torchvision do nothing.

    Symptom: "Model architectures ['Qwen3_5ForCausalLM'] failed to be inspected", caused by a missing torchvision.
    Cause: vLLM defines the text model in one file with the vision model, which imports a function for the sizes of
    images from a module of transformers that needs torchvision; transformers has the same function in a module without
    it.
    Versions: vLLM 0.32, transformers 5.16 to 5.19. Upstream: none known.
    """
    models = "transformers.models.qwen2_vl.image_processing"
    if find_spec("torchvision") is None:
        replace_module(f"{models}_qwen2_vl", f"{models}_pil_qwen2_vl", has={"smart_resize": ("height", "width")})


def cache_of_unchanged_blocks(
    manager: Any, allocate_slots: Callable[..., Any], cache_blocks: Callable[..., Any]
) -> None:
    """Skip the scheduler's calls to the KV-cache manager for tokens that need no new block of the KV cache and fill
    none.

    Symptom: with 128 or more sequences of a small model, the CPU takes as long for a decoding step as the GPU.
    Cause: for each token vLLM checks whether its request needs a new block, and whether it has filled one.
    Versions: vLLM 0.32. Upstream: none known.

    Args:
        manager: the ``KVCacheManager`` of one engine.
        allocate_slots: replaces the manager's method of this name.
        cache_blocks: replaces the manager's method of this name.
    """
    replace(manager, "allocate_slots", allocate_slots, takes=("request", "num_new_tokens"))
    replace(manager, "cache_blocks", cache_blocks, takes=("request", "num_computed_tokens"))


def graphs_of_decoding_steps(runner: Any, graphs: Any) -> None:
    """Run what vLLM launches before and after the model's CUDA graph as CUDA graphs, too.

    Symptom: with few sequences, the GPU waits for the host, which takes 2 to 4 ms for a decoding step.
    Cause: outside of the model's graph vLLM launches about 30 kernels per step, one after another.
    Versions: vLLM 0.32. Upstream: none known.

    Args:
        runner: the ``GPUModelRunner`` of one engine.
        graphs: the object that has the new methods, a ``decoding_graphs.DecodingGraphs``.
    """
    inputs = ("scheduler_output", "batch_req_state", "batch_desc", "num_active_loras")
    updated = ("idx_mapping", "sampled_tokens", "num_sampled", "num_rejected", "query_start_loc")
    replace(runner, "prepare_inputs", graphs.prepare_inputs, takes=inputs)
    replace(runner, "prepare_attn", graphs.prepare_attn, takes=("input_batch",))
    replace(runner, "sample", graphs.sample, takes=("hidden_states", "input_batch", "grammar_output"))
    replace(runner, "postprocess_sampled", graphs.postprocess_sampled, takes=updated)
    metadata = ("input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups", "kv_cache_config")
    replace(runner.model_state, "prepare_attn", graphs.build_metadata, takes=metadata)


@contextmanager
def memory_of_ended_engines(pool: Any, current_usage: Callable[[], int]) -> Iterator[None]:
    """Let an engine start although memory of an ended engine is still allocated in vLLM's pool.

    Symptom: "CuMem allocator can only be used for one instance per process" when a process starts its second engine.
    Cause: before loading weights, vLLM refuses to start if any byte of its memory pool is in use.
    Versions: vLLM 0.32. Upstream: none known.

    Args:
        pool: vLLM's ``CuMemAllocator``.
        current_usage: replaces ``get_current_usage``; returns the bytes to count as in use.
    """
    replace(pool, "get_current_usage", current_usage, takes=())
    try:
        yield
    finally:
        del pool.get_current_usage  # the method of the pool's class is then used again


@contextmanager
def sleep_beside_other_processes(given_back: Callable[[], int]) -> Iterator[None]:
    """Let an engine sleep while other processes take memory of the same GPU.

    Symptom: "Memory usage increased after sleeping", an AssertionError that ends the run.
    Cause: vLLM compares the free memory of the whole GPU before and after it frees its own.
    Versions: vLLM 0.32. Upstream: none known.

    Args:
        given_back: returns the bytes that vLLM's pool has given back, which are compared instead.
    """
    plainly = torch.accelerator.get_memory_info

    def own_memory(device_index: Any = None) -> tuple[int, int]:
        return given_back(), plainly(device_index)[1]

    with replaced(torch.accelerator, "get_memory_info", own_memory, takes=("device_index",)):
        yield


@contextmanager
def decoder_classes_apart() -> Iterator[None]:
    """Make vLLM use a subclass of the decoder's class if it runs a model by transformers' code.

    Symptom: once an engine of OLMo 3 has started, the trainer's model fails: "no attribute 'do_not_compile'".
    Cause: vLLM's Transformers backend decorates the decoder's class for torch.compile, and the trainer's model has the
    same class.
    Versions: vLLM 0.32. Upstream: none known.
    """
    base: Any = import_module("vllm.model_executor.models.transformers.base").Base
    models: Any = import_module("transformers").AutoModel._model_mapping
    decorate, added = base._decorate_cls_for_torch_compile, []

    def decorate_subclass(self: Any, cls: type, **options: Any) -> None:
        own = type(cls.__name__, (cls,), {"__module__": cls.__module__})
        decorate(self, own, **options)
        if type(self.config) not in models._extra_content:
            models._extra_content[type(self.config)] = own  # vLLM looks up the class of its model in this mapping
            added.append(type(self.config))

    takes = ("self", "cls", "dynamic_arg_dims", "enable_if", "is_encoder")
    with replaced(base, "_decorate_cls_for_torch_compile", decorate_subclass, takes=takes), ExitStack() as at_end:
        at_end.callback(lambda: [models._extra_content.pop(config) for config in added])
        yield


@contextmanager
def quiet_memory_binding() -> Iterator[None]:
    """Keep an engine that starts on a CPU from writing a line about NUMA nodes.

    Symptom: "Warning: NUMA binding: Using MEMBIND policy ..." on the terminal of every run, though nothing is wrong.
    Cause: vLLM's C++ code reports its default as a warning.
    Versions: vLLM 0.32. Upstream: none known.
    """
    import_module("vllm._custom_ops")  # registers the operator
    operators: Any = torch.ops._C
    bind = operators.init_cpu_memory_env

    def bind_quietly(*arguments: Any) -> Any:
        with without_lines("NUMA binding: Using"):
            return bind(*arguments)

    with replaced(operators, "init_cpu_memory_env", bind_quietly, takes=()):
        yield


@contextmanager
def kept_process_group() -> Iterator[None]:
    """Keep torch's default process group, which belongs to the trainer, when an engine ends within this context.

    Symptom: in a run of several ranks, the first collective after an engine was closed fails.
    Cause: vLLM destroys the default process group at its end, even if it did not create it.
    Versions: vLLM 0.32. Upstream: none known. Other groups than the default one are destroyed as before.
    """
    destroy = dist.destroy_process_group
    others = lambda group=None: destroy(group) if group is not None else None  # noqa: E731
    with replaced(dist, "destroy_process_group", others, takes=("group",)):
        yield


PATCHES: tuple[Callable[..., Any], ...] = (
    fast_adapters,
    parallel_token_scores,
    state_at_fixed_addresses,
    graphs_with_adapter,
    warmup_without_unused_kernels,
    humming_schedules,
    delta_nets_in_fp32,
    text_models_without_torchvision,
    native_nvfp4_linears,
    packed_weights_on_host,
    cache_of_unchanged_blocks,
    graphs_of_decoding_steps,
    memory_of_ended_engines,
    sleep_beside_other_processes,
    decoder_classes_apart,
    quiet_memory_binding,
    kept_process_group,
)
