"""Scheduler for vLLM that needs less CPU time per token than vLLM's own; vLLM imports it by its name
(``scheduler_cls``).

In each decoding step, vLLM 0.32 makes one object per request of the log-probabilities, passes these objects through
three classes and appends log-probabilities token by token. It also checks for every request whether it has images,
drafts, a grammar or a part of its prompt left to compute, and makes an output object of every token. With 256 sequences
of a small model, the CPU then takes longer for a decoding step than the GPU.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from qerl_pl.rollout.vllm.draft_counts import DraftCounts
from qerl_pl.rollout.vllm.routes import RouteRecorder

T = TypeVar("T")
START_SHARE = 16  # waiting requests start together when one place in so many is free


class RolloutScheduler(AsyncScheduler):
    """Scheduler for vLLM that also collects, for the rollout engine, the log-probabilities of sampled tokens and the
    experts that computed each token. Steps that return log-probabilities of other tokens than the sampled ones are left
    to vLLM's code.

    If ``is_lean``, steps in which all requests decode are scheduled by simpler code of this class, and a request's
    tokens are kept until the request ends, instead of making an output object of every token. Waiting requests start
    when a sixteenth of the places for running requests is free, or as many places as requests wait. vLLM would start
    one as soon as another ends; with many waiting requests nearly every step would then compute a prompt, and such a
    step runs in many small CUDA graphs instead of one. All other requests and steps are left to vLLM's code.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._logprobs: defaultdict[str, list[float]] = defaultdict(list)
        self.draft_counts = DraftCounts()
        """Counts of drafted and accepted tokens; ``VLLMEngine`` replaces the object by its ``draft_counts``."""
        self.recorder: RouteRecorder | None = None
        """Recorder of the experts that the model's routers choose. The engine sets it if ``generate`` has to return the
        experts."""
        self._routes: dict[str, Tensor] = {}
        self.is_lean = False
        """Whether code of this class, which takes less CPU time than vLLM's, schedules steps in which all requests
        decode; set if all layers of the model have full attention."""
        self._ends: dict[str, tuple[set[int | None], int]] = {}
        """Tokens that end each running request, and the largest number of tokens of its output (``ends_of``)."""
        self._kept: defaultdict[str, list[int]] = defaultdict(list)
        """Tokens of running requests that have not been output yet."""

    def take_logprobs(self) -> dict[str, list[float]]:
        """Return the log-probabilities, in nats, of the tokens sampled for each request since the last call, by the ids
        that vLLM's caller gave to the requests, and forget them."""
        return _taken(self._logprobs)

    def take_routes(self) -> dict[str, Tensor]:
        """Return the experts that computed the tokens of each request that has ended since the last call, by the ids
        that vLLM's caller gave to the requests, and forget them: [T, L, k] int16 for T tokens of prompt and completion
        without the last, L layers with experts and k experts per token. The result is empty if ``recorder`` is None."""
        if self._routes and torch.cuda.is_available():
            torch.cuda.synchronize()  # wait for the copies to the host
        return _taken(self._routes)

    def forget(self) -> None:
        """Forget what was collected."""
        self._logprobs.clear()
        self._routes.clear()
        self._ends.clear()
        self._kept.clear()
        if self.recorder:
            self.recorder.clear()

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        """Store which experts computed the tokens of a request, and let vLLM preempt it, that is, free its blocks. They
        are stored now because the request may end while it has no blocks, by a token that is still being computed."""
        self._store_routes(request, request.num_computed_tokens)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        """Store an ended request's routes for ``take_routes``, before vLLM frees its blocks."""
        if request.num_output_tokens:
            self._store_routes(request, request.num_tokens - 1)
        return super()._free_request(request, delay_free_blocks)

    def _store_routes(self, request: Request, num_tokens: int) -> None:
        """Store which experts computed the first ``num_tokens`` tokens of a request, which are recorded by slot of the
        KV cache. A request that has been preempted has no blocks; its experts were stored when it was preempted."""
        params, name = request.sampling_params, request.request_id
        if not self.recorder or not params or params.prompt_logprobs is not None:
            return
        groups = zip(self.kv_cache_config.kv_cache_groups, self.kv_cache_manager.get_block_ids(name), strict=True)
        for group, blocks in groups:
            if self.recorder.attention in group.layer_names:
                size = group.kv_cache_spec.block_size
                read = self.recorder.read(blocks, size, num_tokens) if blocks else self._routes[name][:num_tokens]
                self._routes[name] = read

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step."""
        return self._decoding_step() or super().schedule(throttle_prefills)

    def _decoding_step(self) -> SchedulerOutput | None:
        """Schedule one token for each running request; None if vLLM's own code has to schedule the step, because
        ``is_lean`` is not set, a running request does not decode or has drafts, a waiting request starts now, or the KV
        cache has fewer free blocks than there are running requests."""
        running, manager = self.running, self.kv_cache_manager
        if not self.is_lean or self.kv_holding_waiting or self._pause_state != PauseState.UNPAUSED:
            return None
        free = self.max_num_active_reqs - len(running) - self.num_waiting_for_streaming_input
        if self.waiting and free >= max(1, min(len(self.waiting), self.max_num_active_reqs // START_SHARE)):
            return None
        if not running or manager.block_pool.get_num_free_blocks() < len(running):
            return None
        decoding: list[Request] = []
        for request in running:
            computed, unknown = request.num_computed_tokens, request.num_output_placeholders
            if request.is_prefill_chunk or request.spec_token_ids or request.num_tokens + unknown != computed + 1:
                return None
            last = request.num_prompt_tokens + request.max_tokens - 1
            if (unknown and computed - unknown >= last - 1) or computed + 1 >= self.max_model_len:
                continue  # the last token is being computed
            decoding.append(request)
        none, size = manager.empty_kv_cache_blocks, self.block_size
        blocks: dict[str, Any] = {
            request.request_id: none if request.num_computed_tokens % size else manager.allocate_slots(request, 1)
            for request in decoding
        }
        before, waiting = self.prev_step_scheduled_req_ids, self.waiting
        self.running, self.waiting, self.prev_step_scheduled_req_ids = [], create_request_queue(self.policy), set()
        step = super().schedule()  # everything that does not depend on requests
        self.running, self.waiting, self.prev_step_scheduled_req_ids = running, waiting, before
        step.num_scheduled_tokens = dict.fromkeys(blocks, 1)
        step.total_num_scheduled_tokens = len(decoding)
        step.scheduled_cached_reqs = self._make_cached_request_data(decoding, [], step.num_scheduled_tokens, {}, blocks)
        self.prev_step_scheduled_req_ids = set(blocks)
        if self.dynamic_sd_lookup is not None and decoding:
            step.num_spec_tokens_to_schedule = self.dynamic_sd_lookup[len(decoding)]
        self._update_after_schedule(step)
        return step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Collect the sampled tokens and log-probabilities of a step, and return vLLM's outputs."""
        logprobs = model_runner_output.logprobs
        if logprobs is None or logprobs.logprobs.shape[1] > 1:
            return super().update_from_output(scheduler_output, model_runner_output)
        model_runner_output.logprobs = None
        values, rows = logprobs.logprobs[:, 0].tolist(), model_runner_output.req_id_to_index
        first = logprobs.cu_num_generated_tokens  # None: each request has one row
        scheduled, sampled = scheduler_output.num_scheduled_tokens, model_runner_output.sampled_token_ids
        if self.is_lean and first is None and sampled:
            scheduler_output = replace(
                scheduler_output, num_scheduled_tokens=self._keep(scheduled, sampled, rows, values)
            )
        by_client = super().update_from_output(scheduler_output, model_runner_output)
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
                if kept := self._kept.pop(output.request_id, None):
                    output.new_token_ids = kept + output.new_token_ids
        return by_client

    def _keep(
        self, scheduled: Mapping[str, int], sampled: list[list[int]], rows: Mapping[str, int], values: list[float]
    ) -> dict[str, int]:
        """Append the token that a decoding step has sampled for each running request to the request, as vLLM does, but
        make no output object. Requests that end with this token, may end by something else (``ends_of``), have no token
        before it, or have none or several tokens in this step are not changed: vLLM's own code then appends the tokens.

        Args:
            scheduled: the number of tokens of each request in this step.
            sampled: the sampled tokens in each row of the model's output.
            rows: the row of each request.
            values: the log-probability in each row, in nats.

        Returns:
            The entries of ``scheduled`` of the requests that were not changed.
        """
        others, size = {}, self.block_size
        for name, number in scheduled.items():
            request, tokens = self.requests.get(name), sampled[rows[name]]
            if request and name not in self._ends:
                self._ends[name] = ends_of(request, self.max_model_len)
            if (
                request is None
                or request.status is not RequestStatus.RUNNING
                or request.num_stale_output_tokens
                or not request._output_token_ids  # vLLM counts the prompt's cached tokens when it outputs the first
                or len(tokens) != 1
                or tokens[0] in self._ends[name][0]
                or len(request._output_token_ids) + 1 >= self._ends[name][1]
            ):
                others[name] = number
                continue
            request.num_in_flight_tokens -= number
            request.num_output_placeholders -= 1
            request._output_token_ids += tokens
            request._all_token_ids += tokens
            if len(request._all_token_ids) % size == 0:
                request.update_block_hashes()
            if (known := request.num_computed_tokens - request.num_output_placeholders) % size == 0:
                self.kv_cache_manager.cache_blocks(request, known)
            self._kept[name] += tokens
            self._logprobs[name].append(values[rows[name]])
        return others


def ends_of(request: Request, max_model_len: int) -> tuple[set[int | None], int]:
    """Return the ids of the tokens that end a request, and the largest number of tokens that it may sample: 0 if
    anything else may end it, such as a stop string, so that vLLM's own code has to look at each token."""
    params = request.sampling_params
    if params is None or params.stop or params.repetition_detection or request.use_structured_output:
        return set(), 0
    most = min(request.max_tokens, max_model_len - request.num_prompt_tokens)
    return {params.eos_token_id, *(params.stop_token_ids or ())}, most


def _taken(values: dict[str, T]) -> dict[str, T]:
    """Empty ``values``, whose keys are vLLM's request ids, and return its items with the ids that the caller gave to
    the requests as keys; vLLM has added a suffix to these ids."""
    taken = {name.partition("-")[0]: value for name, value in values.items()}
    values.clear()
    return taken
