"""Rollouts from vLLM inside the trainer's process: adapters from memory, noise on the live norm weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor

from qerl_pl.common.stopwatch import Stopwatch
from qerl_pl.common.types import Completion
from qerl_pl.memory.settings import EngineMemory
from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.policy.policy import Policy, check_same_tensors
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.checksums import checksums
from qerl_pl.rollout.collate import micro_batches
from qerl_pl.rollout.common import check_prompts, end_tokens, request_seeds, trained_norms
from qerl_pl.rollout.isolation import preserved_rng
from qerl_pl.rollout.vllm import memory, requests, setup, worker
from qerl_pl.rollout.vllm.launch import launch

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.v1.engine.core_client import InprocClient

    from qerl_pl.rollout.vllm.scheduler import RolloutScheduler

SCORED_TOKENS_PER_CALL = 65536

T = TypeVar("T")


class VLLMEngine:
    """vLLM as a ``RolloutEngine``.

    Log-probabilities are those of the distribution that was sampled from: at the sampling temperature, and with top_p
    or top_k over the tokens that these keep (a trainer that computes them over the whole vocabulary will differ then).
    Greedy completions come with log-probabilities at temperature 1.

    Cached prefixes live within one call. So a changed adapter or norm never meets a stale prefix, and equal arguments
    give equal tokens whatever ran before. NVFP4 on Hopper is the exception: Humming, which multiplies there, adds
    partial sums up in any order, and where two tokens are about as likely the other one may be sampled.

    Args:
        dtype: compute dtype; "auto" is the policy's.
        kv_cache_bytes: size of the key/value cache. None: room for max_num_seqs sequences of the longest length; in
            training on a GPU at most what the memory plan leaves, otherwise at most half of the memory that is free
            (on a CPU: 4 GiB). Sequences for which there is no room wait: vLLM stops the youngest and makes its cache
            again later, which costs time and no tokens.
        max_num_seqs: sequences sampled at the same time.
        max_num_batched_tokens: tokens in one forward pass; None: 8192 on a GPU, vLLM's default on a CPU.
        enforce_eager: no CUDA graphs, no compilation: starts faster, samples slower.
        block_size: tokens in a block of the cache; None is vLLM's default.
        enable_prefix_caching: share the prompt's cache among its completions.
        kv_cache_dtype: of the cache, e.g. "fp8"; "auto" is the compute dtype.
        sleep_level: what is given back while the trainer works. 0: the cache. 1: the weights too, which host memory
            keeps. A CPU gives nothing back. (vLLM's level 2 reads weights again, and fails where there are adapters.)
        decoding_kernel: what multiplies by NVFP4 weights where a step has up to 256 tokens. "auto" is our kernels where
            they can run, on Hopper with Humming and cuda-bindings in bfloat16, and what vLLM chooses elsewhere; on
            Hopper that is Humming, which is slower (`docs/performance.md`).

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        kv_cache_bytes: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        enforce_eager: bool = False,
        block_size: int | None = None,
        enable_prefix_caching: bool = True,
        kv_cache_dtype: str = "auto",
        sleep_level: Literal[0, 1] = 0,
        decoding_kernel: Literal["auto", "native", "humming"] = "auto",
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}; expected at least 1")
        self.dtype: Literal["auto", "float32", "bfloat16"] = dtype
        self.sleep_level = sleep_level
        self.decoding_kernel: Literal["auto", "native", "humming"] = decoding_kernel
        self.kv_cache_bytes = kv_cache_bytes
        self._cache_bytes = kv_cache_bytes
        """As planned."""
        arguments = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "enforce_eager": enforce_eager,
            "block_size": block_size,
            "enable_prefix_caching": enable_prefix_caching,
            "kv_cache_dtype": kv_cache_dtype,
        }
        self._arguments = {name: value for name, value in arguments.items() if value is not None}
        self.start_s: dict[str, float] = {}
        """Seconds of the last start by phase: imports, vLLM itself, adapter (its slots and kernels)."""
        self._fp32_norms = self._fp32_head = True  # benchmarks measure what they cost
        self._llm: LLM | None = None
        self._asleep = False

    @property
    def memory(self) -> EngineMemory:
        """What of the settings decides how much memory the engine takes."""
        names = {field.name for field in fields(EngineMemory)}
        given = {name: value for name, value in self._arguments.items() if name in names}
        return EngineMemory(dtype=self.dtype, kv_cache_bytes=self.kv_cache_bytes, sleep_level=self.sleep_level, **given)

    batch_tokens = 0  # its cache is in ``memory``

    def plan_cache(self, num_bytes: int | None) -> None:
        """See ``RolloutEngine``."""
        self._cache_bytes = self.kv_cache_bytes if num_bytes is None else num_bytes

    def start(self, policy: Policy, *, max_model_len: int) -> None:
        """Load vLLM with the policy's base and adapter. Every request carries its own seed.

        Raises:
            ValueError: ``decoding_kernel`` is "native" where our kernel cannot run.
        """
        if self._llm is not None:
            return
        setup.prepare_environment()
        setup.log_starting()
        watch = Stopwatch()
        self._policy, self._max_model_len = policy, max_model_len
        self._base_norms = self._clean_norms = {}
        self._end_tokens = end_tokens(policy.base, policy.config)
        self._llm, self._on_cpu, self._owns_group = launch(
            policy,
            replace(self.memory, kv_cache_bytes=self._cache_bytes),
            self._arguments,
            dtype=self.dtype,
            max_model_len=max_model_len,
            decoding_kernel=self.decoding_kernel,
            fp32_norms=self._fp32_norms,
            fp32_head=self._fp32_head,
            watch=watch,
        )
        from vllm.lora.request import LoRARequest

        self._lora_request = LoRARequest("policy", worker.ADAPTER_ID, "in memory")
        try:
            self._get_ready(watch)
        except BaseException:
            self.close()
            raise
        self.start_s = dict(watch.seconds)
        setup.log_started(self.start_s)

    def _get_ready(self, watch: Stopwatch) -> None:
        """Once vLLM runs: its clean norms, and the adapter in its slots."""
        setup.log_kernels(self._call(worker.linear_kernels))
        self._base_norms = {name: weight.clone() for name, weight in self._call(worker.live_norms).items()}
        self._clean_norms, self._noise = self._base_norms, NormNoise()
        with watch.phase("adapter"):
            self._call(worker.reserve_adapter, self._lora_request)
            if not self._on_cpu:
                self._call(worker.compile_adapter_kernels)
            self.load_adapter(self._policy.adapter_state())

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int | Sequence[int], *, adapter: bool = True
    ) -> list[list[Completion]]:
        """See ``RolloutEngine``. One call samples with the adapter or without it, never both.

        Raises:
            ValueError: as in the protocol, or the temperature is one at which vLLM does not sample.
        """
        self._check(prompts, max_tokens=sampling.max_tokens)
        requests.check_temperature(sampling.temperature)
        copies = sampling.num_completions
        params = requests.sampling_params(sampling, request_seeds(prompts, copies, seed), self._end_tokens)
        self._scheduler().take_logprobs()  # of a call that failed
        outputs = self._run([prompt for prompt in prompts for _ in range(copies)], params, adapter=adapter)
        logprobs = self._scheduler().take_logprobs()
        completions = [requests.completion(output, logprobs[output.request_id]) for output in outputs]
        return [completions[first : first + copies] for first in range(0, len(completions), copies)]

    def score(self, sequences: Sequence[Sequence[int]], *, adapter: bool = True) -> list[list[float]]:
        """See ``RolloutEngine``. The last token is scored as one that might be sampled, the others as a prompt."""
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
        """See ``RolloutEngine``. Names and shapes are checked first: vLLM takes wrong ones without a word."""
        self._running()
        check_same_tensors(adapter, self._policy.adapter_state())
        self._call(worker.write_adapter, adapter, self._policy.lora_scaling)
        trained = {name: weight.detach().clone() for name, weight in trained_norms(adapter).items()}
        if trained:
            self._clean_norms = trained
            self._write_norms(self._clean_norms)

    def set_norm_noise(self, noise: NormNoise) -> int:
        """See ``RolloutEngine``."""
        self._running()
        self._noise = noise
        noisy = self._write_norms(self._clean_norms)
        live = self._call(worker.live_norms)
        written = torch.stack([noisy[name].to(live[name]) for name in live])  # [2L, H]
        held = int((torch.stack(list(live.values())) == written).all(dim=1).sum())
        return held if noise.sigma else 0

    def fingerprint(self) -> dict[str, int]:
        """See ``RolloutEngine``. Read from vLLM's adapter slots and from the weights of its model."""
        known = self._policy.adapter_state() if self._running() else {}
        slots = self._call(worker.read_adapter, self._policy.peft_config.r)
        held = {name: matrix for name, matrix in slots.items() if name in known or matrix.any()}
        return checksums(held | self._call(worker.live_norms))

    def sleep(self) -> None:
        """Give back what ``sleep_level`` says. On a CPU there is nothing to give back."""
        if self._asleep:
            return
        llm = self._running()
        if llm.model_config.enable_sleep_mode:
            core = self._core()
            while core.engine_core.batch_queue:  # vLLM schedules a step ahead, here of requests that have ended
                core.get_output()
            llm.sleep(level=self.sleep_level)
            if self.sleep_level == 0:
                llm.release_kv_cache_memory()
        self._asleep = True

    def wake(self) -> None:
        """See ``RolloutEngine``."""
        if not self._asleep:
            return
        self._asleep = False
        llm = self._running()
        if llm.model_config.enable_sleep_mode:
            llm.wake_up()

    def close(self) -> None:
        """See ``RolloutEngine``."""
        if self._llm is None:
            return
        self.wake()  # vLLM cannot free memory that it has unmapped
        with preserved_rng(), setup.trainers_group(engines_own=self._owns_group):
            self._call(memory.free)
            self._llm.llm_engine.engine_core.shutdown()
        self._llm, self._asleep = None, False
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
        return self._running().collective_rpc(function, args=args)[0]

    def _run(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, adapter: bool
    ) -> list[RequestOutput]:
        from vllm.inputs import TokensPrompt

        llm = self._running()
        if not llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not clear its prefix cache: requests of an earlier call are still queued")
        inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        lora = self._lora_request if adapter else None
        # Compiling the one compiled function of the CPU sampler takes 20 s and a C++ compiler, and gains nothing.
        compilation = torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext()
        try:
            with preserved_rng(), compilation, self._norms_of(adapter):
                return llm.generate(inputs, params, use_tqdm=False, lora_request=lora)
        except BaseException:
            # What is left in the queue would make the next call spin for ever.
            llm.llm_engine.abort_request(list(llm.llm_engine.output_processor.request_states), internal=True)
            raise

    @contextmanager
    def _norms_of(self, adapter: bool) -> Iterator[None]:
        """Without the adapter, trained norms give way to the base's."""
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
        kept_in = self._noise.kept_in(self._running().model_config.dtype)
        noisy = noisy_norms(clean, self._noise, dtype=kept_in)
        for name, weight in noisy.items():
            live[name].copy_(weight)
        return noisy
