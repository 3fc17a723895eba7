"""Tests of training passes of MoE models in which each token uses given experts instead of those that the router
chooses. If the given experts are the router's, results have the same bits as without them. With other experts, packing
rows and recomputing activations change results only by rounding, and an update stops if experts were given to the wrong
tokens or layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_pl.common.checks import CheckFailed
from qerl_pl.common.types import Completion, Experience, Prompt
from qerl_pl.model.layers import num_recurrent_layers
from qerl_pl.objective import Objective
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.policy.recompute import recompute_of
from qerl_pl.quant.experts import UNSEEN, choose, mixtures
from qerl_pl.rollout.scored import collate
from tests.rollout.conftest import random_adapter, save_mixture
from tests.updates import updated

LENGTHS = ((9, 6), (9, 4), (3, 5), (3, 6))
"""Tokens of prompt and completion; rows 0 and 1 have the same prompt, as have rows 2 and 3."""


@pytest.fixture(scope="module", params=[("qwen3_moe", 4), ("qwen3_5_moe_text", 3), ("glm4_moe", 4)], ids=str)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an NVFP4 model with three blocks that are mixtures of eight experts; models with four blocks have a
    dense one, too."""
    folder, (family, blocks) = tmp_path_factory.mktemp("replay"), request.param
    save_mixture(folder, family, num_hidden_layers=blocks)
    return folder / "nvfp4"


@pytest.fixture(scope="module")
def policy(base: Path) -> Policy:
    """Load a policy that no test changes, except for its setting of gradient checkpointing."""
    policy = load_policy(str(base), dtype=torch.float32, lora=LoraSettings(rank=4), seed=0)
    policy.load_adapter_state(random_adapter(policy, seed=1))
    return policy


SETTINGS: list[Any] = ["offload", "blocks", 2, "selective", "none"]  # the last stays for the next test


def rows() -> tuple[Tensor, Tensor]:
    """Draw tokens [B, S] and the mask of completions."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(8, 64, (4, 15), generator=generator)
    tokens[1, :9], tokens[3, :3] = tokens[0, :9], tokens[2, :3]
    column = torch.arange(15)
    mask = torch.stack([(column >= prompt) & (column < prompt + own) for prompt, own in LENGTHS])
    return tokens, mask


@torch.no_grad()
def own_routes(policy: Policy, tokens: Tensor) -> Tensor:
    """Return the experts that the routers choose for each token, [B, S, L, k]: k experts in each of L mixtures. Padding
    is at the end of rows."""
    found: list[Tensor] = []

    def record(mixture: Any, args: tuple[Tensor]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1])
        found.append(choose(mixture.scores(x)[1], mixture.chosen))

    hooks = [mixture.register_forward_pre_hook(record) for mixture in mixtures(policy.causal_lm)]
    policy.causal_lm(input_ids=tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).unflatten(0, tokens.shape).to(torch.uint8)


def outcome(policy: Policy, routes: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute log-probabilities of the completions, the gradient of a sum in which every token has a different weight,
    and how many of the experts in ``routes`` the routers would not have chosen."""
    tokens, mask = rows()
    stats = policy.token_stats(tokens, mask, temperature=0.8, routes=routes)
    (stats.logprobs * torch.arange(1, 16)).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    policy.zero_grad()
    return stats.logprobs.detach(), gradient, stats.others


def random_routes(seed: int) -> Tensor:
    routes = torch.rand(4, 15, 3, 8, generator=torch.Generator().manual_seed(seed)).argsort(dim=-1)[..., :2]
    routes[1, :9], routes[3, :3] = routes[0, :9], routes[2, :3]
    return routes.to(torch.uint8)


def recomputed(policy: Policy, setting: Any) -> Policy:
    how = recompute_of(setting, num_layers=policy.num_layers)
    assert how is not None
    policy.set_recompute(how)
    return policy


def test_replaying_the_policys_own_experts_changes_no_bit_whatever_is_recomputed(policy):
    routes = own_routes(policy, rows()[0])
    computed = torch.arange(15) < torch.tensor([sum(both) - 1 for both in LENGTHS]).unsqueeze(1)
    expected, gradient, none = outcome(recomputed(policy, "none"), None)
    assert none is None
    for setting in SETTINGS:
        found, found_gradient, others = outcome(recomputed(policy, setting), routes)
        assert torch.equal(found, expected), setting
        assert torch.equal(found_gradient, gradient), setting
        assert others is not None
        assert torch.equal(others, torch.where(computed, 0, UNSEEN).unsqueeze(2).expand(4, 15, 3).to(torch.uint8))


def test_given_experts_give_the_same_gradient_whatever_is_recomputed_and_shared(policy, monkeypatch):
    routes = random_routes(0)
    expected, gradient, expected_others = outcome(recomputed(policy, "none"), routes)
    assert (expected - outcome(policy, None)[0]).abs().max() > 0.1  # the experts matter
    assert expected_others is not None
    for setting in SETTINGS:
        found, found_gradient, _ = outcome(recomputed(policy, setting), routes)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert (found_gradient - gradient).norm() < 1e-5 * gradient.norm(), setting
    if num_recurrent_layers(policy.config):  # with which rows cannot share a prompt
        return
    monkeypatch.setattr("qerl_pl.policy.packing.shares_prompts", lambda model: True)
    for setting in SETTINGS:
        found, found_gradient, others = outcome(recomputed(policy, setting), routes)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert (found_gradient - gradient).norm() < 1e-5 * gradient.norm(), setting
        assert others is not None
        assert (others[1, :9] == UNSEEN).all()  # the prompt is computed in row 0
        seen = others != UNSEEN
        assert torch.equal(others[seen], expected_others[seen])


def test_one_row_alone_has_the_log_probabilities_of_the_batch(policy):
    routes, (tokens, mask) = random_routes(1), rows()
    whole = policy.token_stats(tokens, mask, temperature=1.0, routes=routes).logprobs
    for row in range(4):
        part = slice(row, row + 1)
        alone = policy.token_stats(tokens[part], mask[part], temperature=1.0, routes=routes[part]).logprobs
        torch.testing.assert_close(alone[0], whole[row], atol=1e-5, rtol=1e-5)


def experience(routes: Tensor | None) -> Experience:
    tokens, _ = rows()
    prompts, completions = [], []
    for row, (prompt, own) in enumerate(LENGTHS):
        given = tuple(tokens[row, prompt : prompt + own].tolist())
        experts = None if routes is None else routes[row, : prompt + own - 1]
        completions.append(Completion(given, (-3.0,) * own, True, routes=experts))
        prompts.append(Prompt(tuple(tokens[row, :prompt].tolist()), ""))
    flags = torch.ones(4, dtype=torch.bool)
    return collate(prompts, completions, scored=flags, advantages=torch.tensor([1.0, -1.0, 0.0, 0.0]), in_loss=flags)


def test_an_update_with_the_policys_own_experts_is_the_one_without(policy):
    routes = own_routes(policy, rows()[0])
    plain, gradient = updated(policy, experience(None), Objective())
    report, replayed = updated(policy, experience(routes), Objective())
    assert torch.equal(replayed, gradient)
    assert torch.equal(report.old_logprobs, plain.old_logprobs)
    added = {name: float(value) for name, value in report.metrics.items() if name not in plain.metrics}
    computed = [routes[row, : sum(both) - 1] for row, both in enumerate(LENGTHS)]
    counts = torch.stack([torch.cat(computed)[:, layer].flatten().long().bincount(minlength=8) for layer in range(3)])
    assert added == pytest.approx(
        {
            "router/changed_share": 0.0,
            "router/other_experts": 0.0,
            "router/other_experts_max": 0.0,
            "router/max_load": float((counts.amax(1) / counts.double().mean(1)).mean()),
            "router/idle_share": float((counts == 0).double().mean()),
        }
    )


def test_some_changed_experts_are_counted_and_used(policy):
    routes = own_routes(policy, rows()[0])
    changed = routes.clone()
    last = routes[0, 2, 2]  # in the last block, so that no later router sees another input
    changed[0, 2, 2, 0] = next(expert for expert in range(8) if expert not in last)
    report, _ = updated(policy, experience(changed), Objective())
    num_tokens = sum(sum(both) - 1 for both in LENGTHS)
    assert float(report.metrics["router/changed_share"]) == pytest.approx(1 / (3 * num_tokens))
    assert float(report.metrics["router/other_experts"]) == pytest.approx(1 / (6 * num_tokens))
    assert float(report.metrics["router/other_experts_max"]) == pytest.approx(1 / (2 * num_tokens))


@pytest.mark.parametrize(
    ("fault", "kl"),
    [
        pytest.param(fault, kl, marks=[] if (kl > 0) == (fault == "exchanged layers") else pytest.mark.long)
        for fault in ("shifted by a token", "exchanged layers", "of another row")
        for kl in (0.0, 0.1)
    ],
)
def test_experts_of_other_tokens_or_layers_stop_the_update_before_its_first_step(policy, fault, kl):
    routes = own_routes(policy, rows()[0])
    wrong = {
        "shifted by a token": routes.roll(1, dims=1),
        "exchanged layers": routes[:, :, [1, 0, 2]],
        "of another row": routes.roll(1, dims=0),
    }[fault]
    before = {name: tensor.clone() for name, tensor in policy.adapter_state().items()}
    with pytest.raises(CheckFailed, match=r"of the experts that the engine returned .*router_replay to off"):
        updated(policy, experience(wrong), Objective(kl_coefficient=kl))
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.adapter_state().items())
