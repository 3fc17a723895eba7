"""Print, at the end of training, how many groups had different rewards, and which scores each reward gave."""

from collections import Counter, defaultdict
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from callbacks.progress import since_resume
from qerl_pl.common import ranks
from qerl_pl.module import QeRLModule


def score_words(scores: Tensor) -> str:
    """Describe the scores of a reward, [N] fp32 with NaN for unscored completions, by mean, minimum and maximum."""
    known = scores[~scores.isnan()].double()
    unscored = len(scores) - len(known)
    if not len(known):
        return f"scored none of {unscored}"
    others = f", {unscored} unscored" if unscored else ""
    lowest, highest = known.min().item(), known.max().item()
    if lowest == highest:
        return f"{lowest:.4g} for each of {len(known)}{others}"
    return f"{known.mean().item():.4g} on average ({lowest:.4g} to {highest:.4g}){others}"


def signal_words(with_signal: int, groups: int, *, rows: int, unscored: int, cut_off: int) -> str:
    """Return the rest of a line that begins with "signal: ": how many groups (the completions of one prompt) had a
    signal, that is, a completion with an advantage other than 0, and if none had, why. ``groups`` is the number of all
    groups, and ``with_signal`` the number of those with a signal. Of all completions, of which there are ``rows``,
    ``unscored`` could not be scored by a reward whose weight is not 0, and ``cut_off`` others were left out of the loss
    because they ended at max_tokens."""
    if with_signal:
        return f"{with_signal} of {groups} groups had one: their completions earned different rewards"
    left_out = [f"{unscored} could not be scored"] if unscored else []
    left_out += [f"{cut_off} were cut off at max_tokens (model.objective.filter_truncated)"] if cut_off else []
    counted = rows - unscored - cut_off
    why = f"of {rows} completions {' and '.join(left_out)}" + (counted > 0) * "; " if left_out else ""
    if counted > 0:
        why += f"all {'other ' if left_out else ''}completions of each prompt earned the same"
    return (
        f"none of {groups} groups had one: {why}, so nothing was learned from rewards. Look at the completions "
        "in the run's folder: are answers found, and are problems neither too easy nor too hard?"
    )


class SignalReport(Callback):
    """Prints two lines when training ends: how many groups (the completions of one prompt) had a signal, and the scores
    of each reward.

    A group has a signal if one of its completions has an advantage other than 0 in the loss, so that the policy can
    learn from it. Both lines count the rollouts of all ranks since this process started, and say so in a resumed run.
    The command line adds this callback to every run.
    """

    def __init__(self) -> None:
        self._first = 0
        self._numbers = Counter[str]()
        self._scores: dict[str, list[Tensor]] = defaultdict(list)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._first = pl_module.rollout_index

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        batch = outputs["rollout"].sampled
        signal, scored = batch.has_signal, batch.table.scored
        self._numbers.update(
            groups=len(signal),
            with_signal=int(torch.count_nonzero(signal)),
            rows=len(scored),
            unscored=int(torch.count_nonzero(~scored)),
            cut_off=int(torch.count_nonzero(scored & ~batch.in_loss)),
        )
        for name, scores in batch.table.components.items():
            self._scores[name].append(scores)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        numbers, scores = Counter[str](), defaultdict[str, list[Tensor]](list)
        for of_rank, scores_of_rank in ranks.gather_values((self._numbers, self._scores)):
            numbers.update(of_rank)
            for name, parts in scores_of_rank.items():
                scores[name] += parts
        if not trainer.is_global_zero or not numbers["groups"]:
            return
        if not pl_module.is_rewarded:
            print("rewards: none has a weight; the teacher alone trained the policy", flush=True)
            return
        since = since_resume(self._first)
        print(f"signal{since}: {signal_words(**numbers)}")
        words = [f"{name} {score_words(torch.cat(parts))}" for name, parts in scores.items()]
        print(f"rewards{since}: {'; '.join(words)}", flush=True)
