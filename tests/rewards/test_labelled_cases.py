"""The scorers against labels: cases.jsonl holds what a careful reader would say of each completion.

A row has kind, reward, completion, answer and label (1, 0, or null for unscored); ``pad`` characters of other text
stand before the completion.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from qerl_pl.rewards.dapo import DapoAnswer
from qerl_pl.rewards.math import MathAnswer, NumericAnswer

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases.jsonl").open()]
FILLER = "We think about it, line by line.\n"
Scorers = dict[str, NumericAnswer | MathAnswer | DapoAnswer]


@pytest.fixture(scope="module")
def scorers() -> Iterator[Scorers]:
    """As ``python -m qerl_pl score`` sets them up, with less patience."""
    math, dapo = MathAnswer(fallback="last_math", num_workers=2, time_limit=1.0), DapoAnswer(num_workers=1)
    yield {"gsm8k": NumericAnswer(marker="any", fallback="last_number"), "math": math, "dapo": dapo}
    math.close()
    dapo.close()


def confusion(scorers: Scorers, cases: list[dict]) -> tuple[Counter[tuple], list[str]]:
    """How often each (label, score) came up, and a line for each disagreement."""
    table, wrong = Counter(), []
    for name, scorer in scorers.items():
        rows = [case for case in cases if case["reward"] == name]
        texts = [FILLER * (row.get("pad", 0) // len(FILLER)) + row["completion"] for row in rows]
        for row, verdict in zip(rows, scorer.judge(texts, [row["answer"] for row in rows]), strict=True):
            table[name, row["label"], verdict.score] += 1
            if verdict.score != row["label"]:
                wrong.append(f"{row['kind']}: {row['completion']!r} against {row['answer']!r}: {verdict}")
    return table, wrong


def test_a_sample_of_the_labelled_cases_is_scored_as_labelled(scorers):
    quick = [case for case in CASES if case["kind"] != "adversarial"]
    table, wrong = confusion(scorers, quick[::12])
    assert table.total() > 100
    assert not wrong


@pytest.mark.slow
def test_the_scorers_agree_with_at_least_995_in_1000_labels(scorers, capsys):
    table, wrong = confusion(scorers, CASES)
    with capsys.disabled():
        print("\nreward  label   score 1   score 0  unscored")
        for name in scorers:
            for label in (1, 0, None):
                print(f"{name:7} {label!s:5}", *(f"{table[name, label, score]:9}" for score in (1.0, 0.0, None)))
        print(*wrong, sep="\n")
    assert table.total() == len(CASES) > 1000
    assert len(wrong) <= 0.005 * len(CASES)
