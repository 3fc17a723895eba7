"""Check that the rollout engine holds and uses the trainer's policy."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from qerl_pl.common import ranks
from qerl_pl.common.checks import CheckFailed, is_due, require_at_least
from qerl_pl.common.loggers import log_at
from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.module import QeRLModule
from qerl_pl.noise.norm_noise import NormNoise, noisy_norms
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout import comparison
from qerl_pl.rollout.base import expected_fingerprint
from qerl_pl.rollout.checksums import checksums
from qerl_pl.rollout.common import trained_norms
from qerl_pl.rollout.comparison import LAST, NUM_PROMPTS, PROBE, WITH_ADAPTER, WITHOUT_ADAPTER, Gap
from qerl_pl.rollout.loop import Rollout
from qerl_pl.rollout.probe import find_strength

# Mean difference in nats per token up to which an engine passes, however small the trainer's rounding errors are.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}
SEED = 0
NO_WINDOW = (
    "the canary found no random adapter that changes this model's log-probabilities far more than rounding errors do, "
    "so it does not compare samples under one; its other checks go on"
)


class Due(NamedTuple):
    """Choice of the comparisons of log-probabilities between engine and trainer that a check makes."""

    samples: bool
    scores: bool


class SyncCanary(Callback):
    """Stops the run when the rollout engine does not hold the current policy, or holds it and does not use it
    (docs/correctness.md).

    The checks run after each training rollout, before the update, and before each batch of an evaluation:

    1. Checksums, every time. The engine's adapter slots and norms are read back and compared with the trainer's adapter
       and its norms plus the current noise; in every dtype, all bits have to be equal. With vLLM, the weights of a
       4-bit base are compared with the trainer's, too: the first row of each linear layer that vLLM holds dequantised
       and, where engine and trainer share one copy of a layer's weight, the digest of this copy, which must not have
       changed since the weight was loaded. Layers whose 4-bit weights vLLM holds in another memory order were compared
       when the engine started. In mixture-of-experts models, experts and routers are compared as well.
    2. Samples with a probe adapter, less often. An engine may hold the right tensors and use cached prefixes of an
       older policy, or leave out the adapter, whose effect is small early in a run. So the engine samples after a text,
       gets a strong random adapter (the probe adapter), and then samples after several beginnings of this text, one
       token each. The log-probabilities of these tokens must be those that the trainer's model has with the probe
       adapter. A validation before the first rollout has no such check: there are no prefixes of an older policy, and
       check 3 shows whether the adapter is left out.
    3. Scores, still less often. Engine and trainer compute the log-probabilities of text from the run's prompts and
       completions, with and without the adapter. (vLLM does not use the prefix cache for scoring.)

    How far a correct engine may be from the trainer in checks 2 and 3 depends on the model and its dtype, so the
    trainer computes the log-probabilities a second time with random rounding errors added. An engine fails if it
    differs from the trainer by more than ``tolerance`` and also by more than ``comparison.MARGIN`` times as much as the
    trainer's two results differ.

    The trainer finds the scale of the probe adapter's weights once per run, without the engine: the adapter must change
    log-probabilities far more than rounding errors do, without making the model chaotic. If no scale does so, check 2
    is left out, with a warning. The texts end with those tokens of the rollout's completions of which the policy was
    least certain, because an adapter hardly changes log-probabilities near 0. After the checks, the engine holds the
    run's adapter and noise again.

    Args:
        sample_every: rollouts, or batches of an evaluation, from one check 2 (samples) to the next; the first four
            rollouts of a run, and the first after a start, always have one.
        score_every: rollouts from one check 3 (scores) to the next; the first rollout after a start and the first batch
            of an evaluation always have one.
        num_tokens: number of tokens of the texts after which check 2 samples and which check 3 scores, limited by the
            engine's longest sequence. It should exceed the block size of the engine's KV cache (by default 16 tokens on
            a GPU, 128 on a CPU), because shorter prefixes are never cached and check 2 then finds no stale ones.
        tolerance: mean difference of log-probabilities, in nats per token, up to which checks 2 and 3 never stop the
            run; null: 1e-4 if engine and trainer compute in float32, 0.02 if one of them computes in bfloat16.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.canary.SyncCanary
              init_args: {sample_every: 8, score_every: 16}
    """

    def __init__(
        self, sample_every: int = 1, score_every: int = 10, num_tokens: int = 160, tolerance: float | None = None
    ) -> None:
        require_at_least(1, sample_every=sample_every, score_every=score_every)
        require_at_least(2 * NUM_PROMPTS, num_tokens=num_tokens)
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance is {tolerance}; expected more than 0 nats, or null for the dtype's default")
        self.sample_every, self.score_every, self.num_tokens = sample_every, score_every, num_tokens
        self.tolerance = tolerance
        self._is_first = True
        self._held_before: dict[str, int] = {}
        # Strength of the probe adapters in training; 0: none is usable; None: not known yet.
        self._strength: float | None = None
        self._evaluation_strength: float | None = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"strength": self._strength}  # a resumed run uses the same strength

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._strength = state_dict["strength"]

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._is_first = True
        pl_module.loop.observers.append(partial(self._check_rollout, pl_module))

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: QeRLModule, batch: list[Prompt], batch_idx: int, *_: Any
    ) -> None:
        if batch_idx == 0:
            self._evaluation_strength = self._strength
        comes_first = trainer.state.fn == TrainerFn.FITTING and self._strength is None
        due = Due(samples=is_due(batch_idx, self.sample_every) and not comes_first, scores=batch_idx == 0)
        seed, rows = derive_seed(SEED, "canary/evaluation", batch_idx), [prompt.tokens for prompt in batch]
        known = self._evaluation_strength
        checked = self._check(pl_module, NormNoise(), rows, due, seed=seed, strength=known)
        self._evaluation_strength = checked[1]

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start  # pyright: ignore[reportAssignmentType]

    def _check_rollout(self, pl_module: QeRLModule, rollout: Rollout) -> None:
        index, first, batch = pl_module.rollout_index, self._is_first, rollout.sampled
        due = Due(samples=is_due(index, self.sample_every), scores=index % self.score_every == 0)
        made = Due(samples=due.samples or first, scores=due.scores or first)
        rows: list[tuple[int, ...]] = []
        if any(made):  # gathered, so that the text is the same for any number of ranks
            pairs = zip(batch.prompts, batch.completions, strict=True)
            local = [until_least_certain(prompt, completion) for prompt, completion in pairs]
            gathered = ranks.gather_groups(local, batch.group_size)
            rows = [tokens for tokens, _ in sorted(gathered, key=lambda row: row[1], reverse=True)]
        seed, noise, before = derive_seed(SEED, "canary/rollout", index), pl_module.norm_noise, self._strength
        gaps, self._strength = self._check(pl_module, noise, rows, made, seed=seed, strength=before, among_ranks=True)
        self._is_first = False
        pl_module.log("canary/tensors_checked", float(len(self._held_before)))
        # Comparisons made only because the process has just started are not logged, so that a resumed run logs the same
        # values as an uninterrupted one.
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
        """Compare the engine's checksums with the trainer's; if ``due.samples``, also the log-probabilities of tokens
        sampled with the probe adapter (a strong random one); if ``due.scores``, those of text of the run, with the
        policy's adapter and without it. Returns the differences of log-probabilities by the names of these comparisons,
        and the strength of the probe adapter, None if it is still unknown. Raises CheckFailed if the engine does not
        hold the policy or does not compute with it.

        ``noise`` is what the engine's norms should have. The text is taken from ``rows``, tokens of prompts or of
        prompts with completions. ``strength`` is the scale of the probe adapter's weights: 0 if none is usable, None if
        this call has to find it. With ``among_ranks``, all ranks make this call and use the lowest strength that any of
        them finds.
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
        dtype = max(dtype, policy.dtype, key=lambda coarser: torch.finfo(coarser).eps)
        tokens = comparison.own_text(rows, min(self.num_tokens, pl_module.settings.max_model_len - 1))
        tolerance = self.tolerance or TOLERANCE[dtype]
        with comparison.trainers_engine(policy, noise, max_model_len=len(tokens) + 1) as oracle:
            if due.samples and strength is None:
                search_seed = derive_seed(SEED, "canary/strength")
                strength = find_strength(oracle, policy, tokens, dtype, seed=search_seed) or 0.0
                strength = min(ranks.gather_values(strength)) if among_ranks else strength
                if not strength:
                    rank_zero_warn(NO_WINDOW)
            used = strength if due.samples else 0
            compare = partial(
                comparison.score_gaps, loop, oracle, policy, dtype=dtype, strength=used, scores=due.scores
            )
            gaps = compare(tokens=tokens, seed=seed)
            wrong = comparison.wrong_ones(gaps, tolerance)
            if wrong:
                # Rounding errors have heavy tails, so one large difference is no proof: the run stops only if another
                # text and another probe adapter show the same fault.
                loop.sync(policy.adapter_state(), noise)
                others = comparison.own_text([*rows[len(rows) // 2 :], *rows], len(tokens))
                again = compare(tokens=others, seed=derive_seed(seed, "canary/again"))
                wrong = [what for what in comparison.wrong_ones(again, tolerance) if what in wrong]
        if due.samples:
            loop.sync(policy.adapter_state(), noise)
        if wrong:
            differences = "; ".join(
                f"{what}, by {gaps[what].nats:.2g} nats per token, {gaps[what].excess:.1f} times as much as rounding "
                "errors change those of the trainer"
                for what in wrong
            )
            raise CheckFailed(
                "the rollout engine does not compute with the current policy, although it holds the trainer's adapter "
                f"and norms. Its log-probabilities differ too much from those of the trainer: {differences}"
            )
        return gaps, strength


def until_least_certain(prompt: Prompt, completion: Completion) -> tuple[tuple[int, ...], float]:
    """Find those consecutive tokens of a completion, ``LAST`` in number, of which the policy was least certain: those
    with the largest sum of -log p, in nats. Returns the tokens of the prompt and of the completion up to the last of
    them, and the sum. A log-probability that is not finite counts as 0."""
    surprisals = (-logprob if math.isfinite(logprob) else 0.0 for logprob in completion.logprobs)
    sums = list(accumulate(surprisals, initial=0.0))
    ends = range(min(LAST, len(sums) - 1), len(sums))
    surprisal, end = max((sums[end] - sums[max(0, end - LAST)], end) for end in ends)
    return prompt.tokens + completion.tokens[:end], surprisal


def logged(gaps: Mapping[str, Gap], due: Due) -> dict[str, float]:
    """Return, by name, the scalars to log for the comparisons that ``due`` names."""
    values = {}
    if due.scores:
        scores = max((gaps[what] for what in (WITH_ADAPTER, WITHOUT_ADAPTER)), key=lambda gap: gap.excess)
        values |= {"score_gap": scores.nats, "score_rounding": scores.rounding, "score_excess": scores.excess}
    if due.samples and PROBE in gaps:
        probe = gaps[PROBE]
        values |= {"probe_gap": probe.nats, "probe_change": probe.change, "probe_rounding": probe.rounding}
        values |= {"probe_excess": probe.excess, "probe_share": probe.nats / max(probe.change, 1e-9)}
    return {f"canary/{name}": value for name, value in values.items()}


def dtype_held(held: Mapping[str, int], policy: Policy, noise: NormNoise) -> torch.dtype | None:
    """Find out in which compute dtype an engine holds the policy. The policy's adapter, and its norms with ``noise``,
    are rounded to each of several dtypes, and the first dtype is returned with which their checksums equal ``held``,
    those of the engine's tensors. None: with no dtype they are equal, so the engine does not hold this policy and
    noise."""
    dtypes = dict.fromkeys((policy.dtype, *TOLERANCE))  # the engine may compute in another dtype than the trainer
    return next((dtype for dtype in dtypes if held == expected(policy, noise, dtype)), None)


def describe_fault(held: Mapping[str, int], policy: Policy, noise: NormNoise, *, before: Mapping[str, int]) -> str:
    """Describe, for an error message, what an engine with the checksums ``held`` seems to hold instead of the policy's
    adapter and its norms with ``noise``. ``before`` are its checksums at the last check that passed, if one has."""
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
    if norms and not (matrices and trained_norms(adapter)):  # a wrong adapter has wrong trained norms
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
    """Compute the checksums that adapter and norms with noise have in an engine that computes in ``dtype``."""
    adapter = policy.adapter_state()
    norms = {name: weight.to(dtype) for name, weight in policy.norm_weights().items()} | trained_norms(adapter)
    noisy = noisy_norms(norms, noise, dtype=noise.kept_in(dtype))
    return expected_fingerprint(adapter, noisy, scaling=policy.lora_scaling, dtype=dtype)
