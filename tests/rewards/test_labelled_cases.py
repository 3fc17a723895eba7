"""Completions are scored as their labels say, which state what a careful reader would decide, apart from recorded
exceptions."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from qerl_pl.rewards.math import NumericAnswer
from tests.bench.report import RESULTS
from tests.rewards.agreement import SETS, Scorer, confusion, make_scorers, read_cases

Scorers = dict[str, Scorer]


@pytest.fixture(scope="module")
def scorers() -> Iterator[Scorers]:
    made = make_scorers(time_limit=1.0)
    yield made
    for scorer in made.values():
        if not isinstance(scorer, NumericAnswer):
            scorer.close()


@pytest.fixture(scope="module")
def misread(scorers: Scorers) -> Callable[..., list[dict]]:
    """Return a function of the name of a set and of a reward that lists the rows (or every n-th) whose score is not the
    label. Rows are scored once for all tests."""

    @cache
    def found(name: str, reward: str, every: int) -> list[dict]:
        rows = read_cases(name)[::every]
        return confusion(scorers[reward], [row for row in rows if row["reward"] == reward])[1]

    return found


def unlike(scorers: Scorers, cases: list[dict]) -> list[dict]:
    """List the cases whose score is not the label."""
    return [
        row
        for name, scorer in scorers.items()
        for row in confusion(scorer, [case for case in cases if case["reward"] == name])[1]
    ]


def test_a_sample_of_the_labelled_cases_is_scored_as_labelled(scorers):
    quick = [case for case in read_cases("cases") if case["kind"] != "adversarial"][::12]
    assert len(quick) > 100
    assert not unlike(scorers, quick)


def test_whole_completions_of_models_are_scored_as_labelled(scorers):
    rows = read_cases("model_outputs")
    assert len(rows) > 400
    assert len(unlike(scorers, rows[::5])) <= 2


def test_no_kind_of_answer_is_often_paid_wrongly_or_lost(scorers, misread):
    rows = read_cases("classes")
    kinds = Counter((row["kind"], row["label"]) for row in rows)
    texts = {(row["completion"], row["answer"]): row["kind"] for row in rows}
    wrong = [row for reward in scorers for row in misread("classes", reward, 1)]
    found = Counter((texts[row["completion"], row["answer"]], row["label"]) for row in wrong)
    assert len(rows) > 1000
    for (kind, label), count in kinds.items():
        assert found[kind, label] <= (0.03 if label else 0.01) * count, (kind, wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "every"),
    [pytest.param("cases", 1, marks=pytest.mark.long), *[(name, 6 if name == "cases" else 1) for name in SETS]],
)
def test_no_set_is_scored_worse_than_the_documents_say(scorers, misread, name, every):
    recorded = [json.loads(line) for line in (RESULTS / "scorers.jsonl").read_text().splitlines()]
    best = {line["reward"]: len(line["unlike"]) for line in recorded if line["name"] == name}
    assert best
    for reward in scorers:
        wrong = misread(name, reward, every)
        assert len(wrong) <= best.get(reward, 0), wrong


@pytest.mark.parametrize(
    ("reward", "paid", "lost"), [("gsm8k", 0, 3), pytest.param("math", 7, 3, marks=pytest.mark.long)]
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
