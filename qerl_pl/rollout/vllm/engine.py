"""Rollout engine that runs vLLM in the trainer's process and writes adapter and noise into vLLM's memory in place."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from qerl_pl import native
from qerl_pl.common.batching import micro_batches
from qerl_pl.common.checks import require_at_least
from qerl_pl.common.isolation import any_algorithm, preserved_rng
from qerl_pl.common.metrics import Stopwatch
from qerl_pl.common.types import Completion
from qerl_pl.memory.settings import EngineMemory
from qerl_pl.model.layers import num_recurrent_layers
from qerl_pl.model.stop import tokenizer_of
from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.policy.policy import Policy, check_same_tensors
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.checksums import checksums
from qerl_pl.rollout.common import check_prompts, end_tokens, request_seeds, trained_norms
from qerl_pl.rollout.vllm import memory, patches, requests, setup, worker
from qerl_pl.rollout.vllm.draft_counts import DraftCounts
from qerl_pl.rollout.vllm.launch import launch
from qerl_pl.rollout.vllm.sampling_bar import sampling_bar

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.v1.engine.core_client import InprocClient

    from qerl_pl.rollout.vllm.scheduler import RolloutScheduler

SCORED_TOKENS_PER_CALL = 65536
SIZES = ("max_num_seqs", "max_num_batched_tokens", "block_size")
OF_VLLM = (*SIZES, "enforce_eager", "enable_prefix_caching", "kv_cache_dtype")
"""Fields of ``VLLMEngine`` that are passed to ``vllm.LLM`` as arguments with the same names, unless they are None."""

T = TypeVar("T")


@dataclass(eq=False)
class VLLMEngine:
    """Rollout engine that samples with vLLM in the trainer's process.

    Log-probabilities belong to the distribution that was sampled from: at the sampling temperature and, with top_p or
    top_k, normalised over the kept tokens. Greedy completions have log-probabilities at temperature 1.

    The prefix cache is cleared before each call, so no keys and values are used that were computed with another adapter
    or with other noise on norm weights. Calls with equal arguments, adapter and noise therefore give equal tokens and
    log-probabilities with equal bits, whatever was sampled before; with ``trainer.deterministic: true`` also in a
    resumed run. The exception is a 4-bit base on a GPU that uses vLLM's own kernels instead of this project's. vLLM's
    kernels may add partial sums in any order, so equal calls may give slightly different log-probabilities and,
    sometimes, different tokens. The engine logs at its start if it uses such kernels.

    Args:
        dtype: compute dtype; "auto" means the policy's.
        kv_cache_bytes: size of the KV cache. null: enough for max_num_seqs sequences of the longest length, but at most
            what the trainer's prediction of GPU memory leaves (training on a GPU), half of the free memory (otherwise
            on a GPU) or 4 GiB (on a CPU). If the cache is full, vLLM preempts the newest sequences and recomputes their
            keys and values later.
        max_num_seqs: largest number of sequences that are sampled at the same time.
        max_num_batched_tokens: largest number of tokens in one forward pass; null: 8192 on a GPU, vLLM's default on a
            CPU.
        enforce_eager: use no CUDA graphs and no compilation, which starts faster and samples slower.
        block_size: tokens per block of the KV cache; null means vLLM's default.
        enable_prefix_caching: share the KV cache of a prompt among its completions; no effect with recurrent layers.
        kv_cache_dtype: dtype of the KV cache, e.g. "fp8"; "auto" means the compute dtype.
        sleep_level: GPU memory that is freed while the trainer works. 0: the KV cache, unless the GPU has memory to
            spare; 1: the cache and the weights, which are kept in host memory. On a CPU nothing is freed. Level 2 of
            vLLM is not supported, because it fails with adapters.
        decoding_kernel: which kernels multiply by the weights of an NVFP4 base. "native": the CUDA kernels of this
            project (`docs/kernels.md`), which need a Hopper GPU, bfloat16, cuda-bindings and a tested version of vLLM.
            In forward passes of more than 2048 tokens, that is, of many prompts, the weight of each linear layer is
            dequantised to scratch memory (0.3 GB for a 7B). "humming": the kernels that vLLM chooses; on Hopper they
            are those of the library Humming, which decode slower. "auto": native if those kernels can run, else
            humming.
        speculation: "on" lets decoding steps of up to 64 sequences sample several tokens per sequence where text
            repeats what the sequence or another completion of its prompt says. The tokens are those that are sampled
            with "off", up to rounding. Needs a CUDA GPU, a tested vLLM and a model without recurrent layers
            (`docs/speculation.md`). "auto": on if all these conditions hold and it is a Hopper GPU.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_cache_bytes: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enforce_eager: bool = False
    block_size: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    sleep_level: Literal[0, 1] = 0
    decoding_kernel: Literal["auto", "native", "humming"] = "auto"
    speculation: Literal["auto", "off", "on"] = "off"

    def __post_init__(self) -> None:
        require_at_least(1, **{name: getattr(self, name) for name in ("kv_cache_bytes", *SIZES)})
        self._arguments = {name: value for name in OF_VLLM if (value := getattr(self, name)) is not None}
        self._speculates = self.speculation != "off"
        self._drafts: Any = None
        """The drafter, if the engine speculates."""
        self.draft_counts = DraftCounts()
        """Counts of drafted, verified and accepted tokens in all calls since the counts were last cleared."""
        self.draft_history: list[list[int]] = []
        """Counts of drafted and accepted tokens in earlier rollouts, in the form of ``hopper/draft_guard.py``, which
        decide at which numbers of sequences the next calls draft tokens. If empty, as outside of training, decoding
        steps of up to 64 sequences have drafts."""
        self._planned: EngineMemory | None = None
        """Sizes that the memory plan has chosen; None without a plan."""
        self.start_s: dict[str, float] = {}
        """Seconds of each phase of the last start: imports, vLLM, adapter slots, adapter kernels."""
        self._llm: LLM | None = None
        self._asleep = self._freed = False  # whether the engine sleeps, and has freed memory

    @property
    def memory(self) -> EngineMemory:
        """Settings that decide how much memory the engine takes."""
        sizes = {name: value for name, value in self._arguments.items() if hasattr(EngineMemory, name)}
        # The memory plan ignores ``one_copy`` and ``dequantises`` if the base is not in NVFP4.
        is_native = setup.decoding_kernel(self.decoding_kernel, NVFP4, torch.bfloat16) == "native"
        sizes |= {"one_copy": is_native, "dequantises": is_native, "sleep_level": self.sleep_level}
        sizes["speculates"] = self.speculates
        return EngineMemory(dtype=self.dtype, kv_cache_bytes=self.kv_cache_bytes, **sizes)

    @property
    def _sizes(self) -> EngineMemory:
        """Sizes with which the engine runs: those that the memory plan has chosen or, without a plan, the settings'."""
        return self._planned or self.memory

    @property
    def speculates(self) -> bool:
        """Whether the engine uses speculative decoding. With ``speculation: auto``, the value is True before ``start``
        if the machine allows it, and after ``start`` only if the model does, too."""
        return self._speculates and (self.speculation == "on" or not self._lacks())

    returns_routes = True
    batch_tokens = 0  # the memory plan does not use ``batch_tokens``, because ``memory`` is not None

    def plan_memory(self, planned: EngineMemory | None) -> None:
        """Keep what the memory plan has chosen: the size of the KV cache that ``start`` will allocate, whether
        ``sleep`` keeps it, and up to how many sequences a decoding step may have to run entirely as CUDA graphs."""
        assert planned is not None
        self._planned = planned

    def start(self, policy: Policy, *, max_model_len: int) -> None:
        """Start vLLM with the policy's base and adapter. Raises ValueError if vLLM does not start, or if
        ``decoding_kernel`` is "native" and this project's CUDA kernels cannot run."""
        if self._llm is not None:
            return
        setup.prepare_environment()
        setup.log_starting()
        watch = Stopwatch()
        self._policy, self._max_model_len = policy, max_model_len
        self._base_norms = self._clean_norms = {}
        self._end_tokens = end_tokens(policy.base, policy.config)
        self._llm, self._on_cpu, self._owns_group, recorder = launch(
            policy,
            self._sizes,
            self._arguments | self._speculative_arguments(policy),
            dtype=self.dtype,
            max_model_len=max_model_len,
            decoding_kernel=self.decoding_kernel,
            watch=watch,
        )
        from vllm.lora.request import LoRARequest

        self._lora_request = LoRARequest("policy", worker.ADAPTER_ID, "in memory")
        self._scheduler().recorder = recorder
        try:
            self._get_ready(watch)
        except BaseException:
            self.close()
            raise
        self.start_s = dict(watch.seconds)
        setup.log_started(self.start_s, self._call(worker.linear_kernels))

    def _speculative_arguments(self, policy: Policy) -> dict[str, Any]:
        """Build the arguments of ``vllm.LLM`` for speculative decoding; empty if it is off. Raises ValueError if the
        setting ``speculation`` is "on", and this machine or model does not support speculative decoding."""
        if self.speculation == "off":
            return {}
        lacks = self._lacks() + ["a model without recurrent layers"] * (num_recurrent_layers(policy.config) > 0)
        if lacks and self.speculation == "on":
            raise ValueError(f"engine.speculation is on, which needs {', '.join(lacks)}; set it to off")
        self._speculates = not lacks
        if self.speculation == "auto":
            reason = f"off, because it needs {', '.join(lacks)}" if lacks else "on"
            rank_zero_info(f"engine.speculation is auto: {reason}")
        return {} if lacks else native.for_vllm().speculative_arguments(self.memory.max_num_seqs)

    def _lacks(self) -> list[str]:
        """List what speculation needs and this machine does not have."""
        off = native.why_off()
        lacks = ["a CUDA GPU"] * (not torch.cuda.is_available()) + [f"qerl_pl/hopper ({off})"] * bool(off)
        if self.speculation == "auto" and not lacks and torch.cuda.get_device_capability() != (9, 0):
            lacks.append("a Hopper GPU, on which its costs were measured")
        return lacks

    def _get_ready(self, watch: Stopwatch) -> None:
        """Complete the start of vLLM: prepare adapter slots, adapter kernels, speculative decoding and CUDA graphs of
        decoding steps, and load the policy's adapter."""
        faster = native.for_vllm()
        self._scheduler().draft_counts = self.draft_counts
        if faster:
            faster.spare(self._scheduler())
        self._base_norms = {name: weight.clone() for name, weight in self._call(worker.live_norms).items()}
        self._clean_norms, self._noise = self._base_norms, NormNoise()
        with watch.phase("adapter slots"):
            self._call(worker.reserve_adapter, self._lora_request)
        with watch.phase("adapter kernels"):
            if not self._on_cpu:
                self._call(worker.compile_adapter_kernels)
                if faster and self.speculates:
                    self._drafts = self._call(faster.speculate)
                if faster:
                    self._call(faster.use_graphs, self._sizes.graph_sequences)
        self.load_adapter(self._policy.adapter_state())

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int | Sequence[int], *, adapter: bool = True
    ) -> list[list[Completion]]:
        """Sample completions as ``RolloutEngine.generate`` describes. ValueError is also raised for temperatures that
        vLLM does not support."""
        self._check(prompts, max_tokens=sampling.max_tokens)
        requests.check_temperature(sampling.temperature)
        if sampling.stop:  # vLLM was started without a tokenizer, and needs one to find stop strings
            self._running().llm_engine.output_processor.tokenizer = tokenizer_of(self._policy.base)
        copies = sampling.num_completions
        seeds = request_seeds(prompts, copies, seed)
        params = requests.sampling_params(sampling, seeds, self._end_tokens)
        self._scheduler().forget()  # drop what remains of an earlier call that failed
        with sampling_bar(len(params)) as bar:
            rows = [prompt for prompt in prompts for _ in range(copies)]
            outputs = self._run(rows, params, adapter=adapter, bar=bar)
        logprobs, routes = self._scheduler().take_logprobs(), self._scheduler().take_routes()
        keys = seeds if self._call(worker.samples_by_keyed_noise) else [None] * len(seeds)
        completions = [
            requests.completion(output, logprobs[output.request_id], routes.get(output.request_id), key)
            for output, key in zip(outputs, keys, strict=True)
        ]
        return [completions[first : first + copies] for first in range(0, len(completions), copies)]

    def score(self, sequences: Sequence[Sequence[int]], *, adapter: bool = True) -> list[list[float]]:
        """Score sequences as ``RolloutEngine.score`` describes. The prompt of a request is all tokens of a sequence but
        the last. vLLM returns the log-probability of the last token as that of a candidate for the token after the
        prompt."""
        self._check(sequences, max_tokens=0)
        scores: list[list[float]] = [[] for _ in sequences]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        limit = max([SCORED_TOKENS_PER_CALL, *lengths.tolist()])
        for batch in micro_batches(lengths, limit):
            rows = [row for row in batch.tolist() if len(sequences[row]) > 1]
            params = requests.scoring_params(sequences[row][-1] for row in rows)
            outputs = self._run([sequences[row][:-1] for row in rows], params, adapter=adapter)
            for row, output in zip(rows, outputs, strict=True):
                scores[row] = requests.scores(output)
        return scores

    def load_adapter(self, adapter: Mapping[str, Tensor]) -> None:
        """Write the adapter into vLLM's slots. Names and shapes of its tensors are checked before, because vLLM does
        not check them."""
        self._running()
        check_same_tensors(adapter, self._policy.adapter_state())
        self._call(worker.write_adapter, adapter, self._policy.lora_scaling)
        trained = {name: weight.detach().clone() for name, weight in trained_norms(adapter).items()}
        if trained:
            self._clean_norms = trained
            self._write_norms(self._clean_norms)

    def set_norm_noise(self, noise: NormNoise) -> int:
        """Write norm weights with noise into vLLM's model (if sigma is 0, those without noise) and read vLLM's weights
        back. Returns the number of norms whose weights equal those that were written, but 0 if sigma is 0."""
        self._running()
        self._noise = noise
        noisy = self._write_norms(self._clean_norms)
        live = self._call(worker.live_norms)
        written = torch.stack([noisy[name].to(live[name]) for name in live])  # [2L, H]
        held = int((torch.stack(list(live.values())) == written).all(dim=1).sum())
        return held if noise.sigma else 0

    def fingerprint(self) -> dict[str, int]:
        """Compute checksums of vLLM's adapter and norm weights, and check that its base weights equal the trainer's."""
        from qerl_pl.rollout.vllm.base_weights import check_rows

        known = self._policy.adapter_state() if self._running() else {}
        self._call(check_rows, self._policy.packed_linears(), self._policy.router_weights())
        slots = self._call(worker.read_adapter, self._policy.peft_config.r, self._policy.expert_rank)
        held = {name: matrix for name, matrix in slots.items() if name in known or matrix.any()}
        return checksums(held | self._call(worker.live_norms))

    def sleep(self) -> None:
        """Free the GPU memory that the setting ``sleep_level`` describes. Nothing is freed on a CPU, or if the memory
        plan lets the KV cache stay allocated."""
        if self._asleep:
            return
        llm, core = self._running(), self._core()
        # finish a step that vLLM scheduled before it knew that all requests had ended
        while core.engine_core.batch_queue:
            core.get_output()
        self._freed = llm.model_config.enable_sleep_mode and not (self._planned and self._planned.keeps_cache)
        if self._freed:
            with patches.sleep_beside_other_processes(memory.given_back):
                llm.sleep(level=self.sleep_level)
            if self.sleep_level == 0:
                llm.release_kv_cache_memory()
        elif llm.model_config.enable_sleep_mode:
            gc.collect()  # as vLLM does before it sleeps: objects in cycles may hold GPU memory
        self._asleep = True

    def free_cache(self) -> bool:
        """Free the KV cache if ``sleep`` has kept it, and make every later ``sleep`` free it. Returns whether it was
        freed."""
        if not self._asleep or self._freed or self._planned is None:
            return False
        self._planned = replace(self._planned, keeps_cache=False)
        self.wake()  # needs no memory
        self.sleep()
        return self._freed

    def wake(self) -> None:
        """Allocate again, or copy back, what ``sleep`` freed."""
        if not self._asleep:
            return
        assert self._llm is not None
        if self._freed:
            self._llm.wake_up()  # if memory is short, the engine stays asleep
        self._asleep = self._freed = False

    def close(self) -> None:
        """Shut vLLM down and free its memory and process groups."""
        if self._llm is None:
            return
        self.wake()  # vLLM cannot free memory that it unmapped in ``sleep``
        with preserved_rng(), setup.trainers_group(engines_own=self._owns_group):
            self._call(memory.free)
            self._llm.llm_engine.engine_core.shutdown()
        self._llm, self._drafts, self._asleep, self._freed = None, None, False, False
        del self._policy, self._base_norms, self._clean_norms
        memory.collect()

    def _running(self) -> LLM:
        if self._llm is None:
            raise RuntimeError("the vLLM engine is not running: call start(policy, ...) first")
        if self._asleep:
            raise RuntimeError("the vLLM engine is asleep: call wake() first")
        return self._llm

    def _core(self) -> InprocClient:
        from vllm.v1.engine.core_client import InprocClient

        core = self._running().llm_engine.engine_core
        assert isinstance(core, InprocClient)
        return core

    def _scheduler(self) -> RolloutScheduler:
        from qerl_pl.rollout.vllm.scheduler import RolloutScheduler

        scheduler = self._core().engine_core.scheduler
        assert isinstance(scheduler, RolloutScheduler)
        return scheduler

    def _check(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> None:
        self._running()
        vocab_size = self._policy.config.vocab_size
        check_prompts(prompts, vocab_size=vocab_size, max_model_len=self._max_model_len, max_tokens=max_tokens)

    def _call(self, function: Callable[..., T], *args: object) -> T:
        with any_algorithm():
            return self._running().collective_rpc(function, args=args)[0]

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        adapter: bool,
        bar: Callable[..., Any] | None = None,
    ) -> list[RequestOutput]:
        lora = self._lora_request if adapter else None
        if self._drafts:
            self._drafts.forget()
            sizes = self._sizes
            self._scheduler().dynamic_sd_lookup = native.for_vllm().guard.drafts_by_sequences(
                self.draft_history, sizes.max_num_seqs, graph_tokens=sizes.graph_sequences
            )
        with preserved_rng(), any_algorithm(), self._norms_of(adapter):
            return requests.results(self._running(), prompts, params, lora, on_cpu=self._on_cpu, bar=bar)

    @contextmanager
    def _norms_of(self, adapter: bool) -> Iterator[None]:
        """If norms are trained but requests shall use the base model only (``adapter`` is False), write the base's norm
        weights into vLLM's model at the start of the context, and the trained ones at its end; otherwise do nothing."""
        if adapter or self._clean_norms is self._base_norms:
            yield
            return
        self._write_norms(self._base_norms)
        try:
            yield
        finally:
            self._write_norms(self._clean_norms)

    def _write_norms(self, clean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        live = self._call(worker.live_norms)
        noisy = noisy_norms(clean, self._noise, dtype=self._noise.kept_in(self._running().model_config.dtype))
        for name, weight in noisy.items():
            live[name].copy_(weight)
        return noisy
