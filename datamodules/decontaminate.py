"""Remove training problems that share a run of words with an evaluation problem."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from datamodules.sources import PromptSource
from qerl_pl.common.types import Problem


class Overlap(NamedTuple):
    """A pair of a training question and an evaluation question that share a run of words, and that run."""

    train_index: int
    train_question: str
    evaluation_question: str
    words: str
    """The first run of words that they share."""


class Decontaminated:
    """A source of problems from which training problems that share a run of words with an evaluation problem are
    removed.

    Args:
        source: source of the training problems; its validation problems are kept.
        against: sources of the evaluation problems.
        num_words: length of the run of words: 13 as in GPT-3 (arXiv 2005.14165, appendix C). A smaller number finds
            more overlaps, and more chance ones. An evaluation question with fewer words matches a training question
            that has the same words and no others.
        report_path: JSON Lines file that lists what was removed and why; None writes none.
    """

    def __init__(
        self,
        source: PromptSource,
        against: list[PromptSource],
        num_words: int = 13,
        report_path: str | None = None,
    ) -> None:
        if num_words < 1:
            raise ValueError(f"num_words is {num_words}; expected at least 1")
        if not against:
            raise ValueError("against is empty; name at least one evaluation set")
        self.source = source
        self.against = against
        self.num_words = num_words
        self.report_path = report_path

    def train(self) -> list[Problem]:
        """Return the training problems that share no run of words with an evaluation problem."""
        problems = self.source.train()
        evaluation = [problem for source in self.against for problem in source.validation()]
        overlaps = find_overlaps(problems, evaluation, num_words=self.num_words)
        rank_zero_info(
            f"decontamination: removed {len(overlaps)} of {len(problems)} training problems that share "
            f"{self.num_words} words in a row with one of {len(evaluation)} evaluation problems"
        )
        if self.report_path is not None:
            _write(self.report_path, overlaps)
        removed = {overlap.train_index for overlap in overlaps}
        return [problem for index, problem in enumerate(problems) if index not in removed]

    def validation(self) -> list[Problem]:
        """Return the source's validation problems."""
        return self.source.validation()


def find_overlaps(train: Sequence[Problem], evaluation: Sequence[Problem], *, num_words: int) -> list[Overlap]:
    """Find the training problems that share a run of words with an evaluation problem, and one such run for each. Case,
    punctuation and white space are ignored."""
    owners: dict[tuple[str, ...], str] = {}  # evaluation question by run of words (all words of a short question)
    for problem in evaluation:
        for run in runs_of_words(problem.question, num_words):
            owners.setdefault(run, problem.question)
    overlaps = []
    for index, problem in enumerate(train):
        run = next((run for run in runs_of_words(problem.question, num_words) if run in owners), None)
        if run is not None:
            overlaps.append(Overlap(index, problem.question, owners[run], " ".join(run)))
    return overlaps


@rank_zero_only
def _write(path: str, overlaps: Sequence[Overlap]) -> None:
    with open(os.path.expanduser(path), "w", encoding="utf-8") as report:
        for overlap in overlaps:
            report.write(json.dumps(overlap._asdict(), ensure_ascii=False) + "\n")


def runs_of_words(text: str, num_words: int) -> list[tuple[str, ...]]:
    """List all sequences of ``num_words`` consecutive words (n-grams) of a text, ignoring case, punctuation and white
    space.

    A shorter text gives one n-gram of all its words; a text without words gives none.
    """
    words = re.findall(r"[^\W_]+", text.lower())
    last = max(0, len(words) - num_words)
    return [tuple(words[start : start + num_words]) for start in range(last + 1)] if words else []
