"""Words about the scores of a run."""

from __future__ import annotations

import math

import pytest
import torch

from callbacks.signal_report import Scores, signal_words


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([[0.0, 0.0], [0.0]], "0 for each of 3"),
        ([[1.0], [0.0, math.nan]], "0.5 on average (0 to 1), 1 unscored"),
        ([[math.nan], [math.nan]], "scored none of 2"),
        ([[-2.0, math.nan, -2.0]], "-2 for each of 2, 1 unscored"),
        ([[], [0.25, 0.75]], "0.5 on average (0.25 to 0.75)"),
    ],
)
def test_scores_are_told_with_their_bounds(batches, said):
    scores = Scores()
    for batch in batches:
        scores.add(torch.tensor(batch))
    assert str(scores) == said


@pytest.mark.parametrize(
    ("with_signal", "unscored", "cut_off", "said"),
    [
        (2, 1, 0, "2 of 6 groups had one: their completions earned different rewards"),
        (0, 0, 0, "none of 6 groups had one: all completions of each prompt earned the same, so nothing was learned."),
        (0, 24, 0, "none of 6 groups had one: of 24 completions 24 could not be scored, so nothing"),
        (
            0,
            2,
            3,
            "2 could not be scored and 3 were cut off at max_tokens (model.objective.filter_truncated); all other",
        ),
        (0, 0, 24, "of 24 completions 24 were cut off at max_tokens (model.objective.filter_truncated), so nothing"),
    ],
)
def test_no_signal_is_told_apart_from_some_and_has_its_cause(with_signal, unscored, cut_off, said):
    assert said in signal_words(with_signal, 6, rows=24, unscored=unscored, cut_off=cut_off)
