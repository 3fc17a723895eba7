"""The training tensors of a rollout have each token and log-probability of its completions, as fp32, in its place."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rollout.common import all_logprobs
from qerl_pl.rollout.scored import collate

TOKENS = st.lists(st.integers(0, 2**31), min_size=1, max_size=6)
LOGPROBS = st.floats(-1e30, 0) | st.sampled_from([-math.inf, math.nan, -0.0, -1e-40])


@st.composite
def rows(draw: st.DrawFn) -> tuple[Prompt, Completion]:
    tokens = draw(TOKENS)
    logprobs = draw(st.lists(LOGPROBS, min_size=len(tokens), max_size=len(tokens)))
    return Prompt(tuple(draw(TOKENS)), ""), Completion(tuple(tokens), tuple(logprobs), True)


@given(batch=st.lists(rows(), min_size=1, max_size=5))
def test_each_token_and_log_probability_is_in_its_place(batch):
    prompts, completions = zip(*batch, strict=True)
    flags = torch.ones(len(batch), dtype=torch.bool)
    made = collate(prompts, completions, scored=flags, advantages=torch.zeros(len(batch)), in_loss=flags)
    for row, (prompt, completion) in enumerate(batch):
        start, end = len(prompt.tokens), len(prompt.tokens + completion.tokens)
        assert made.tokens[row, :end].tolist() == [*prompt.tokens, *completion.tokens]
        assert made.sampled[row].nonzero()[:, 0].tolist() == list(range(start, end))
        expected = torch.tensor(completion.logprobs)
        torch.testing.assert_close(made.sampler_logprobs[row, start:end], expected, rtol=0, atol=0, equal_nan=True)
    expected = torch.tensor([logprob for completion in completions for logprob in completion.logprobs])
    torch.testing.assert_close(all_logprobs(completions), expected, rtol=0, atol=0, equal_nan=True)
