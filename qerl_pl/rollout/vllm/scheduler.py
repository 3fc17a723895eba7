"""Scheduler for vLLM that needs less CPU time per token than vLLM's own; vLLM imports it by its name
(``scheduler_cls``).

vLLM 0.32 divides the log-probabilities of a step into one object per request, passes these objects through three
classes and appends log-probabilities token by token. With many sequences, the CPU then takes as long for a decoding
step as the GPU.
"""

from collections import defaultdict
from typing import Any, TypeVar

import torch
from torch import Tensor
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from qerl_pl.rollout.vllm.draft_counts import DraftCounts
from qerl_pl.rollout.vllm.routes import RouteRecorder

T = TypeVar("T")


class RolloutScheduler(AsyncScheduler):
    """Scheduler that collects log-probabilities of sampled tokens, and the experts that computed them; in steps that
    also return log-probabilities of other tokens, vLLM handles these."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._logprobs: defaultdict[str, list[float]] = defaultdict(list)
        self.draft_counts = DraftCounts()
        """Counts of drafted and accepted tokens; ``VLLMEngine`` replaces the object by its ``draft_counts``."""
        self.recorder: RouteRecorder | None = None
        """Recorder of the experts that the model chooses; the engine sets it if it returns them."""
        self._routes: dict[str, Tensor] = {}

    def take_logprobs(self) -> dict[str, list[float]]:
        """Return and forget the log-probabilities, in nats per sampled token, by the caller's request id."""
        return _taken(self._logprobs)

    def take_routes(self) -> dict[str, Tensor]:
        """Return, by the caller's request id, the experts that computed the tokens of each ended request, [T, L, k]
        int16, and forget them. Its last token was sampled but not computed. Empty without a recorder."""
        if self._routes and torch.cuda.is_available():
            torch.cuda.synchronize()  # wait for the copies to the host
        return _taken(self._routes)

    def forget(self) -> None:
        """Forget what was collected."""
        self._logprobs.clear()
        self._routes.clear()
        if self.recorder:
            self.recorder.clear()

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        """Read the experts of an ended request before vLLM gives its blocks of the KV cache to others."""
        params = request.sampling_params
        if self.recorder and request.num_output_tokens and params and params.prompt_logprobs is None:
            of_group = self.kv_cache_manager.get_block_ids(request.request_id)
            for group, blocks in zip(self.kv_cache_config.kv_cache_groups, of_group, strict=True):
                if self.recorder.attention in group.layer_names:
                    size = group.kv_cache_spec.block_size
                    self._routes[request.request_id] = self.recorder.read(blocks, size, request.num_tokens - 1)
        return super()._free_request(request, delay_free_blocks)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Collect a step's log-probabilities, and call vLLM's method of this name without them."""
        logprobs = model_runner_output.logprobs
        if logprobs is None or logprobs.logprobs.shape[1] > 1:
            return super().update_from_output(scheduler_output, model_runner_output)
        model_runner_output.logprobs = None
        by_client = super().update_from_output(scheduler_output, model_runner_output)
        values, rows = logprobs.logprobs[:, 0].tolist(), model_runner_output.req_id_to_index
        first = logprobs.cu_num_generated_tokens  # None: each request has one row
        drafts, num = scheduler_output.scheduled_spec_decode_tokens, len(scheduler_output.num_scheduled_tokens)
        for outputs in by_client.values():
            for output in outputs.outputs:
                if output.new_token_ids:
                    if output.request_id in drafts:
                        self.draft_counts.drafted[num] += len(drafts[output.request_id])
                        self.draft_counts.verified[num] += 1
                        self.draft_counts.emitted[num] += len(output.new_token_ids)
                    row = rows[output.request_id]
                    start = row if first is None else first[row]
                    self._logprobs[output.request_id] += values[start : start + len(output.new_token_ids)]
        return by_client


def _taken(values: dict[str, T]) -> dict[str, T]:
    """Empty a mapping whose keys are vLLM's request ids, and return its values by the caller's request id, which is
    vLLM's without the suffix."""
    taken = {name.partition("-")[0]: value for name, value in values.items()}
    values.clear()
    return taken
