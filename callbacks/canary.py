"""Proof, at every step, that rollouts come from the policy that the trainer holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from qerl_pl.loop import Rollout, RolloutLoop
from qerl_pl.module import QeRLModule
from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.base import RolloutEngine, Sampling, checksum, expected_fingerprint
from qerl_pl.rollout.common import trained_norms
from qerl_pl.rollout.hf import TransformersEngine

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # nats, mean over tokens; healthy engines: docs/correctness.md
CONTINUATION = Sampling(num_completions=4, max_tokens=8, temperature=1.0)
STRENGTH = 0.1  # of the strange adapter: std of B A x in units of x, about
SEED = 0


class SyncCanary(Callback):
    """Stops the run when the rollout engine does not hold the current policy.

    After every training rollout, before anything is learned from it, and after every batch of an evaluation:

    1. Checksums. Adapter slots and norms are read back from the engine and compared with the trainer's adapter and with
       its norms under the noise that is due. This is exact, in any dtype and however small the last update was.
    2. Scores, less often. Fixed tokens are scored by the engine and by the trainer's model, with the adapter and
       without, and continuations of them are sampled and scored. This sees an engine that holds the right tensors and
       computes with others. Early in a run B is near 0 and no score can tell one adapter from another, so a strange
       adapter is loaded first. Continuations are sampled from it, which also fills the cache with its prefixes; then
       the engine is synced again, and continuations of the same tokens must be those of the current policy. (Given
       tokens are no test of the cache: vLLM computes them anew.)

    The engine is left as it was found.

    Args:
        score_every: rollouts between two checks of scores. The first rollout after a start has one, and so has the
            first batch of an evaluation.
        num_tokens: fixed tokens, cut to the engine's longest sequence. More than a block of its cache, or no prefix of
            them is ever cached.
        tolerance: mean difference of log-probabilities, in nats, above which scores disagree; null: 1e-4 where trainer
            and engine both compute in float32, 0.1 where one of them does in bfloat16.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(self, score_every: int = 1, num_tokens: int = 160, tolerance: float | None = None) -> None:
        for name, value in (("score_every", score_every), ("num_tokens", num_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        if tolerance is not None and tolerance <= 0:
            raise ValueError(f"tolerance is {tolerance}; expected more than 0 nats, or null for the dtype's own")
        self.score_every = score_every
        self.num_tokens = num_tokens
        self.tolerance = tolerance
        self._is_first = True
        self._held_before: dict[str, int] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._is_first = True
        pl_module.loop.observers.append(partial(self._check_rollout, pl_module))

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: QeRLModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._check(pl_module, NormNoise(), with_scores=batch_idx == 0)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # pyright: ignore[reportAssignmentType]

    def _check_rollout(self, pl_module: QeRLModule, rollout: Rollout) -> None:
        is_due = pl_module.rollout_index % self.score_every == 0
        num_tensors, gap = self._check(pl_module, pl_module.norm_noise, with_scores=is_due or self._is_first)
        self._is_first = False
        pl_module.log("canary/tensors_checked", float(num_tensors))
        if is_due:  # and not for the first alone, or a resumed run would have points that a straight one has not
            pl_module.log("canary/score_gap", gap)

    def _check(self, pl_module: QeRLModule, noise: NormNoise, *, with_scores: bool) -> tuple[int, float]:
        """The number of tensors compared, and the largest mean difference of scores in nats (0 without scores).

        Raises:
            RuntimeError: the engine does not hold the policy.
        """
        loop, policy = pl_module.loop, pl_module.policy
        held = loop.engine.fingerprint()
        dtype = dtype_held(held, policy, noise)
        if dtype is None:
            fault = describe_fault(held, policy, noise, before=self._held_before)
            raise RuntimeError(f"the rollout engine does not hold the current policy: {fault}")
        self._held_before = held
        if not with_scores:
            return len(held), 0.0
        length = min(self.num_tokens, pl_module.max_model_len - CONTINUATION.max_tokens)
        gaps = score_gaps(loop, policy, noise, num_tokens=length, max_model_len=pl_module.max_model_len)
        tolerance = self.tolerance or max(TOLERANCE[policy.dtype], TOLERANCE[dtype])
        if wrong := {what: gap for what, gap in gaps.items() if not gap <= tolerance}:
            found = "; ".join(f"{what} (by {gap:.2g} nats a token)" for what, gap in wrong.items())
            raise RuntimeError(
                "the rollout engine does not compute with the current policy, although its adapter and norms are the "
                f"trainer's. Log-probabilities differ by more than {tolerance:g} nats: {found}"
            )
        return len(held), max(gaps.values())


def dtype_held(held: Mapping[str, int], policy: Policy, noise: NormNoise) -> torch.dtype | None:
    """The compute dtype in which an engine with these checksums holds the policy with this noise; None: in none."""
    dtypes = dict.fromkeys((policy.dtype, *TOLERANCE))  # an engine may compute in another one than the trainer
    return next((dtype for dtype in dtypes if held == expected(policy, noise, dtype)), None)


def describe_fault(held: Mapping[str, int], policy: Policy, noise: NormNoise, *, before: Mapping[str, int]) -> str:
    """What an engine holds instead of the policy with this noise, in words.

    Args:
        held: what its ``fingerprint`` returned.
        policy: the trainer's.
        noise: that is due on the norms.
        before: what it held when all was well the last time; empty if it never was.
    """
    due, adapter = expected(policy, noise, policy.dtype), policy.adapter_state()
    wrong = sorted(name for name in held.keys() | due.keys() if held.get(name) != due.get(name))
    matrices = [name for name in wrong if ".lora_" in name]
    norms = [name for name in wrong if ".lora_" not in name]
    reasons = []
    if matrices:
        zeros = {name: checksum(torch.zeros_like(tensor, dtype=policy.dtype)) for name, tensor in adapter.items()}
        if all(name in before and held.get(name) == before[name] for name in matrices):
            reasons.append("it has the adapter of before the last update")
        elif all(held.get(name) == zeros.get(name) for name in matrices):
            reasons.append("it has no adapter")
        else:
            reasons.append("it has another adapter")
    if norms:
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
    """Checksums of the policy with this noise, as an engine of this compute dtype holds it."""
    adapter = policy.adapter_state()
    norms = {name: weight.to(dtype) for name, weight in policy.norm_weights().items()}
    noisy = noisy_norms(norms | trained_norms(adapter), noise.sigma, noise.seed)  # trained ones get theirs in fp32
    return expected_fingerprint(adapter, noisy, scaling=policy.lora_scaling, dtype=dtype)


def score_gaps(
    loop: RolloutLoop, policy: Policy, noise: NormNoise, *, num_tokens: int, max_model_len: int
) -> dict[str, float]:
    """What scores say about the engine -> mean |engine - trainer| over tokens, nats.

    Args:
        loop: its engine holds the policy with the noise, and does so again afterwards.
        policy: the trainer's; it is as before afterwards, to the last bit.
        noise: of the current rollout.
        num_tokens: fixed tokens to score.
        max_model_len: the engine's longest sequence, in tokens.
    """
    engine, current = loop.engine, policy.adapter_state()
    strange = strange_adapter(current, scale=STRENGTH / policy.lora_scaling / policy.peft_config.r**0.5)
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(policy.config.vocab_size, (num_tokens,), generator=generator).tolist()
    oracle = TransformersEngine()
    oracle.start(policy, max_model_len=max_model_len, seed=SEED)
    try:
        oracle.set_norm_noise(noise.sigma, noise.seed)
        gaps = {
            f"scores of given tokens {with_or_without} the adapter": _mean_gap(
                engine.score([tokens], adapter=adapter), oracle.score([tokens], adapter=adapter)
            )
            for with_or_without, adapter in (("with", True), ("without", False))
        }
        engine.load_adapter(strange)
        oracle.load_adapter(strange)
        gaps["samples after another adapter was loaded: it is not used, or cached prefixes are stale"] = _sampled_gap(
            engine, oracle, tokens
        )
        loop.sync(current, noise)
        oracle.load_adapter(current)
        gaps["samples after the adapter was loaded again: cached prefixes are stale"] = _sampled_gap(
            engine, oracle, tokens
        )
    finally:
        oracle.close()
    return gaps


def strange_adapter(adapter: Mapping[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """The adapter with B drawn anew, N(0, scale^2)."""
    generator = torch.Generator().manual_seed(SEED)
    return {
        name: (scale * torch.randn(tensor.shape, generator=generator)).to(tensor) if ".lora_B" in name else tensor
        for name, tensor in adapter.items()
    }


def _sampled_gap(engine: RolloutEngine, oracle: RolloutEngine, prompt: list[int]) -> float:
    [completions] = engine.generate([prompt], CONTINUATION, SEED)
    scores = oracle.score([[*prompt, *completion.tokens] for completion in completions])
    return _mean_gap(
        [completion.logprobs for completion in completions],
        [row[len(prompt) - 1 :] for row in scores],
    )


def _mean_gap(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    flat = [torch.tensor([value for row in rows for value in row]) for rows in (left, right)]
    return (flat[0] - flat[1]).abs().mean().item()
