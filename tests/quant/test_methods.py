"""Whole checkpoints by calibrated methods: what they gain, what they say about it, and that they continue."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from qerl_pl.quant.calibration import Calibration
from qerl_pl.quant.loading import load_base
from qerl_pl.quant.quantize import quantize_checkpoint
from qerl_pl.tools.quantize import main

TOKENS = torch.randint(0, 38, (16, 64), generator=torch.Generator().manual_seed(0))
CALIBRATION = Calibration(TOKENS, "random tokens")


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "methods"),
    [("qwen2", ["rtn", "mse", "awq", "gptq"]), ("qwen3", ["rtn", "awq"]), ("llama", ["rtn", "awq"])],
)
def test_each_method_is_better_than_rounding_to_nearest(make_checkpoint, tmp_path, architecture, methods):
    path = make_checkpoint(architecture, dtype=torch.float32)
    dense = logits(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    errors, gaps = {}, {}
    for method in methods:
        layers = quantize_checkpoint(path, tmp_path / method, method=method, calibration=CALIBRATION)
        # The first block reads the same inputs whatever the method; those of later blocks are what the method left.
        errors[method] = sum((layer.output_error or 0.0) ** 2 for layer in layers if "layers.0." in layer.name)
        packed = load_base(tmp_path / method, dtype=torch.float32, device="cpu")
        gaps[method] = (logits(packed) - dense).square().mean().item()
    for method in methods[1:]:
        assert errors[method] < errors["rtn"]
        assert gaps[method] < gaps["rtn"]
    assert min(gaps, key=lambda method: gaps[method]) == methods[-1]


def test_output_errors_are_measured_after_the_packed_blocks_before(make_checkpoint, tmp_path):
    path = make_checkpoint(dtype=torch.float32)
    layers = quantize_checkpoint(path, tmp_path / "out", calibration=CALIBRATION)
    packed = load_base(tmp_path / "out", dtype=torch.float32, device="cpu")
    dense = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    name = "model.layers.1.self_attn.k_proj"
    seen: list[Tensor] = []
    packed.get_submodule(name).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits(packed)
    weight = dense.get_parameter(f"{name}.weight").detach()
    rounded = packed.get_submodule(name)(seen[0]) - packed.get_buffer(f"{name}.bias")
    expected = (rounded - seen[0] @ weight.T).norm() / (seen[0] @ weight.T).norm()
    (reported,) = (layer.output_error for layer in layers if layer.name == name)
    assert reported == pytest.approx(expected.item(), 1e-3)


def test_the_output_says_what_was_done(make_checkpoint, tmp_path):
    path = make_checkpoint()
    quantize_checkpoint(path, tmp_path / "out", method="awq", calibration=CALIBRATION)
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert report["method"] == "awq"
    assert report["calibration"] == {"source": "random tokens", "shape": [16, 64]}
    assert len(report["folds"]) == 2 * 4
    source, written = (
        load_file(path / "model.safetensors"),
        load_file(tmp_path / "out/model-00002-of-00003.safetensors"),
    )
    for fold in report["folds"][2:4]:
        assert fold["into"] in ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
        ratio = source[f"{fold['into']}.weight"].float() / written[f"{fold['into']}.weight"].float()
        assert (ratio.min().item(), ratio.max().item()) == (fold["smallest"], fold["largest"])


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_method_without_what_it_needs_is_refused(make_checkpoint, tmp_path, method):
    path = make_checkpoint()
    with pytest.raises(ValueError, match=f"{method} needs calibration data"):
        quantize_checkpoint(path, tmp_path / "out", method=method)
    ignore = ["model.layers.0.mlp.down_proj"]
    with pytest.raises(ValueError, match=r"decoder blocks only; add \['lm_head'\] to ignore"):
        quantize_checkpoint(path, tmp_path / "out", method=method, ignore=ignore, calibration=CALIBRATION)


def test_the_command_calibrates(make_checkpoint, tmp_path, capsys):
    path, text = make_checkpoint(), tmp_path / "text.txt"
    text.write_text("abcdefghijklmnopqrstuvwxyz0123456789" * 20)
    command = ["--model", str(path), "--device", "cpu", "--calibration", str(text), "--length", "32"]
    assert main([*command, "--output", str(tmp_path / "out"), "--method", "gptq", "--samples", "8"]) == 0
    assert "relative output error on calibration data at most 0." in capsys.readouterr().out
    assert main([*command, "--output", str(tmp_path / "more"), "--method", "gptq", "--samples", "99"]) == 2
    assert "lower --samples or --length" in capsys.readouterr().err
