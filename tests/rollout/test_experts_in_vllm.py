"""vLLM with a mixture of experts samples from the trainer's distribution, and the engine detects if weights of experts
change."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from callbacks.canary import describe_fault, dtype_held
from qerl_pl.common.checks import CheckFailed
from qerl_pl.common.types import Completion
from qerl_pl.memory.parts import adapter_slots, recorded_routes
from qerl_pl.memory.settings import EngineMemory
from qerl_pl.memory.shape import config_shape
from qerl_pl.model.layers import num_recurrent_layers
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.rollout.base import Sampling, checked_routes
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.training.routing import MOST_OTHERS
from tests.combinations import first_of
from tests.families import MIXTURES, tiny_config
from tests.random_models import run_of
from tests.rollout.conftest import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    Setup,
    assert_change_is_noticed,
    first_mixture,
    make_engine,
    rewrite,
    save_dense,
    save_mixture,
    some_prompts,
    started_engine,
)
from tests.rollout.expert_faults import KERNELS, SLOTS, expert_adapters, heal
from tests.rollout.test_families_in_vllm import gaps

pytestmark = pytest.mark.vllm
LORA = LoraSettings(rank=6, alpha=12, rslora=True)


@pytest.fixture(scope="module", params=MIXTURES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    save_mixture(folder, request.param)
    return folder


of_one_family = first_of("base", MIXTURES)


@pytest.fixture(scope="module", params=["nvfp4", pytest.param("dense", marks=pytest.mark.long)])
def setup(request: pytest.FixtureRequest, base: Path) -> Iterator[Setup]:
    with started_engine(load_policy(str(base / request.param), dtype=torch.float32, lora=LORA, seed=0)) as setup:
        yield setup


def most(setup: Setup) -> float:
    """Return the largest difference, in nats at one token, that is allowed between engine and trainer. It is larger for
    models with gated delta nets, whose rounding errors grow with the number of tokens."""
    return 1e-4 if num_recurrent_layers(setup.policy.config) else 1e-5


def assert_same(setup: Setup, *, adapter: bool = True) -> None:
    """Check that the log-probabilities that vLLM reports for its samples equal the policy's, up to rounding in fp32."""
    differences = gaps(setup, adapter=adapter)
    assert differences.mean() < 1e-5
    assert differences.max() < most(setup)


def test_the_gap_is_below_a_hundred_thousandth_of_a_nat(setup):
    assert_same(setup)
    assert_same(setup, adapter=False)


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_moe", True),
        pytest.param(("qwen3_moe", False), marks=pytest.mark.long),
        ("qwen3_5_moe_text", False),
        pytest.param(("glm4_moe", True), marks=pytest.mark.long),
    ],
    ids=["prefixes cached", "not cached", "recurrent", "sigmoid"],
)
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """An engine that also returns the experts that each token chose. One of the model's four blocks differs from the
    others: in Qwen3-MoE and GLM-4.5 it has no mixture of experts, in Qwen3.5 it has attention. The KV cache is so small
    that sequences are preempted."""
    folder = tmp_path_factory.mktemp("deep")
    family, caching = request.param
    save_mixture(folder, family, num_hidden_layers=4)
    policy = load_policy(str(folder / "nvfp4"), dtype=torch.float32, lora=LORA, seed=0)
    policy.replays_routes = True
    engine = VLLMEngine(
        block_size=BLOCK_SIZE,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        kv_cache_bytes=10 * 2**16,
        enable_prefix_caching=caching,
    )
    with started_engine(policy, engine) as setup:
        yield setup


def replayed(policy: Policy, prompt: list[int], row: Completion) -> tuple[Tensor, Tensor]:
    """Compute the trainer's log-probabilities of a completion, [N] for its N tokens, using the experts that the engine
    returned. Also returns how many of these experts the trainer's routers would not have chosen, [S, L] for the S
    tokens of prompt and completion without the last one, and for L MoE layers."""
    tokens = torch.tensor([[*prompt, *row.tokens]])
    mask = torch.arange(tokens.shape[1]).unsqueeze(0) >= len(prompt)
    assert row.routes is not None
    routes = torch.cat([row.routes, row.routes[-1:]]).unsqueeze(0)  # those of the last token are not used
    with torch.no_grad():
        stats = policy.token_stats(tokens, mask, temperature=1.0, routes=routes)
    assert stats.others is not None
    return stats.logprobs[mask], stats.others[0, :-1]


@pytest.mark.parametrize("stop", [(), ("w9",)])
def test_the_engine_returns_the_experts_of_every_token_of_prompt_and_completion(deep, stop, monkeypatch):
    preempted, scheduler = [], deep.engine._scheduler()
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **kw: (preempted.append(a), preempt(*a, **kw)))
    prompts = [*some_prompts(62, 3, BLOCK_SIZE, 2 * BLOCK_SIZE + 5, 70), some_prompts(70)[0][:40]]
    prompts.append(prompts[3])
    sampling = Sampling(3, 64, stop=stop)
    groups = deep.engine.generate(prompts, sampling, 3)
    groups = checked_routes(groups, prompts, deep.policy.routing, engine="vLLM")
    gaps = []
    for prompt, group in zip(prompts, groups, strict=True):
        for row in group:
            logprobs, others = replayed(deep.policy, prompt, row)
            gaps.append((logprobs - torch.tensor(row.logprobs)).abs())
            assert not others.any()
    assert torch.cat(gaps).mean() <= 1e-5
    assert torch.cat(gaps).max() <= most(deep)
    # stop strings end the few sequences of the model with delta nets before its cache is full
    assert preempted or (stop and num_recurrent_layers(deep.policy.config))
    if not stop and deep.engine.enable_prefix_caching:
        again = deep.engine.generate(prompts, sampling, 3)
        pairs = zip(chain(*groups), chain(*again), strict=True)
        assert all(row.routes is not None and row.routes.equal(other.routes) for row, other in pairs)


@pytest.mark.slow
def test_in_bf16_the_samplers_experts_leave_less_than_a_third_of_the_gap(tmp_path):
    sizes = {"num_hidden_layers": 4, "mlp_only_layers": [], "hidden_size": 128, "initializer_range": 0.2}
    save_dense(tmp_path, tiny_config("qwen3_moe", **sizes, num_experts=64, num_experts_per_tok=8))
    for block in range(4):  # logits of standard deviation 1
        rewrite(tmp_path, f"model.layers.{block}.mlp.gate.weight", lambda weight: weight.normal_(std=128**-0.5))
    policy = load_policy(str(tmp_path), dtype=torch.bfloat16, lora=LORA, seed=0)
    policy.replays_routes = True
    engine = VLLMEngine(max_num_seqs=64, kv_cache_bytes=2**24)
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    prompts, gaps, others = some_prompts(12, 20, 30, 9), [], []
    for prompt, group in zip(prompts, engine.generate(prompts, Sampling(3, 64), 0), strict=True):
        for row in group:
            mine, changed = replayed(policy, prompt, row)
            tokens = torch.tensor([[*prompt, *row.tokens]])
            mask = torch.arange(tokens.shape[1]).unsqueeze(0) >= len(prompt)
            with torch.no_grad():
                live = policy.token_stats(tokens, mask, temperature=1.0).logprobs[mask]
            gaps.append((torch.stack([mine, live]) - torch.tensor(row.logprobs)).abs())
            others.append(changed)
    engine.close()
    with_experts, without = torch.cat(gaps, dim=1).mean(dim=1).tolist()
    assert 0 < with_experts < without / 3
    assert 0.01 < (torch.cat(others) > 0).float().mean() < 0.2
    assert (torch.cat(others).float().mean(dim=0) / 8).max() < MOST_OTHERS / 5


def test_scoring_and_sampling_without_the_adapter_leave_no_experts_behind(deep):
    deep.engine.score(some_prompts(20, 30))
    assert not deep.engine._scheduler()._routes
    [[row]] = deep.engine.generate(some_prompts(9), Sampling(1, 5), 0, adapter=False)
    with deep.policy.model.disable_adapter():
        logprobs, others = replayed(deep.policy, some_prompts(9)[0], row)
    assert (logprobs - torch.tensor(row.logprobs)).abs().max() < 1e-5
    assert not others.any()


def test_the_plan_counts_the_bytes_of_recorded_experts(deep):
    scheduler = deep.engine._scheduler()
    shape = config_shape(deep.policy.config, NVFP4, torch.float32)
    slots = scheduler.cache_config.num_gpu_blocks * scheduler.cache_config.block_size
    held, layers = scheduler.recorder._chosen.nbytes, deep.policy.routing.num_layers
    assert held == recorded_routes(shape, slots) == 2 * layers * 2 * (slots + 1)


MESSAGES = {
    "adapter flag 0": r"1 of .* without their adapters.*: MIXTURE\.experts",
    "gate and up exchanged": r"1 of \d+ tensors differ: .*MIXTURE\.experts\.base_layer\.lora_B",
    "slot of the next expert": r"2 of \d+ tensors differ: .*MIXTURE\.experts\.lora_A.*MIXTURE\.experts\.lora_B",
    "two values of one A": r"different adapters in the 2 slots of .*MIXTURE\.experts\.base_layer",
}


def checked(setup: Setup) -> None:
    """Check what the engine holds, as the canary does."""
    held = setup.engine.fingerprint()
    if dtype_held(held, setup.policy, NormNoise()) is None:
        raise CheckFailed(describe_fault(held, setup.policy, NormNoise(), before={}))


@pytest.mark.parametrize("fault", SLOTS)
def test_a_fault_in_the_adapters_of_experts_is_named_before_the_rollout_is_used(setup, fault):
    SLOTS[fault](expert_adapters(setup.engine))
    message = MESSAGES[fault].replace("MIXTURE", re.escape(first_mixture(Path(setup.policy.base))))
    with pytest.raises(CheckFailed, match=message):
        checked(setup)
    heal(expert_adapters(setup.engine))
    setup.engine.load_adapter(setup.adapter)
    assert setup.engine.fingerprint() == setup.expected_fingerprint()


@of_one_family
@pytest.mark.parametrize("fault", KERNELS)
def test_a_kernel_that_computes_other_adapters_changes_log_probabilities_a_thousand_times_the_gap(setup, fault):
    KERNELS[fault](expert_adapters(setup.engine))
    assert gaps(setup).mean() > 1e-2
    heal(expert_adapters(setup.engine))
    assert_same(setup)


def test_the_plan_counts_the_bytes_of_the_slots_of_experts(setup):
    module = expert_adapters(setup.engine)
    stacks = [*module.w13_lora_a_stacked, *module.w13_lora_b_stacked, *module.w2_lora_a_stacked]
    held = sum(stack.nbytes for stack in (*stacks, *module.w2_lora_b_stacked))
    shape = config_shape(setup.policy.config, NVFP4, torch.float32)
    runs = (run_of(4, rank=LORA.rank, targets=LORA.targets, expert_rank=rank) for rank in (3, 0))
    with_experts, without = (adapter_slots(shape, run, EngineMemory()) for run in runs)
    assert with_experts - without == held * shape.experts.layers


@of_one_family
def test_slots_of_experts_have_the_rank_that_is_needed(base):
    lora = LoraSettings(rank=12, expert_rank=1)
    with started_engine(load_policy(str(base / "nvfp4"), dtype=torch.float32, lora=lora, seed=0)) as setup:
        assert [stack.shape[2] for stack in expert_adapters(setup.engine).w2_lora_a_stacked] == [8]
        assert_same(setup)


def flip(weight: Tensor) -> None:
    weight[5, 3, 7] += 0.5


def exchange(weight: Tensor) -> None:
    weight[[2, 6]] = weight[[2, 6]] * torch.tensor([1.25, 0.8]).view(2, 1, 1)


FAULTS: dict[str, tuple[str | tuple[str, ...], Callable[[Tensor], object], str]] = {
    "one code": ("w13_weight", flip, r"experts\.5\.gate_proj\+up_proj"),
    "two tensor scales": ("w2_weight", exchange, r"2 of .*experts\.2\.down_proj, .*experts\.6\.down_proj"),
    "a row of the router": ("mlp.gate.weight", lambda weight: weight[3].mul_(1.01), r"mlp\.gate\.weight"),
    "a router's correction": (
        "correction_bias",
        lambda bias: bias[3].add_(0.01),
        r"mlp\.gate\.e_score_correction_bias",
    ),
    "a shared expert": (
        ("expert.down_proj.weight", "shared_experts.down_proj.weight"),
        lambda weight: weight[0, 7].add_(1),
        r"shared_experts?\.down_proj",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_change_of_one_expert_or_the_router_stops_the_rollout(setup, fault):
    ending, change, message = FAULTS[fault]
    experts = setup.policy.family.experts
    if "correction" in message and (experts is None or experts.correction is None):
        pytest.skip("the family has no correction")
    if setup.policy.packed_format is None and r"mlp\.gate\." not in message:
        pytest.skip("weights of dense bases are not compared")
    if "shared" in message and not config_shape(setup.policy.config, None, torch.float32).experts.shared:
        pytest.skip("the family has no shared expert")
    assert isinstance(setup.engine, VLLMEngine)
    assert_change_is_noticed(setup.engine, ending, change, message)
    assert setup.engine.fingerprint() == setup.expected_fingerprint()


CHANGES: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "a code": ("experts.5.up_proj.weight_packed", lambda codes: codes[3, 5].bitwise_xor_(1)),
    "a scale": ("experts.2.down_proj.weight_scale", lambda scale: scale.view(torch.uint8)[2, 1].add_(1)),
    "a tensor scale": ("experts.7.down_proj.weight_global_scale", lambda divisor: divisor.mul_(1.5)),
}


@of_one_family
@pytest.mark.parametrize(
    "change", [name if name == "a code" else pytest.param(name, marks=pytest.mark.long) for name in CHANGES]
)
def test_an_expert_that_changes_between_trainer_and_engine_stops_the_start(base, tmp_path, change):
    shutil.copytree(base / "nvfp4", tmp_path / "base")
    policy = load_policy(str(tmp_path / "base"), dtype=torch.float32, lora=LORA, seed=0)
    name, write = CHANGES[change]
    rewrite(tmp_path / "base", f"{first_mixture(tmp_path / 'base')}.{name}", write)
    engine = make_engine("vllm")
    with pytest.raises(ValueError, match=rf"base has changed.*experts\.{name.split('.')[1]}\..*start the run again"):
        engine.start(policy, max_model_len=MAX_MODEL_LEN)
