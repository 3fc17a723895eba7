"""Evaluations sample and score without training. One completion per prompt is enough, even if the advantages that
training uses need several."""

import pytest
from torch import Tensor
from transformers import AutoTokenizer

from qerl_pl.common.metrics import Stopwatch
from qerl_pl.common.types import Prompt
from qerl_pl.rewards.base import WeightedReward
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.loop import RolloutLoop
from tests.rollout.conftest import END_TOKENS, MAX_MODEL_LEN, make_policy, some_prompts


def number_of_tokens(prompts, completions):
    return [float(len(completion.tokens)) for completion in completions]


def less_the_others(rewards: Tensor, scored: Tensor) -> Tensor:
    """Compute advantages as the reward minus the mean of the other rewards in the group. Fails for groups of one
    completion, so a test notices if an evaluation computes advantages."""
    assert rewards.shape[1] > 1
    return rewards - (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


@pytest.mark.parametrize("sampling", [Sampling(1, max_tokens=5, temperature=0), Sampling(3, max_tokens=5)], ids=str)
def test_an_evaluation_needs_no_advantages(checkpoints, sampling):
    engine = TransformersEngine()
    engine.start(make_policy(checkpoints["dense"]), max_model_len=MAX_MODEL_LEN)
    rewards, tokenizer = (
        [WeightedReward("length", number_of_tokens)],
        AutoTokenizer.from_pretrained(checkpoints["dense"]),
    )
    loop = RolloutLoop(engine, rewards, tokenizer, baseline=less_the_others)
    loop.end_tokens = sorted(END_TOKENS)
    prompts = [Prompt(tuple(tokens), "") for tokens in some_prompts(4, 9)]
    batch = loop.sample_and_score(prompts, sampling=sampling, seed=1, watch=Stopwatch())
    assert batch.rewards.tolist() == [
        [len(row.tokens) for row in batch.completions[first : first + sampling.num_completions]]
        for first in range(0, len(batch.completions), sampling.num_completions)
    ]
    assert batch.has_signal.tolist() == [len(set(group.tolist())) > 1 for group in batch.rewards]
