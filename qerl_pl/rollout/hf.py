"""Rollout engine that calls transformers' ``generate`` on the trained policy; also the reference with which the vLLM
engine is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qerl_pl.common.checks import require_at_least
from qerl_pl.common.isolation import preserved_rng
from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.types import Completion
from qerl_pl.memory.settings import EngineMemory
from qerl_pl.model.stop import StopStrings, tokenizer_of
from qerl_pl.noise.fp32_norms import weights_replaced
from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.policy.logprobs import fp32_logits
from qerl_pl.policy.policy import Policy, check_same_tensors
from qerl_pl.rollout.base import Sampling, expected_fingerprint
from qerl_pl.rollout.common import check_prompts, different, end_tokens, padded, trained_norms


class TransformersEngine:
    """Rollout engine that calls transformers' ``generate``; it works on any device.

    The engine uses the trained policy's model. During a call, the adapter and the noise on norm weights that were last
    given to the engine are written into this model; afterwards the policy's weights are restored bit for bit.

    Log-probabilities belong to the distribution that was sampled from: at the sampling temperature and, with top_p or
    top_k, normalised over the kept tokens. Greedy completions have log-probabilities at temperature 1.

    Args:
        batch_tokens: largest number of tokens, padding included, in the KV cache of one batch of sequences. A sequence
            that is longer gets a batch of its own.
    """

    def __init__(self, batch_tokens: int = 16384) -> None:
        require_at_least(1, batch_tokens=batch_tokens)
        self.batch_tokens = batch_tokens
        self.returns_routes = False
        self._policy: Policy | None = None
        self._asleep = False

    @property
    def memory(self) -> None:
        """None, because this engine samples with the trainer's model."""
        return None

    def plan_memory(self, planned: EngineMemory | None) -> None:
        """Do nothing; ``batch_tokens`` decides the size of this engine's KV cache."""

    def start(self, policy: Policy, *, max_model_len: int) -> None:
        """Keep a reference to the policy, whose model this engine samples with."""
        if self._policy is not None:
            return
        self._policy, self._max_model_len = policy, max_model_len
        self._end_tokens = end_tokens(policy.base, policy.config)
        norms = _norms(policy, adapter=False)
        self._base_norms = {name: module.get_parameter("weight").detach().clone() for name, module in norms.items()}
        self._noise = NormNoise()
        self.load_adapter(policy.adapter_state())

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int | Sequence[int], *, adapter: bool = True
    ) -> list[list[Completion]]:
        """Sample completions as ``RolloutEngine.generate`` describes."""
        policy = self._check(prompts, max_tokens=sampling.max_tokens)
        groups: list[list[Completion]] = [[] for _ in prompts]
        rows = [index for index in range(len(prompts)) for _ in range(sampling.num_completions)]
        batches = self._batches([len(prompts[index]) + sampling.max_tokens for index in rows])
        with preserved_rng(), self._in_place(policy, adapter=adapter):
            for number, batch in enumerate(batches):
                indices = [rows[row] for row in batch]
                some = [list(prompts[index]) for index in indices]
                given = seed if isinstance(seed, int) else derive_seed(0, f"seeds {[seed[index] for index in indices]}")
                # a batch's seed depends on its prompts, because all ranks get the same ``seed``
                torch.manual_seed(derive_seed(given, f"batch {some}", number))
                completions = self._sample(policy, some, sampling)
                for index, completion in zip(indices, completions, strict=True):
                    groups[index].append(completion)
        return groups

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]], *, adapter: bool = True) -> list[list[float]]:
        """Score sequences as ``RolloutEngine.score`` describes."""
        policy = self._check(sequences, max_tokens=0)
        scores: list[list[float]] = [[] for _ in sequences]
        with self._in_place(policy, adapter=adapter):
            for batch in self._batches([len(sequence) for sequence in sequences]):
                tokens, real = padded([sequences[row] for row in batch], left=False, device=policy.causal_lm.device)
                real[:, 0] = False  # no token precedes the first, so it has no log-probability
                logprobs = policy.token_stats(tokens, real, temperature=1.0).logprobs
                for row, values, mask in zip(batch, logprobs, real, strict=True):
                    scores[row] = values[mask].tolist()
        return scores

    @torch.no_grad()
    def score_next(
        self, tokens: Sequence[int], lengths: Sequence[int], following: Sequence[int], *, copies: int = 1
    ) -> Tensor:
        """Compute, for N prefixes of a sequence, the log-probability in nats of token ``following[i]`` after the first
        ``lengths[i]`` tokens. Returns [copies, N] fp32 on the CPU. The lengths must be distinct and less than that of
        the sequence; the tokens ``following`` need not be the sequence's own. The ``copies`` of the sequence are
        computed in one forward pass, and their results differ only by the errors that hooks may add to activations
        (``policy.shaken``)."""
        policy = self._check([tokens], max_tokens=0)
        device, at = policy.causal_lm.device, list(lengths)
        rows = torch.tensor([tokens], device=device).repeat(copies, 1)
        mask = torch.zeros(rows.shape, dtype=torch.bool, device=device)
        # Each copy needs random errors of its own, but the policy may compute a prompt once for all rows that have it.
        # A row's prompt ends before the first token that the mask selects, so with several copies the mask selects all
        # tokens but the first.
        mask[:, at if copies == 1 else slice(1, None)] = True
        targets = rows.clone()
        targets[:, at] = torch.tensor(following, device=device)
        with self._in_place(policy, adapter=True):
            logprobs = policy.token_stats(rows, mask, temperature=1.0, targets=targets[mask]).logprobs
        return logprobs[:, at].cpu()

    @contextmanager
    def sampled_as(self) -> Iterator[Callable[..., tuple[Tensor, Tensor]]]:
        """Give the trainer's model this engine's adapter and its noise on norm weights within the context. Yields the
        method ``Policy.sampled_as`` with its argument ``end_tokens`` filled in, to be called within the context. The
        method returns two results for each token that a mask selects: the token's log-probabilities under the policy
        and under other ways of sampling, such as another temperature; and the token's margin (``policy.margins``). vLLM
        samples the token with the largest sum of logit and Gumbel noise, which is computed again from the requests'
        seeds, and the margin is how far the token's sum is below the largest."""
        policy = self._running()
        with self._in_place(policy, adapter=True):
            yield partial(policy.sampled_as, end_tokens=self._end_tokens)

    def load_adapter(self, adapter: Mapping[str, Tensor]) -> None:
        """Set the adapter with which completions are sampled. It is copied, so that later updates of the trainer do not
        change it."""
        check_same_tensors(adapter, self._running().adapter_state())
        self._adapter = {name: tensor.detach().clone() for name, tensor in adapter.items()}

    def set_norm_noise(self, noise: NormNoise) -> int:
        """Set AQN's noise of the norms as ``RolloutEngine.set_norm_noise`` describes."""
        self._running()
        self._noise = noise
        return len(self._clean_norms(adapter=True)) if noise.sigma else 0

    def fingerprint(self) -> dict[str, int]:
        """Compute checksums of adapter and norm weights of the trainer's model while this engine samples."""
        policy = self._running()
        with self._in_place(policy, adapter=True):
            return expected_fingerprint(
                policy.adapter_state(), policy.norm_weights(), scaling=policy.lora_scaling, dtype=policy.dtype
            )

    def sleep(self) -> None:
        """Mark the engine as asleep; it has no memory to free."""
        if not self._asleep:
            self._running()
            self._asleep = True

    def free_cache(self) -> bool:
        """Return False, because the KV cache of this engine exists only while it samples."""
        return False

    def wake(self) -> None:
        """Mark the engine as awake."""
        self._asleep = False

    def close(self) -> None:
        """Drop the policy and the copied weights."""
        if self._policy is not None:
            self._policy, self._asleep = None, False
            del self._adapter, self._base_norms

    def _running(self) -> Policy:
        if self._policy is None:
            raise RuntimeError("the transformers engine is not running: call start(policy, ...) first")
        if self._asleep:
            raise RuntimeError("the transformers engine is asleep: call wake() first")
        return self._policy

    def _check(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Policy:
        policy = self._running()
        vocab_size = policy.config.vocab_size
        check_prompts(prompts, vocab_size=vocab_size, max_model_len=self._max_model_len, max_tokens=max_tokens)
        return policy

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Divide sequences of the given ``lengths``, in tokens, into batches, longest sequence first, each of at most
        ``batch_tokens`` tokens with padding; a longer sequence gets a batch of its own. Returns the indices of each
        batch's sequences."""
        batches: list[list[int]] = []
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > self.batch_tokens:
                batches.append([])
            batches[-1].append(row)
        return batches

    def _sample(self, policy: Policy, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        tokens, real = padded(prompts, left=True, device=policy.causal_lm.device)
        recorder = SampledLogprobs(sampling)
        config = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=sampling.temperature > 0,
            top_k=0,  # ``recorder`` applies top_k and top_p, and records log-probabilities after that
            eos_token_id=self._end_tokens or None,
            pad_token_id=0,
            use_cache=True,
        )
        stop = StopStrings(sampling.stop, tokenizer_of(policy.base), prompts) if sampling.stop else None
        sequences = policy.causal_lm.generate(
            tokens,
            attention_mask=real.long(),
            generation_config=config,
            logits_processor=LogitsProcessorList([recorder]),
            stopping_criteria=None if stop is None else StoppingCriteriaList([stop]),
        )
        logprobs = recorder.finish(sequences)
        rows = zip(
            sequences[:, tokens.shape[1] :].tolist(),
            logprobs.tolist(),
            [None] * len(prompts) if stop is None else stop.lengths,
            strict=True,
        )
        return [self._completion(*row) for row in rows]

    def _completion(self, tokens: list[int], logprobs: list[float], stopped_at: int | None) -> Completion:
        ends = [position + 1 for position, token in enumerate(tokens) if token in self._end_tokens]
        ends += [] if stopped_at is None else [stopped_at]
        length = min(ends, default=len(tokens))
        return Completion(tuple(tokens[:length]), tuple(logprobs[:length]), finished=bool(ends))

    def _clean_norms(self, *, adapter: bool) -> dict[str, Tensor]:
        return self._base_norms | (trained_norms(self._adapter) if adapter else {})

    @contextmanager
    def _in_place(self, policy: Policy, *, adapter: bool) -> Iterator[None]:
        """Give the trainer's model, within the context, this engine's adapter (if ``adapter``) and noise on norm
        weights, in evaluation mode; the policy's own state is restored afterwards."""
        wanted = {name: tensor for name, tensor in self._adapter.items() if ".lora_" in name}
        live = policy.adapter_state()
        noise, modules = self._noise, _norms(policy, adapter=adapter)
        norms = noisy_norms(self._clean_norms(adapter=adapter), noise, dtype=noise.kept_in(policy.dtype))
        changed = different(live, wanted)
        kept = {name: live[name].clone() for name in changed}
        generation_config = policy.causal_lm.generation_config
        try:
            for name in changed:
                live[name].copy_(wanted[name])
            policy.causal_lm.generation_config = GenerationConfig()  # avoids the checkpoint's sampling defaults
            with (
                policy.evaluating(),  # in training mode, gradient checkpointing would prevent the use of a KV cache
                nullcontext() if adapter else policy.model.disable_adapter(),
                weights_replaced(modules, norms),
                _fp32_head(policy),
            ):
                yield
        finally:
            policy.causal_lm.generation_config = generation_config
            for name in changed:
                live[name].copy_(kept[name])


class SampledLogprobs(LogitsProcessor):
    """Logits processor that applies temperature, top_k and top_p, and records the log-probability of each sampled
    token. transformers' ``generate`` itself could only return the scores of the whole vocabulary for all steps."""

    def __init__(self, sampling: Sampling) -> None:
        self._cuts: list[LogitsProcessor] = []
        if sampling.temperature > 0:
            self._cuts.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k > 0:
            self._cuts.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._cuts.append(TopPLogitsWarper(sampling.top_p))
        self._distribution: Tensor | None = None
        self._columns: list[Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Apply temperature, top_k and top_p to logits [B, V] fp32 for the next tokens of sequences [B, S] int64."""
        self._note(input_ids)
        for cut in self._cuts:
            scores = cut(input_ids, scores)
        self._distribution = scores.log_softmax(dim=-1)
        return scores

    def finish(self, sequences: Tensor) -> Tensor:
        """Return the log-probabilities [B, N] fp32, in nats, of the N sampled tokens per row."""
        self._note(sequences)
        return torch.cat(self._columns, dim=1)

    def _note(self, input_ids: Tensor) -> None:
        if self._distribution is not None:
            self._columns.append(self._distribution.gather(1, input_ids[:, -1:]))


@contextmanager
def _fp32_head(policy: Policy) -> Iterator[None]:
    """Make the model compute logits in fp32 within this context, as in training, if its compute dtype has 16 bits."""
    if policy.dtype.itemsize >= torch.float32.itemsize:
        yield
        return
    head = policy.causal_lm.get_output_embeddings()

    def forward(hidden: Tensor) -> Tensor:
        logits = fp32_logits(hidden.flatten(0, -2), head.weight, head.bias)
        return logits.unflatten(0, hidden.shape[:-1])

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def _norms(policy: Policy, *, adapter: bool) -> dict[str, nn.Module]:
    """Return the norms that get noise (AQN), by the names of their weights: for norms that the policy trains, the
    trained copies if ``adapter`` is True and the base's modules otherwise."""
    modules = policy.norm_modules()
    if not adapter:
        for name in modules:
            module = policy.causal_lm.get_submodule(name.removesuffix(".weight"))
            modules[name] = getattr(module, "original_module", module)
    return modules
