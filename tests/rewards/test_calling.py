"""A reward gets the arguments that the names of its parameters ask for: either this project's objects, or lists as TRL
passes them."""

import functools
import itertools
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.base import WeightedReward, check_answers, score_rewards
from qerl_pl.rewards.calling import Progress, takes_objects

TEXTS = ("<think>so</think> \\boxed{\\frac{1}{3}}", "it is \\boxed{7}", "")
GOLD = ("$\\frac{1}{3}$", "$8$", "$1$")
CHATS = tuple([{"role": "user", "content": f"question {number}"}] for number in range(3))
COMPLETIONS = [Completion(tuple(range(30 * n)), (0.0,) * (30 * n), True, text) for n, text in enumerate(TEXTS, 1)]


def prompts(*, conversational: bool) -> list[Prompt]:
    return [
        Prompt((1,), f"known {n}", messages=tuple(chat), row={"solution": gold}, conversational=conversational)
        for n, (chat, gold) in enumerate(zip(CHATS, GOLD, strict=True))
    ]


def scores(reward: Any, *, conversational: bool = False, **settings: Any) -> list[float]:
    table = score_rewards(
        [WeightedReward("mine", reward, **settings)], prompts(conversational=conversational), COMPLETIONS
    )
    return table.components["mine"].tolist()


def test_objects_are_given_by_name_in_any_order():
    def one(prompts, completions):
        return [len(completion.text) + 0.5 * len(prompt.answer) for prompt, completion in zip(prompts, completions)]  # noqa: B905

    def other(completions, prompts):
        return one(prompts, completions)

    class Method:
        def __call__(self, completions, *, prompts):
            return one(prompts, completions)

    assert scores(one) == scores(other) == scores(Method()) == scores(functools.partial(Method()))
    assert scores(one) != [0.0] * 3


def test_a_module_of_torch_gets_what_its_forward_names():
    class Module(torch.nn.Module):
        def forward(self, completions, prompts):
            assert all(isinstance(prompt, Prompt) for prompt in prompts)
            return torch.tensor([float(len(row.text)) for row in completions])

    class OfTexts(torch.nn.Module):
        def forward(self, completions, solution):
            return torch.tensor([float(len(text)) for text in (*solution[:1], *completions[1:])])

    assert scores(Module()) == [float(len(text)) for text in TEXTS]
    assert scores(OfTexts()) == [float(len(text)) for text in (GOLD[0], *TEXTS[1:])]
    assert takes_objects("mine", Module)


@pytest.mark.parametrize("names", list(itertools.permutations(("completions", "answer", "solution"))))
def test_a_column_is_given_by_name_whatever_the_order(names):
    seen = {}
    namespace: dict[str, Any] = {"seen": seen}
    exec(f"def f({', '.join(names)}, **kwargs):\n seen.update(locals())\n return [1.0] * 3", namespace)
    assert scores(namespace["f"]) == [1.0] * 3
    assert seen["completions"] == list(TEXTS)
    assert seen["answer"] == ["known 0", "known 1", "known 2"]
    assert seen["solution"] == list(GOLD)
    assert seen["kwargs"]["prompts"] == ["question 0", "question 1", "question 2"]
    assert seen["kwargs"]["completion_ids"][0] == list(range(30))
    assert not {"completions", "answer", "solution"} & seen["kwargs"].keys()


def test_a_decorator_with_another_order_gets_arguments_by_name():
    def plain(completions, solution, prompts, **kwargs):
        return [
            float(completion == text) + 2 * (gold in GOLD)
            for completion, text, gold in zip(completions, TEXTS, solution, strict=True)
        ]

    @functools.wraps(plain)
    def named(prompts, solution, completions, **kwargs):
        return plain(prompts=prompts, completions=completions, solution=solution, **kwargs)

    @functools.wraps(plain)
    def keywords(**kwargs):
        return plain(**kwargs)

    @functools.wraps(plain)
    async def variadic(*args, **kwargs):
        return plain(*args, **kwargs)

    def swapped(completions, prompts):
        return [float(len(completion.text)) for completion in completions]

    @functools.wraps(swapped)
    def places(*args):
        return swapped(*args)

    def only_places(unknown=None, completions=None, /, solution=None, **kwargs):
        assert unknown is None
        return plain(completions, solution, None)

    for reward in (plain, named, keywords, variadic, only_places, functools.partial(plain, scale=2)):
        assert scores(reward) == [3.0] * 3
    assert scores(places) == [float(len(text)) for text in TEXTS]


def test_annotated_completions_are_objects_with_further_settings_and_columns():
    def reward(prompts: list[Prompt], completions: list[Completion], solution, scale=2.0):
        assert solution == list(GOLD)
        return [scale * len(completion.tokens) for completion in completions]

    assert scores(reward) == [60.0, 120.0, 180.0]
    with pytest.raises(ValueError, match="takes 'solution', which the data does not have"):
        check_answers([WeightedReward("mine", reward)], [Prompt((1,), "4")])


def test_scores_may_be_of_other_kinds_and_come_one_by_one():
    lengths = [float(len(text)) for text in TEXTS]
    assert scores(lambda completions, **rest: [np.bool_(True), np.float16(0.5), np.int8(3)]) == [1.0, 0.5, 3.0]
    assert scores(lambda completions, **rest: (float(len(text)) for text in completions)) == lengths
    assert scores(lambda completions, **rest: map(Decimal, ("0.5", "1", "2"))) == [0.5, 1.0, 2.0]

    async def reward(completions, **kwargs):
        return [1.0] * len(completions)

    assert scores(reward) == [1.0] * 3
    for wrong in ({0: 1.0, 1: 1.0, 2: 1.0}, {1.0, 2.0, 3.0}, "123"):
        with pytest.raises(ValueError, match="expected a list with a number"):
            scores(lambda completions, wrong=wrong, **rest: wrong)


def test_a_column_with_a_default_is_given_too_and_one_that_is_missing_keeps_it():
    def reward(prompts, completions, answer=None, other="kept", **kwargs):
        assert answer == ["known 0", "known 1", "known 2"]
        assert other == "kept"
        return [1.0] * len(completions)

    assert scores(reward) == [1.0] * 3


def test_messages_are_given_where_the_data_has_messages_or_they_are_asked_for():
    def reward(completions, prompts, **kwargs):
        assert prompts == list(CHATS)
        assert completions == [[{"role": "assistant", "content": text}] for text in TEXTS]
        return [1.0] * 3

    assert scores(reward, conversational=True) == scores(reward, messages=True) == [1.0] * 3

    def texts(completions, **kwargs):
        return [float(isinstance(completion, str)) for completion in completions]

    assert scores(texts) == scores(texts, conversational=True, messages=False) == [1.0] * 3


def test_progress_and_logging_are_given_as_trl_gives_them():
    def reward(completions, trainer_state, log_extra, log_metric):
        assert (trainer_state.global_step, trainer_state.max_steps) == (3, 8)
        log_extra("parsed", ["a", "b\nc", None])
        log_metric("share", 0.25)
        return [1.0, None, 0.0]

    term = WeightedReward("mine", reward)
    table = score_rewards([term], prompts(conversational=False), COMPLETIONS, progress=Progress(3, 8))
    assert [verdict.reason for verdict in table.verdicts["mine"]] == ["parsed: a", "parsed: b c", "parsed: None"]
    assert table.metrics == {"share": (0.25,)}
    assert table.verdicts["mine"][1].cause == "unsaid"


def test_a_parameter_that_cannot_be_filled_is_refused_before_anything_is_sampled():
    def reward(completions, gold, **kwargs):
        raise AssertionError

    with pytest.raises(ValueError, match=r"reward 'mine' takes 'gold', which the data does not have.*solution"):
        check_answers([WeightedReward("mine", reward)], prompts(conversational=False))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("accuracy_reward", None),
        ("reasoning_accuracy_reward", None),
        ("think_format_reward", None),
        ("get_soft_overlong_punishment", {"max_completion_len": 80, "soft_punish_cache": 40}),
        ("get_repetition_penalty_reward", {"ngram_size": 2}),
        ("get_cosine_scaled_reward", {"max_len": 100}),
    ],
)
def test_scores_equal_those_of_trl_calling_its_own_rewards(name, settings):
    trl = pytest.importorskip("trl.rewards", reason="needs TRL: pip install --no-deps trl==1.16.0")
    reward = getattr(trl, name) if settings is None else getattr(trl, name)(**settings)
    by_trl = reward(  # as in GRPOTrainer._calculate_rewards
        prompts=[list(chat) for chat in CHATS],
        completions=[[{"role": "assistant", "content": text}] for text in TEXTS],
        completion_ids=[list(completion.tokens) for completion in COMPLETIONS],
        solution=list(GOLD),
        trainer_state=None,
        log_extra=lambda column, values: None,
        log_metric=lambda metric, value: None,
    )
    assert scores(reward, conversational=True) == scores(reward, messages=True) == torch.tensor(by_trl).tolist()
    assert len(set(by_trl)) > 1 or name == "get_repetition_penalty_reward"


def test_a_reward_that_expects_objects_and_gets_texts_is_told_why():
    def scaled(prompts, completions, scale=2.0):
        return [scale * len(completion.text) for completion in completions]

    with pytest.raises(
        ValueError, match=r"'mine' failed .* has no attribute 'text'; .*\(scale\) gets texts .*test_calling.py"
    ):
        scores(scaled)
