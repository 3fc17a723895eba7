"""Proof, at every step, that rollouts come from the policy that the trainer holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from qerl_pl.common.seeding import derive_seed
from qerl_pl.module import QeRLModule
from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.base import RolloutEngine, Sampling, expected_fingerprint
from qerl_pl.rollout.checksums import checksums
from qerl_pl.rollout.common import trained_norms
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.loop import Rollout, RolloutLoop

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.3}  # nats, mean over tokens; healthy engines: docs/correctness.md
ONE_TOKEN = Sampling(num_completions=2, max_tokens=1, temperature=1.0)  # rollouts ask for several too
NUM_PROMPTS = 16
STRENGTH = 0.5  # of the probe adapter: it adds about a third of the input to the output of a linear, in rms
SEED = 0

WITH_ADAPTER = "scores with the adapter"
WITHOUT_ADAPTER = "scores without the adapter"
PROBE = "samples after another adapter was loaded (it is not used, or cached prefixes are those of an older policy)"
CHANGE = "what that adapter changes in the trainer's own scores of the samples"


class SyncCanary(Callback):
    """Stops the run when the rollout engine does not hold the current policy.

    After every training rollout, before anything is learned from it, and before every batch of an evaluation:

    1. Checksums. Adapter slots and norms are read back from the engine and compared with the trainer's adapter and with
       its norms under the noise that is due. This is exact, in any dtype and however small the last update was.
    2. Samples under a probe adapter. An engine may hold the right tensors and compute with others: cached prefixes of
       an older policy, or no adapter at all. Early in a run B is near 0, and no score tells such policies apart. So a
       few tokens are sampled, a random adapter is loaded, and what is sampled after the same prompts must be what the
       trainer's model says under that adapter, within half of what it changes there at the most
       (``canary/probe_share`` is the share). Then the engine is synced as before every rollout.
    3. Scores, less often. Fixed tokens are scored by the engine and by the trainer's model, with the adapter and
       without. (Alone they are no test of the cache: vLLM computes the tokens that it scores anew.)

    The engine is left as it was found.

    Args:
        score_every: rollouts between two checks of scores. The first rollout after a start has one, and so has the
            first batch of an evaluation.
        num_tokens: fixed tokens, cut to the engine's longest sequence. Should be more than a block of its cache (16
            tokens on a GPU, 128 on a CPU by default): of less, no prefix is ever cached.
        tolerance: mean difference of log-probabilities, in nats, above which engine and trainer disagree; null: 1e-4
            where both compute in float32, 0.3 where one of them does in bfloat16. For samples under a probe adapter
            half of its change is the limit, and a tolerance below 0.3 if that is less.

    Raises:
        ValueError: a value is out of its range.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.canary.SyncCanary
              init_args: {score_every: 10}
    """

    def __init__(self, score_every: int = 10, num_tokens: int = 160, tolerance: float | None = None) -> None:
        for name, value, least in (("score_every", score_every, 1), ("num_tokens", num_tokens, 2 * NUM_PROMPTS)):
            if value < least:
                raise ValueError(f"{name} is {value}; expected at least {least}")
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance is {tolerance}; expected more than 0 nats, or null for the dtype's own")
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
        self._check(pl_module, NormNoise(), seed=seed, with_scores=batch_idx == 0)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start  # pyright: ignore[reportAssignmentType]

    def _check_rollout(self, pl_module: QeRLModule, rollout: Rollout) -> None:
        index = pl_module.rollout_index
        is_due = index % self.score_every == 0
        seed = derive_seed(SEED, "canary/rollout", index)
        gaps = self._check(pl_module, pl_module.norm_noise, seed=seed, with_scores=is_due or self._is_first)
        self._is_first = False
        pl_module.log("canary/tensors_checked", float(len(self._held_before)))
        # What the first rollout has beyond its turn is left out: a straight run and a resumed one log the same.
        change = gaps.pop(CHANGE)
        pl_module.log("canary/score_gap", max(gaps.values()) if is_due else gaps[PROBE])
        pl_module.log("canary/probe_share", gaps[PROBE] / max(change, 1e-9))

    def _check(self, pl_module: QeRLModule, noise: NormNoise, *, seed: int, with_scores: bool) -> dict[str, float]:
        """What was compared -> mean difference in nats. The probe adapter is a function of the seed.

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
        gaps = score_gaps(loop, policy, noise, fixed_tokens(policy, num_tokens), seed=seed, with_scores=with_scores)
        tolerance = self.tolerance or max(TOLERANCE[policy.dtype], TOLERANCE[dtype])
        if wrong := too_far(gaps, tolerance):
            found = "; ".join(f"{what}, by {gaps[what]:.2g} nats per token" for what in wrong)
            raise RuntimeError(
                "the rollout engine does not compute with the current policy, although the adapter and norms that it "
                f"holds are the trainer's. Of its log-probabilities these differ by more than {max(wrong.values()):.2g}"
                f": {found}"
            )
        return gaps


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
        zeros = checksums({name: torch.zeros_like(tensor, dtype=policy.dtype) for name, tensor in adapter.items()})
        if all(name in before and held.get(name) == before[name] for name in matrices):
            reasons.append("it has the adapter of before the last update")
        elif all(held.get(name) == zeros.get(name) for name in matrices):
            reasons.append("it has no adapter")
        else:
            reasons.append("it has another adapter")
    if norms and not (matrices and trained_norms(adapter)):  # else they differ with the adapter
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
    norms = {name: weight.to(dtype) for name, weight in policy.norm_weights().items()} | trained_norms(adapter)
    noisy = noisy_norms(norms, noise, dtype=noise.kept_in(dtype))
    return expected_fingerprint(adapter, noisy, scaling=policy.lora_scaling, dtype=dtype)


def too_far(gaps: Mapping[str, float], tolerance: float) -> dict[str, float]:
    """Which of ``score_gaps`` tell of a fault -> the most that each may be.

    An engine that does not use the probe adapter is wrong by what that adapter changes, a healthy one by a small
    share of it, whatever the dtype and the model. Half of it tells them apart. A tolerance that is as wide as that of
    bf16 says nothing more: roundings add up with the layers, and so does what the adapter changes.
    """
    limits = {what: tolerance for what in gaps if what != CHANGE}
    half = gaps[CHANGE] / 2
    limits[PROBE] = half if tolerance >= TOLERANCE[torch.bfloat16] else min(tolerance, half)
    return {what: limit for what, limit in limits.items() if not gaps[what] <= limit}


def score_gaps(
    loop: RolloutLoop, policy: Policy, noise: NormNoise, tokens: list[int], *, seed: int, with_scores: bool
) -> dict[str, float]:
    """What is compared -> mean |engine - trainer| in nats, and ``CHANGE``. Engine and policy are as before afterwards.

    Args:
        loop: its engine holds the policy with the noise.
        policy: the trainer's.
        noise: of the current rollout; the trainer's model gets the same for the length of the call.
        tokens: to score and to sample after.
        seed: of the probe adapter. Not that of the check before, whose prefixes may still be in the cache.
        with_scores: compare scores too, and not samples alone.
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
        scale = STRENGTH / policy.lora_scaling / policy.peft_config.r**0.5
        probe = probe_adapter(adapter, scale=scale, seed=seed)
        gaps[PROBE], gaps[CHANGE] = probe_adapter_gap(engine, oracle, probe, tokens)
    finally:
        oracle.close()
    loop.sync(adapter, noise)
    return gaps


def probe_adapter_gap(
    engine: RolloutEngine, oracle: RolloutEngine, adapter: Mapping[str, Tensor], tokens: list[int]
) -> tuple[float, float]:
    """Mean |engine - oracle| in nats, of one token sampled after each of some beginnings of the tokens.

    Both are left with the adapter loaded. The second number is what the adapter changed in the oracle's scores of these
    tokens, mean of the absolute values, in nats.

    Beginnings are two tokens apart: of a stale prefix much is left in what follows on a cached block at once, and less
    after some tokens that the engine computes anew. Blocks have 16 tokens or more.
    """
    prompts = [tokens[:-shorter] for shorter in range(1, min(2 * NUM_PROMPTS, len(tokens)), 2)]
    engine.generate(prompts[:1], ONE_TOKEN, SEED)  # the cache now has prefixes of the policy that is to be forgotten
    engine.load_adapter(adapter)
    completions = [group[-1] for group in engine.generate(prompts, ONE_TOKEN, SEED)]
    rows = [[*prompt, *completion.tokens] for prompt, completion in zip(prompts, completions, strict=True)]
    usual = [row[-1:] for row in oracle.score(rows)]
    oracle.load_adapter(adapter)
    scores = [row[-1:] for row in oracle.score(rows)]
    return _mean_gap([completion.logprobs for completion in completions], scores), _mean_gap(usual, scores)


def fixed_tokens(policy: Policy, num_tokens: int) -> list[int]:
    """The same random tokens in every run."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(policy.config.vocab_size, (num_tokens,), generator=generator).tolist()


def probe_adapter(adapter: Mapping[str, Tensor], *, scale: float, seed: int) -> dict[str, Tensor]:
    """The adapter with B drawn anew, N(0, scale^2)."""
    device = next(iter(adapter.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: scale * torch.randn(tensor.shape, generator=generator, device=device) if ".lora_B" in name else tensor
        for name, tensor in adapter.items()
    }


def _mean_gap(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    flat = [torch.tensor([value for row in rows for value in row]) for rows in (left, right)]
    return (flat[0] - flat[1]).abs().mean().item()
