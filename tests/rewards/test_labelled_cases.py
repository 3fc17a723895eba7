"""Completions are scored as their labels say, which state what a careful reader would decide, apart from recorded
exceptions."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from qerl_pl.rewards.math import MathAnswer
from tests.bench.report import RESULTS
from tests.rewards.agreement import SETS, Scorer, confusion, make_scorers, read_cases

Scorers = dict[str, Scorer]


@pytest.fixture(scope="module")
def scorers() -> Iterator[Scorers]:
    made = make_scorers(time_limit=1.0)
    math, dapo = made["math"], made["dapo"]
    assert isinstance(math, MathAnswer)
    assert isinstance(dapo, MathAnswer)
    dapo.verifier = math.verifier
    yield made
    math.close()


@pytest.fixture(scope="module")
def misread(scorers: Scorers) -> Callable[..., list[dict]]:
    """Return a function of the name of a set of labelled rows, the name of a reward and a number n. The function takes
    every n-th row of the set, scores those that are for this reward, and lists those whose score is not the label. For
    equal arguments, rows are scored only once."""

    @cache
    def found(name: str, reward: str, every: int) -> list[dict]:
        rows = read_cases(name)[::every]
        return confusion(scorers[reward], [row for row in rows if row["reward"] == reward])[1]

    return found


def test_no_kind_of_answer_is_often_paid_wrongly_or_lost(scorers, misread):
    rows = read_cases("classes")
    kinds = Counter((row["kind"], row["label"]) for row in rows)
    texts = {(row["completion"], row["answer"]): row["kind"] for row in rows}
    wrong = [row for reward in scorers for row in misread("classes", reward, 1)]
    found = Counter((texts[row["completion"], row["answer"]], row["label"]) for row in wrong)
    assert len(rows) > 1000
    for (kind, label), count in kinds.items():
        assert found[kind, label] <= (0.03 if label else 0.01) * count, (kind, wrong)


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *zip(SETS, (12, 3, 3, 1), strict=True),
        *(pytest.param(name, 1, marks=pytest.mark.long) for name in SETS[:3]),
    ],
)
def test_no_rows_are_misread_but_those_that_the_documents_list(scorers, misread, name, every):
    lines = map(json.loads, (RESULTS / "scorers.jsonl").read_text().splitlines())
    listed = {line["reward"]: line["unlike"] for line in lines if line["name"] == name}
    assert listed
    assert len(read_cases(name)) > 400
    for reward in scorers:
        known = [(row["completion"], row["answer"]) for row in listed.get(reward, ())]
        assert [row for row in misread(name, reward, every) if (row["completion"], row["answer"]) not in known] == []


@pytest.mark.parametrize(
    ("reward", "paid", "lost"), [("gsm8k", 0, 3), pytest.param("math", 6, 3, marks=pytest.mark.long)]
)
def test_no_more_probes_of_a_hostile_reader_are_misread_than_before(scorers, reward, paid, lost):
    # The probes are completions that were written, without knowledge of the scorers, to be misread. ``paid`` and
    # ``lost`` are how many wrong ones get a score of 1 today, and how many right ones do not; whoever improves the
    # scorers lowers these numbers.
    rows = [row for row in read_cases("probes") if row["reward"] == reward]
    assert len(rows) > 400
    misread = confusion(scorers[reward], rows)[1]
    assert sum(row["score"] == 1 for row in misread) <= paid, misread
    assert sum(row["label"] == 1 for row in misread) <= lost, misread
