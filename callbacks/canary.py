"""Check that the rollout engine holds and uses the trainer's policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from qerl_pl.common.due import is_due
from qerl_pl.common.loggers import log_at
from qerl_pl.common.seeding import derive_seed
from qerl_pl.module import QeRLModule
from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.base import RolloutEngine, Sampling, expected_fingerprint
from qerl_pl.rollout.checksums import checksums
from qerl_pl.rollout.common import trained_norms
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.loop import Rollout, RolloutLoop

# mean nats per token; docs/correctness.md has those of correct engines
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.3}
# two completions per prompt, as rollouts have several
ONE_TOKEN = Sampling(num_completions=2, max_tokens=1, temperature=1.0)
NUM_PROMPTS = 16
# size of the random adapter that tests the engine: its output has about a third of the rms of the linear's input
STRENGTH = 0.5
SEED = 0

WITH_ADAPTER = "scores with the adapter"
WITHOUT_ADAPTER = "scores without the adapter"
PROBE = "samples after another adapter was loaded (it is not used, or cached prefixes are those of an older policy)"
CHANGE = "what that adapter changes in the trainer's own scores of the samples"


class SyncCanary(Callback):
    """Stops the run when the rollout engine does not hold the current policy.

    The checks run after training rollouts, before the update, and before batches of an evaluation:

    1. Checksums, every time. The engine's adapter slots and norms are read back and compared with the trainer's adapter
       and its norms with the current noise. This is exact in every dtype, however small the last update was. With vLLM,
       one row of each NVFP4 linear of the base is compared with the trainer's too; where engine and trainer share one
       copy of the base, its digest is compared with the digest at the start of the run.
    2. Samples under a probe adapter, less often. An engine may hold the right tensors and compute with others: with
       cached prefixes of an older policy, or without any adapter. Early in a run the adapter's matrix B is near 0, so
       log-probabilities cannot tell such policies apart. Therefore a few tokens are sampled, a random adapter is
       loaded, tokens are sampled again after the same prompts, and their log-probabilities must be those of the
       trainer's model with that adapter. The difference may be at most half of what the adapter changes there
       (``canary/probe_share`` is the share). Then the policy is loaded again.
    3. Scores, still less often. Fixed tokens are scored by the engine and by the trainer's model, with and without the
       adapter. (This does not test the cache, because vLLM computes scored tokens without it.)

    Afterwards the engine is in the same state as before.

    Args:
        sample_every: rollouts, or batches of an evaluation, from one check of samples to the next. The first four of a
            run or an evaluation all have one, and so has the first rollout after a start.
        score_every: rollouts from one check of scores to the next. The first rollout after a start has one, and so has
            the first batch of an evaluation.
        num_tokens: number of fixed tokens, cut to the engine's longest sequence. It should exceed a block of the
            engine's cache (by default 16 tokens on a GPU, 128 on a CPU), because shorter prefixes are never cached.
        tolerance: largest mean difference of log-probabilities in nats; null: 1e-4 if engine and trainer compute in
            float32, 0.3 if one of them computes in bfloat16. Samples under the probe adapter may differ by half of what
            that adapter changes, or by the tolerance if it is below 0.3 and less than that.

    Raises:
        ValueError: a value is out of range.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.canary.SyncCanary
              init_args: {sample_every: 8, score_every: 16}
    """

    def __init__(
        self, sample_every: int = 1, score_every: int = 10, num_tokens: int = 160, tolerance: float | None = None
    ) -> None:
        smallest = {"sample_every": (sample_every, 1), "score_every": (score_every, 1)}
        for name, (value, least) in {**smallest, "num_tokens": (num_tokens, 2 * NUM_PROMPTS)}.items():
            if value < least:
                raise ValueError(f"{name} is {value}; expected at least {least}")
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance is {tolerance}; expected more than 0 nats, or null for the dtype's own")
        self.sample_every = sample_every
        self.score_every = score_every
        self.num_tokens = num_tokens
        self.tolerance = tolerance
        self._is_first = True
        self._held_before: dict[str, int] = {}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._is_first = True
        pl_module.loop.observers.append(partial(self._check_rollout, pl_module))

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: QeRLModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        seed = derive_seed(SEED, "canary/evaluation", batch_idx)
        due = is_due(batch_idx, self.sample_every)
        self._check(pl_module, NormNoise(), seed=seed, with_samples=due, with_scores=batch_idx == 0)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start  # pyright: ignore[reportAssignmentType]

    def _check_rollout(self, pl_module: QeRLModule, rollout: Rollout) -> None:
        index, first = pl_module.rollout_index, self._is_first
        samples_due, scores_due = is_due(index, self.sample_every), index % self.score_every == 0
        gaps = self._check(
            pl_module,
            pl_module.norm_noise,
            seed=derive_seed(SEED, "canary/rollout", index),
            with_samples=samples_due or first,
            with_scores=scores_due or first,
        )
        self._is_first = False
        pl_module.log("canary/tensors_checked", float(len(self._held_before)))
        # What was compared only because the process is new is not logged, so that a resumed run logs the same values as
        # an uninterrupted one.
        compared = [*([PROBE] if samples_due else []), *([WITH_ADAPTER, WITHOUT_ADAPTER] if scores_due else [])]
        values = {"canary/score_gap": max(gaps[what] for what in compared)} if compared else {}
        if samples_due:
            values["canary/probe_share"] = gaps[PROBE] / max(gaps[CHANGE], 1e-9)
        if values:
            log_at(pl_module.trainer.loggers, values, step=index)

    def _check(
        self, pl_module: QeRLModule, noise: NormNoise, *, seed: int, with_samples: bool, with_scores: bool
    ) -> dict[str, float]:
        """Run the checks that are due; returns mean |engine - trainer| in nats by check, see ``score_gaps``.

        Raises:
            RuntimeError: the engine does not hold the policy, or does not compute with it.
        """
        loop, policy = pl_module.loop, pl_module.policy
        held = loop.engine.fingerprint()
        dtype = dtype_held(held, policy, noise)
        if dtype is None:
            fault = describe_fault(held, policy, noise, before=self._held_before)
            raise RuntimeError(f"the rollout engine does not hold the current policy: {fault}")
        self._held_before = held
        num_tokens = min(self.num_tokens, pl_module.settings.max_model_len - 1)
        tokens, due = fixed_tokens(policy, num_tokens), {"with_samples": with_samples, "with_scores": with_scores}
        gaps = score_gaps(loop, policy, noise, tokens, seed=seed, **due) if any(due.values()) else {}
        tolerance = self.tolerance or max(TOLERANCE[policy.dtype], TOLERANCE[dtype])
        if wrong := too_far(gaps, tolerance):
            found = "; ".join(f"{what}, by {gaps[what]:.2g} nats per token" for what in wrong)
            raise RuntimeError(
                "the rollout engine does not compute with the current policy, although it holds the trainer's adapter "
                f"and norms. These of its log-probabilities differ by more than {max(wrong.values()):.2g} nats: "
                f"{found}"
            )
        return gaps


def dtype_held(held: Mapping[str, int], policy: Policy, noise: NormNoise) -> torch.dtype | None:
    """Find the compute dtype for which the policy with this noise has the engine's checksums ``held``; None if none
    has."""
    dtypes = dict.fromkeys((policy.dtype, *TOLERANCE))  # the engine may compute in another dtype than the trainer
    return next((dtype for dtype in dtypes if held == expected(policy, noise, dtype)), None)


def describe_fault(held: Mapping[str, int], policy: Policy, noise: NormNoise, *, before: Mapping[str, int]) -> str:
    """Describe how an engine's tensors differ from the policy with this noise.

    Args:
        held: checksums from the engine's ``fingerprint``, by name of the tensor.
        policy: the trainer's policy.
        noise: noise that the norm weights should have.
        before: the engine's checksums at the last check that passed; empty if none has passed.
    """
    due, adapter = expected(policy, noise, policy.dtype), policy.adapter_state()
    wrong = sorted(name for name in held.keys() | due.keys() if held.get(name) != due.get(name))
    matrices = [name for name in wrong if ".lora_" in name]
    norms = [name for name in wrong if ".lora_" not in name]
    reasons = []
    if matrices:
        zeros = checksums({name: torch.zeros_like(tensor, dtype=policy.dtype) for name, tensor in adapter.items()})
        if all(name in before and held.get(name) == before[name] for name in matrices):
            reasons.append("it has the adapter from before the last update")
        elif all(held.get(name) == zeros.get(name) for name in matrices):
            reasons.append("it has no adapter")
        else:
            reasons.append("it has another adapter")
    if norms and not (matrices and trained_norms(adapter)):  # trained norms differ whenever the adapter does
        clean = expected(policy, NormNoise(), policy.dtype)
        if noise.sigma == 0:
            reasons.append("noise was left on its norms, which should be clean")
        elif all(held.get(name) == clean.get(name) for name in norms):
            reasons.append(f"its norms are clean, and noise of sigma {noise.sigma:g} is missing")
        else:
            reasons.append(f"its norms have other noise than that of this rollout (sigma {noise.sigma:g})")
    listed = ", ".join(wrong[:4]) + (", ..." if len(wrong) > 4 else "")
    return f"{'; '.join(reasons)}. {len(wrong)} of {len(due)} tensors differ: {listed}"


def expected(policy: Policy, noise: NormNoise, dtype: torch.dtype) -> dict[str, int]:
    """Compute the checksums that adapter and norms, with this noise, should have in an engine with this compute
    dtype."""
    adapter = policy.adapter_state()
    norms = {name: weight.to(dtype) for name, weight in policy.norm_weights().items()} | trained_norms(adapter)
    noisy = noisy_norms(norms, noise, dtype=noise.kept_in(dtype))
    return expected_fingerprint(adapter, noisy, scaling=policy.lora_scaling, dtype=dtype)


def too_far(gaps: Mapping[str, float], tolerance: float) -> dict[str, float]:
    """Select the differences between engine and trainer that show a fault; returns the limit that each exceeds, in
    nats.

    The probe adapter changes log-probabilities by ``gaps[CHANGE]`` on average. An engine that ignores it differs from
    the trainer by all of this, a correct engine by a small share of it, whatever the dtype and the model; half of it
    separates the two. A fixed tolerance as wide as that of bf16 would not: rounding errors and the change by the
    adapter both grow with the number of layers.
    """
    limits = {what: tolerance for what in gaps if what != CHANGE}
    if CHANGE in gaps:
        half = gaps[CHANGE] / 2
        limits[PROBE] = half if tolerance >= TOLERANCE[torch.bfloat16] else min(tolerance, half)
    return {what: limit for what, limit in limits.items() if not gaps[what] <= limit}


def score_gaps(
    loop: RolloutLoop,
    policy: Policy,
    noise: NormNoise,
    tokens: list[int],
    *,
    seed: int,
    with_samples: bool = True,
    with_scores: bool,
) -> dict[str, float]:
    """Compare log-probabilities of engine and trainer; returns mean |engine - trainer| in nats by check.

    With samples, the entry ``CHANGE`` is the mean change in nats that the probe adapter makes to the trainer's
    log-probabilities. The current adapter and noise are loaded into the engine again afterwards.

    Args:
        loop: rollout loop whose engine holds the policy with the noise.
        policy: the trainer's policy.
        noise: noise of the current rollout; the trainer's model gets the same noise during the call.
        tokens: fixed tokens that are scored, and whose prefixes are the prompts of the samples.
        seed: seed of the probe adapter; it must differ from the previous check's, whose prefixes may still be cached.
        with_samples: compare sampled tokens.
        with_scores: compare the scores of ``tokens``.
    """
    engine, adapter = loop.engine, policy.adapter_state()
    oracle = TransformersEngine()
    oracle.start(policy, max_model_len=len(tokens) + 1)
    try:
        oracle.set_norm_noise(noise)
        gaps = {}
        if with_scores:
            gaps[WITH_ADAPTER] = _mean_gap(engine.score([tokens]), oracle.score([tokens]))
            gaps[WITHOUT_ADAPTER] = _mean_gap(
                engine.score([tokens], adapter=False), oracle.score([tokens], adapter=False)
            )
        if with_samples:
            scale = STRENGTH / policy.lora_scaling / policy.peft_config.r**0.5
            probe = probe_adapter(adapter, scale=scale, seed=seed)
            gaps[PROBE], gaps[CHANGE] = probe_adapter_gap(engine, oracle, probe, tokens)
    finally:
        oracle.close()
    if with_samples:
        loop.sync(adapter, noise)
    return gaps


def probe_adapter_gap(
    engine: RolloutEngine, oracle: TransformersEngine, adapter: Mapping[str, Tensor], tokens: list[int]
) -> tuple[float, float]:
    """Sample one token after each of several prefixes of ``tokens``; compare its log-probability in engine and oracle.

    The oracle is the trainer's model. Engine and oracle are left with ``adapter`` loaded. The prefixes differ in length
    by two tokens: a stale prefix cache changes most the first tokens after a cached block (of 16 tokens or more).

    Returns:
        Mean |engine - oracle| in nats, and the mean absolute change in nats that the adapter makes to the oracle's
        scores of these tokens.
    """
    prompts = [tokens[:-shorter] for shorter in range(1, min(2 * NUM_PROMPTS, len(tokens)), 2)]
    engine.generate(prompts[:1], ONE_TOKEN, SEED)  # caches prefixes under the old adapter; must be dropped
    engine.load_adapter(adapter)
    completions = [group[-1] for group in engine.generate(prompts, ONE_TOKEN, SEED)]
    lengths, sampled = [len(prompt) for prompt in prompts], [completion.tokens[0] for completion in completions]
    usual = oracle.score_next(tokens, lengths, sampled)
    oracle.load_adapter(adapter)
    scores = oracle.score_next(tokens, lengths, sampled)
    return _mean_gap([completion.logprobs for completion in completions], [scores]), _mean_gap([usual], [scores])


def fixed_tokens(policy: Policy, num_tokens: int) -> list[int]:
    """Draw random tokens from a fixed seed, so that they are the same in every run."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(policy.config.vocab_size, (num_tokens,), generator=generator).tolist()


def probe_adapter(adapter: Mapping[str, Tensor], *, scale: float, seed: int) -> dict[str, Tensor]:
    """Copy the adapter with a new B drawn from N(0, scale^2)."""
    device = next(iter(adapter.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: scale * torch.randn(tensor.shape, generator=generator, device=device) if ".lora_B" in name else tensor
        for name, tensor in adapter.items()
    }


def _mean_gap(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    flat = [torch.tensor([value for row in rows for value in row]) for rows in (left, right)]
    return (flat[0] - flat[1]).abs().mean().item()
