"""Read how far a training is from its log, and estimate the rest of a study from finished commands and trainings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from qerl_pl.study.study_file import FIT

END_OF_LOG = 4096  # bytes of a log that are searched for its last line about a rollout
ROLLOUT = re.compile(r"^rollout (\d+) of (\d+): ", re.MULTILINE)


class Training(NamedTuple):
    """A training that is being executed."""

    rollouts: int
    """Rollouts that are done, at least 1."""
    total: int
    """Rollouts of the whole training."""
    seconds: float
    """Duration of its processes so far, those before an interruption included."""


def rollouts_of(log: Path) -> tuple[int, int] | None:
    """Return the number of rollouts done and their total from the last line that ``callbacks.progress`` wrote to a log;
    None if there is no such line."""
    if not log.is_file():
        return None
    with log.open("rb") as file:
        file.seek(max(0, os.path.getsize(log) - END_OF_LOG))
        found = ROLLOUT.findall(file.read().decode("utf-8", errors="replace"))
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def seconds_of_commands(done: Iterable[Mapping[str, float]], trainings: Sequence[Training]) -> dict[str, float]:
    """Estimate the seconds that each command takes, by name: the mean over the runs in which it ended.

    As long as no training has ended, its seconds are extrapolated from the running trainings.

    Args:
        done: seconds of the ended commands of each run, by name.
        trainings: the running trainings.
    """
    ended: dict[str, list[float]] = {}
    for run in done:
        for name, seconds in run.items():
            ended.setdefault(name, []).append(seconds)
    if trainings and FIT not in ended:
        ended[FIT] = [each.seconds * each.total / each.rollouts for each in trainings]
    return {name: sum(values) / len(values) for name, values in ended.items()}


def described(trainings: Sequence[Training]) -> str:
    """Describe how far the running trainings are, e.g. "rollouts 12 to 31 of 100"; empty if there are none."""
    if not trainings:
        return ""
    done = [each.rollouts for each in trainings]
    total = max(each.total for each in trainings)
    if min(done) == max(done):
        return f"rollout {done[0]} of {total}"
    return f"rollouts {min(done)} to {max(done)} of {total}"
