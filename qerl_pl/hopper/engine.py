"""Entry points of the folder ``qerl_pl/hopper``, which the rollout engine calls through ``qerl_pl.native``."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from qerl_pl.hopper import draft_guard, driver, patches
from qerl_pl.policy.policy import Policy
from qerl_pl.quant.experts import OF_EXPERT
from qerl_pl.quant.selection import fused_groups

PATCHES, guard = patches.PATCHES, draft_guard


def install() -> None:
    """Apply those patches of vLLM that stay in force until the process ends; a second call changes nothing."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        patches.parallel_token_scores()
        patches.state_at_fixed_addresses()
        patches.graphs_with_adapter()
        patches.warmup_without_unused_kernels()


@contextmanager
def loading(policy: Policy) -> Iterator[None]:
    """Make vLLM use the kernels of this project for the NVFP4 layers of the model that it loads within this context
    (``NativeLinear`` for linear layers, ``NativeExperts`` for experts), and let these kernels read the trainer's
    weights, so that vLLM needs no copy. The layers keep these kernels after the context."""
    from qerl_pl.hopper import native_linear, one_copy

    packed = policy.packed_linears()
    linears = {name: linear for name, linear in packed.items() if not OF_EXPERT.fullmatch(name)}
    groups = fused_groups(list(linears), present=linears.keys()).values()
    for outputs, inputs in {
        (sum(linears[name].out_features for name in group), linears[group[0]].in_features) for group in groups
    }:
        driver.start_compiling(native_linear.kernels_for(outputs, inputs))
    one_copy.put_in_tile_order(linears)
    linear_classes = patches.native_nvfp4_linears(native_linear.make, native_linear.apply_with_adapter)
    with linear_classes, patches.packed_weights_on_host(), ExitStack() as of_experts:
        if len(linears) < len(packed):
            from qerl_pl.hopper import native_experts

            of_experts.enter_context(patches.native_nvfp4_experts(native_experts.install))
        yield


def loader_hooks() -> Any:
    """Return the module ``one_copy``. This project's model loader for vLLM calls its functions ``unread``, ``lend`` and
    ``loaded``, so that vLLM uses the trainer's base weights instead of a second copy."""
    from qerl_pl.hopper import one_copy

    return one_copy


def spare(scheduler: Any) -> None:
    """Reduce the CPU time that vLLM's scheduler takes per decoding step, by two changes. The calls of the scheduler to
    the KV-cache manager return at once for a token that neither needs a new block of the KV cache nor fills one. And
    steps in which all requests only decode are scheduled by shorter code, which ``RolloutScheduler.is_lean`` turns on.
    Nothing changes if some layers of the model are not full attention."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    manager, max_model_len = scheduler.kv_cache_manager, scheduler.max_model_len
    groups = manager.coordinator.single_type_managers
    if len(groups) != 1 or type(groups[0]) is not FullAttentionManager:
        return
    [group] = groups
    if group.block_size != manager.block_pool.hash_block_size:
        return
    allocate, cache = manager.allocate_slots, manager.cache_blocks

    def is_cached(request: Any, num_tokens: int) -> bool:
        cached = group.num_cached_block.get(request.request_id, 0)
        return not group.enable_caching or num_tokens // group.block_size <= cached

    def allocate_slots(request: Any, num_new_tokens: int, *, num_lookahead_tokens: int = 0, **others: Any) -> Any:
        if num_new_tokens > 0 and not num_lookahead_tokens and not others:  # a decoding request
            num_tokens = min(request.num_computed_tokens + num_new_tokens, max_model_len)
            room = len(group.req_to_blocks.get(request.request_id, ())) * group.block_size
            if num_tokens <= room and is_cached(request, min(num_tokens, request.num_tokens)):
                return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **others)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if not is_cached(request, num_computed_tokens):
            cache(request, num_computed_tokens)

    patches.cache_of_unchanged_blocks(manager, allocate_slots, cache_blocks)
    scheduler.is_lean = not scheduler.defer_block_free


def use_graphs(worker: Any, most: int) -> None:
    """Make vLLM replay CUDA graphs for the kernels that a decoding step launches before and after the model's decoder
    blocks (``decoding_graphs``)."""
    from qerl_pl.hopper import decoding_graphs

    decoding_graphs.use_graphs(worker, most)


def speculative_arguments(max_num_seqs: int) -> dict[str, Any]:
    """Build the arguments of ``vllm.LLM`` for an engine that uses speculative decoding."""
    from qerl_pl.hopper import speculation

    return speculation.arguments(max_num_seqs)


def speculate(worker: Any) -> Any:
    """Make vLLM draft and verify tokens by the module ``speculation``, which changes no sampled token, and return the
    object that drafts. Its ``forget`` must be called before each call of ``generate``, so that drafts do not depend on
    earlier calls."""
    from qerl_pl.hopper import speculation

    return speculation.install(worker)
