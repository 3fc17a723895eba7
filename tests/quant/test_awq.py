"""AWQ: the scales that are folded into other weights leave the dense model's output alone, bit for bit, and reduce the
error of the packed one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from qerl_pl.model.family import FAMILIES, Family
from qerl_pl.model.layers import head_dims
from qerl_pl.quant.awq import fold_block
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.quant.rounding import output_error, pack_weight
from tests.families import NAMES, tiny_config
from tests.rollout.conftest import save_dense

TOKENS = torch.arange(40).view(2, 20)


BLOCK = "model.layers.0"


def block_tensors(path: Path, block: str) -> dict[str, Tensor]:
    tensors = load_file(path / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith(f"{block}.")}


def small_weights_on_large_inputs(weight: Tensor) -> Tensor:
    """Shrink every eighth column of a weight in place, and return second moments of inputs [K, K] by which these
    columns matter most."""
    weight[:, 3::8] *= 0.05
    spread = torch.ones(weight.shape[1])
    spread[3::8] = 64
    return torch.outer(spread, spread) * (0.1 + torch.eye(len(spread)))


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float32) for family in NAMES), ("qwen2", torch.bfloat16)]
)
def test_the_folds_of_each_family_leave_its_dense_model_alone_bit_for_bit(tmp_path, family, dtype):
    save_dense(tmp_path, tiny_config(family))
    file, described = tmp_path / "model.safetensors", FAMILIES[family]
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    firsts = [f"model.layers.{number}.{group[0]}.weight" for number in range(2) for group, _ in described.scale_sources]
    moments = {
        name.removesuffix(".weight"): small_weights_on_large_inputs(tensors[name]) for name in firsts if name in tensors
    }

    def logits() -> Tensor:
        save_file(tensors, file, metadata={"format": "pt"})
        model: nn.Module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        with torch.no_grad():
            return model(TOKENS).logits

    before, num_folds = logits(), 0
    for number, dim in enumerate(head_dims(tiny_config(family))):
        block = f"model.layers.{number}"
        measured = {name: moment for name, moment in moments.items() if name.startswith(f"{block}.")}
        part = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{block}.")}
        folds = fold_block(block, part, measured, NVFP4, family=described, head_dim=dim)
        num_folds += sum(fold.smallest != fold.largest for fold in folds)
        tensors |= part
    assert num_folds > 2
    assert torch.equal(logits(), before)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_a_folded_block_has_a_lower_error_and_moments_that_match_its_inputs(make_checkpoint, architecture):
    path = make_checkpoint(architecture)
    tensors = block_tensors(path, BLOCK)
    firsts = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
    moments = {f"{BLOCK}.{leaf}": small_weights_on_large_inputs(tensors[f"{BLOCK}.{leaf}.weight"]) for leaf in firsts}

    def outputs() -> dict[str, Tensor]:  # W H W^T, the second moment of the outputs, whoever scales what
        weights = {name: tensors[f"{name}.weight"].double() for name in moments}
        return {name: weights[name] @ moments[name].double() @ weights[name].T for name in moments}

    def errors() -> float:
        total = 0.0
        for name, moment in moments.items():
            weight = tensors[f"{name}.weight"].float()
            packed = pack_weight(weight, MXFP4, torch.ones(()), "mse", moment)
            total += output_error(weight, MXFP4.dequantize(packed, torch.float32), moment)
        return total

    before, error = outputs(), errors()
    folds = fold_block(BLOCK, tensors, moments, MXFP4, family=Family(), head_dim=24 if architecture == "qwen3" else 16)
    assert [fold.into.removeprefix(f"{BLOCK}.") for fold in folds] == [
        "self_attn.v_proj",
        "mlp.up_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ]
    assert all(fold.exponent > 0 and fold.smallest < fold.largest for fold in folds)
    assert errors() < 0.2 * error
    after = outputs()
    for name in moments.keys() - {f"{BLOCK}.self_attn.q_proj", f"{BLOCK}.mlp.gate_proj"}:
        torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-5)


def test_linears_that_nothing_known_precedes_are_refused():
    with pytest.raises(ValueError, match=r"awq knows no norm or linear before \['b\.mlp\.router'\]"):
        fold_block("b", {}, {"b.mlp.router": torch.eye(16)}, NVFP4, family=Family(), head_dim=16)
