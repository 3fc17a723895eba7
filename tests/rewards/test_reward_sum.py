"""A run's reward is a weighted sum: how it is computed and written in YAML, and the two rewards for a completion's form
and length."""

import math
import textwrap

import pytest
import torch
from jsonargparse import ArgumentParser

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.base import WeightedReward, judge_rows, ready_rewards, score_rewards
from qerl_pl.rewards.format import think_answer_format
from qerl_pl.rewards.guard import RewardError
from qerl_pl.rewards.length import SoftOverlong
from qerl_pl.rewards.math import NumericAnswer


def completion(text: str = "", num_tokens: int = 1) -> Completion:
    return Completion((1,) * num_tokens, (0.0,) * num_tokens, True, text)


def constant(*scores: float | None):
    return lambda prompts, completions: list(scores)


PROMPTS = [Prompt((1,), "5")] * 3


def test_the_total_is_the_weighted_sum_and_components_are_unweighted():
    terms = [WeightedReward("a", constant(1.0, 0.0, 0.5)), WeightedReward("b", constant(-1.0, 2.0, 0.0), weight=0.25)]
    table = score_rewards(terms, PROMPTS, [completion()] * 3)
    torch.testing.assert_close(table.total, torch.tensor([0.75, 0.5, 0.5]))
    assert table.total.dtype == torch.float32
    assert table.scored.tolist() == [True, True, True]
    assert {name: scores.tolist() for name, scores in table.components.items()} == {
        "a": [1.0, 0.0, 0.5],
        "b": [-1.0, 2.0, 0.0],
    }


def test_one_unscored_component_makes_the_row_unscored_and_its_total_finite():
    terms = [WeightedReward("a", constant(1.0, None, 1.0)), WeightedReward("b", constant(None, 1.0, 1.0), weight=0.1)]
    table = score_rewards(terms, PROMPTS, [completion()] * 3)
    assert table.scored.tolist() == [False, False, True]
    assert table.total.tolist() == pytest.approx([0.0, 0.0, 1.1])
    assert math.isnan(table.components["a"][1])
    assert table.components["a"][0] == 1.0


@pytest.mark.parametrize(("scores", "weights"), [((3e38, 3e38), (1.0, 1.0)), ((1e30, 0.0), (1e10, 1.0))])
def test_a_sum_that_is_no_number_names_the_reward_with_which_it_is_none(scores, weights):
    terms = [
        WeightedReward(name, constant(0.0, score, 1.0), weight)
        for name, score, weight in zip("ab", scores, weights, strict=True)
    ]
    with pytest.raises(RewardError, match=rf"reward '{'b' if scores[1] else 'a'}' .* row 1 add up to inf"):
        score_rewards(terms, PROMPTS, [completion()] * 3)


def test_a_reward_without_weight_only_logs():
    answer, extra = WeightedReward("a", constant(1.0, 0.0, 1.0)), WeightedReward("b", constant(None, 5, None), weight=0)
    table, without = (score_rewards(terms, PROMPTS, [completion()] * 3) for terms in ([answer, extra], [answer]))
    assert torch.equal(table.total, without.total)
    assert torch.equal(table.scored, without.scored)
    assert table.scored.all()
    assert table.components["b"].isnan().tolist() == [True, False, True]
    torch.testing.assert_close(table.components["b"][1], torch.tensor(5.0))

    unread = WeightedReward("a", constant(1.0, None, 1.0))
    assert score_rewards([unread, extra], PROMPTS, [completion()] * 3).scored.tolist() == [True, False, True]


def test_the_rewards_of_a_run_are_checked_together_and_told_the_limit():
    answer, overlong = WeightedReward("a", constant(1.0)), WeightedReward("long", SoftOverlong(buffer=4))
    ready = ready_rewards([answer, overlong], max_tokens=8, metric="a")
    assert ready[0] is answer
    assert ready[1].reward(PROMPTS[:2], [completion(num_tokens=n) for n in (4, 8)]) == [0, -1]
    assert ready_rewards([WeightedReward("long", SoftOverlong(4, max_tokens=8))], max_tokens=8)
    for terms, metric, message in (
        ([WeightedReward("long", SoftOverlong(4, 9))], None, "SoftOverlong.max_tokens is 9 and .*max_tokens is 8"),
        ([WeightedReward("long", SoftOverlong(9))], None, r"buffer is 9; expected 1 to max_tokens \(8\)"),
        ([WeightedReward("a", constant(1.0), 0.0)], None, "every reward of model.rewards has weight 0"),
        ([answer, overlong], "right", "metric is 'right'; expected the name of a reward: a, long"),
    ):
        with pytest.raises(ValueError, match=message):
            ready_rewards(terms, max_tokens=8, metric=metric)
    with pytest.raises(ValueError, match="has no max_tokens"):
        SoftOverlong(4)(PROMPTS, [completion()] * 3)


def test_missing_scores_are_counted_by_cause_and_the_commonest_reason_is_named():
    unreadable = [Prompt((1,), "five"), Prompt((1,), "some"), Prompt((1,), "some")]
    table = score_rewards(
        [WeightedReward("a", NumericAnswer()), WeightedReward("b", constant(1.0, None, 0.0))],
        unreadable,
        [completion("<answer>5</answer>")] * 3,
    )
    assert table.causes() == {"known_answer": 2, "hang": 0, "crash": 0, "memory": 0, "unsaid": 1}
    assert table.common_reason() == "the known answer 'some' is not a number"
    assert table.verdicts["a"][0].reason == "5 equals 5"


def test_only_with_a_teacher_may_there_be_no_reward_or_none_with_a_weight():
    logged = WeightedReward("a", constant(1, 0, 1), weight=0.0)
    for terms, message in (([], "rewards is empty"), ([logged], "has weight 0, which only logs")):
        with pytest.raises(ValueError, match=message):
            ready_rewards(terms, max_tokens=8)
        assert ready_rewards(terms, max_tokens=8, optional=True) == terms
        table = score_rewards(terms, PROMPTS, [completion()] * 3)
        assert not table.rewarded
        assert table.scored.all()
        assert not table.total.any()


@pytest.mark.parametrize(
    ("terms", "rows", "message"),
    [
        ([WeightedReward("a", constant(1, 1, 1)), WeightedReward("a", constant(0, 0, 0))], 3, "named 'a'"),
        ([WeightedReward("a", constant(1, 1))], 3, "returned 2 scores for 3 rows"),
        ([WeightedReward("a", constant(1, math.nan, 1))], 3, "scored row 1 as nan"),
        ([WeightedReward("a", constant(1, 1, 1))], 2, "3 prompts for 2 completions"),
    ],
)
def test_what_cannot_be_summed_is_refused(terms, rows, message):
    with pytest.raises(ValueError, match=message):
        score_rewards(terms, PROMPTS, [completion()] * rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": ""}, "name is ''; expected the name to log it under"),
        ({"name": "a\n"}, r"name is 'a\\n'"),
        ({"weight": math.inf}, "the weight of reward 'a' is inf; expected a finite number"),
        *[
            ({"time_limit": limit}, f"the time_limit of reward 'a' is {limit}")
            for limit in (0, -1.0, math.nan, math.inf)
        ],
        ({"messages": True}, "messages is True for reward 'a', which gets Prompt and Completion"),
        *[
            ({"reward": reward}, "reward 'a' ")  # parameters of which none is known
            for reward in (lambda completion, prompt: [], lambda question: [], list, lambda *rows: [], max, print)
        ],
    ],
)
def test_a_term_that_means_nothing_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        WeightedReward(**{"name": "a", "reward": constant(), **settings})


def without_annotations(prompts, completions):
    return [None] * len(prompts)


def test_yaml_takes_classes_with_settings_and_plain_functions(tmp_path):
    config = tmp_path / "rewards.yaml"
    config.write_text(
        textwrap.dedent("""
        rewards:
          - {name: answer, reward: {class_path: qerl_pl.rewards.math.NumericAnswer, init_args: {marker: boxed}}}
          - {name: format, weight: 0.2, reward: qerl_pl.rewards.format.think_answer_format}
          - {name: plain, weight: 0, time_limit: 5, reward: tests.rewards.test_reward_sum.without_annotations}
          - name: overlong
            reward: {class_path: qerl_pl.rewards.length.SoftOverlong, init_args: {max_tokens: 8, buffer: 4}}
        """)
    )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--rewards", type=list[WeightedReward])
    terms = parser.instantiate(parser.parse_args([f"--config={config}"])).rewards
    assert [(term.name, term.weight) for term in terms] == [
        ("answer", 1.0),
        ("format", 0.2),
        ("plain", 0.0),
        ("overlong", 1.0),
    ]
    assert isinstance(terms[0].reward, NumericAnswer)
    assert terms[1].reward is think_answer_format
    table = score_rewards(
        terms, PROMPTS[:1], [completion("<think>so</think><answer>\\boxed{5}</answer>", num_tokens=6)]
    )
    torch.testing.assert_close(table.total, torch.tensor([1.0 + 0.2 - 0.5]))


def test_soft_overlong_is_zero_then_linear_then_minus_one():
    lengths = [0, 80, 81, 90, 99, 100, 101, 1000]
    scores = SoftOverlong(max_tokens=100, buffer=20)([PROMPTS[0]] * 8, [completion(num_tokens=n) for n in lengths])
    assert scores == pytest.approx([0, 0, -0.05, -0.5, -0.95, -1, -1, -1])
    for buffer in (0, -1, 101):
        with pytest.raises(ValueError, match=f"buffer is {buffer}"):
            SoftOverlong(max_tokens=100, buffer=buffer)


def test_thoughts_that_the_chat_template_opened_count_as_the_completions():
    opened = Prompt((1,), "4", text="<|im_start|>assistant\n<think>\n")
    closed = opened._replace(text="<|im_start|>assistant\n<think>\n\n</think>\n\n")
    text = completion("2+2, so <answer>5</answer>?</think><answer>4</answer>")
    assert think_answer_format([opened], [completion("2+2</think><answer>4</answer>")]) == [1.0]
    assert think_answer_format([closed], [completion("2+2</think><answer>4</answer>")]) == [0.0]
    assert think_answer_format([opened], [completion("<think>2+2</think><answer>4</answer>")]) == [0.0]
    assert NumericAnswer()([opened, closed], [text, text]) == [1.0, 1.0]
    cut_off = completion("so <answer>4</answer> it seems, but")
    assert NumericAnswer()([opened, closed], [cut_off, cut_off]) == [0.0, 1.0]


def test_a_reward_cannot_change_the_rows_of_later_calls():
    row, messages = {"tests": [1], "level": 1}, ({"role": "user", "content": "q"},)
    prompts = [Prompt((), "a", row=row, messages=messages)] * 2

    def spoil(prompts: list[Prompt], completions: list[Completion]) -> list[float]:
        seen = []
        for prompt in prompts:
            seen.append(float(len(prompt.row["tests"]) + len(prompt.messages[0]["content"])))
            prompt.row["tests"].append(2)
            prompt.row.clear()
            prompt.messages[0]["content"] += "!"
        return seen

    for _ in range(2):
        verdicts, _ = judge_rows(WeightedReward("spoil", spoil), prompts, [Completion((), (), True)] * 2)
        assert [verdict.score for verdict in verdicts] == [2, 2]
    assert row == {"tests": [1], "level": 1}
    assert messages[0]["content"] == "q"
