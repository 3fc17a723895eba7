"""Speculation that changes no token, on vLLM's model runner for GPUs.

vLLM is started with its own n-gram speculation, so that its scheduler plans for drafts and takes back rejected ones.
The drafts are replaced by those of ``group_drafts``, and the verification by that of ``equal_drafts``.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.worker_base import WorkerBase

from qerl_pl.hopper import patches
from qerl_pl.hopper.equal_drafts import accept
from qerl_pl.hopper.group_drafts import draft
from qerl_pl.memory.settings import DRAFTS_BY_SEQUENCES

MOST_DRAFTS = DRAFTS_BY_SEQUENCES[0][1]
MOST_SIBLINGS = 16
"""Most completions of a prompt that are searched for the last tokens of a completion, this completion included."""


def arguments(max_num_seqs: int) -> dict[str, Any]:
    """Build the arguments of ``vllm.LLM`` for an engine that speculates.

    vLLM uses the numbers of drafts in these arguments only to choose which CUDA graphs it captures: before each call,
    the engine gives the scheduler the numbers of ``draft_guard``. Any of those may be 0, so vLLM must also capture
    graphs without drafts. It does so if, in these arguments, at least one number of sequences has no drafts. If all of
    them would have drafts, a single sequence is therefore given none.
    """
    before = ((1, 0),) if 1 < max_num_seqs <= DRAFTS_BY_SEQUENCES[-1][0] else ()
    ranges, first = [], 1
    for last, drafts in (*before, *DRAFTS_BY_SEQUENCES, (max_num_seqs, 0)):
        if first <= min(last, max_num_seqs):
            ranges.append((first, min(last, max_num_seqs), drafts))
        first = last + 1
    return {
        "speculative_config": {
            "method": "ngram_gpu",
            "num_speculative_tokens": MOST_DRAFTS,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 1,
            # Without it, vLLM would add drafts to the last token of a prompt whose other tokens are cached.
            "num_speculative_tokens_per_batch_size": ranges,
        }
    }


class EqualDrafts:
    """Verifies drafts in the place of vLLM's ``RejectionSampler``: samples every row as without drafts, and takes the
    tokens up to and including the first that differs from its draft."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def __call__(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """Sample from logits [R, V] of all rows. The log-probabilities are of all R rows too; vLLM and the scheduler
        read those of the tokens that are taken."""
        assert draft_logits is None
        assert invalid_drafts is None
        batch, output = input_batch, self.sampler(logits, input_batch)
        sampled = output.sampled_token_ids.view(-1)
        tokens, counts = accept(sampled, batch.input_ids, batch.logits_indices, batch.cu_num_logits, MOST_DRAFTS)
        prefill_lengths = self.sampler.req_states.prefill_len.gpu
        counts, rejected = get_num_sampled_and_rejected(
            counts, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, prefill_lengths
        )
        return replace(output, sampled_token_ids=tokens, num_sampled=counts, num_rejected=rejected)


class GroupDrafts:
    """Drafts tokens in place of vLLM's n-gram speculator.

    vLLM keeps the tokens of a request that has ended until another one takes its row of the table. Until then other
    completions of the same prompt find drafts in it. Only rows that were filled since the last ``forget`` are read, and
    completions of a prompt are searched in the order of their requests, so drafts depend on the arguments of the
    current call only.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        self.states, self.device = runner.req_states, runner.device
        self.add_plainly = runner.req_states.add_request
        self.candidates_np = np.full((runner.max_num_reqs, MOST_SIBLINGS), -1, dtype=np.int32)
        self.candidates = torch.full((runner.max_num_reqs, MOST_SIBLINGS), -1, dtype=torch.int32, device=self.device)
        self.forget()

    def forget(self) -> None:
        """Read no text of earlier requests from now on."""
        self.orders: dict[str, int] = {}
        self.groups: dict[tuple[int, ...], dict[int, int]] = {}  # prompt: order of its requests: row
        self.held: dict[int, tuple[tuple[int, ...], int]] = {}  # row: prompt and order
        self.candidates_np.fill(-1)
        self.is_changed = True

    def add_request(
        self, req_id: str, prompt_len: int, all_token_ids: list[int], num_computed_tokens: int, max_tokens: int
    ) -> None:
        """Give a request a row of vLLM's table of requests, and let all requests with the same prompt find drafts in
        each other's tokens; replaces the table's method."""
        self.add_plainly(req_id, prompt_len, all_token_ids, num_computed_tokens, max_tokens)
        row, prompt = self.states.req_id_to_index[req_id], tuple(all_token_ids[:prompt_len])
        order = self.orders.setdefault(req_id, len(self.orders))
        if row in self.held:
            before, other = self.held.pop(row)
            del self.groups[before][other]
            self.list_candidates(before)
        group = self.groups.setdefault(prompt, {})
        if order in group:  # it was preempted and had another row
            del self.held[group[order]]
        group[order], self.held[row] = row, (prompt, order)
        self.list_candidates(prompt)

    def list_candidates(self, prompt: tuple[int, ...]) -> None:
        """Write, for each request of a prompt, the rows in which to look for drafts: those of all requests of the
        prompt in order or, of more than ``MOST_SIBLINGS``, those nearest to the request in this order."""
        rows = [row for _, row in sorted(self.groups[prompt].items())]
        for place, row in enumerate(rows):
            first = max(0, min(place - MOST_SIBLINGS // 2, len(rows) - MOST_SIBLINGS))
            found = rows[first : first + MOST_SIBLINGS]
            self.candidates_np[row, : len(found)], self.candidates_np[row, len(found) :] = found, -1
        self.is_changed = True

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        *_: object,
        dummy_run: bool = False,
        num_speculative_tokens: int = MOST_DRAFTS,
        **__: object,
    ) -> Tensor:
        """Draft ``MOST_DRAFTS`` tokens for each sequence of a batch, [N, MOST_DRAFTS] int64, of which the next step
        verifies the first ``num_speculative_tokens``; replaces the method of vLLM's speculator."""
        if dummy_run or not num_speculative_tokens:
            return torch.zeros(input_batch.num_reqs, MOST_DRAFTS, dtype=torch.int64, device=self.device)
        if self.is_changed:
            async_tensor_h2d(self.candidates_np, out=self.candidates)
            self.is_changed = False
        lengths = self.states.total_len.gpu
        return draft(self.states.all_token_ids.gpu, lengths, self.candidates, input_batch.idx_mapping, MOST_DRAFTS)


def install(worker: WorkerBase) -> GroupDrafts:
    """Draft and verify as this module says, in an engine that was started with ``arguments``; ValueError if vLLM uses
    another model runner or recurrent layers."""
    runner: Any = worker.model_runner
    if type(runner) is not GPUModelRunner or type(runner.rejection_sampler).__name__ != "RejectionSampler":
        raise ValueError(
            f"speculation is on, and vLLM runs {type(runner).__name__} of {type(runner).__module__}; expected its "
            "model runner V2. Set engine.speculation to off"
        )
    assert runner.sampler is not None
    drafts = GroupDrafts(runner)
    patches.speculation_without_other_tokens(runner, EqualDrafts(runner.sampler), drafts)
    return drafts
