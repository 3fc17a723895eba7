"""Remove training problems that share a question, or a sequence of words, with a problem of an evaluation."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from datamodules.sources import PromptSource
from qerl_pl.common.checks import require_at_least
from qerl_pl.common.types import Problem

SHARED_WORDS = 13  # as in GPT-3 (arXiv 2005.14165, appendix C)


class Overlap(NamedTuple):
    """A training question and an evaluation question that share a sequence of consecutive words."""

    train_index: int
    train_question: str
    evaluation_question: str
    words: str
    """The first sequence of consecutive words in the training question that the evaluation question contains, too."""


@dataclass(frozen=True)
class Decontaminated:
    """A source of problems that leaves out training problems which share a sequence of consecutive words with an
    evaluation problem.

    Args:
        source: source of the training problems; its validation problems are kept.
        against: sources whose validation problems are the evaluation problems.
        num_words: number of consecutive shared words at which a problem is left out: 13 as in GPT-3 (arXiv 2005.14165,
            appendix C). A smaller number finds more overlaps, of which more are due to chance. An evaluation question
            with fewer words only matches a training question with exactly the same words.
        report_path: JSON Lines file to which removed problems are written, each with the shared words; null writes no
            file.
    """

    source: PromptSource
    against: list[PromptSource]
    num_words: int = SHARED_WORDS
    report_path: str | None = None

    def __post_init__(self) -> None:
        require_at_least(1, num_words=self.num_words)
        if not self.against:
            raise ValueError("against is empty; name at least one evaluation set")

    def train(self) -> list[Problem]:
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
        return self.source.validation()


def find_overlaps(train: Sequence[Problem], evaluation: Sequence[Problem], *, num_words: int) -> list[Overlap]:
    """Find the training problems that share ``num_words`` consecutive words with an evaluation problem. Returns each of
    these training problems with the first sequence of words that it shares. Case, punctuation and white space are
    ignored."""
    owners: dict[tuple[str, ...], str] = {}  # maps a sequence of words to an evaluation question that contains it
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
    space. A shorter text gives one n-gram of all its words; a text without words gives none."""
    words = re.findall(r"[^\W_]+", text.lower())
    last = max(0, len(words) - num_words)
    return [tuple(words[start : start + num_words]) for start in range(last + 1)] if words else []


def without_shared(train: Sequence[Problem], validation: Sequence[Problem]) -> tuple[list[Problem], int]:
    """Remove the training problems whose question, apart from white space, equals that of a validation problem. Returns
    the remaining training problems in their order, and the number of removed ones."""
    seen = {" ".join(problem.question.split()) for problem in validation}
    kept = [problem for problem in train if " ".join(problem.question.split()) not in seen]
    return kept, len(train) - len(kept)


def hold_out(problems: Sequence[Problem], num: int) -> tuple[list[Problem], list[Problem]]:
    """Split training problems into those that stay in training and ``num`` held-out ones. The held-out problems are
    those with the smallest hashes of their questions, so the choice does not depend on the order of the problems.
    Problems that share ``SHARED_WORDS`` consecutive words with a held-out problem are in neither list. Raises
    ValueError if no training problem would be left."""
    if num == 0:
        return list(problems), []
    questions = {" ".join(problem.question.split()) for problem in problems}
    if num >= len(questions):
        raise ValueError(
            f"data.held_out is {num} and there are {len(questions)} different training questions; lower it"
        )
    chosen = set(sorted(questions, key=lambda text: hashlib.sha256(text.encode()).digest())[:num])
    held: dict[str, Problem] = {}
    rest = []
    for problem in problems:
        question = " ".join(problem.question.split())
        if question in chosen:
            held.setdefault(question, problem)
        else:
            rest.append(problem)
    alike = {overlap.train_index for overlap in find_overlaps(rest, list(held.values()), num_words=SHARED_WORDS)}
    kept = [problem for index, problem in enumerate(rest) if index not in alike]
    if not kept:
        raise ValueError(f"data.held_out is {num}: every other training problem resembles a held-out one; lower it")
    rank_zero_info(f"data: {num} training problems are held out; removed {len(alike)} that resemble one of them")
    return kept, list(held.values())
