"""The evidence that an engine used another policy names this policy, and is 0 for a policy that does not differ."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.evidence import SHARES, log_false_alarm
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.rewards.base import RewardTable
from qerl_pl.rollout.comparison import trainers_engine
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.measured import measure_some
from qerl_pl.rollout.other_policies import (
    OF_BEFORE,
    OTHER_POLICIES,
    WITHOUT_ADAPTER,
    WITHOUT_NOISE,
    Others,
    measure_others,
)
from qerl_pl.rollout.scored import ScoredBatch

ROWS, TOKENS = 24, 12
NOISE = NormNoise(sigma=1e-5, seed=3)
SMALL = 2e-5  # of B: log-probabilities change by some 1e-5 nats
Adapter = dict[str, Tensor]


@pytest.fixture(params=[False, True], ids=["LoRA alone", "trained norms"])
def policy(request, checkpoints) -> Policy:
    lora = LoraSettings(rank=4, alpha=8, train_norms=request.param)
    return load_policy(checkpoints["dense"], dtype=torch.float32, lora=lora, seed=0)


def trained(policy: Policy, seed: int) -> Adapter:
    """Return the policy's adapter after a small random change of what is trained, except the matrices A."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + SMALL * torch.randn(tensor.shape, generator=generator) * (".lora_A" not in name)
        for name, tensor in policy.adapter_state().items()
    }


def batch_of(policy: Policy, engine: Callable[[TransformersEngine, int], None], noise: NormNoise) -> ScoredBatch:
    """Make a rollout of random tokens. Before the log-probabilities of a row are computed, ``engine`` is called with
    the engine that computes them and the row's number, and may change adapter or noise."""
    tokens = torch.randint(5, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    rows = []
    with trainers_engine(policy, noise, max_model_len=2 * TOKENS) as oracle:
        adapter = oracle._adapter
        for number, row in enumerate(tokens):
            oracle.set_norm_noise(noise)
            oracle.load_adapter(adapter)
            engine(oracle, number)
            rows.append(Completion(tuple(row[2:]), tuple(oracle.score([row])[0][1:]), finished=True))
    table = RewardTable(torch.zeros(ROWS), torch.ones(ROWS, dtype=torch.bool), {}, {})
    prompts = tuple(Prompt(tuple(row[:2]), "") for row in tokens)
    return ScoredBatch.of(prompts, ("",) * ROWS, tuple(rows), table, ROWS)


def others_of(policy: Policy, batch: ScoredBatch, noise: NormNoise, before: Adapter | None, **limits: int) -> Others:
    settings = {"temperature": 1.0, "micro_batch_tokens": 3 * TOKENS}
    measured = measure_some(policy, batch, noise, **settings, max_model_len=2 * TOKENS, max_tokens=10_000, seed=1)
    limit = limits.get("max_tokens", 10_000)
    return measure_others(policy, batch, measured, noise, before, strengths={}, **settings, max_tokens=limit)


@pytest.mark.parametrize("name", [None, *OTHER_POLICIES])
def test_the_policy_of_a_quarter_of_the_rows_is_named_and_a_right_engine_is_not_suspected(policy, name):
    before = trained(policy, 1)
    base = {key: tensor.clone() for key, tensor in policy.adapter_state().items()}
    policy.load_adapter_state(before)
    policy.load_adapter_state(trained(policy, 2))

    def change(engine: TransformersEngine, row: int) -> None:
        if name == WITHOUT_NOISE and row % 4 == 0:
            engine.set_norm_noise(NormNoise())
        if name in (WITHOUT_ADAPTER, OF_BEFORE) and row % 4 == 0:
            engine.load_adapter(base if name == WITHOUT_ADAPTER else before)

    evidence = others_of(policy, batch_of(policy, change, NOISE), NOISE, before).evidence
    assert evidence.shape == (len(SHARES) * len(OTHER_POLICIES),)
    if name is None:
        assert log_false_alarm(evidence) > math.log(0.1)
        return
    assert log_false_alarm(evidence) < math.log(1e-6)
    assert [*OTHER_POLICIES][int(evidence.argmax()) % len(OTHER_POLICIES)] == name


def test_a_policy_that_does_not_differ_gives_exactly_no_evidence_and_costs_no_pass(policy):
    def change(engine: TransformersEngine, row: int) -> None:
        engine.set_norm_noise(replace(NOISE, sigma=0.1))  # a wrong engine, but not one of the other policies

    before = {name: tensor.clone() for name, tensor in policy.adapter_state().items()}
    for known in (None, before):  # B is 0, as in a fresh adapter
        found = others_of(policy, batch_of(policy, change, NormNoise()), NormNoise(), known)
        assert found.evidence.abs().max() == 0
        assert found.strengths == {}


def test_the_policy_is_unchanged_afterwards_and_few_tokens_are_enough(policy):
    before = trained(policy, 1)
    policy.load_adapter_state(trained(policy, 2))
    policy.train()
    state = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    modes = [module.training for module in policy.modules()]
    batch = batch_of(policy, lambda *_: None, NOISE)
    found = others_of(policy, batch, NOISE, before, max_tokens=1)
    assert found.strengths.keys() == set(OTHER_POLICIES)
    assert all(1 <= strength <= 32 for strength in found.strengths.values())
    assert all(torch.equal(tensor, state[name]) for name, tensor in policy.state_dict().items())
    assert [module.training for module in policy.modules()] == modes
