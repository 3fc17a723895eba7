"""Check that the rollout engine holds and uses the trainer's policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from qerl_pl.common import ranks
from qerl_pl.common.checks import CheckFailed, is_due
from qerl_pl.common.loggers import log_at
from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.module import QeRLModule
from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.base import expected_fingerprint
from qerl_pl.rollout.checksums import checksums
from qerl_pl.rollout.common import trained_norms
from qerl_pl.rollout.comparison import (
    NUM_PROMPTS,
    PROBE,
    WITH_ADAPTER,
    WITHOUT_ADAPTER,
    Gap,
    own_text,
    score_gaps,
    trainers_engine,
    wrong_ones,
)
from qerl_pl.rollout.loop import Rollout
from qerl_pl.rollout.probe import find_strength

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Mean difference in nats per token that is right whatever the trainer's rounding errors are."""
SEED = 0

NO_WINDOW = (
    "the canary found no random adapter that changes this model's log-probabilities far more than rounding errors do, "
    "so it does not compare samples under one; its other checks go on"
)


def surprisal(completion: Completion) -> float:
    """Return the mean of -log p over a completion's tokens in nats; 0 if it is not finite, or there is no token."""
    mean = -sum(completion.logprobs) / max(1, len(completion.logprobs))
    return mean if math.isfinite(mean) else 0.0


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
       trainer's model with that adapter. Then the policy is loaded again.
    3. Scores, still less often. Text of the run's own prompts and completions is scored by the engine and by the
       trainer's model, with and without the adapter. (This does not test the cache, because vLLM computes scored tokens
       without it.)

    How far a right engine may be from the trainer in 2 and 3 depends on the model and its dtype. The trainer measures
    it on the same tokens: it computes its own log-probabilities again with other rounding errors. An engine is wrong if
    it differs by more than ``qerl_pl.rollout.comparison.MARGIN`` times as much. The strength of the probe adapter is
    found once, by the trainer alone, at the start of a run or of an evaluation: strong enough to change far more than
    rounding errors, and too weak to make the model chaotic. If there is no such strength, a warning says so, and 2 is
    left out. The text begins with the completion of which the policy was least certain, because an adapter changes the
    log-probabilities of nearly certain tokens too little.

    Afterwards the engine is in the same state as before.

    Args:
        sample_every: rollouts, or batches of an evaluation, from one check of samples to the next. The first four of a
            run or an evaluation all have one, and so has the first rollout after a start.
        score_every: rollouts from one check of scores to the next. The first rollout after a start has one, and so has
            the first batch of an evaluation.
        num_tokens: number of tokens of text, cut to the engine's longest sequence. It should exceed a block of the
            engine's cache (by default 16 tokens on a GPU, 128 on a CPU), because shorter prefixes are never cached.
        tolerance: mean difference of log-probabilities in nats that never stops the run; null: 1e-4 if engine and
            trainer compute in float32, 0.02 if one of them computes in bfloat16.

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
        self._strength: float | None = None
        """Strength of the probe adapters in training; 0: none is usable; None: not known yet."""
        self._evaluation_strength: float | None = None

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the strength of the probe adapters, so that a resumed run uses the same."""
        return {"strength": self._strength}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the strength of the probe adapters."""
        self._strength = state_dict["strength"]

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._is_first = True
        pl_module.loop.observers.append(partial(self._check_rollout, pl_module))

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: QeRLModule, batch: list[Prompt], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0:
            self._evaluation_strength = self._strength
        due = Due(samples=is_due(batch_idx, self.sample_every), scores=batch_idx == 0)
        seed, rows = derive_seed(SEED, "canary/evaluation", batch_idx), [prompt.tokens for prompt in batch]
        _, self._evaluation_strength = self._check(
            pl_module, NormNoise(), rows, due, seed=seed, strength=self._evaluation_strength
        )

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start  # pyright: ignore[reportAssignmentType]

    def _check_rollout(self, pl_module: QeRLModule, rollout: Rollout) -> None:
        index, first = pl_module.rollout_index, self._is_first
        due = Due(samples=is_due(index, self.sample_every), scores=index % self.score_every == 0)
        rows: list[tuple[int, ...]] = []
        if due.samples or due.scores or first:  # the same text for any number of ranks
            pairs = zip(rollout.sampled.prompts, rollout.sampled.completions, strict=True)
            own = [(prompt.tokens + completion.tokens, surprisal(completion)) for prompt, completion in pairs]
            gathered = ranks.gather_groups(own, rollout.sampled.group_size)
            rows = [tokens for tokens, _ in sorted(gathered, key=lambda row: row[1], reverse=True)]
        gaps, self._strength = self._check(
            pl_module,
            pl_module.norm_noise,
            rows,
            Due(samples=due.samples or first, scores=due.scores or first),
            seed=derive_seed(SEED, "canary/rollout", index),
            strength=self._strength,
            among_ranks=True,
        )
        self._is_first = False
        pl_module.log("canary/tensors_checked", float(len(self._held_before)))
        # What was compared only because the process is new is not logged, so that a resumed run logs the same values as
        # an uninterrupted one.
        if values := logged(gaps, due) | ({"canary/probe_strength": self._strength or 0.0} if due.samples else {}):
            log_at(pl_module.trainer.loggers, values, step=index)

    def _check(
        self,
        pl_module: QeRLModule,
        noise: NormNoise,
        rows: Sequence[Sequence[int]],
        due: Due,
        *,
        seed: int,
        strength: float | None,
        among_ranks: bool = False,
    ) -> tuple[dict[str, Gap], float | None]:
        """Run the checks that are due; returns the differences by check, see ``score_gaps``, and the strength of the
        probe adapter.

        Args:
            pl_module: module whose engine is checked.
            noise: noise that the engine's norms should have.
            rows: prompts, or prompts with completions, as tokens: the text that is scored.
            due: what is compared.
            seed: seed of the probe adapter and of rounding errors.
            strength: strength of the probe adapter; 0: there is none; None: it is found now, if samples are due.
            among_ranks: whether every rank is here, so that all can use the same strength.

        Raises:
            CheckFailed: the engine does not hold the policy, or does not compute with it.
        """
        loop, policy = pl_module.loop, pl_module.policy
        held = loop.engine.fingerprint()
        dtype = dtype_held(held, policy, noise)
        if dtype is None:
            fault = describe_fault(held, policy, noise, before=self._held_before)
            raise CheckFailed(f"the rollout engine does not hold the current policy: {fault}")
        self._held_before = held
        if not (due.samples or due.scores):
            return {}, strength
        dtype = max(dtype, policy.dtype, key=lambda each: torch.finfo(each).eps)
        tokens = own_text(rows, min(self.num_tokens, pl_module.settings.max_model_len - 1))
        tolerance = self.tolerance or TOLERANCE[dtype]
        with trainers_engine(policy, noise, max_model_len=len(tokens) + 1) as oracle:
            if due.samples and strength is None:
                strength = (
                    find_strength(oracle, policy, tokens, dtype, seed=derive_seed(SEED, "canary/strength")) or 0.0
                )
                strength = min(ranks.gather_values(strength)) if among_ranks else strength
                if not strength:
                    rank_zero_warn(NO_WINDOW)
            compare = partial(
                score_gaps,
                loop,
                oracle,
                policy,
                dtype=dtype,
                strength=strength if due.samples else 0,
                scores=due.scores,
            )
            gaps = compare(tokens=tokens, seed=seed)
            wrong = wrong_ones(gaps, tolerance)
            if wrong:
                # Rounding errors have heavy tails, so one large difference is no proof: another text and another probe
                # adapter have to show the fault too.
                loop.sync(policy.adapter_state(), noise)
                others = own_text([*rows[len(rows) // 2 :], *rows], len(tokens))
                again = compare(tokens=others, seed=derive_seed(seed, "canary/again"))
                wrong = [what for what in wrong_ones(again, tolerance) if what in wrong]
        if due.samples:
            loop.sync(policy.adapter_state(), noise)
        if wrong:
            found = "; ".join(
                f"{what}, by {gaps[what].nats:.2g} nats per token, {gaps[what].excess:.1f} times what rounding errors "
                "change the trainer's own by"
                for what in wrong
            )
            raise CheckFailed(
                "the rollout engine does not compute with the current policy, although it holds the trainer's adapter "
                f"and norms. These of its log-probabilities are too far from the trainer's: {found}"
            )
        return gaps, strength


@dataclass(frozen=True)
class Due:
    """Comparisons of log-probabilities that a check makes."""

    samples: bool
    scores: bool


def logged(gaps: Mapping[str, Gap], due: Due) -> dict[str, float]:
    """Return the scalars to log of the comparisons that are due."""
    values = {}
    if due.scores:
        scores = max((gaps[what] for what in (WITH_ADAPTER, WITHOUT_ADAPTER)), key=lambda gap: gap.excess)
        values |= {"canary/score_gap": scores.nats, "canary/score_rounding": scores.rounding}
        values["canary/score_excess"] = scores.excess
    if due.samples and PROBE in gaps:
        probe = gaps[PROBE]
        values |= {"canary/probe_gap": probe.nats, "canary/probe_change": probe.change}
        values |= {"canary/probe_rounding": probe.rounding, "canary/probe_excess": probe.excess}
        values["canary/probe_share"] = probe.nats / max(probe.change, 1e-9)
    return values


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
