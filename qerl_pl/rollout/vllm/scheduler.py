"""Scheduler for vLLM that needs less CPU time per token than vLLM's own; vLLM imports it by its name
(``scheduler_cls``).

vLLM 0.32 divides the log-probabilities of a step into one object per request, passes these objects through three
classes and appends log-probabilities token by token. With many sequences, the CPU then takes as long for a decoding
step as the GPU.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

from qerl_pl.rollout.vllm.draft_counts import DraftCounts


class RolloutScheduler(AsyncScheduler):
    """Scheduler that collects log-probabilities of sampled tokens; in steps that also return log-probabilities of other
    tokens, vLLM handles them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._logprobs: defaultdict[str, list[float]] = defaultdict(list)
        self.draft_counts = DraftCounts()
        """Counts of drafted and accepted tokens; ``VLLMEngine`` replaces the object by its ``draft_counts``."""

    def take_logprobs(self) -> dict[str, list[float]]:
        """Return and forget the log-probabilities collected so far, in nats per sampled token, by the caller's request
        id."""
        taken = {name.partition("-")[0]: values for name, values in self._logprobs.items()}  # without vLLM's suffix
        self._logprobs.clear()
        return taken

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
