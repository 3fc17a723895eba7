"""vLLM with a mixture of experts on a GPU, where this project's kernels add the adapters and, on Hopper, compute the
experts from the trainer's weights; elsewhere vLLM's kernels compute them from a copy in another order. The engine
samples from the trainer's distribution, and detects weights of experts and routers that change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_pl.hopper import driver
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.quant.experts import mixtures
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine, worker
from qerl_pl.rollout.vllm.worker import ADAPTER_ID
from tests.rollout.conftest import (
    MAX_MODEL_LEN,
    assert_change_is_noticed,
    assert_sampled_by_its_policy,
    random_adapter,
    save_mixture,
    some_prompts,
)
from tests.rollout.leaks import is_inside

base_weights = pytest.importorskip("qerl_pl.rollout.vllm.base_weights")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.xdist_group("experts"),  # one process has the engine
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ADDED: list[int] = []
"""Number of rows of each call of this project's kernel for adapters on experts, also while CUDA graphs are captured."""
SIZES = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "head_dim": 64}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    folder = tmp_path_factory.mktemp("experts")
    save_mixture(folder, "qwen3_moe", **SIZES, initializer_range=0.05)
    lora = LoraSettings(rank=6, alpha=12)
    policy = load_policy(str(folder / "nvfp4"), dtype=torch.bfloat16, lora=lora, seed=0, device="cuda")
    policy.load_adapter_state(random_adapter(policy, seed=1))
    engine = VLLMEngine(kv_cache_bytes=2**28, max_num_seqs=16)
    from qerl_pl.kernels import lora_experts  # Triton reads whether to interpret kernels when they are imported

    add_lora = lora_experts.add_lora

    def recorded(y: Tensor, *operands: Any) -> None:
        ADDED.append(len(y))
        add_lora(y, *operands)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_experts, "add_lora", recorded)
        engine.start(policy, max_model_len=MAX_MODEL_LEN)
    yield engine
    engine.close()


def test_it_samples_by_its_policy(engine):
    assert_sampled_by_its_policy(engine, some_prompts(1, 40, 70), Sampling(num_completions=2, max_tokens=12))


def test_adapters_are_added_by_this_projects_kernel_as_by_vllms(engine):
    """The CUDA graphs of decoding steps contain this project's kernel for adapters of experts, and vLLM's kernels add
    the same values to the same rows."""
    assert ADDED

    def added(worker: Any) -> list[tuple[Tensor, Tensor]]:
        from vllm.lora.layers import LoRAMapping
        from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

        modules = worker.model_runner.lora_manager._adapter_manager.modules.values()
        experts = next(module for module in modules if hasattr(module, "adapter_enabled"))
        kernels, chosen = experts.punica_wrapper, experts.moe_config.experts_per_token
        gate_up = experts.w13_lora_a_stacked, experts.w13_lora_b_stacked
        down = experts.w2_lora_a_stacked, experts.w2_lora_b_stacked
        assert all(matrix.any() for matrix in (*gate_up[0], *gate_up[1], *down[0], *down[1]))
        pairs = []
        for tokens in (1, 7, 16, 32):
            adapters = tuple(int(token % 3 != 1) * ADAPTER_ID for token in range(tokens))
            kernels.update_metadata(LoRAMapping(adapters, adapters), [ADAPTER_ID], 2, 100)

            def draw(*shape: int) -> Tensor:
                return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

            ids = torch.rand(tokens, experts.local_num_experts, device="cuda").argsort(dim=1).int()[:, :chosen]
            ids, weights = ids.contiguous(), torch.rand(tokens, chosen, device="cuda")
            inner = experts.intermediate_size_per_partition
            x, product = draw(tokens, experts.hidden_size), draw(tokens * chosen, inner)
            outs = draw(tokens, chosen, 2 * inner), draw(tokens, chosen, experts.hidden_size)
            bases = torch.empty(ids.shape[1], 2 * inner, len(x[0])), torch.empty(ids.shape[1], len(x[0]), inner)
            results = []
            kinds: tuple[Any, ...] = type(kernels), PunicaWrapperGPU
            for kind in kinds:
                y, z = (out.clone() for out in outs)
                sizes, enabled = (*bases, tokens, chosen, 1), experts.adapter_enabled
                flags = experts.local_num_experts, chosen, 2, False, False
                rows = kind.add_lora_w13(kernels, y, x, *gate_up, ids, weights, None, *sizes, enabled, *flags)
                rest = tokens, *bases, chosen, 1, enabled, chosen, False, 0, False
                kind.add_lora_w2(kernels, z, product, *down, weights, *rows, *rest)
                results.append((y, z))
            pairs += zip(*results, strict=True)
        return pairs

    for ours, theirs in engine._call(added):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-5)


def flip(weight: Tensor) -> None:
    weight.view(torch.int32).flatten()[7] ^= 1 << 5


def exchange(weight: Tensor) -> None:
    scales = weight.view(torch.uint8)
    scales[[2, 6]] = scales[[6, 2]]


NATIVE = driver.is_available(torch.device("cuda"))
"""Whether ``NativeExperts`` computes the experts."""
CODES, SCALES = ("gate_proj_codes", "down_proj_block_scale") if NATIVE else ("w13_weight", "w2_weight_scale")
FAULTS: dict[str, tuple[str, Callable[[Tensor], object], str]] = {
    "a code": (CODES, flip, r"layers\.0\.mlp\.experts"),
    "two experts' scales": (SCALES, exchange, r"layers\.0\.mlp\.experts"),
    "a row of the router": ("mlp.gate.weight", lambda weight: weight[3].mul_(1.1), r"mlp\.gate\.weight"),
}


@pytest.mark.skipif(not NATIVE, reason="needs Hopper")
def test_experts_are_in_memory_once(engine, caplog):
    """vLLM's kernels read the trainer's tensors, which are outside vLLM's memory pool; the engine says so."""
    policy = engine._policy
    trainers = {linear.codes.untyped_storage().data_ptr() for linear in policy.packed_linears().values()}
    parameters = engine._call(lambda worker: dict(worker.get_model().named_parameters()))
    codes = [weight for name, weight in parameters.items() if name.endswith("_proj_codes")]
    assert len(codes) == 3 * len(mixtures(policy.model))
    assert {weight.untyped_storage().data_ptr() for weight in codes} <= trainers
    assert not any(is_inside(weight) for weight in codes)
    assert sum(parameter.untyped_storage().nbytes() for name, parameter in parameters.items() if ".w13_" in name) < 1024
    assert engine._call(worker.linear_kernels)["NativeExperts"] == len(codes) / 3
    with caplog.at_level(logging.INFO):
        engine._call(base_weights.log_copies, policy.packed_linears())
    assert "use one copy of" in caplog.text


@pytest.mark.parametrize("fault", FAULTS)
def test_a_change_of_an_expert_or_the_router_stops_the_rollout(engine, fault):
    held = engine.fingerprint()
    assert_change_is_noticed(engine, *FAULTS[fault])
    assert engine.fingerprint() == held


@pytest.mark.parametrize("level", [0, 1])
def test_weights_and_samples_are_the_same_after_a_sleep(engine, level):
    held, prompts, sampling = engine.fingerprint(), some_prompts(3, 20), Sampling(num_completions=1, max_tokens=4)
    engine.sleep_level = level
    engine.sleep()
    engine.wake()
    assert engine.fingerprint() == held
    assert_sampled_by_its_policy(engine, prompts, sampling)
