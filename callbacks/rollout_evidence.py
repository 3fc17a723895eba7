"""Stop the run when the completions of a rollout are not independent samples from the current policy."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from qerl_pl.common import ranks
from qerl_pl.common.checks import CheckFailed, is_due, require_at_least
from qerl_pl.common.loggers import log_at
from qerl_pl.common.metrics import over_ranks
from qerl_pl.common.seeding import derive_seed
from qerl_pl.memory.settings import check_limit
from qerl_pl.module import QeRLModule
from qerl_pl.policy.evidence import accumulated, copy_evidence, log_false_alarm, repeats
from qerl_pl.policy.jumps import apart, change
from qerl_pl.rollout.gaps import OF_ALL, OF_THE_CHOSEN, GapLimits, gaps_of
from qerl_pl.rollout.loop import Rollout
from qerl_pl.rollout.measured import Measured, measure_some
from qerl_pl.rollout.other_policies import OTHER_POLICIES, measure_others
from qerl_pl.rollout.readings import evidence_of_branches, evidence_of_order, have_own_rewards
from qerl_pl.rollout.scored import ScoredBatch
from qerl_pl.rollout.verdicts import verdict
from qerl_pl.training.metrics import gap


class RolloutEvidence(Callback):
    """Stops the run when completions are not independent samples from the current policy (docs/correctness.md).

    A row is a prompt with one completion, a group has all completions of a prompt, and the sampler is the rollout
    engine. In rollouts chosen by ``every``, before the update, randomly chosen rows of up to ``max_tokens`` tokens go
    through the trainer's model once, with this rollout's noise on norm weights, if any. The run stops

    - if ``evidence/gap``, the mean of |log p of the trainer - log p of the sampler| over tokens, in nats, exceeds
      ``max_gap`` or ``max_jump`` times its median over recent rollouts. A less certain policy, or noise, increases both
      the gap and the trainer's own rounding errors. Before the run stops, a second pass with random rounding errors
      therefore measures their effect, and an increase of the gap that it explains does not count;
    - if ``evidence/high_gap``, the gap that one row in 32 reaches, exceeds 1.5 times ``max_jump`` times its own median.
      It shows a few wrong rows, which hardly change a mean over many;
    - if ``evidence/logit_gap``, the gap converted to a difference of logits, which depends little on how certain the
      policy is, exceeds 0.8 times ``max_jump`` times its own median;
    - if ``evidence/far_share``, the share of tokens whose probabilities in trainer and sampler differ by more than a
      factor of 8, exceeds 1/256;
    - if the tokens of all rows, of a quarter or of a sixteenth of them were sampled from another distribution than the
      one whose log-probabilities the engine reports (``evidence/other_sampling``: another temperature, top_p or top_k,
      end tokens more or less often, some tokens drawn uniformly from the vocabulary);
    - with vLLM on a GPU, if the tokens are not those that follow from the engine's random numbers, which the trainer
      can compute again (``evidence/other_draws``). This finds completions of other prompts than the engine was given,
      completions that were selected among several, and tokens that were changed after sampling. In a correct run the
      logged margins (``margin/{mean_abs,p99,max}``) are about as large as the gap;
    - with ``policy_tokens``, if all rows, a quarter or a sixteenth of them were sampled with another policy
      (``evidence/other_policy``): without the adapter, with the adapter of the previous rollout, which is kept in host
      memory and in checkpoints, or without the rollout's noise, also where this changes a token's log-probability less
      than rounding errors do. For each of these policies two more passes are made. ``evidence/part_*`` is about 0 for a
      correct engine, and 1 if all rows were sampled with the other policy.

    In every rollout, all completions are tested as well. The run stops

    - if completions of the same prompt, in this and earlier rollouts, are equal more often than independent draws would
      be, for example because a seed does not change, or less often (``evidence/copies``);
    - if the engine selects completions by length or reward (``evidence/branches``): where a completion begins like
      earlier ones of its group, its next token is that of a short, long, good or bad completion more often than its
      log-probabilities say. Rewards that depend on other completions of the batch, such as a majority vote, are left
      out of this test, with a warning, when it would stop the run;
    - if the length or mean log-probability of a completion depends on its position in the group (``evidence/order``),
      as when the engine sorts or selects completions, or samples some with another policy;
    - after the update, if the trainer's log-probabilities of all rows, which the update has computed, are too far from
      the sampler's by the limits above; the checkpoint of the previous RL iteration is kept. With ``lora.dropout``, and
      in rollouts with noise (the update computes without it), the gaps of all rows are only logged.

    There is a warning if the completions' length or its spread, the share of finished completions, the reward or the
    share of distinct completions differs from the previous rollout by more than chance explains; the run goes on,
    because a policy may change so fast. Rollouts of a few groups are compared with several earlier ones: with 3 if they
    have 8 groups, with 11 if they have 5. Rollouts of fewer than 5 groups cause no such warning.

    The multiples of medians hold only for rollouts in which at least 64 different tokens are compared, because means of
    fewer tokens vary too much. The six tests other_sampling, other_draws, other_policy, copies, branches and order
    compute log-likelihood ratios in nats, which accumulate over rollouts (``qerl_pl.policy.evidence``), so a fault that
    one rollout does not show is found after several. If a policy is nearly certain of every token, its completions are
    nearly equal however they are sampled, and the tests find little.

    Args:
        max_tokens: limit on the tokens that go through the trainer's model per rollout, including prompts, over all
            ranks; each rank may exceed its share by at most one row. Of equal rows, one goes through the model.
        false_alarm: bound on the probability per rollout that a correct run is stopped by one of the six tests, or
            warned of by one of the numbers that are compared with the previous rollout (if there are enough groups for
            means to be normally distributed). For the tests, it holds for any model and any numerical difference
            between trainer and engine, but other_policy supposes that rounding errors favour another policy as often as
            not, and other_draws that errors of logits are seldom above 2 nats.
        max_gap: gap in nats above which the run stops; null: 1e-3 in float32, 0.3 in bfloat16.
        max_jump: multiple of the median gap of recent rollouts above which the run stops; twice this multiple in the
            first two rollouts of a run (if ``window`` is at least 4), whose medians are mostly estimates. null: no
            multiple stops the run.
        warn_jump: multiple of that median above which there is a warning.
        window: number of rollouts in that median, and the largest number of earlier rollouts with which lengths,
            rewards and so on are compared.
        silent_rollouts: number of consecutive rollouts without a group whose completions earned different rewards,
            after which there is a warning.
        remembered: number of most recent completions with which new completions are compared to find copies.
        every: rollouts from one pass through the trainer's model to the next; the first four of a run all have one.
        policy_tokens: limit on the tokens of each pass with another policy, over all ranks; the rows are some of those
            that ``max_tokens`` limits. 0: other policies are not tested. That is the default, because too few rollouts
            of pretrained models have been measured with this test so far (``docs/correctness.md``).

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.rollout_evidence.RolloutEvidence
              init_args: {max_tokens: 32768, warn_jump: 3.0, max_jump: 10.0}
    """

    def __init__(
        self,
        max_tokens: int = 16384,
        false_alarm: float = 1e-6,
        max_gap: float | None = None,
        max_jump: float | None = 3.0,
        warn_jump: float = 2.0,
        window: int = 20,
        silent_rollouts: int = 5,
        remembered: int = 4096,
        every: int = 1,
        policy_tokens: int = 0,
    ) -> None:
        require_at_least(1, max_tokens=max_tokens, silent_rollouts=silent_rollouts, every=every)
        require_at_least(2, window=window)
        require_at_least(0, remembered=remembered, policy_tokens=policy_tokens)
        if not 0 < false_alarm < 1:
            raise ValueError(f"false_alarm is {false_alarm}; expected a probability above 0 and below 1, e.g. 1e-6")
        if max_gap is not None and not 0 < max_gap < math.inf:
            raise ValueError(f"max_gap is {max_gap}; expected more than 0 nats, or null for the dtype's default")
        for name, value in (("max_jump", max_jump), ("warn_jump", warn_jump)):
            if value is not None and not 1 < value < math.inf:
                raise ValueError(f"{name} is {value}; expected a factor above 1")
        self.max_tokens, self.policy_tokens, self.remembered, self.every = max_tokens, policy_tokens, remembered, every
        self.silent_rollouts, self.false_alarm, self.window = silent_rollouts, false_alarm, window
        # results of earlier rollouts, with which later ones are compared; equal on all ranks
        self.limits = GapLimits(max_gap, max_jump, warn_jump, window)
        self._evidence: dict[str, Tensor] = {}
        self._numbers: dict[str, list[float]] = {}
        self._ranges: dict[str, list[list[float]]] = {}  # lowest, highest and number of the values of each rollout
        self._silent = 0
        self._rewards_are_own = True  # whether rewards seem to depend on their completion alone
        self._seen: list[tuple[int, int]] = []  # digests of prompt and completion
        self._strengths: dict[str, float] = {}
        self._adapter_before: dict[str, Tensor] | None = None  # fp32, on the CPU
        self._margin = gap()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "evidence": {name: log_m.tolist() for name, log_m in self._evidence.items()},
            "gaps": self.limits.history,
            "excess": self.limits.excess,
            "numbers": self._numbers,
            "ranges": self._ranges,
            "silent": self._silent,
            "rewards_are_own": self._rewards_are_own,
            "seen": torch.tensor(self._seen, dtype=torch.int64).reshape(-1, 2),  # lists of lists take long to copy
            "strengths": self._strengths,
            "adapter_before": self._adapter_before,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        evidence = state_dict["evidence"].items()
        self._evidence = {name: torch.tensor(values, dtype=torch.float64) for name, values in evidence}
        self.limits.history, self.limits.excess = dict(state_dict["gaps"]), dict(state_dict["excess"])
        self._numbers, self._silent = dict(state_dict["numbers"]), int(state_dict["silent"])
        seen = torch.as_tensor(state_dict["seen"], dtype=torch.int64)  # in older checkpoints a list
        self._seen = [(prompt, completion) for prompt, completion in seen.reshape(-1, 2).tolist()]
        # older checkpoints have none of these
        self._ranges, self._strengths = dict(state_dict.get("ranges", {})), dict(state_dict.get("strengths", {}))
        self._rewards_are_own = state_dict.get("rewards_are_own", True)
        self._adapter_before = state_dict.get("adapter_before")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        pl_module.loop.observers.append(partial(self._check, pl_module))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        """Compare the log-probabilities that the trainer computed before the update with the sampler's."""
        update, batch, index = outputs["update"], outputs["rollout"].sampled, outputs["rollout_index"]
        sampled = update.experience.sampled
        both = update.old_logprobs, update.experience.sampler_logprobs
        trainers, samplers = (logprobs[sampled].double().cpu() for logprobs in both)
        gaps = gaps_of(trainers, samplers, sampled.nonzero()[:, 0].cpu())
        self._check_gaps(gaps, OF_ALL, pl_module, batch, index)

    def _check(self, pl_module: QeRLModule, rollout: Rollout) -> None:
        """Check a rollout before the update. Raises CheckFailed if its completions are no independent draws from the
        policy."""
        index, batch = pl_module.rollout_index, rollout.sampled
        self._add("order", evidence_of_order(batch, derive_seed(pl_module.settings.seed, "order", index)), pl_module)
        self._check_copies(batch, pl_module)
        self._check_branches(batch, pl_module)
        if is_due(index, self.every):
            is_first = OF_THE_CHOSEN["gap"] not in self.limits.history
            measured = self._measured(pl_module, batch, index, other_rounding=is_first)
            if is_first:
                self.limits.expect(gaps_of(measured.trainer, measured.shaken, measured.rows))
            gaps = gaps_of(measured.trainer, measured.sampler, measured.rows)
            self._check_gaps(gaps, OF_THE_CHOSEN, pl_module, batch, index)
            self._add("other_sampling", measured.evidence, pl_module)
            if batch.completions[0].seed is not None:
                statistics = over_ranks(self._margin, measured.margins)
                values = {f"margin/{name}": float(statistics[name]) for name in ("mean_abs", "p99", "max")}
                log_at(pl_module.trainer.loggers, values, step=index)
                self._add("other_draws", measured.draws, pl_module)
            if self.policy_tokens:
                self._check_policies(measured, batch, pl_module)
        if self.policy_tokens and is_due(index + 1, self.every):
            adapter = pl_module.policy.adapter_state().items()
            self._adapter_before = {name: tensor.to("cpu", copy=True) for name, tensor in adapter}
        self._warn_of_changes(batch, index)
        self._count_silence(rollout)

    def _add(self, name: str, evidence: Tensor, pl_module: QeRLModule) -> None:
        """Add a rollout's results to the test ``name``: ``evidence`` has one log-likelihood ratio in nats for each kind
        of fault that the test looks for, against correct sampling. From them and those of earlier rollouts follows a
        bound: a correct run has such results within n rollouts with a probability of at most n times the bound. Raises
        CheckFailed if the bound is below the setting ``false_alarm``."""
        before, index = self._evidence.get(name, torch.full_like(evidence, -math.inf)), pl_module.rollout_index
        self._evidence[name] = accumulated(before, evidence)
        log_p = log_false_alarm(self._evidence[name])
        log_at(pl_module.trainer.loggers, {f"evidence/{name}": -log_p}, step=index)
        if (chance := math.exp(log_p)) < self.false_alarm:
            raise CheckFailed(verdict(name, self._evidence[name], rollout=index, chance=chance))

    def _check_copies(self, batch: ScoredBatch, pl_module: QeRLModule) -> None:
        pairs = zip(batch.prompts, batch.completions, strict=True)
        local = [(hash(prompt.tokens), hash(row.tokens), math.fsum(row.logprobs)) for prompt, row in pairs]
        rows = [row for part in ranks.gather_values(local) for row in part]  # all ranks remember the same rows
        self._add("copies", copy_evidence(repeats(self._seen, rows)), pl_module)
        seen = [*self._seen, *((prompt, completion) for prompt, completion, _ in rows)]
        self._seen = seen[max(0, len(seen) - self.remembered) :]

    def _check_branches(self, batch: ScoredBatch, pl_module: QeRLModule) -> None:
        try:
            self._add("branches", evidence_of_branches(batch, with_rewards=self._rewards_are_own), pl_module)
        except CheckFailed:
            if not self._rewards_are_own or have_own_rewards(pl_module.loop, batch):
                raise
            self._rewards_are_own = False
            del self._evidence["branches"]
            rank_zero_warn(
                "rewards depend on other completions of the batch or on chance, so the test of whether the engine "
                "chooses among completions (evidence/branches) begins anew without them"
            )

    def _measured(self, pl_module: QeRLModule, batch: ScoredBatch, index: int, *, other_rounding: bool) -> Measured:
        return measure_some(
            pl_module.policy,
            batch,
            pl_module.norm_noise,
            temperature=pl_module.sampling.temperature,
            max_model_len=pl_module.settings.max_model_len,
            micro_batch_tokens=check_limit(pl_module.settings.longest_row),
            max_tokens=self.max_tokens,
            seed=derive_seed(pl_module.settings.seed, f"evidence/{pl_module.global_rank}", index),
            other_rounding=other_rounding,
        )

    def _check_policies(self, measured: Measured, batch: ScoredBatch, pl_module: QeRLModule) -> None:
        others = measure_others(
            pl_module.policy,
            batch,
            measured,
            pl_module.norm_noise,
            self._adapter_before,
            strengths=self._strengths,
            temperature=pl_module.sampling.temperature,
            micro_batch_tokens=check_limit(pl_module.settings.longest_row),
            max_tokens=self.policy_tokens,
        )
        self._strengths = others.strengths
        values = {OTHER_POLICIES[name]: value for name, value in others.parts.items()}
        log_at(pl_module.trainer.loggers, values, step=pl_module.rollout_index)
        self._add("other_policy", others.evidence, pl_module)

    def _check_gaps(
        self, gaps: Mapping[str, float], names: Mapping[str, str], pl_module: QeRLModule, batch: ScoredBatch, index: int
    ) -> None:
        """Log the gaps of rollout ``index`` under their names, and compare them with their limits."""
        log_at(pl_module.trainer.loggers, {name: gaps[kind] for kind, name in names.items()}, step=index)
        if names is OF_ALL and (pl_module.settings.lora.dropout > 0 or pl_module.norm_noise.sigma > 0):
            return  # the update computes log-probabilities with dropout and without noise, the engine the other way

        def rounding() -> Mapping[str, float]:
            measured = self._measured(pl_module, batch, index, other_rounding=True)
            return gaps_of(measured.trainer, measured.shaken, measured.rows)

        self.limits.check(gaps, names, rollout=index, dtype=pl_module.policy.dtype, rounding=rounding)

    def _warn_of_changes(self, batch: ScoredBatch, index: int) -> None:
        """Warn if means over groups, such as those of length and reward, differ from those of the previous rollouts by
        more than chance explains."""
        parts = ranks.gather_values(batch.group_numbers())
        numbers = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        for name, now in numbers.items():
            before, ranges = self._numbers.get(name, []), self._ranges.get(name, [])
            if before and now and 2 * min(change(now, before), apart(now, ranges)) < self.false_alarm:
                first, second = (math.fsum(values) / len(values) for values in (before, now))
                rank_zero_warn(
                    f"the {name} changed from {first:.3g} in rollout {index - 1} to {second:.3g} in rollout {index}, "
                    "more than chance explains: look at RUN/completions of both, and whether the learning rate is too "
                    "high"
                )
            if now:
                self._ranges[name] = [*ranges, [min(now), max(now), len(now)]][-self.window :]
        self._numbers = numbers

    def _count_silence(self, rollout: Rollout) -> None:
        if not rollout.sampled.table.rewarded:
            return
        has_signal = bool(rollout.sampled.has_signal.any())
        self._silent = 0 if any(ranks.gather_values(has_signal)) else self._silent + 1
        if self._silent and self._silent % self.silent_rollouts == 0:
            rank_zero_warn(
                f"no group had a signal in the last {self._silent} rollouts: all completions of each prompt earned the "
                "same, so nothing is learned. Look at RUN/completions: are answers found, and are problems neither "
                "too easy nor too hard for the policy? More completions per prompt (model.sampling.num_completions), a "
                "higher temperature or other data help"
            )
