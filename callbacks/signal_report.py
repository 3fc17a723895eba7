"""Print, at the end of training, how many groups (the completions of one prompt) had different rewards, and which
scores each reward gave."""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from qerl_pl.module import QeRLModule


@dataclass
class Scores:
    """Number, sum, minimum and maximum of a reward's scores, and the number of completions that it did not score."""

    number: int = 0
    total: float = 0.0
    lowest: float = float("inf")
    highest: float = float("-inf")
    unscored: int = 0

    def add(self, scores: Tensor) -> None:
        """Count further scores; ``scores`` is [B] fp32, NaN for unscored completions."""
        known = scores[~scores.isnan()].double()
        self.unscored += len(scores) - len(known)
        if len(known):
            self.number += len(known)
            self.total += known.sum().item()
            self.lowest = min(self.lowest, known.min().item())
            self.highest = max(self.highest, known.max().item())

    def __str__(self) -> str:
        unscored = f", {self.unscored} unscored" if self.unscored else ""
        if not self.number:
            return f"scored none of {self.unscored}"
        if self.lowest == self.highest:
            return f"{self.lowest:.4g} for each of {self.number}{unscored}"
        return f"{self.total / self.number:.4g} on average ({self.lowest:.4g} to {self.highest:.4g}){unscored}"


def signal_words(with_signal: int, groups: int, *, rows: int, unscored: int, cut_off: int) -> str:
    """Return a sentence for the user on how many groups (the completions of one prompt) had a signal, that is, a
    completion with an advantage other than 0, and if none had, why. ``groups`` is the number of groups, ``with_signal``
    of those with a signal, and ``rows`` that of all completions, of which ``unscored`` could not be scored by a reward
    whose weight is not 0, and ``cut_off`` others were left out of the loss because they ended at max_tokens."""
    if with_signal:
        return f"signal: {with_signal} of {groups} groups had one: their completions earned different rewards"
    left_out = [f"{unscored} could not be scored"] if unscored else []
    left_out += [f"{cut_off} were cut off at max_tokens (model.objective.filter_truncated)"] if cut_off else []
    counted = rows - unscored - cut_off
    why = f"of {rows} completions {' and '.join(left_out)}" + (counted > 0) * "; " if left_out else ""
    if counted > 0:
        why += f"all {'other ' if left_out else ''}completions of each prompt earned the same"
    return (
        f"signal: none of {groups} groups had one: {why}, so nothing was learned. Look at the completions in the run's "
        "folder: are answers found, and are problems neither too easy nor too hard?"
    )


class SignalReport(Callback):
    """Prints two lines when training ends: how many groups (the completions of one prompt) had a signal, and the scores
    of each reward.

    A group has a signal if one of its completions has an advantage other than 0 in the loss, so that the policy can
    learn from it. Both lines count the rollouts since this process started, and only the groups that rank 0 sampled.
    The command line adds this callback to every run.
    """

    def __init__(self) -> None:
        self._groups = self._with_signal = self._rows = self._unscored = self._cut_off = 0
        self._scores: dict[str, Scores] = {}

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        signal, batch = outputs["rollout"].sampled.has_signal, outputs["rollout"].sampled
        self._groups += len(signal)
        self._with_signal += int(torch.count_nonzero(signal))
        scored, in_loss = batch.table.scored, batch.in_loss
        self._rows += len(scored)
        self._unscored += int(torch.count_nonzero(~scored))
        self._cut_off += int(torch.count_nonzero(scored & ~in_loss))
        for name, scores in batch.table.components.items():
            self._scores.setdefault(name, Scores()).add(scores)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        if trainer.is_global_zero and self._groups and not pl_module.is_rewarded:
            print("rewards: none has a weight; the teacher alone trained the policy", flush=True)
        elif trainer.is_global_zero and self._groups:
            counts = {"rows": self._rows, "unscored": self._unscored, "cut_off": self._cut_off}
            print(signal_words(self._with_signal, self._groups, **counts))
            print(f"rewards: {'; '.join(f'{name} {scores}' for name, scores in self._scores.items())}", flush=True)
