"""CUDA graphs for those parts of a decoding step for which vLLM launches single kernels instead of a graph.

vLLM replays the model's decoder blocks as one CUDA graph. The rest of a step is about 30 launches: positions, block
tables and the schedule of attention before the blocks; logits, sampled tokens and their log-probabilities after them.
With few sequences the GPU would wait for the host, which needs 2 to 4 ms for a step, whereas the GPU needs 2.5 ms for
the blocks of a 7B model with 8 sequences. These launches, and the addresses of their tensors, are the same in two
decoding steps that have equal numbers of sequences and of drafted tokens and use the same sampling options. This module
captures the launches in two further graphs, one before the blocks and one after them.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import (
    InputBatch,
    combine_sampled_and_draft_tokens,
    expand_idx_mapping,
    prepare_pos_seq_lens,
)
from vllm.v1.worker.gpu.model_runner import BatchReqState, GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.worker_base import WorkerBase

from qerl_pl.hopper import patches


@dataclass
class Step:
    """CUDA graphs, and the tensors that they use, for all decoding steps of one shape: a number of sequences, with a
    number of drafted tokens per sequence."""

    batch: InputBatch
    """vLLM's description of a step, with tensors at fixed addresses on the GPU and values updated by ``describe``."""
    inputs: torch.cuda.CUDAGraph  # writes the model's inputs, block tables and attention's schedule
    starts: torch.Tensor
    """Index of each sequence's first token in the batch; kept because ``inputs`` reads it at each replay."""
    attention: tuple[tuple[torch.Tensor, ...], torch.Tensor]
    """Block tables and slots of the KV cache that ``inputs`` writes."""
    metadata: dict[str, Any]  # attention's metadata by layer
    sampling: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]]
    """Graphs that sample and update the sequences' state, each with its output, by the value of
    ``kind_of_sampling``."""

    def describe(self, state: BatchReqState, runner: GPUModelRunner) -> bool:
        """Update ``batch`` for the step that will be replayed next: the ids of its sequences, their rows in vLLM's
        state tables, and their numbers of computed tokens. Returns whether the sequences and their order are those of
        the previous call, so that their sampling options need not be read again."""
        batch, rows = self.batch, state.idx_mapping_np
        if not (same := np.array_equal(batch.idx_mapping_np, rows)):
            async_tensor_h2d(rows, out=batch.idx_mapping)
        batch.req_ids, batch.idx_mapping_np, batch.prefill_len_np = state.req_ids, rows, state.prefill_len_np
        batch.num_computed_prefill_tokens_np = state.num_computed_prefill_tokens_np
        batch.num_computed_tokens_np = runner.req_states.num_computed_tokens_np[rows]
        new_tokens = batch.num_tokens // batch.num_reqs
        batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs] = batch.num_computed_tokens_np + new_tokens
        return same


class DecodingGraphs:
    """Replacements of methods of vLLM's model runner, which replay CUDA graphs in a decoding step whose kernel launches
    have been captured, and call vLLM's methods in any other step.

    The first step with a new number of sequences is launched by vLLM, which compiles the kernels; then the same
    launches are captured. All graphs are replayed in order on vLLM's stream, so those that write inputs share memory,
    and so do those that sample. vLLM copies the sampled tokens of each step to the host on another stream, and the next
    sampling graph, which writes to the same addresses, waits for this copy.
    """

    def __init__(self, runner: GPUModelRunner, most: int) -> None:
        assert runner.sampler is not None
        self.most = most
        """Largest number of tokens of a step that is run by graphs."""
        self.captures = True
        """Whether graphs are captured for further steps; False after memory ran out in a capture."""
        self.runner, self.sampler = runner, runner.sampler
        self.prepare_inputs_plainly = runner.prepare_inputs
        self.prepare_attention_plainly = runner.prepare_attn
        self.build_metadata_plainly = runner.model_state.prepare_attn
        self.sample_plainly = runner.sample
        self.update_state_plainly = runner.postprocess_sampled
        self.steps: dict[tuple[int, int, BatchExecutionDescriptor], Step] = {}
        """Captured steps by number of sequences, number of tokens, and vLLM's descriptor of the graph of the blocks."""
        self.stream = capture_stream(runner.device)
        # The next step's input graph runs while the sampled tokens of a step are still needed, so input graphs and
        # sampling graphs share no memory.
        self.input_memory, self.sampling_memory = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        self.step: Step | None = None
        """The graphs of the running step; None if its inputs were written without a graph."""
        self.uncaptured: tuple[InputBatch, BatchExecutionDescriptor] | None = None
        """Batch of the running step and vLLM's descriptor of its graph, if vLLM has written the model's inputs without
        a graph and ``sample`` is to capture the same kernel launches; else None."""
        self.kind: Hashable = None
        """Value of ``kind_of_sampling`` for the running batch; None: not determined yet, or not captured."""
        self.is_updated = False
        """Whether a graph has updated the state of the running step's sequences."""

    def prepare_inputs(
        self,
        scheduler_output: SchedulerOutput,
        batch_req_state: BatchReqState,
        batch_desc: BatchExecutionDescriptor,
        num_active_loras: int,
    ) -> InputBatch:
        """Write the model's inputs; replaces the model runner's method of this name."""
        before, self.step, self.uncaptured = self.step, None, None
        decodes = is_decoding(batch_req_state, batch_desc, self.most)
        decodes = decodes and not scheduler_output.has_structured_output_requests
        size = len(batch_req_state.req_ids), batch_req_state.num_tokens
        step = self.steps.get((*size, batch_desc)) if decodes else None
        if step is None:
            self.kind = None
            batch = self.prepare_inputs_plainly(scheduler_output, batch_req_state, batch_desc, num_active_loras)
            self.uncaptured = (batch, batch_desc) if decodes and self.captures else None
            return batch
        if not step.describe(batch_req_state, self.runner) or step is not before:
            self.kind = None
        step.inputs.replay()
        self.step = step
        return step.batch

    def step_of(self, batch: InputBatch) -> Step | None:
        """Return the graphs of the running step, or None if vLLM, and not a graph, has written the inputs of this
        batch."""
        return self.step if self.step and batch is self.step.batch else None

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return the batch's block tables and slots; replaces the model runner's method of this name."""
        step = self.step_of(input_batch)
        return step.attention if step else self.prepare_attention_plainly(input_batch)

    def build_metadata(self, input_batch: InputBatch, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Return the metadata of attention by layer; replaces ``prepare_attn`` of the model runner's model state."""
        step = self.step_of(input_batch)
        return step.metadata if step else self.build_metadata_plainly(input_batch, *arguments, **named)

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: Any
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Sample one token for each row of logits, by a CUDA graph if there is one for this step. Replaces the model
        runner's method of this name, and returns the same: the sampler's output, and for each sequence the numbers of
        sampled and of rejected tokens. ``hidden_states`` are always at the same address, and ``grammar_output`` is None
        in steps that have graphs.
        """
        self.is_updated = False
        step = self.step_of(input_batch)
        if not (step or self.uncaptured):
            return self.sample_plainly(hidden_states, input_batch, grammar_output)
        if self.kind is None:
            self.kind = kind_of_sampling(self.sampler, input_batch.idx_mapping_np)
        if step and self.kind in step.sampling:
            graph, sampled = step.sampling[self.kind]
            self.runner.main_stream.wait_stream(self.runner.output_copy_stream)
            graph.replay()
            self.is_updated = True
            return sampled
        sampled = self.sample_plainly(hidden_states, input_batch, grammar_output)
        if self.kind is not None and self.captures:
            self.capture(hidden_states, self.kind)
        return sampled

    def postprocess_sampled(self, *arguments: Any, **named: Any) -> None:
        """Update the state of sequences that got a token; replaces the model runner's method of this name."""
        if not self.is_updated:
            self.update_state_plainly(*arguments, **named)

    def capture(self, hidden_states: torch.Tensor, kind: Hashable) -> None:
        """Capture the kernel launches that vLLM has just made for the current decoding step. If GPU memory runs out,
        torch's cached memory is freed, which torch cannot do during a capture, and no further graph is captured."""
        try:
            step = self.step
            if self.uncaptured:
                batch, desc = self.uncaptured
                step = self.steps[batch.num_reqs, batch.num_tokens, desc] = self.capture_inputs(batch, desc)
            assert step is not None
            step.sampling[kind] = self.capture_sampling(hidden_states, step.batch)
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            if "out of memory" not in str(error):
                raise
            self.captures = False
            torch.cuda.empty_cache()
            rank_zero_info("no memory is left for further CUDA graphs of decoding steps, which are slower without")

    def capture_inputs(self, batch: InputBatch, desc: BatchExecutionDescriptor) -> Step:
        """Capture the launches that write the model's inputs for decoding steps of the shape of ``batch``. The graph
        finds the sequences in vLLM's state tables by row indices of its own, which ``Step.describe`` updates."""
        runner, buffers, states = self.runner, self.runner.input_buffers, self.runner.req_states
        rows, starts = batch.idx_mapping.clone(), buffers.query_start_loc.clone()
        with self.capturing(self.input_memory) as graph:
            expanded, most = rows, runner.decode_query_len
            if batch.num_draft_tokens:
                expanded, _ = expand_idx_mapping(rows, batch.num_tokens, batch.cu_num_logits, most)
            ours = replace(batch, idx_mapping=rows, expanded_idx_mapping=expanded)
            buffers.query_start_loc.copy_(starts)
            computed = states.num_computed_tokens.gpu
            prepare_pos_seq_lens(rows, ours.query_start_loc, computed, buffers.positions, buffers.seq_lens)
            combine_sampled_and_draft_tokens(
                buffers.input_ids,
                rows,
                states.last_sampled_tokens,
                ours.query_start_loc,
                ours.seq_lens,
                states.prefill_len.gpu,
                states.draft_tokens,
                ours.cu_num_logits,
                ours.num_tokens,
            )
            attention = self.prepare_attention_plainly(ours)
            groups, config = runner.attn_groups, runner.kv_cache_config
            # as in the model's graph, attention's schedule is for sequences of any length
            metadata = self.build_metadata_plainly(ours, desc.cg_mode, *attention, groups, config, for_capture=True)
        return Step(ours, graph, starts, attention, metadata, {})

    def capture_sampling(self, hidden_states: torch.Tensor, batch: InputBatch) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Capture the launches that compute logits, sample, and update the sequences' state."""
        with self.capturing(self.sampling_memory) as graph:
            sampled = self.sample_plainly(hidden_states, batch, None)
            output, num_sampled, num_rejected = sampled
            tokens = output.sampled_token_ids
            self.update_state_plainly(batch.idx_mapping, tokens, num_sampled, num_rejected, batch.query_start_loc)
        return graph, sampled

    @contextmanager
    def capturing(self, pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture what is launched within the context, without running it or, as ``torch.cuda.graph`` does, waiting for
        the GPU."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                graph.capture_end()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the CUDA stream on which all engines of a process capture graphs; torch keeps a cuBLAS workspace of 32 MiB
    (on Hopper) for each such stream."""
    return torch.cuda.Stream(device)


def is_decoding(state: BatchReqState, desc: BatchExecutionDescriptor, most: int) -> bool:
    """Return whether the launches of a step can be captured: all of its sequences decode, with equally many drafted
    tokens, it has at most ``most`` tokens, and vLLM runs the decoder blocks as one CUDA graph."""
    drafts, num = state.num_draft_tokens_np, len(state.req_ids)
    if desc.cg_mode != CUDAGraphMode.FULL or state.has_prefill or state.num_tokens > most:
        return False
    if drafts is None:
        return state.num_tokens == num
    return state.num_tokens == num * (1 + int(drafts[0])) and bool((drafts == drafts[0]).all())


def kind_of_sampling(sampler: Sampler, rows: np.ndarray) -> Hashable:
    """Return a key that is equal for two decoding steps if vLLM's sampler launches the same kernels in both. The key is
    None, for which no graph is captured, if a sequence uses another option than temperature and log-probabilities.
    ``rows`` are the indices of the sequences in vLLM's tables of sampling options."""
    states, processors = sampler.sampling_states, sampler.logits_processors
    biases, penalties, words = (vars(processor) for processor in processors)
    temperature = states.temperature.np[rows]
    scales = bool(((temperature != 0) & (temperature != 1)).any())
    has_others = [
        states.top_k.np[rows] != states.vocab_size,
        states.top_p.np[rows] != 1,
        states.min_p.np[rows] != 0,
        biases["use_logit_bias"][rows],
        penalties["use_penalty"][rows],
        words["num_bad_words"].np[rows] != 0,
    ]
    if np.any(has_others) or sampler.needs_logits_processing[rows].any() != scales:
        return None
    return scales, sampler.get_logprobs_dims(rows)


def use_graphs(worker: WorkerBase, most: int) -> None:
    """Make vLLM run decoding steps of up to ``most`` tokens entirely as CUDA graphs, unless the worker does not use
    vLLM's model runner V2 or not all blocks of the model compute attention by FlashAttention."""
    runner: Any = worker.model_runner
    if type(runner) is not GPUModelRunner or type(runner.model_state) is not DefaultModelState:
        return
    builders = {type(group.get_metadata_builder()) for groups in runner.attn_groups for group in groups}
    if builders == {FlashAttentionMetadataBuilder}:
        patches.graphs_of_decoding_steps(runner, DecodingGraphs(runner, most))
