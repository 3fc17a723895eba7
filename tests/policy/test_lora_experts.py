"""LoRA adapters on the experts of a mixture equal a reference with loops and PEFT, and settings that cannot be trained
are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from qerl_pl.checkpoint import check_identity, run_identity
from qerl_pl.memory.parts import adapter_values
from qerl_pl.memory.shape import checkpoint_shape
from qerl_pl.model.family import MLP, PROJECTIONS
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.lora_experts import adapt_experts
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.quant.formats import Format
from qerl_pl.quant.grouped import outer
from qerl_pl.quant.loading import load_base
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.tools.merge import merged_tensors
from tests.families import MIXTURES
from tests.quant.test_experts import expert_weights, random_mixture
from tests.random_models import run_of
from tests.reference.experts import adapted, mixture
from tests.rollout.conftest import random_adapter, save_mixture

ATTENTION = PROJECTIONS[:4]
SCALE = 0.7


def assert_computed_as_by_loops(
    sizes: tuple[int, int, int, int], *, fmt: Format | None, dtype: torch.dtype, device: str, most: float
) -> None:
    """Check output and all gradients of a mixture of experts with adapters against loops. ``sizes`` are the numbers of
    experts, of experts per token and of tokens, and the rank. No difference may exceed ``most`` times the largest value
    of its tensor."""
    number, chosen, tokens, rank = sizes
    made, generator = random_mixture(number, chosen, fmt=fmt), torch.Generator().manual_seed(1)
    plain = expert_weights(made)
    adapt_experts(torch.nn.ModuleList([made]), LoraConfig(), "default", rank=rank, scale=SCALE)
    trained = {name: parameter for name, parameter in made.named_parameters() if parameter.requires_grad}
    assert [name.removeprefix("experts.").removesuffix(".default.weight") for name in trained] == [
        *("base_layer.lora_A", "base_layer.lora_B", "lora_A", "lora_B")
    ]
    for parameter in trained.values():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 8
    made.to(device)
    x = torch.randn(1, tokens, 64, generator=generator).to(device, dtype).requires_grad_()
    probe = torch.randn(tokens, 64, generator=generator)
    same = [tensor.detach().cpu().double().requires_grad_() for tensor in (x[0], *trained.values())]
    expected = mixture(same[0], made.gate.weight.cpu(), adapted(plain, same[1:], SCALE), chosen, normalised=True)
    found = made(x)[0]
    (found * probe.to(device)).sum().backward()
    (expected * probe).sum().backward()
    assert x.grad is not None
    pairs = [(found, expected), (x.grad[0], same[0].grad)]
    pairs += [(parameter.grad, tensor.grad) for parameter, tensor in zip(trained.values(), same[1:], strict=True)]
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in trained.values())
    for mine, reference in pairs:
        assert mine is not None
        assert reference is not None
        assert (mine.cpu() - reference).abs().max() <= most * reference.abs().max()


@pytest.mark.parametrize("fmt", [NVFP4, None])
@pytest.mark.parametrize("sizes", [(5, 2, 33, 3), (3, 3, 7, 8), (8, 1, 5, 1), (1, 1, 1, 9)])
def test_values_and_gradients_are_those_of_loops(sizes, fmt):
    assert_computed_as_by_loops(sizes, fmt=fmt, dtype=torch.float32, device="cpu", most=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("sizes", [(5, 2, 33, 3), (8, 1, 1, 1), (128, 8, 77, 4)])
def test_values_and_gradients_on_a_gpu_are_those_of_loops(sizes, dtype, most):
    assert_computed_as_by_loops(sizes, fmt=NVFP4, dtype=dtype, device="cuda", most=most)


def test_the_gradient_of_an_expert_without_rows_is_zero():
    left, right = torch.randn(6, 8), torch.randn(6, 16)
    found = outer(left, right, torch.tensor([0, 4, 4, 6], dtype=torch.int32), torch.float32)
    assert not found[[0, 2]].any()
    torch.testing.assert_close(found[1], left[:4].T @ right[:4])
    torch.testing.assert_close(found[3], left[4:].T @ right[4:])


@pytest.fixture(scope="module", params=MIXTURES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    save_mixture(folder, request.param)
    return folder / "nvfp4"


def load(base: Path, **settings: object) -> Policy:
    lora = LoraSettings(**{"rank": 6, "alpha": 12, **settings})  # pyright: ignore[reportArgumentType]
    return load_policy(str(base), dtype=torch.float32, lora=lora, seed=0)


def expert_shapes(policy: Policy) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for name, tensor in policy.adapter_state().items() if ".experts." in name]


@pytest.mark.parametrize(
    ("settings", "rank"),
    [
        ({}, 3),  # 6 / 2 experts per token
        ({"rank": 1}, 1),
        ({"expert_rank": 5}, 5),
        ({"expert_rank": 0}, 0),
        ({"targets": ATTENTION}, 0),
    ],
)
def test_the_rank_is_that_of_attention_divided_by_the_experts_per_token(base, settings, rank):
    policy = load(base, **settings)
    expected = [(8 * rank, 128), (128, 8 * rank), (8 * rank, 64), (128, 8 * rank)]
    shape = checkpoint_shape(base, torch.float32)
    assert expert_shapes(policy) == (expected * shape.experts.layers if rank else [])
    run = run_of(4, **{"rank": 6, **settings})
    adapter, planned = policy.adapter_state(), adapter_values(shape, run)
    of_experts = sum(tensor.numel() for name, tensor in adapter.items() if ".experts." in name)
    assert planned - adapter_values(shape, replace(run, expert_rank=0)) == of_experts
    if not shape.recurrent.num_layers:  # whose linears count as those of attention
        assert planned == sum(tensor.numel() for tensor in adapter.values())


@pytest.mark.parametrize("recompute", ["selective", "blocks"])
def test_recomputation_changes_no_bit_of_the_gradients(base, recompute):
    tokens = torch.randint(8, 64, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(40).expand(2, 40) > 5
    found: list[list[Tensor]] = []
    for how in ("none", recompute):
        policy = load_policy(
            str(base), dtype=torch.float32, lora=LoraSettings(rank=6), seed=0, gradient_checkpointing=how
        )
        policy.load_adapter_state(random_adapter(policy, seed=1))
        policy.token_stats(tokens, mask, temperature=1.0).logprobs.sum().backward()
        found.append([p.grad for p in policy.parameters() if p.requires_grad and p.grad is not None])
    assert len(found[0]) == len(found[1]) == len(policy.adapter_state())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(gradient.any() for gradient in found[0])


def test_without_the_adapter_the_policy_is_its_base(base):
    policy, plain = load(base), load(base, targets=ATTENTION)
    policy.load_adapter_state(random_adapter(policy, seed=1))
    with policy.as_reference():
        assert torch.equal(logits(policy.model), logits(plain.model))


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Path]:
    """A policy with a random adapter on a dense base, and a folder with this adapter as PEFT saves adapters."""
    policy, folder = load(base.with_name("dense"), rslora=True, expert_rank=5), tmp_path_factory.mktemp("adapter")
    policy.load_adapter_state(random_adapter(policy, seed=1))
    policy.peft_config.save_pretrained(str(folder))
    save_file(policy.adapter_state(), folder / "adapter_model.safetensors")
    return policy, folder


def logits(model: Any) -> Tensor:
    tokens = torch.randint(8, 64, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=tokens).logits


def test_stock_peft_computes_the_adapter_of_experts_alike(saved, base):
    policy, folder = saved
    stock = AutoModelForCausalLM.from_pretrained(base.with_name("dense"), dtype=torch.float32)
    without = logits(stock)
    with_adapter = logits(PeftModel.from_pretrained(stock, folder))
    assert (with_adapter - without).abs().max() > 1
    torch.testing.assert_close(logits(policy.model), with_adapter, atol=1e-4, rtol=1e-4)


def test_a_run_can_start_at_an_adapter_of_experts(saved, base):
    policy, folder = saved
    settings = LoraSettings(start=str(folder))
    assert (settings.rank, settings.expert_rank, settings.rslora) == (6, 5, True)
    assert settings.targets == tuple(sorted({*policy.family.projections, *MLP}))
    started = load_policy(str(base.with_name("dense")), dtype=torch.float32, lora=settings, seed=3)
    assert all(torch.equal(tensor, policy.adapter_state()[name]) for name, tensor in started.adapter_state().items())
    assert len(started.adapter_state()) == len(policy.adapter_state())
    with pytest.raises(ValueError, match=r"model\.lora\.expert_rank is 4 and the adapter .* has 5"):
        LoraSettings(start=str(folder), expert_rank=4)


@pytest.mark.parametrize("prefix", ["experts.", ""])
def test_a_start_may_name_the_experts_weights_by_their_last_components_as_peft_does(saved, tmp_path, prefix):
    shutil.copytree(saved[1], tmp_path / "renamed")
    file = tmp_path / "renamed" / "adapter_config.json"
    file.write_text(file.read_text().replace('"mlp.experts.', f'"{prefix}'))
    whole, short = (LoraSettings(start=str(folder)) for folder in (saved[1], tmp_path / "renamed"))
    assert f'"{prefix}down_proj"' in file.read_text()
    assert replace(short, start=whole.start) == whole


@pytest.mark.parametrize(
    "fields",
    [
        {"target_parameters": ["mlp.experts.down_proj"]},
        {"rank_pattern": {"mlp.experts.down_proj": 2, "mlp.experts.gate_up_proj": 4}},
        {"alpha_pattern": {"mlp.experts.down_proj": 3.0, "mlp.experts.gate_up_proj": 3.0}},
        {"rank_pattern": {"q_proj": 2}},
        {"target_parameters": None},
    ],
)
def test_a_start_with_other_adapters_on_experts_is_refused(saved, tmp_path, fields):
    shutil.copytree(saved[1], tmp_path / "changed")
    file = tmp_path / "changed" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(
        ValueError, match=r"expected mlp\.experts\.gate_up_proj and mlp\.experts\.down_proj with one rank"
    ):
        LoraSettings(start=str(tmp_path / "changed"))


def test_the_merged_weights_compute_what_the_adapter_does(base, tmp_path):
    policy = load(base, rslora=True)
    policy.load_adapter_state(random_adapter(policy, seed=1))
    shutil.copytree(base.with_name("dense"), tmp_path / "merged", ignore=shutil.ignore_patterns("*.safetensors*"))
    merged = {name: tensor.contiguous() for name, tensor in merged_tensors(policy)}
    save_file(merged, tmp_path / "merged" / "model.safetensors")
    model = load_base(tmp_path / "merged", dtype=torch.float32, device="cpu")
    torch.testing.assert_close(logits(model), logits(policy.model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ("q_proj", "gate_proj")}, r"targets is \['gate_proj', 'q_proj'\].*name all three or none"),
        ({"targets": ("gate_proj", "up_proj", "down_proj")}, "and at least one linear of attention"),
        ({"targets": ATTENTION, "expert_rank": 4}, "targets lacks gate_proj, up_proj or down_proj; set it to null"),
        ({"dropout": 0.1}, r"dropout is 0.1, which adapters on experts do not support"),
        ({"expert_rank": -1}, "expert_rank is -1; expected 0 or more"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(base, settings, message):
    with pytest.raises(ValueError, match=message) as error:
        load(base, **settings)
    assert "\n" not in str(error.value)


def test_a_rank_of_experts_is_refused_for_a_base_without_experts():
    with pytest.raises(ValueError, match=r"expert_rank is 4 and model\.base has no experts; set it to null"):
        LoraSettings(expert_rank=4).of_base(0)


@pytest.mark.parametrize(("saved", "started"), [(2, 0), (0, 2), (None, 2)])
def test_a_run_is_not_resumed_with_another_rank_on_experts(base, saved, started):
    """Checkpoints of earlier versions have no rank (None) where experts had no adapters."""
    before, now = (
        run_identity(base=str(base), lora=LoraSettings(expert_rank=rank or 0), seed=0) for rank in (saved, started)
    )
    if saved is None:
        del before["lora.expert_rank"]
    check_identity(before, run_identity(base=str(base), lora=LoraSettings(expert_rank=saved or 0), seed=0))
    with pytest.raises(ValueError, match=rf"lora\.expert_rank: the run has {saved or 0}, this start has {started}"):
        check_identity(before, now)
