"""Stop the run when rollouts are not independent draws from the current policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from qerl_pl.common import ranks
from qerl_pl.common.batching import micro_batches
from qerl_pl.common.due import is_due
from qerl_pl.common.loggers import log_at
from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.memory.settings import check_limit
from qerl_pl.module import QeRLModule
from qerl_pl.policy.evidence import ALTERNATIVES, accumulated, copy_evidence, jump, log_false_alarm
from qerl_pl.rollout.common import padded
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.loop import Rollout

MAX_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.3}  # nats; docs/correctness.md has those of correct engines
GAP_FLOOR = {torch.float32: 1e-5, torch.bfloat16: 2e-3}  # nats; smaller gaps never count as a jump
SURE_SIGMAS = 6.0


class RolloutEvidence(Callback):
    """Stops the run when completions are not independent draws from the current policy.

    Training rollouts are checked before the update. Some rows, chosen by the seed, go through the trainer's model once,
    with the noise of the rollout. This gives the log-probability of each token under the policy, and under the
    same logits sampled in other ways. Then:

    - ``evidence/gap`` is mean |trainer - sampler| in nats at the sampling temperature, with noise on both sides. The
      run stops above ``max_gap`` or ``max_jump`` times the recent median, and warns above ``warn_jump`` times the
      median. A large gap means that tokens or log-probabilities were altered or come from another policy.
    - ``evidence/other_sampling`` is evidence in nats that the tokens were sampled at another temperature or with top-p,
      and scored at the reported one afterwards.
    - ``evidence/copies`` is evidence in nats that completions of the same prompt, in this and earlier rollouts, are
      copies: the engine copies completions, or its seed does not change. All completions of the rollout are compared.

    Evidence is a likelihood ratio that accumulates over rollouts (``qerl_pl.policy.evidence.accumulated``), so a fault
    that one rollout does not show is found after several. If a policy is nearly certain of every token, its completions
    are nearly equal at any temperature, and these two tests can find little.

    If no group had a signal for several rollouts, a warning says what to do.

    Args:
        max_tokens: limit on the tokens that go through the trainer's model per rollout, including prompts, over all
            ranks; each rank may exceed its share by at most one row.
        false_alarm: bound on the probability that a correct rollout stops the run, for each of the two tests of
            evidence. It holds for any model and any numerical difference between trainer and engine.
        max_gap: gap in nats above which the run stops; null: 1e-3 in float32, 0.3 in bfloat16.
        max_jump: multiple of the median gap of recent rollouts above which the run stops; null: it only warns.
        warn_jump: multiple of that median above which it warns.
        window: number of rollouts in that median.
        silent_rollouts: warn after every this many consecutive rollouts without a signal (every group's rewards were
            equal).
        remembered: number of most recent completions that new completions are compared with.
        every: rollouts from one comparison of log-probabilities to the next, after the first four of a run, which are
            all compared. Copies are looked for in every rollout.

    Raises:
        ValueError: a value is out of range.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.rollout_evidence.RolloutEvidence
              init_args: {every: 8, warn_jump: 3.0, max_jump: 30.0}
    """

    def __init__(
        self,
        max_tokens: int = 8192,
        false_alarm: float = 1e-6,
        max_gap: float | None = None,
        max_jump: float | None = 10.0,
        warn_jump: float = 3.0,
        window: int = 20,
        silent_rollouts: int = 5,
        remembered: int = 4096,
        every: int = 1,
    ) -> None:
        least = {"max_tokens": (max_tokens, 1), "window": (window, 2), "silent_rollouts": (silent_rollouts, 1)}
        for name, (value, smallest) in {**least, "remembered": (remembered, 0), "every": (every, 1)}.items():
            if value < smallest:
                raise ValueError(f"{name} is {value}; expected at least {smallest}")
        if not 0 < false_alarm < 1:
            raise ValueError(f"false_alarm is {false_alarm}; expected a probability above 0 and below 1, e.g. 1e-6")
        if max_gap is not None and not 0 < max_gap < math.inf:
            raise ValueError(f"max_gap is {max_gap}; expected more than 0 nats, or null for the dtype's own")
        for name, value in (("max_jump", max_jump), ("warn_jump", warn_jump)):
            if value is not None and not 1 < value < math.inf:
                raise ValueError(f"{name} is {value}; expected a factor above 1")
        self.max_tokens = max_tokens
        self.false_alarm = false_alarm
        self.max_gap = max_gap
        self.max_jump = max_jump
        self.warn_jump = warn_jump
        self.window = window
        self.silent_rollouts = silent_rollouts
        self.remembered = remembered
        self.every = every
        self._evidence: dict[str, Tensor] = {}
        self._gaps: list[float] = []
        self._silent = 0
        self._seen: list[tuple[int, int]] = []

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return evidence, gaps and completion digests of past rollouts, which later ones are compared with; equal on
        all ranks."""
        evidence, seen = {name: log_m.tolist() for name, log_m in self._evidence.items()}, list(map(list, self._seen))
        return {"evidence": evidence, "gaps": self._gaps, "silent": self._silent, "seen": seen}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the evidence, gaps and completion digests of past rollouts."""
        evidence = state_dict["evidence"].items()
        self._evidence = {name: torch.tensor(values, dtype=torch.float64) for name, values in evidence}
        self._gaps, self._silent = list(state_dict["gaps"]), int(state_dict["silent"])
        self._seen = [(prompt, completion) for prompt, completion in state_dict["seen"]]

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        pl_module.loop.observers.append(partial(self._check, pl_module))

    def _check(self, pl_module: QeRLModule, rollout: Rollout) -> None:
        """Check a rollout before the update; raises RuntimeError if its completions are no samples from the current
        policy."""
        self._check_copies(pl_module, rollout)
        if is_due(pl_module.rollout_index, self.every):
            gap, evidence = self._measure(pl_module, rollout)
            log_at(pl_module.trainer.loggers, {"evidence/gap": gap}, step=pl_module.rollout_index)
            self._check_gap(gap, pl_module)
            self._check_sampling(evidence, pl_module)
        self._count_silence(rollout)

    def _measure(self, pl_module: QeRLModule, rollout: Rollout) -> tuple[float, Tensor]:
        """Return mean |trainer - sampler| in nats over the chosen rows of all ranks, and the evidence for K other ways
        of sampling, [K] nats."""
        prompts, completions = rollout.evaluation.prompts, rollout.evaluation.completions
        rank = pl_module.global_rank
        generator = torch.Generator().manual_seed(
            derive_seed(pl_module.settings.seed, f"evidence/{rank}", pl_module.rollout_index)
        )
        order = torch.randperm(len(completions), generator=generator).tolist()
        limit = self.max_tokens / ranks.num_ranks()
        rows, total = [], 0
        for row in order:
            rows.append(row)
            total += len(prompts[row].tokens) + len(completions[row].tokens)
            if total >= limit:
                break
        reported = torch.tensor([value for row in rows for value in completions[row].logprobs], dtype=torch.float64)
        own = _alternative_logprobs(pl_module, [prompts[row] for row in rows], [completions[row] for row in rows])
        ratios = own - reported.unsqueeze(1)  # [N, 1 + K]
        sums = torch.cat([ratios[:, :1].abs().sum(dim=0), ratios[:, 1:].sum(dim=0), torch.tensor([float(len(own))])])
        total = torch.tensor(ranks.gather_values(sums.tolist()), dtype=torch.float64).sum(dim=0)
        return (total[0] / total[-1].clamp(min=1)).item(), total[1:-1]

    def _check_sampling(self, evidence: Tensor, pl_module: QeRLModule) -> None:
        chance = self._chance("other_sampling", evidence, pl_module)
        if chance < self.false_alarm:
            best = ALTERNATIVES[int(self._evidence["other_sampling"].argmax())]
            raise RuntimeError(
                f"the sampled tokens up to rollout {pl_module.rollout_index} are no draws from the distribution whose "
                f"log-probabilities the engine reports (chance: below {chance:.1g} per rollout); {best} explains them "
                "best. Look for another temperature, greedy decoding, top_p or top_k in the engine, or altered tokens"
            )

    def _chance(self, name: str, evidence: Tensor, pl_module: QeRLModule) -> float:
        """Add a rollout's evidence; returns a bound on the probability per rollout that a correct run collects as much
        evidence."""
        self._evidence[name] = accumulated(self._evidence.get(name, torch.full_like(evidence, -math.inf)), evidence)
        log_p = log_false_alarm(self._evidence[name])
        log_at(pl_module.trainer.loggers, {f"evidence/{name}": -log_p}, step=pl_module.rollout_index)
        return math.exp(log_p)

    def _check_gap(self, gap: float, pl_module: QeRLModule) -> None:
        dtype, index = pl_module.policy.dtype, pl_module.rollout_index
        limit = self.max_gap or MAX_GAP[dtype]
        found = jump(gap, self._gaps, floor=GAP_FLOOR[dtype])
        advice = (
            "tokens or log-probabilities were altered, or come from another policy. If engine and trainer are correct, "
            "raise RolloutEvidence.max_gap or max_jump"
        )
        said = (
            f"the sampler's log-probabilities of rollout {index} differ from the trainer's by {gap:.2g} nats per token"
        )
        if not gap <= limit:
            raise RuntimeError(f"{said}, more than {limit:.2g}: {advice}")
        if self.max_jump is not None and found.ratio > self.max_jump and found.sigmas > SURE_SIGMAS:
            raise RuntimeError(f"{said}, {found.ratio:.1f} times the usual: {advice}")
        if found.ratio > self.warn_jump and found.sigmas > SURE_SIGMAS:
            rank_zero_warn(f"{said}, {found.ratio:.1f} times the usual: look at gap/* and ledger/* for the cause")
        self._gaps = [*self._gaps, gap][-self.window :]

    def _check_copies(self, pl_module: QeRLModule, rollout: Rollout) -> None:
        pairs = zip(rollout.evaluation.prompts, rollout.evaluation.completions, strict=True)
        rows = [(hash(prompt.tokens), hash(row.tokens), math.fsum(row.logprobs)) for prompt, row in pairs]
        rows = [
            row for part in ranks.gather_values(rows) for row in part
        ]  # all ranks compare and remember the same rows
        chance = self._chance("copies", copy_evidence(repeats(self._seen, rows)), pl_module)
        if chance < self.false_alarm:
            raise RuntimeError(
                f"completions up to rollout {pl_module.rollout_index} repeat others of the same prompt more often than "
                f"independent draws would (chance: below {chance:.1g} per rollout): the engine copies completions, or "
                "its seed does not change from one to the next"
            )
        kept = [*self._seen, *((prompt, completion) for prompt, completion, _ in rows)]
        self._seen = kept[len(kept) - self.remembered :] if len(kept) > self.remembered else kept

    def _count_silence(self, rollout: Rollout) -> None:
        has_signal = bool(rollout.signal.any())
        self._silent = 0 if any(ranks.gather_values(has_signal)) else self._silent + 1
        if self._silent and self._silent % self.silent_rollouts == 0:
            rank_zero_warn(
                f"no group had a signal in the last {self._silent} rollouts: all completions of each prompt earned the "
                "same, so nothing is learned. Look at RUN/completions: are answers found, and are problems neither "
                "too easy nor too hard for the policy? More completions per prompt (model.sampling.num_completions), a "
                "higher temperature or other data help"
            )


def repeats(
    seen: Sequence[tuple[int, int]], rows: Sequence[tuple[int, int, float]]
) -> Iterator[tuple[int, int, int, float]]:
    """Prepare the arguments of ``copy_evidence`` from rows (digest of prompt, digest of completion, log-probability).

    Args:
        seen: digests of prompt and completion, of earlier rollouts.
        rows: this rollout's completions.
    """
    prompts, both = Counter(prompt for prompt, _ in seen), Counter(seen)
    for prompt, completion, logprob in rows:
        yield prompt, prompts[prompt], both[prompt, completion], logprob
        prompts[prompt] += 1
        both[prompt, completion] += 1


def _alternative_logprobs(
    pl_module: QeRLModule, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> Tensor:
    """Compute log-probabilities of the completions' N tokens under the policy with the rollout's noise: [N, 1 + K] fp64
    on the CPU, in nats. Column 0 has the reported way of sampling, the others have ``ALTERNATIVES``."""
    starts = torch.tensor([len(prompt.tokens) for prompt in prompts])
    lengths = starts + torch.tensor([len(completion.tokens) for completion in completions])
    sequences = [prompt.tokens + completion.tokens for prompt, completion in zip(prompts, completions, strict=True)]
    tokens, real = padded(sequences, left=False, device=torch.device("cpu"))
    sampled = real & (torch.arange(tokens.shape[1]) >= starts.unsqueeze(1))
    found = torch.zeros(*tokens.shape, 1 + len(ALTERNATIVES), dtype=torch.float64)
    oracle, noise = TransformersEngine(), pl_module.norm_noise
    oracle.start(pl_module.policy, max_model_len=pl_module.settings.max_model_len)
    try:
        oracle.set_norm_noise(noise)
        for rows in micro_batches(lengths, check_limit(pl_module.settings.longest_row)):
            width, device = int(lengths[rows].max()), pl_module.device
            mask = sampled[rows, :width]
            values = oracle.alternative_logprobs(
                tokens[rows, :width].to(device), mask.to(device), temperature=pl_module.sampling.temperature
            )
            row, column = mask.nonzero(as_tuple=True)
            found[rows[row], column] = values.double().cpu()
    finally:
        oracle.close()
    return found[sampled]
