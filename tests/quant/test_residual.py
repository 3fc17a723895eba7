"""Tests of adapters that start as an approximation of the quantisation error (dense minus quantised weight): no product
B A of the same rank has a smaller error of the layer's outputs, and PEFT reads the folder that is written."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from qerl_pl.__main__ import main as program
from qerl_pl.model.files import Checkpoint
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.quant.blockwise import BlockStream
from qerl_pl.quant.calibration import Calibration
from qerl_pl.quant.loading import meta_model
from qerl_pl.quant.quantize import quantize_checkpoint
from qerl_pl.quant.residual import residual_factors
from tests.families import tiny_config
from tests.rollout.conftest import save_dense

SHAPES = [(12, 12), (5, 17), (23, 6), (1, 7), (7, 1)]
TOKENS = torch.randint(0, 38, (16, 64), generator=torch.Generator().manual_seed(0))
CALIBRATION = Calibration(TOKENS, "random tokens")


def drawn(shape: tuple[int, int], *, tokens: int = 60, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Draw a residual [N, K] (a dense weight minus its quantised weight), and inputs [T, K] of its linear layer, whose
    channels are correlated and of very different sizes."""
    generator = torch.Generator().manual_seed(sum(shape))
    residual = torch.randn(shape, generator=generator, dtype=torch.float64)
    mix = torch.randn(shape[1], shape[1], generator=generator, dtype=torch.float64)
    inputs = torch.randn(tokens, shape[1], generator=generator, dtype=torch.float64) @ mix
    inputs[:, 0] *= 1000
    return residual.to(dtype), inputs


def moment_of(inputs: Tensor) -> Tensor:
    return inputs.T @ inputs / len(inputs)


def output_error(error: Tensor, inputs: Tensor) -> float:
    return (inputs @ error.double().T).square().sum(1).mean().item()


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_product_of_this_rank_has_a_smaller_output_error(shape, rank):
    """By the theorem of Eckart and Young, no approximation of rank ``rank`` has a smaller squared error of the outputs
    than the sum of the outputs' squared singular values without the ``rank`` largest ones. The adapter reaches this
    bound."""
    residual, inputs = drawn(shape)
    a, b = residual_factors(residual, moment_of(inputs), rank)
    assert (a.shape, b.shape) == ((rank, shape[1]), (shape[0], rank))
    assert (a.dtype, b.dtype) == (torch.float32, torch.float32)
    singular = torch.linalg.svdvals(inputs @ residual.T)
    least, most = (singular[start:].square().sum().item() / len(inputs) for start in (rank, 0))
    assert output_error(residual - b.double() @ a.double(), inputs) == pytest.approx(least, rel=1e-5, abs=1e-11 * most)


@pytest.mark.parametrize("spread", [0.0, 1.5], ids=["equal channels", "outlier channels"])
@pytest.mark.parametrize("shape", [(72, 90), (90, 72)])
def test_large_matrices_leave_hardly_more_than_the_least_error(shape, spread):
    """Matrices with both sides above 4 (2 rank + 10) get approximate directions. A residual of independent values whose
    inputs have equal mean squares has the least separate singular values, and so the worst approximation."""
    generator = torch.Generator().manual_seed(0)
    residual = torch.randn(shape, dtype=torch.float64, generator=generator)
    scales = (spread * torch.randn(shape[1], dtype=torch.float64, generator=generator)).exp()
    inputs = scales * torch.randn(200, shape[1], dtype=torch.float64, generator=generator)
    a, b = residual_factors(residual, moment_of(inputs), 3, generator=generator)
    assert min(shape) > 4 * (2 * 3 + 10)
    least = torch.linalg.svdvals(inputs @ residual.T)[3:].square().sum().item() / len(inputs)
    left = output_error(residual - b.double() @ a.double(), inputs)
    assert least * (1 - 1e-6) <= left <= least * (1.01 if spread == 0 else 1.0001)
    torch.testing.assert_close(a.norm(dim=1), b.norm(dim=0))


@pytest.mark.parametrize("shape", SHAPES)
def test_identity_moments_give_the_plain_singular_value_decomposition(shape):
    residual, _ = drawn(shape)
    a, b = residual_factors(residual, torch.eye(shape[1]), 2)
    u, s, v = torch.linalg.svd(residual, full_matrices=False)
    plain = u[:, :2] * s[:2] @ v[:2]
    torch.testing.assert_close(b.double() @ a.double(), plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.norm(dim=1)[: min(shape)], b.norm(dim=0)[: min(shape)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_full_rank_leaves_no_error_and_factors_that_can_be_trained(shape, dtype):
    residual, inputs = drawn(shape, dtype=dtype)
    for moment in (moment_of(inputs), torch.zeros(shape[1], shape[1])):
        a, b = residual_factors(residual, moment, min(shape) + 2)
        torch.testing.assert_close(b @ a, residual.float(), rtol=1e-5, atol=1e-5)
        assert a.norm(dim=1).min() > 0, "a row of zeros with a column of zeros has no gradient"


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_input_has_a_larger_error_whatever_was_measured(shape, tokens):
    residual, inputs = drawn(shape, tokens=tokens)
    inputs[:, -1] = 0
    never_seen = torch.randn(50, shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for moment in (moment_of(inputs), torch.zeros(shape[1], shape[1]), -1e-9 * torch.eye(shape[1])):
        a, b = residual_factors(residual, moment, 2)
        after, before = (never_seen @ error.T for error in (residual - b.double() @ a.double(), residual))
        assert (after.norm(dim=1) <= before.norm(dim=1) + 1e-5).all()


def test_a_residual_of_zero_gives_a_fresh_adapter():
    a, b = residual_factors(torch.zeros(6, 8), torch.eye(8), 3, generator=torch.Generator().manual_seed(0))
    assert not b.any()
    assert 0 < a.abs().max() <= 8**-0.5


def test_moments_in_fp64_are_positive_where_one_channel_is_a_million_times_the_others(make_checkpoint):
    path = make_checkpoint(dtype=torch.float32)
    checkpoint, block = Checkpoint(path), "model.layers.0"
    tensors = {name: checkpoint.read(name) for name in checkpoint.names() if name.startswith(f"{block}.")}
    tensors[f"{block}.mlp.up_proj.weight"][3] *= 1e6
    name = f"{block}.mlp.down_proj"
    moment = BlockStream(meta_model(path), checkpoint, TOKENS, "cpu").second_moments(
        block, tensors, [name], dtype=torch.float64
    )[name]
    scale = moment.diagonal().sqrt()
    assert moment.dtype == torch.float64
    assert scale.max() > 1e5 * scale.median()
    assert torch.linalg.eigvalsh(moment / torch.outer(scale, scale)).min() > 0


def test_the_folder_is_one_that_peft_reads(make_checkpoint, tmp_path):
    path, out = make_checkpoint(dtype=torch.float32), tmp_path / "out"
    ignore = ["lm_head", r"re:model\.layers\.1\."]
    quantize_checkpoint(path, out, calibration=CALIBRATION, ignore=ignore, residual=4)
    written = load_file(out / "start" / "adapter_model.safetensors")
    config = json.loads((out / "start" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 4, str(out.resolve()))
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), str(out / "start"), is_trainable=True
    )
    named = {name.replace(".default", ""): tensor for name, tensor in adapted.named_parameters() if "lora_" in name}
    assert named.keys() == written.keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in written.items())
    assert {name.split(".")[4] for name, tensor in written.items() if "lora_B" in name and tensor.any()} == {"0"}
    assert not (out / "start.parts").exists()


@torch.no_grad()
def logprobs(base: Path, lora: LoraSettings) -> Tensor:
    tokens = TOKENS[:4]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    return (
        load_policy(str(base), dtype=torch.float32, lora=lora, seed=0).token_stats(tokens, mask, temperature=1).logprobs
    )


@pytest.mark.parametrize(
    ("architecture", "method"), [("qwen2", "rtn"), ("qwen2", "gptq"), ("phi3", "rtn"), ("qwen3_5_text", "rtn")]
)
def test_a_run_that_starts_from_the_folder_is_nearer_to_the_dense_model(tmp_path, architecture, method):
    """Phi-3 is tested because it stores q_proj, k_proj and v_proj as one linear layer, and Qwen3.5 because its blocks
    have different linear layers."""
    dense, packed = tmp_path / "dense", tmp_path / "packed"
    save_dense(dense, CONFIG_MAPPING[architecture].from_dict(tiny_config(architecture).to_dict()))
    quantize_checkpoint(dense, packed, method=method, calibration=CALIBRATION, residual=8)
    whole, without = (logprobs(base, LoraSettings()) for base in (dense, packed))
    start = logprobs(packed, LoraSettings(start=str(packed / "start")))
    assert (start - whole).square().mean() < 0.8 * (without - whole).square().mean()


def test_the_command_says_what_the_residual_needs_and_where_it_is(make_checkpoint, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("abcdefgh" * 40)
    command = ["--device", "cpu", "--model", str(make_checkpoint()), "--output", str(out), "--residual", "2"]
    assert program(["quantize", *command]) == 2
    assert "a residual of rank 2 needs calibration data: give --calibration" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
    assert program(["quantize", *command, "--calibration", str(text), "--samples", "4", "--length", "32"]) == 0
    assert f"--model.lora.start {out / 'start'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("residual", "tokens", "message"),
    [
        (65, 64, r"the rank of the residual is 65; expected at least 1 and at most the model's hidden_size \(64\)"),
        (0, 64, "the rank of the residual is 0; expected at least 1"),
        (None, 200, "calibration sequences have 200 tokens and the model has 128 positions"),
    ],
)
def test_what_no_run_could_start_from_is_refused_before_the_work(make_checkpoint, tmp_path, residual, tokens, message):
    calibration = Calibration(torch.zeros(2, tokens, dtype=torch.int64), "zeros")
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(make_checkpoint(), tmp_path / "out", calibration=calibration, residual=residual)
    assert not list(tmp_path.glob("out*"))
