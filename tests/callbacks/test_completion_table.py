"""The table of completions: which are shown, and that text of a model is only text."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from callbacks.completion_table import CompletionTable, completion_table, spread_over_rewards


def record(reward: float | None, completion: str = "so it is 3", **more: object) -> dict:
    scores = {"rewards": {"accuracy": reward}, "reasons": {"accuracy": "no number" if reward is None else ""}}
    return {"reward": reward, "completion": completion, "prompt": "<|user|>1+2=?", "answer": "3", **scores, **more}


def shown(*rows: dict, max_chars: int = 300) -> str:
    """On a terminal with colours."""
    output = io.StringIO()
    Console(file=output, width=160, force_terminal=True).print(
        completion_table(rows, title="rollout 1", max_chars=max_chars)
    )
    return output.getvalue()


@pytest.mark.parametrize(
    ("count", "rewards"), [(1, [3.0]), (2, [3.0, None]), (3, [3.0, 1.0, None]), (5, [3.0, 2.0, 1.0, 0.0, None])]
)
def test_they_are_spread_from_the_best_to_the_worst(count, rewards):
    rows = [record(reward) for reward in (1.0, None, 3.0, 0.0, 2.0)]
    assert [row["reward"] for row in spread_over_rewards(rows, count)] == rewards
    assert len(spread_over_rewards(rows, 9)) == 5
    assert spread_over_rewards([], 3) == []


def test_a_row_has_question_scores_reason_and_answer():
    text = shown(record(None), record(0.5, question="What is 1+2?"))
    for part in ("not scored", "no number", "0.5", "What is 1+2?", "so it is 3", "<|user|>1+2=?"):
        assert part in text
    assert text.count("<|user|>") == 1, "the template is shown only where the question is not known"


def test_what_a_model_wrote_does_not_steer_the_terminal():
    text = shown(record(1.0, "[bold]kept[/bold] \x1b]0;title\x07\x1b[2J\r\x9b1m \u202etxet\ttab"))
    assert "[bold]kept[/bold]" in text
    for sign in ("\x1b]", "\x1b[2J", "\r", "\x07", "\x9b", "\u202e", "\t"):
        assert sign not in text


def test_of_a_long_text_the_end_is_shown():
    text = shown(record(1.0, "begin" + "x" * 500 + "the end"), max_chars=20)
    assert "the end" in text
    assert "begin" not in text


@pytest.mark.parametrize("wrong", [{"every": 0}, {"num_rows": 0}, {"max_chars": -1}, {"where": "nowhere"}])
def test_values_that_mean_nothing_are_refused(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}; expected"):
        CompletionTable(**wrong)
