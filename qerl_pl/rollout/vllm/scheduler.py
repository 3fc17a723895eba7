"""Scheduler for vLLM that needs less CPU time per token than vLLM's own; vLLM imports it by its name
(``scheduler_cls``).

With vLLM's own scheduler and many sequences, the CPU takes as long for a decoding step as the GPU. vLLM 0.32 divides
the log-probabilities of a step into one object per request, passes these objects through three classes and appends
log-probabilities token by token. For each token it also checks whether the request needs a new block of the KV cache,
and whether it has filled one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from qerl_pl.rollout.vllm import patches


class RolloutScheduler(AsyncScheduler):
    """Scheduler that collects the log-probabilities of sampled tokens and skips needless calls to the KV-cache manager.

    If requests ask for log-probabilities of more tokens than the sampled ones, vLLM handles all log-probabilities.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        skip_unchanged(self.kv_cache_manager, self.max_model_len)
        self._logprobs: defaultdict[str, list[float]] = defaultdict(list)

    def take_logprobs(self) -> dict[str, list[float]]:
        """Return the log-probabilities collected so far, in nats per sampled token, by the caller's request id, and
        forget them."""
        found = {name.partition("-")[0]: values for name, values in self._logprobs.items()}  # without vLLM's suffix
        self._logprobs.clear()
        return found

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Collect a step's log-probabilities for all requests that got a token, and call vLLM's method of this name, to
        which they are not passed."""
        logprobs = model_runner_output.logprobs
        if logprobs is None or logprobs.logprobs.shape[1] > 1:
            return super().update_from_output(scheduler_output, model_runner_output)
        model_runner_output.logprobs = None
        found = super().update_from_output(scheduler_output, model_runner_output)
        values, rows = logprobs.logprobs[:, 0].tolist(), model_runner_output.req_id_to_index
        for outputs in found.values():
            for output in outputs.outputs:
                if output.new_token_ids:
                    self._logprobs[output.request_id].append(values[rows[output.request_id]])
        return found


def skip_unchanged(manager: KVCacheManager, max_model_len: int) -> None:
    """Make a KV-cache manager return early for tokens that fit into the last KV-cache block of their request without
    filling it.

    With blocks of 16 tokens this saves the work for 15 of 16 tokens. Managers of models with layers other than full
    attention are not changed.
    """
    groups = manager.coordinator.single_type_managers
    if len(groups) != 1 or type(groups[0]) is not FullAttentionManager:
        return
    [group] = groups
    if group.block_size != manager.block_pool.hash_block_size:
        return
    allocate, cache = manager.allocate_slots, manager.cache_blocks

    def is_cached(request: Request, num_tokens: int) -> bool:
        cached = group.num_cached_block.get(request.request_id, 0)
        return not group.enable_caching or num_tokens // group.block_size <= cached

    def allocate_slots(
        request: Request, num_new_tokens: int, *, num_lookahead_tokens: int = 0, **more: Any
    ) -> KVCacheBlocks | None:
        if num_new_tokens > 0 and not num_lookahead_tokens and not more:  # a decoding request
            num_tokens = min(request.num_computed_tokens + num_new_tokens, max_model_len)
            room = len(group.req_to_blocks.get(request.request_id, ())) * group.block_size
            if num_tokens <= room and is_cached(request, min(num_tokens, request.num_tokens)):
                return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **more)

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if not is_cached(request, num_computed_tokens):
            cache(request, num_computed_tokens)

    patches.cache_of_unchanged_blocks(manager, allocate_slots, cache_blocks)
