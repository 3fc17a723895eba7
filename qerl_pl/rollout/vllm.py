"""Rollouts from vLLM inside the trainer's process: adapters from memory, noise on the live norm weights."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor

from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.policy.policy import Policy, check_same_tensors
from qerl_pl.rollout import vllm_plugin, vllm_setup, vllm_worker
from qerl_pl.rollout.base import Sampling, checksum
from qerl_pl.rollout.collate import micro_batches
from qerl_pl.rollout.common import check_prompts, end_tokens, trained_norms
from qerl_pl.rollout.isolation import preserved_rng, preserved_torch_settings
from qerl_pl.seeding import derive_seed
from qerl_pl.types import Completion

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

COOLEST, HOTTEST = 0.01, 2.0  # vLLM raises lower temperatures to the first and refuses those above the second
SCORED_TOKENS_PER_CALL = 65536

T = TypeVar("T")


class VLLMEngine:
    """vLLM as a ``RolloutEngine``.

    Log-probabilities are those of the distribution that was sampled from: at the sampling temperature, and with top_p
    or top_k over the tokens that these keep (a trainer that computes them over the whole vocabulary will differ then).
    Greedy completions come with log-probabilities at temperature 1.

    Cached prefixes live within one call. So a changed adapter or norm never meets a stale prefix, and equal arguments
    give equal tokens whatever ran before.

    Args:
        dtype: compute dtype; "auto" is the policy's.
        gpu_memory_utilization: share of the GPU's memory for the engine's weights and cache. A CPU has no use for it.
        kv_cache_bytes: size of the key/value cache, which overrides gpu_memory_utilization. None on a CPU: room for
            max_num_seqs sequences of the longest length, at most 4 GiB.
        max_num_seqs: sequences sampled at the same time.
        max_num_batched_tokens: tokens in one forward pass; None is vLLM's default.
        enforce_eager: no CUDA graphs, no compilation: starts faster, samples slower.
        block_size: tokens in a block of the cache; None is vLLM's default.
        enable_prefix_caching: share the prompt's cache among its completions.
        kv_cache_dtype: of the cache, e.g. "fp8"; "auto" is the compute dtype.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        gpu_memory_utilization: float = 0.3,
        kv_cache_bytes: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        enforce_eager: bool = False,
        block_size: int | None = None,
        enable_prefix_caching: bool = True,
        kv_cache_dtype: str = "auto",
    ) -> None:
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization is {gpu_memory_utilization}; expected more than 0 and at most 1")
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}; expected at least 1")
        self.dtype = dtype
        arguments = {
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "enforce_eager": enforce_eager,
            "block_size": block_size,
            "enable_prefix_caching": enable_prefix_caching,
            "kv_cache_dtype": kv_cache_dtype,
        }
        self._arguments = {name: value for name, value in arguments.items() if value is not None}
        self._llm: LLM | None = None
        self._asleep = False

    def start(self, policy: Policy, *, max_model_len: int, seed: int) -> None:
        """Load vLLM with the policy's base and adapter. Every request carries its own seed, so ``seed`` is not used."""
        if self._llm is not None:
            return
        vllm_setup.prepare_environment()
        self._end_tokens = end_tokens(policy.base, policy.config)
        # vLLM looks at names of torch that are deprecated, which is no news to the user.
        quietly = warnings.catch_warnings(action="ignore", category=FutureWarning)
        with preserved_rng(), preserved_torch_settings(), quietly:
            from vllm import LLM
            from vllm.lora.request import LoRARequest
            from vllm.platforms import current_platform

            vllm_plugin.register()
            dtype = policy.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
            arguments = vllm_setup.policy_arguments(policy, dtype=dtype, max_model_len=max_model_len)
            self._on_cpu = current_platform.is_cpu()
            if self._on_cpu:
                num_seqs = self._arguments["max_num_seqs"]
                arguments |= vllm_setup.cpu_arguments(
                    policy.config, dtype=dtype, max_model_len=max_model_len, max_num_seqs=num_seqs
                )
            else:
                vllm_setup.check_fused_scales(policy.base)
            self._llm = LLM(**(arguments | self._arguments))
        self._policy, self._max_model_len = policy, max_model_len
        self._base_norms = {name: weight.clone() for name, weight in self._call(vllm_worker.live_norms).items()}
        self._clean_norms, self._noise = self._base_norms, NormNoise()
        self._lora_request = LoRARequest("policy", vllm_worker.ADAPTER_ID, "in memory")
        self._call(vllm_worker.reserve_adapter, self._lora_request)
        self.load_adapter(policy.adapter_state())

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, *, adapter: bool = True
    ) -> list[list[Completion]]:
        """See ``RolloutEngine``. One call samples with the adapter or without it, never both.

        Raises:
            ValueError: as in the protocol, or the temperature is one at which vLLM does not sample.
        """
        self._check(prompts, max_tokens=sampling.max_tokens)
        if sampling.temperature != 0 and not COOLEST <= sampling.temperature <= HOTTEST:
            raise ValueError(f"temperature is {sampling.temperature}; vLLM samples at 0 or {COOLEST} to {HOTTEST}")
        from vllm import SamplingParams

        rows = [(index, copy) for index in range(len(prompts)) for copy in range(sampling.num_completions)]
        params = [
            SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=derive_seed(seed, f"prompt {index}", copy),
                stop_token_ids=self._end_tokens,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for index, copy in rows
        ]
        outputs = self._run([prompts[index] for index, _ in rows], params, adapter=adapter)
        groups: list[list[Completion]] = [[] for _ in prompts]
        for (index, _), output in zip(rows, outputs, strict=True):
            [sampled] = output.outputs
            logprobs = tuple(_values(sampled.logprobs))
            groups[index].append(Completion(tuple(sampled.token_ids), logprobs, sampled.finish_reason == "stop"))
        return groups

    def score(self, sequences: Sequence[Sequence[int]], *, adapter: bool = True) -> list[list[float]]:
        """See ``RolloutEngine``. The last token is scored as one that might be sampled, the others as a prompt."""
        self._check(sequences, max_tokens=0)
        from vllm import SamplingParams

        scores: list[list[float]] = [[] for _ in sequences]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        limit = max([SCORED_TOKENS_PER_CALL, *lengths.tolist()])
        for batch in micro_batches(lengths, limit):
            rows = [row for row in batch.tolist() if len(sequences[row]) > 1]
            params = [
                SamplingParams(
                    max_tokens=1,
                    temperature=0,
                    prompt_logprobs=0,
                    logprob_token_ids=[sequences[row][-1]],
                    flat_logprobs=True,
                    detokenize=False,
                )
                for row in rows
            ]
            outputs = self._run([sequences[row][:-1] for row in rows], params, adapter=adapter)
            for row, output in zip(rows, outputs, strict=True):
                scores[row] = [*_values(output.prompt_logprobs), _values(output.outputs[0].logprobs)[-1]]
        return scores

    def load_adapter(self, adapter: Mapping[str, Tensor]) -> None:
        """See ``RolloutEngine``. Names and shapes are checked first: vLLM takes wrong ones without a word."""
        self._running()
        check_same_tensors(adapter, self._policy.adapter_state())
        self._call(vllm_worker.write_adapter, adapter, self._policy.lora_scaling)
        trained = {name: weight.detach().clone() for name, weight in trained_norms(adapter).items()}
        if trained:
            self._clean_norms = trained
            self._write_norms(self._clean_norms)

    def set_norm_noise(self, sigma: float, seed: int) -> int:
        """See ``RolloutEngine``."""
        self._running()
        noisy_norms({}, sigma, seed)  # refuses a sigma that means nothing before anything is changed
        self._noise = NormNoise(sigma, seed)
        noisy = self._write_norms(self._clean_norms)
        live = self._call(vllm_worker.live_norms)
        written = torch.stack([noisy[name].to(live[name]) for name in live])  # [2L, H]
        held = int((torch.stack(list(live.values())) == written).all(dim=1).sum())
        return held if sigma else 0

    def fingerprint(self) -> dict[str, int]:
        """See ``RolloutEngine``. Read from vLLM's adapter slots and from the weights of its model."""
        known = self._policy.adapter_state() if self._running() else {}
        slots = self._call(vllm_worker.read_adapter, self._policy.peft_config.r)
        held = {name: matrix for name, matrix in slots.items() if name in known or matrix.any()}
        return {name: checksum(tensor) for name, tensor in (held | self._call(vllm_worker.live_norms)).items()}

    def sleep(self) -> None:
        """Drop the cache and move the weights to host memory. On a CPU there is nothing to give back."""
        if not self._asleep:
            llm = self._running()
            self._asleep = True
            if llm.model_config.enable_sleep_mode:
                llm.sleep(level=1)

    def wake(self) -> None:
        """See ``RolloutEngine``."""
        if self._asleep:
            self._asleep = False
            llm = self._running()
            if llm.model_config.enable_sleep_mode:
                llm.wake_up()

    def close(self) -> None:
        """See ``RolloutEngine``."""
        if self._llm is None:
            return
        self.wake()  # vLLM cannot free memory that it has unmapped
        with preserved_rng():
            self._llm.llm_engine.engine_core.shutdown()
        self._llm, self._asleep = None, False
        del self._policy, self._base_norms, self._clean_norms
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _running(self) -> LLM:
        if self._llm is None:
            raise RuntimeError("the vLLM engine is not running: call start(policy, ...) first")
        if self._asleep:
            raise RuntimeError("the vLLM engine is asleep: call wake() first")
        return self._llm

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
        live = self._call(vllm_worker.live_norms)
        noisy = noisy_norms(clean, self._noise.sigma, self._noise.seed)
        for name, weight in noisy.items():
            live[name].copy_(weight)
        return noisy


def _values(logprobs: object) -> list[float]:
    from vllm.logprobs import FlatLogprobs

    assert isinstance(logprobs, FlatLogprobs)
    return logprobs.logprobs
