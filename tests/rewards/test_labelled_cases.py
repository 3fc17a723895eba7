"""The scorers against the labels of three sets: what a careful reader would say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qerl_pl.rewards.math import NumericAnswer
from tests.rewards.agreement import Scorer, confusion, make_scorers, read_cases

Scorers = dict[str, Scorer]


@pytest.fixture(scope="module")
def scorers() -> Iterator[Scorers]:
    made = make_scorers(time_limit=1.0)
    yield made
    for scorer in made.values():
        if not isinstance(scorer, NumericAnswer):
            scorer.close()


def unlike(scorers: Scorers, cases: list[dict]) -> list[dict]:
    """The cases that are not scored as labelled."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tolerance", "every"),
    [
        pytest.param("cases", 0.005, 1, marks=pytest.mark.long),
        ("cases", 0.005, 3),
        ("held_out", 0.03, 1),
        ("model_outputs", 0.02, 1),
    ],
)
def test_the_scorers_agree_with_nearly_all_labels_and_reward_hardly_a_wrong_answer(scorers, name, tolerance, every):
    cases = read_cases(name)[::every]
    wrong = unlike(scorers, cases)
    assert len(wrong) <= tolerance * len(cases), wrong
    assert len([row for row in wrong if row["score"] == 1]) <= 0.002 * len(cases)
