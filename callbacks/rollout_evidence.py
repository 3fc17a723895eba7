"""Stop the run when the completions of a rollout are not independent samples from the current policy."""

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import product
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
from qerl_pl.policy import evidence as likelihood
from qerl_pl.policy.branches import branch_evidence
from qerl_pl.policy.jumps import FAR, MAX_FAR_SHARE, apart, change, jump
from qerl_pl.rollout.loop import Rollout
from qerl_pl.rollout.measured import Measured, measure_some
from qerl_pl.rollout.other_policies import OF_BEFORE, OTHER_POLICIES, WITHOUT_ADAPTER, WITHOUT_NOISE, measure_others
from qerl_pl.rollout.readings import gaps_of, have_own_rewards, lengths_and_means, num_different
from qerl_pl.rollout.scored import ScoredBatch
from qerl_pl.training.metrics import gap

MAX_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.3}  # nats; docs/correctness.md has the gaps of correct engines
GAP_FLOOR = {torch.float32: 1e-5, torch.bfloat16: 2e-3}  # nats; smaller gaps never count as a jump
# Factors of GAP_FLOOR for each kind of gap (difference between the log-probabilities of trainer and sampler): smaller
# values never count as a sudden increase. A mean over one row varies more than a mean over a rollout, and logits vary
# more than log-probabilities.
FLOORS = {"gap": 1.0, "high_gap": 5.0, "logit_gap": 10.0}
# Factors of the setting max_jump for each kind of gap: from rollout to rollout, gaps of single rows vary most, and gaps
# of logits least.
JUMPS = {"gap": 1.0, "high_gap": 1.5, "logit_gap": 0.8}
SURE_SIGMAS = 6.0
FIRST = 2.0  # factor of the limits while most values in a median are estimates from the trainer's rounding errors
# Number of different tokens that a rollout must have for a jump: the means of fewer vary too much. Equal completions,
# whose errors are equal, count once.
LEAST_TOKENS = 64
KINDS = (*FLOORS, "far_share")
# Names under which differences between the engine's and the trainer's log-probabilities are logged. OF_THE_CHOSEN: of a
# few rows, for which the trainer computes log-probabilities before the update, with the noise on norms that the engine
# had. OF_ALL: of all rows, with the log-probabilities that the update computes anyway, without noise.
OF_THE_CHOSEN = {kind: f"evidence/{kind}" for kind in KINDS}
OF_ALL = {kind: f"evidence/{kind}_of_all" for kind in KINDS}
PART_OF = {  # names under which is logged which fraction of another policy's effect the engine's errors contain
    WITHOUT_ADAPTER: "evidence/part_without_adapter",
    OF_BEFORE: "evidence/part_of_rollout_before",
    WITHOUT_NOISE: "evidence/part_without_noise",
}
AMBIGUOUS = 5.0  # nats; policies whose evidence is less than this below the largest are named in the message, too
ADVICE = (
    "tokens or log-probabilities were altered, or come from another policy. If engine and trainer are correct, raise "
    "RolloutEvidence.max_gap or max_jump"
)


class RolloutEvidence(Callback):
    """Stops the run when completions are not independent samples from the current policy (docs/correctness.md).

    A row is a prompt with one completion, a group has all completions of a prompt, and the sampler is the rollout
    engine. In rollouts chosen by ``every``, before the update, randomly chosen rows of up to ``max_tokens`` tokens go
    through the trainer's model once, with this rollout's noise on norm weights, if any. The run stops

    - if ``evidence/gap``, the mean of |log p of the trainer - log p of the sampler| over tokens, in nats, exceeds
      ``max_gap`` or ``max_jump`` times its median over recent rollouts (a warning comes above ``warn_jump`` times this
      median). A less certain policy, or noise, also increases the gap, but then the trainer's own rounding errors
      increase as much. These are therefore measured before the run stops, by a second pass with random rounding errors,
      and an increase that they explain does not count;
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
      completions that were selected among several, and tokens that were changed after sampling.
      ``margin/{mean_abs,p99,max}`` say by how many nats the trainer's logits would have to change for the random
      numbers to give the sampled token, for tokens with a probability of at most 0.97. In a correct run the margins are
      about as large as the gap;
    - with ``policy_tokens``, if all rows, a quarter or a sixteenth of them were sampled with another policy
      (``evidence/other_policy``): without the adapter, with the adapter of the previous rollout or without the
      rollout's noise, also where this changes a token's log-probability less than rounding errors do.
      ``evidence/part_*`` says how much of this change the engine's errors contain: about 0 for a correct engine, 1 if
      all rows were sampled with the other policy. For each of these policies two more passes are made with rows of up
      to ``policy_tokens`` tokens. The adapter of the previous rollout is kept in host memory and in checkpoints.

    In every rollout, all completions are tested as well. The run stops

    - if completions of the same prompt, in this and earlier rollouts, are equal more often than independent draws would
      be, as with a seed that does not change, or less often (``evidence/copies``);
    - if the engine selects completions by length or reward (``evidence/branches``): where a completion begins like
      earlier ones of its group, its next token is that of a short, long, good or bad completion more often than its
      log-probabilities say. Rewards that depend on other completions of the batch, such as a majority vote, are left
      out of this test, with a warning, when it would stop the run;
    - if the length or mean log-probability of a completion depends on its position in the group (``evidence/order``),
      as when the engine sorts or selects completions, or samples some with another policy;
    - after the update, if the trainer's log-probabilities of all rows, which the update has computed, are too far from
      the sampler's by the limits above. The checkpoint of the RL iteration before is kept. In rollouts with noise,
      which these log-probabilities of the trainer do not have, and with ``lora.dropout``, the gaps of all rows are only
      logged.

    There is a warning if the completions' length or its spread, the share of finished completions, the reward or the
    share of distinct completions differs from the previous rollout by more than chance explains; the run goes on,
    because a policy may change so fast. Rollouts of a few groups are compared with several earlier ones: with 3 if they
    have 8 groups, with 11 if they have 5; with fewer there is no such warning. There is another warning if for several
    rollouts no group had completions with different rewards.

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
        self.false_alarm, self.max_gap, self.max_jump, self.warn_jump = false_alarm, max_gap, max_jump, warn_jump
        self.window, self.silent_rollouts = window, silent_rollouts
        # results of earlier rollouts, with which later ones are compared; equal on all ranks
        self._evidence: dict[str, Tensor] = {}
        self._gaps: dict[str, list[float]] = {}
        self._excess: dict[str, float] = {}
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
            "gaps": self._gaps,
            "excess": self._excess,
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
        self._gaps, self._silent = dict(state_dict["gaps"]), int(state_dict["silent"])
        self._excess, self._numbers = dict(state_dict["excess"]), dict(state_dict["numbers"])
        seen = torch.as_tensor(state_dict["seen"], dtype=torch.int64)  # in older checkpoints a list
        self._seen = [(prompt, completion) for prompt, completion in seen.reshape(-1, 2).tolist()]
        self._ranges = dict(state_dict.get("ranges", {}))
        self._rewards_are_own = state_dict.get("rewards_are_own", True)  # older checkpoints have none of these
        self._strengths = dict(state_dict.get("strengths", {}))
        self._adapter_before = state_dict.get("adapter_before")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        pl_module.loop.observers.append(partial(self._check, pl_module))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        """Compare the log-probabilities that the trainer computed before the update with the sampler's."""
        update, sampled = outputs["update"], outputs["update"].experience.sampled
        rows = torch.arange(len(sampled), device=sampled.device).unsqueeze(1).expand(sampled.shape)[sampled]
        trainer_logprobs = update.old_logprobs[sampled].double().cpu()
        sampler_logprobs = update.experience.sampler_logprobs[sampled].double().cpu()
        gaps = gaps_of(trainer_logprobs, sampler_logprobs, rows.cpu())
        which = {"index": outputs["rollout_index"], "num_tokens": num_different(trainer_logprobs)}
        self._check_gaps(gaps, OF_ALL, pl_module, outputs["rollout"].sampled, **which)

    def _check(self, pl_module: QeRLModule, rollout: Rollout) -> None:
        """Check a rollout before the update. CheckFailed: its completions are no independent draws from the policy."""
        index, batch = pl_module.rollout_index, rollout.sampled
        self._check_order(pl_module, batch)
        self._check_copies(pl_module, batch)
        self._check_branches(pl_module, batch)
        if is_due(index, self.every):
            is_first = OF_THE_CHOSEN["gap"] not in self._gaps
            measured = self._measured(pl_module, batch, index, other_rounding=is_first)
            if is_first:  # there is no history yet: expect gaps of the size of the trainer's own rounding errors
                usual = gaps_of(measured.trainer, measured.shaken, measured.rows)
                for names, kind in product((OF_THE_CHOSEN, OF_ALL), FLOORS):
                    self._gaps[names[kind]] = [usual[kind]] * 2
            gaps = gaps_of(measured.trainer, measured.sampler, measured.rows)
            num_tokens = num_different(measured.trainer)
            self._check_gaps(gaps, OF_THE_CHOSEN, pl_module, batch, index=index, num_tokens=num_tokens)
            self._check_sampling(measured.evidence, pl_module)
            if batch.completions[0].seed is not None:
                self._check_draws(measured, pl_module)
            if self.policy_tokens:
                self._check_policies(measured, batch, pl_module)
        if self.policy_tokens and is_due(index + 1, self.every):
            adapter = pl_module.policy.adapter_state().items()
            self._adapter_before = {name: tensor.to("cpu", copy=True) for name, tensor in adapter}
        self._warn_of_changes(batch, index)
        self._count_silence(rollout)

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

    def _check_order(self, pl_module: QeRLModule, batch: ScoredBatch) -> None:
        index, size = pl_module.rollout_index, batch.group_size
        numbers = lengths_and_means(batch)
        values = torch.tensor(ranks.gather_groups(numbers, size), dtype=torch.float64).T.reshape(2, -1, size)
        generator = torch.Generator().manual_seed(derive_seed(pl_module.settings.seed, "order", index))
        uniforms = torch.rand(values.shape, generator=generator, dtype=torch.float64)
        if chance := self._small_chance("order", likelihood.order_evidence(values, uniforms), pl_module):
            raise CheckFailed(
                f"length or log-probability of the completions up to rollout {index} depends on their place in the "
                f"group ({chance}), so they are no independent draws: the engine sorts or chooses completions, or "
                "samples some of a group in another way"
            )

    def _check_branches(self, pl_module: QeRLModule, batch: ScoredBatch) -> None:
        rewards = (batch.table.total.nan_to_num() * self._rewards_are_own).tolist()
        texts = [(row.tokens, row.logprobs) for row in batch.completions]
        numbers = [[len(row.tokens), reward] for row, reward in zip(batch.completions, rewards, strict=True)]
        starts = [slice(start, start + batch.group_size) for start in range(0, len(texts), batch.group_size)]
        evidence = branch_evidence([texts[group] for group in starts], [numbers[group] for group in starts])
        evidence = torch.tensor(ranks.gather_values(evidence.tolist()), dtype=torch.float64).sum(dim=0)
        if chance := self._small_chance("branches", evidence, pl_module):
            if self._rewards_are_own and not have_own_rewards(pl_module.loop, batch):
                self._rewards_are_own = False
                del self._evidence["branches"]
                rank_zero_warn(
                    "rewards depend on other completions of the batch or on chance, so the test of whether the engine "
                    "chooses among completions (evidence/branches) begins anew without them"
                )
                return
            raise CheckFailed(
                f"completions up to rollout {pl_module.rollout_index} begin like others of their group that are short, "
                f"long, good or bad more often than their probabilities say ({chance}): the engine chooses among "
                "completions, or copies them"
            )

    def _check_sampling(self, evidence: Tensor, pl_module: QeRLModule) -> None:
        if chance := self._small_chance("other_sampling", evidence, pl_module):
            best = likelihood.ALTERNATIVES[
                int(self._evidence["other_sampling"].argmax()) % len(likelihood.ALTERNATIVES)
            ]
            raise CheckFailed(
                f"the sampled tokens up to rollout {pl_module.rollout_index} are no draws from the distribution whose "
                f"log-probabilities the engine reports ({chance}); {best} explains them best. Look for another "
                "temperature, greedy decoding, top_p, top_k or limits of length in the engine, a choice among "
                "completions, or altered tokens"
            )

    def _check_draws(self, measured: Measured, pl_module: QeRLModule) -> None:
        index = pl_module.rollout_index
        statistics = over_ranks(self._margin, measured.margins)
        values = {f"margin/{name}": float(statistics[name]) for name in ("mean_abs", "p99", "max")}
        log_at(pl_module.trainer.loggers, values, step=index)
        if chance := self._small_chance("other_draws", measured.draws, pl_module):
            raise CheckFailed(
                f"some or all tokens up to rollout {index} are not those that the random numbers of their requests "
                f"give ({chance}): the engine answered other prompts than it was given, such as prompts with a token "
                "more or less, chose among completions, exchanged or copied them, or changed tokens after sampling"
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
        values = {PART_OF[name]: value for name, value in others.parts.items()}
        log_at(pl_module.trainer.loggers, values, step=pl_module.rollout_index)
        if chance := self._small_chance("other_policy", others.evidence, pl_module):
            best = self._evidence["other_policy"].reshape(-1, len(OTHER_POLICIES)).amax(dim=0)
            near = [name for name, log_m in zip(OTHER_POLICIES, best, strict=True) if log_m > best.max() - AMBIGUOUS]
            raise CheckFailed(
                f"some or all completions up to rollout {pl_module.rollout_index} look as if they were sampled "
                f"{', or '.join(near)} ({chance}): the log-probabilities that the engine reports differ from the "
                "trainer's as those of such a policy do. Look for requests that the engine answers without the adapter "
                "or the noise, with an old adapter, or with cached prefixes of an older policy"
            )

    def _check_copies(self, pl_module: QeRLModule, batch: ScoredBatch) -> None:
        pairs = zip(batch.prompts, batch.completions, strict=True)
        local = [(hash(prompt.tokens), hash(row.tokens), math.fsum(row.logprobs)) for prompt, row in pairs]
        # all ranks compare and remember the same rows
        rows = [row for part in ranks.gather_values(local) for row in part]
        evidence = likelihood.copy_evidence(likelihood.repeats(self._seen, rows))
        if chance := self._small_chance("copies", evidence, pl_module):
            best = int(self._evidence["copies"].argmax()) % (len(self._evidence["copies"]) // len(likelihood.SHARES))
            often = "more" if best < len(likelihood.COPY_RATES) * len(likelihood.COPIED) else "less"
            raise CheckFailed(
                f"completions up to rollout {pl_module.rollout_index} repeat others of the same prompt {often} often "
                f"than independent draws would ({chance}): the engine copies completions or chooses among them, or its "
                "seed does not change from one to the next"
            )
        seen = [*self._seen, *((prompt, completion) for prompt, completion, _ in rows)]
        self._seen = seen[max(0, len(seen) - self.remembered) :]

    def _small_chance(self, name: str, evidence: Tensor, pl_module: QeRLModule) -> str | None:
        """Add a rollout's results to the test ``name``, and decide whether the run has to stop. ``evidence`` has one
        log-likelihood ratio in nats for each kind of fault that the test looks for, against correct sampling; they are
        combined with those of earlier rollouts. From the result follows a bound per rollout: the probability that a
        correct run reaches this result within n rollouts is at most n times the bound. Returns a text with the bound if
        the bound is below the setting ``false_alarm``, so that the caller stops the run, else None."""
        before = self._evidence.get(name, torch.full_like(evidence, -math.inf))
        self._evidence[name] = likelihood.accumulated(before, evidence)
        log_p = likelihood.log_false_alarm(self._evidence[name])
        log_at(pl_module.trainer.loggers, {f"evidence/{name}": -log_p}, step=pl_module.rollout_index)
        chance = math.exp(log_p)
        return f"chance: below {chance:.1g} per rollout" if chance < self.false_alarm else None

    def _check_gaps(
        self,
        gaps: Mapping[str, float],
        names: Mapping[str, str],
        pl_module: QeRLModule,
        batch: ScoredBatch,
        *,
        index: int,
        num_tokens: int,
    ) -> None:
        """Log the differences between the log-probabilities of trainer and sampler (``gaps_of``) under the metric names
        in ``names``, and compare them with their limits: constants, settings, or, if they are over at least
        ``LEAST_TOKENS`` different tokens, multiples of the median of earlier rollouts. CheckFailed: one exceeds its
        limit."""
        log_at(pl_module.trainer.loggers, {names[kind]: value for kind, value in gaps.items()}, step=index)
        if names is OF_ALL and (pl_module.settings.lora.dropout > 0 or pl_module.norm_noise.sigma > 0):
            return  # the update computes log-probabilities with dropout and without noise, the engine the other way
        if gaps["far_share"] > MAX_FAR_SHARE:
            raise CheckFailed(
                f"{gaps['far_share']:.2%} of the tokens of rollout {index} have a probability in the trainer that "
                f"differs from the sampler's by more than a factor of {FAR:g} (allowed: {MAX_FAR_SHARE:.2%}): {ADVICE}"
            )
        dtype = pl_module.policy.dtype
        limit = self.max_gap or MAX_GAP[dtype]
        rounding: dict[str, float] = {}
        for kind in FLOORS:
            name, value, floor = names[kind], gaps[kind], GAP_FLOOR[dtype] * FLOORS[kind]
            what = {"high_gap": " in some rows", "logit_gap": " as a difference of logits"}.get(kind, "")
            differ = (
                f"the sampler's log-probabilities of rollout {index} differ from the trainer's by {value:.2g} nats per "
                f"token{what}"
            )
            if kind == "gap" and not value <= limit:
                raise CheckFailed(f"{differ}, more than {limit:.2g}: {ADVICE}")
            if num_tokens < LEAST_TOKENS:
                continue
            history = self._gaps.get(name, [])
            ratio, sigmas = jump(value, history, floor=floor)
            # The history of a run's first rollouts begins with estimates from the trainer's rounding errors, which may
            # be smaller or larger than gaps. Limits are therefore wider until most of the history is measured.
            known = len(history) >= min(4, self.window)
            if ratio > self.warn_jump and sigmas > SURE_SIGMAS:
                if not rounding:  # gaps that the trainer's own rounding errors cause in some completions
                    measured = self._measured(pl_module, batch, index, other_rounding=True)
                    rounding = gaps_of(measured.trainer, measured.shaken, measured.rows)
                excess = max(value, floor) / max(rounding[kind], floor)
                ratio = min(ratio, excess / self._excess.get(name, 1.0))
            most = math.inf if self.max_jump is None else self.max_jump * JUMPS[kind] * (1 if known else FIRST)
            if ratio > most and sigmas > SURE_SIGMAS:
                raise CheckFailed(f"{differ}, {ratio:.1f} times the usual: {ADVICE}")
            if known and kind == "gap" and ratio > self.warn_jump and sigmas > SURE_SIGMAS:
                rank_zero_warn(f"{differ}, {ratio:.1f} times the usual: look at gap/* and ledger/* for the cause")
            if history and not known:
                self._excess.setdefault(name, max(value, floor) / max(history[0], floor))
            self._gaps[name] = [*history, value][-self.window :]

    def _warn_of_changes(self, batch: ScoredBatch, index: int) -> None:
        """Warn if values of groups, of length, reward and so on, differ from those of the previous rollouts by more
        than chance explains."""
        numbers: defaultdict[str, list[float]] = defaultdict(list)
        for part in ranks.gather_values(batch.group_numbers()):
            for name, values in part.items():
                numbers[name] += values
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
        self._numbers = dict(numbers)

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
