"""Engines check all prompts before they start with the first one, and every end token that a checkpoint names ends
completions."""

import pytest
from transformers import AutoConfig, Qwen2Config

from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.types import Completion
from qerl_pl.rollout.base import Sampling, check_groups
from qerl_pl.rollout.common import end_tokens, request_seeds
from tests.rollout.conftest import END_TOKENS, VOCAB_SIZE


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_equal_prompts_get_different_seeds_and_the_same_whatever_ranks_share_them(num_ranks):
    batch = [[5, 6], [7], [5, 6], [5, 6], [7], [8]]
    own = [derive_seed(3, "copy", copy) if copy else 3 for copy in (0, 0, 1, 2, 1, 0)]
    whole = request_seeds(batch, 2, own)
    assert len(set(whole)) == len(whole)
    shares = [request_seeds(batch[rank::num_ranks], 2, own[rank::num_ranks]) for rank in range(num_ranks)]
    assert [shares[row % num_ranks][2 * (row // num_ranks) + copy] for row in range(6) for copy in range(2)] == whole
    assert request_seeds(batch[:2], 2, 3) == whole[:4], "a seed for all is a seed for each where no two are equal"
    assert len(set(request_seeds(batch, 2, 3))) == 12


def test_end_tokens_come_from_config_generation_config_and_tokenizer(checkpoints):
    config = AutoConfig.from_pretrained(checkpoints["dense"])
    assert end_tokens(checkpoints["dense"], config) == sorted(END_TOKENS)
    assert max(END_TOKENS) < VOCAB_SIZE


def test_files_that_are_missing_add_no_end_token(tmp_path):
    assert end_tokens(str(tmp_path), Qwen2Config(eos_token_id=[3, 1])) == [1, 3]
    assert end_tokens(str(tmp_path), Qwen2Config(eos_token_id=None)) == []


GOOD = Completion((1, 2), (-0.1, -0.2), True)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[GOOD] * 2], "Engine returned 1 groups of completions for 2 prompts"),
        ([[GOOD] * 2, [GOOD]], "Engine returned 1 completions for prompt 1; expected 2"),
        ([[GOOD] * 2, []], "Engine returned 0 completions for prompt 1"),
        (
            [[GOOD] * 2, [GOOD, Completion((), (), True)]],
            "returned 0 tokens as completion 1 of prompt 1; expected 1 to 3",
        ),
        (
            [[GOOD] * 2, [Completion((1,) * 4, (0.0,) * 4, False), GOOD]],
            "returned 4 tokens as completion 0 of prompt 1",
        ),
        ([[GOOD, Completion((1,), (0.0, 0.0), True)], [GOOD] * 2], "1 tokens and 2 log-probabilities as completion 1"),
        ([[GOOD, Completion((1,), (float("nan"),), True)], [GOOD] * 2], "nan or infinite in completion 1 of prompt 0"),
    ],
)
def test_an_engines_answer_of_a_wrong_size_is_named(groups, message):
    with pytest.raises(RuntimeError, match=message):
        check_groups(groups, ["a", "b"], Sampling(2, max_tokens=3), engine="Engine")
    check_groups([[GOOD] * 2] * 2, ["a", "b"], Sampling(2, max_tokens=3), engine="Engine")
