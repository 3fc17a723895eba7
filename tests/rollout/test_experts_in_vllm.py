"""A mixture of experts in vLLM samples from the trainer's distribution, and changed expert weights are detected."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.quant.quantize import quantize_checkpoint
from tests.families import tiny_config
from tests.rollout.conftest import MAX_MODEL_LEN, Setup, make_engine, random_adapter, rewrite, save_dense
from tests.rollout.test_families_in_vllm import gap

pytestmark = pytest.mark.vllm
LORA = LoraSettings(rank=6, alpha=12)
BLOCK = "model.layers.0.mlp"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    save_dense(folder / "dense", tiny_config("qwen3_moe"))
    quantize_checkpoint(folder / "dense", folder / "nvfp4")
    return folder


@pytest.fixture(scope="module", params=["nvfp4", "dense"])
def setup(request: pytest.FixtureRequest, base: Path) -> Iterator[Setup]:
    policy = load_policy(str(base / request.param), dtype=torch.float32, lora=LORA, seed=0)
    adapter = random_adapter(policy, seed=1)
    policy.load_adapter_state(adapter)
    engine = make_engine("vllm")
    engine.start(policy, max_model_len=MAX_MODEL_LEN)
    yield Setup(engine, policy, adapter, adapter, {})
    engine.close()


def test_the_gap_is_below_a_hundred_thousandth_of_a_nat(setup):
    assert gap(setup) < 1e-5
    assert gap(setup, adapter=False) < 1e-5


def parameters(setup: Setup) -> dict[str, nn.Parameter]:
    return setup.engine._call(lambda worker: dict(worker.get_model().named_parameters()))  # pyright: ignore[reportAttributeAccessIssue]


def flip(weight: Tensor) -> None:
    weight[5, 3, 7] += 0.5


def exchange(weight: Tensor) -> None:
    weight[[2, 6]] = weight[[2, 6]] * torch.tensor([1.25, 0.8]).view(2, 1, 1)


FAULTS: dict[str, tuple[str, Callable[[Tensor], object], str]] = {
    "one code": ("w13_weight", flip, r"experts\.5\.gate_proj\+up_proj"),
    "two tensor scales": ("w2_weight", exchange, r"2 of .*experts\.2\.down_proj, .*experts\.6\.down_proj"),
    "a row of the router": ("mlp.gate.weight", lambda weight: weight[3].mul_(1.01), r"mlp\.gate\.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_change_of_one_expert_or_the_router_stops_the_rollout(setup, fault):
    ending, change, message = FAULTS[fault]
    if setup.policy.packed_format is None and ending != "mlp.gate.weight":
        pytest.skip("weights of dense bases are not compared")
    [(_, weight)] = [item for item in parameters(setup).items() if item[0].endswith(ending)]
    kept = weight.data.clone()
    change(weight.data)
    with pytest.raises(RuntimeError, match=f"does not compute with the trainer's base.*{message}"):
        setup.engine.fingerprint()
    weight.data.copy_(kept)
    assert setup.engine.fingerprint() == setup.expected_fingerprint(norms=setup.policy.norm_weights())


CHANGES: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "a code": (f"{BLOCK}.experts.5.up_proj.weight_packed", lambda codes: codes[3, 5].bitwise_xor_(1)),
    "a scale": (f"{BLOCK}.experts.2.down_proj.weight_scale", lambda scale: scale.view(torch.uint8)[2, 1].add_(1)),
    "a tensor scale": (f"{BLOCK}.experts.7.down_proj.weight_global_scale", lambda divisor: divisor.mul_(1.5)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_expert_that_changes_between_trainer_and_engine_stops_the_start(base, tmp_path, change):
    shutil.copytree(base / "nvfp4", tmp_path / "base")
    policy = load_policy(str(tmp_path / "base"), dtype=torch.float32, lora=LORA, seed=0)
    name, write = CHANGES[change]
    rewrite(tmp_path / "base", name, write)
    engine = make_engine("vllm")
    with pytest.raises(ValueError, match=rf"base has changed.*experts\.{name.split('.')[5]}\..*start the run again"):
        engine.start(policy, max_model_len=MAX_MODEL_LEN)
