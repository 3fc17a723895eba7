"""Speculative decoding that changes no sampled token, on vLLM's model runner for GPUs.

vLLM is started with its own n-gram speculation, so that its scheduler plans for drafts and takes back rejected ones.
The module ``group_drafts`` then makes the drafts instead of vLLM, and ``equal_drafts`` verifies them.
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
"""Largest number of completions of a prompt, the one to draft for included, that are searched for drafts."""


def arguments(max_num_seqs: int) -> dict[str, Any]:
    """Build the arguments of ``vllm.LLM`` for an engine that uses speculative decoding.

    They include the number of drafted tokens per sequence, by the number of sequences in a decoding step. vLLM uses
    these numbers only to choose which CUDA graphs it captures; before each call of ``generate``, the engine gives
    vLLM's scheduler the numbers that ``draft_guard`` has chosen, which may be 0. So vLLM must also capture graphs
    without drafts, which it does only if some number of sequences up to ``max_num_seqs`` has 0 drafts in these
    arguments. If no number would otherwise have 0 drafts, steps of one sequence are given 0.
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
    """Verifier of drafts in place of vLLM's ``RejectionSampler``: samples one token per row of logits as without
    drafts, and takes each sequence's tokens up to and including the first one that differs from its draft."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def __call__(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """Sample a token in each of R rows of logits [R, V], and take each sequence's tokens up to and including the
        first one that differs from its draft. The result has log-probabilities of all R rows; vLLM and its scheduler
        read only those of the tokens that are taken."""
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
    """Drafter that replaces vLLM's n-gram speculator (``group_drafts``).

    vLLM's table of requests keeps the tokens of a request that has ended until another request takes its row, so drafts
    can also be taken from completions that have ended. Drafts depend on the current call of ``generate`` only: the
    engine calls ``forget`` before it, only rows that were filled since are read, and the completions of a prompt are
    searched in the order of their requests.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        self.states, self.device = runner.req_states, runner.device
        self.add_plainly = runner.req_states.add_request
        self.candidates_np = np.full((runner.max_num_reqs, MOST_SIBLINGS), -1, dtype=np.int32)
        self.candidates = torch.full((runner.max_num_reqs, MOST_SIBLINGS), -1, dtype=torch.int32, device=self.device)
        self.forget()

    def forget(self) -> None:
        """Take no drafts from the tokens of earlier requests from now on."""
        self.orders: dict[str, int] = {}
        self.groups: dict[tuple[int, ...], dict[int, int]] = {}  # prompt: order of its requests: row
        self.held: dict[int, tuple[tuple[int, ...], int]] = {}  # row: prompt and order
        self.candidates_np.fill(-1)
        self.is_changed = True

    def add_request(
        self, req_id: str, prompt_len: int, all_token_ids: list[int], num_computed_tokens: int, max_tokens: int
    ) -> None:
        """Add a request to vLLM's table of requests, in place of its method of this name, and let all requests with the
        same prompt take drafts from each other's tokens."""
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
        """Store, for each request with the given prompt, the rows of vLLM's table of requests in which its drafts are
        searched: the rows of all requests with this prompt, in the order of the requests. Of more than
        ``MOST_SIBLINGS`` requests, only those nearest to the request in this order are used."""
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
        """Draft tokens for each of the N sequences that decode, [N, MOST_DRAFTS] int64, of which the next step verifies
        the first ``num_speculative_tokens``. Replaces the method of vLLM's speculator."""
        if dummy_run or not num_speculative_tokens:
            return torch.zeros(input_batch.num_reqs, MOST_DRAFTS, dtype=torch.int64, device=self.device)
        if self.is_changed:
            async_tensor_h2d(self.candidates_np, out=self.candidates)
            self.is_changed = False
        lengths = self.states.total_len.gpu
        return draft(self.states.all_token_ids.gpu, lengths, self.candidates, input_batch.idx_mapping, MOST_DRAFTS)


def install(worker: WorkerBase) -> GroupDrafts:
    """Make an engine that was started with ``arguments`` draft and verify tokens by this project's code, which changes
    no sampled token; return the drafter. Raises ValueError if vLLM does not use its model runner V2, or if the model
    has recurrent layers."""
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
