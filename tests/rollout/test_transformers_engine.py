"""The transformers engine samples with the trainer's model. It restores everything that it changes in this model, and
its results do not depend on how sequences are batched."""

import pytest
import torch

from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.hf import TransformersEngine
from tests.rollout.conftest import MAX_MODEL_LEN, make_policy, random_adapter, some_prompts

PROMPTS = some_prompts(3, 20, 9, 40)
SAMPLING = Sampling(num_completions=2, max_tokens=4)
GREEDY = Sampling(num_completions=1, max_tokens=8, temperature=0)


@pytest.fixture
def policy(checkpoints):
    policy = make_policy(checkpoints["dense"], train_norms=True)
    policy.load_adapter_state(random_adapter(policy, seed=1))
    return policy


def start(policy, **kwargs):
    engine = TransformersEngine(**kwargs)
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    return engine


def snapshot(policy):
    """Copy everything of the policy that a call of the engine could change."""
    return (
        {name: tensor.clone() for name, tensor in policy.state_dict().items()},
        [module.training for module in policy.modules()],
        [parameter.requires_grad for parameter in policy.parameters()],
        policy.causal_lm.generation_config.to_dict(),
    )


def assert_same(before, after):
    assert before[1:] == after[1:]
    for name, tensor in before[0].items():
        assert torch.equal(tensor, after[0][name]), name


def test_a_token_after_a_prefix_scores_as_at_the_end_of_its_own_row(policy):
    engine = start(policy)
    engine.load_adapter(random_adapter(policy, seed=2))
    engine.set_norm_noise(NormNoise(0.1, 3))
    [tokens] = some_prompts(40)
    lengths, following = [39, 7, 20, 1], [5, tokens[7], 0, 9]
    rows = [[*tokens[:length], token] for length, token in zip(lengths, following, strict=True)]
    expected = [row[-1] for row in engine.score(rows)]
    for copies in (1, 3):
        found = engine.score_next(tokens, lengths, following, copies=copies)
        assert found.tolist() == [pytest.approx(expected, abs=1e-5)] * copies
    before = snapshot(policy)
    engine.score_next(tokens, lengths, following)
    assert_same(before, snapshot(policy))


@pytest.mark.parametrize("adapter", [True, False])
def test_the_policy_is_given_back_bit_for_bit(policy, adapter):
    engine = start(policy)
    engine.load_adapter(random_adapter(policy, seed=2))
    engine.set_norm_noise(NormNoise(0.1, 3))
    policy.train()
    policy.causal_lm.model.layers[0].eval()
    before = snapshot(policy)
    engine.generate(PROMPTS, SAMPLING, seed=1, adapter=adapter)
    engine.score(PROMPTS, adapter=adapter)
    engine.fingerprint()
    assert_same(before, snapshot(policy))


def test_the_policy_is_given_back_when_a_call_fails_in_the_middle(policy):
    engine = start(policy)
    engine.load_adapter(random_adapter(policy, seed=2))
    engine.set_norm_noise(NormNoise(0.1, 3))
    expected = engine.generate(PROMPTS, SAMPLING, seed=1)
    policy.train()
    before = snapshot(policy)
    calls = []

    def fail_the_third_time(*_):
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt

    hook = policy.causal_lm.model.layers[1].register_forward_hook(fail_the_third_time)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, SAMPLING, seed=1)
    hook.remove()
    assert_same(before, snapshot(policy))
    assert engine.generate(PROMPTS, SAMPLING, seed=1) == expected


def test_gradients_flow_after_a_call(policy):
    engine = start(policy)
    engine.generate(PROMPTS, SAMPLING, seed=1, adapter=False)
    policy.model(input_ids=torch.tensor(PROMPTS[:1])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters() if parameter.requires_grad)


def test_gradient_checkpointing_and_training_mode_change_no_token(policy):
    engine = start(policy)
    expected = engine.generate(PROMPTS, SAMPLING, seed=1)
    policy.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    assert engine.generate(PROMPTS, SAMPLING, seed=1) == expected


def test_padding_and_company_change_no_greedy_token_and_no_score(policy):
    together, alone = start(policy), start(policy, batch_tokens=1)
    for left, right in zip(together.score(PROMPTS), alone.score(PROMPTS), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-4)
    for [left], [right] in zip(
        *(engine.generate(PROMPTS, GREEDY, seed=1) for engine in (together, alone)), strict=True
    ):
        assert left.tokens == right.tokens
        torch.testing.assert_close(torch.tensor(left.logprobs), torch.tensor(right.logprobs), rtol=0, atol=1e-4)


def test_batch_tokens_below_one_are_refused():
    with pytest.raises(ValueError, match="batch_tokens is 0"):
        TransformersEngine(batch_tokens=0)
