"""vLLM's scheduler with less work for each token; vLLM finds it by name (``scheduler_cls``).

With many sequences the host's part of a decoding step takes as long as the GPU's. vLLM 0.32 cuts a step's
log-probabilities into objects for each request, sends them through three classes and appends token by token; and for
each token it looks twice whether its request needs a block of the cache or has filled one.
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
    """Keeps the log-probabilities of sampled tokens itself, until ``take_logprobs``, and skips what changes no block.

    Where a request wants log-probabilities of more tokens than the sampled one, all go vLLM's way.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        skip_unchanged(self.kv_cache_manager, self.max_model_len)
        self._logprobs: defaultdict[str, list[float]] = defaultdict(list)

    def take_logprobs(self) -> dict[str, list[float]]:
        """Those of the requests since the last call, nats, by the request's id of the caller."""
        found = {name.partition("-")[0]: values for name, values in self._logprobs.items()}  # vLLM adds -random
        self._logprobs.clear()
        return found

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """vLLM's, which sees a step without log-probabilities; of its outputs, those with a token get theirs here."""
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
    """Spare a manager of the cache those calls for a token that would change nothing.

    That is a token for which its request's last block has room and which does not complete it: with blocks of 16, 15 of
    16. Models whose layers do not all attend to everything are left alone.
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
        if num_new_tokens > 0 and not num_lookahead_tokens and not more:  # a request that is running
            num_tokens = min(request.num_computed_tokens + num_new_tokens, max_model_len)
            room = len(group.req_to_blocks.get(request.request_id, ())) * group.block_size
            if num_tokens <= room and is_cached(request, min(num_tokens, request.num_tokens)):
                return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **more)

    def cache_blocks(request: Request, num_computed_tokens: int) -> None:
        if not is_cached(request, num_computed_tokens):
            cache(request, num_computed_tokens)

    patches.cache_of_unchanged_blocks(manager, allocate_slots, cache_blocks)
