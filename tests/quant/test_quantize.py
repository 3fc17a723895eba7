"""The command that quantises a checkpoint: what it writes, which linear layers share a tensor scale, and how it stops
and continues."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from qerl_pl.__main__ import main as program
from qerl_pl.model.layers import block_of
from qerl_pl.model.quantization import Method
from qerl_pl.quant import quantize
from qerl_pl.quant.calibration import Calibration
from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.layouts import WRITERS
from qerl_pl.quant.loading import empty_model, load_base
from qerl_pl.quant.nvfp4 import tensor_scale
from qerl_pl.quant.output import OutputFolder
from qerl_pl.quant.quantize import VERSION, quantize_checkpoint
from qerl_pl.quant.selection import OutputFile, block_weights, fused_groups
from tests.families import NAMES, SIZES, tiny_config
from tests.packed import quantize_nvfp4
from tests.quant.published import read_all, rewrite
from tests.reference.dequantize import dequantize_reference


def interrupted_at(name: str) -> Callable[..., Any]:
    """Return a replacement of the function that quantises the tensors of an output file: for the file ``name`` it
    raises KeyboardInterrupt, as Ctrl-C would."""
    original = quantize.pack_file

    def pack(file: OutputFile, *more: Any) -> Any:
        if file.name == name:
            raise KeyboardInterrupt
        return original(file, *more)

    return pack


def dense_of(tensors: dict[str, Tensor], name: str) -> Tensor:
    parts = (tensors[f"{name}.{leaf}"] for leaf in ("weight_packed", "weight_scale", "weight_global_scale"))
    codes, scale, divisor = parts
    return dequantize_reference(PackedWeight(codes, scale.view(torch.uint8), 1 / divisor[0].double()))


@pytest.mark.parametrize(("architecture", "shard"), [("qwen2", "60KB"), ("qwen3", "5GB"), ("llama", "5GB")])
def test_linears_are_rounded_to_nearest_and_everything_else_is_copied(make_checkpoint, tmp_path, architecture, shard):
    path = make_checkpoint(architecture, shard=shard)
    reports = quantize_checkpoint(path, tmp_path / "out")
    source, written = read_all(path), read_all(tmp_path / "out")
    packed = {report.name for report in reports}
    assert len(packed) == 14
    for name, tensor in source.items():
        module = name.removesuffix(".weight")
        if module not in packed:
            assert torch.equal(written[name], tensor), name
            assert written[name].dtype == tensor.dtype
    for block in range(2):
        attention, mlp = f"model.layers.{block}.self_attn", f"model.layers.{block}.mlp"
        fused = [[f"{attention}.{leaf}_proj" for leaf in "qkv"], [f"{mlp}.gate_proj", f"{mlp}.up_proj"]]
        for group in [*fused, [f"{attention}.o_proj"], [f"{mlp}.down_proj"]]:
            weights = {name: source[f"{name}.weight"].float() for name in group}
            shared = tensor_scale(torch.stack([weight.abs().max() for weight in weights.values()]).max())
            for name, weight in weights.items():
                assert torch.equal(dense_of(written, name), dequantize_reference(quantize_nvfp4(weight, shared)))
                assert f"{name}.weight" not in written


def test_each_report_says_what_the_written_weights_say(make_checkpoint, tmp_path):
    path = make_checkpoint()
    reports = quantize_checkpoint(path, tmp_path / "out")
    source, written = read_all(path), read_all(tmp_path / "out")
    for report in reports:
        weight = source[f"{report.name}.weight"].double()
        error = dense_of(written, report.name).double() - weight
        assert report.shape == tuple(weight.shape)
        assert report.weight_error == pytest.approx((error.norm() / weight.norm()).item(), rel=1e-5)
        assert report.max_error == pytest.approx((error.abs().max() / weight.abs().max()).item(), rel=1e-5)
        assert report.outlier_ratio == pytest.approx((weight.abs().max() / weight.square().mean().sqrt()).item(), 1e-5)
        assert 0.05 < report.weight_error < 0.15  # Gaussian weights in NVFP4
    on_disk = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert [layer["name"] for layer in on_disk["layers"]] == [report.name for report in reports]
    assert (on_disk["format"], on_disk["method"], on_disk["version"]) == ("nvfp4", "rtn", VERSION)


@pytest.mark.parametrize(("name", "preset"), [("nvfp4", NVFP4A16), ("mxfp4", MXFP4A16)])
def test_the_config_says_what_compressed_tensors_calls_the_scheme(name, preset):
    parsed = QuantizationConfig.model_validate(WRITERS[name].config(["lm_head"], torch.bfloat16))
    scheme = parsed.config_groups["group_0"]
    assert not isinstance(scheme, list)
    assert scheme.weights is not None
    assert scheme.weights.model_dump() == preset["weights"].model_dump()
    assert scheme.input_activations is None
    assert scheme.targets == ["Linear"]
    assert parsed.ignore == ["lm_head"]
    assert parsed.quantization_status.value == "compressed"


def test_small_files_are_copied_and_foreign_weights_and_code_are_not(make_checkpoint, tmp_path):
    path, out = make_checkpoint(shard="60KB"), tmp_path / "out"
    carried = {"LICENSE", "chat_template.jinja", "merges_of_mine.json"}
    left = {"modeling.py", "run.sh", "lib.so", "weights.pkl", "program", "pytorch_model.bin"}
    for name in carried | left:
        (path / name).write_text("text")
    quantize_checkpoint(path, out)
    names = {file.name for file in out.iterdir()}
    assert {*carried, "tokenizer.json"} <= names
    assert not names & left
    assert (out / "generation_config.json").read_bytes() == (path / "generation_config.json").read_bytes()
    (tmp_path / "new").write_text("")  # permissions are those of any new file
    assert {file.stat().st_mode for file in out.iterdir()} == {(tmp_path / "new").stat().st_mode}
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {file.name for file in out.glob("*.safetensors")}
    assert index.keys() == read_all(out).keys()
    source, written = (json.loads((folder / "config.json").read_text()) for folder in (path, out))
    assert written.pop("quantization_config")["format"] == "nvfp4-pack-quantized"
    assert written == source


CALIBRATION = Calibration(torch.randint(0, 38, (16, 64), generator=torch.Generator().manual_seed(0)), "random tokens")


@pytest.mark.parametrize(
    ("at", "settings"),
    [
        (3, {}),
        pytest.param(3, {"format": "nvfp4", "method": "gptq", "calibration": CALIBRATION}, marks=pytest.mark.slow),
        pytest.param(3, {"format": "nf4", "method": "gptq", "calibration": CALIBRATION}, marks=pytest.mark.long),
        (2, {"calibration": CALIBRATION, "residual": 3}),
        (3, {"calibration": CALIBRATION, "residual": 3}),
    ],
)
def test_a_stopped_run_continues_and_ends_with_the_same_bytes(make_checkpoint, tmp_path, monkeypatch, at, settings):
    path, straight, out = make_checkpoint(), tmp_path / "straight", tmp_path / "out"
    quantize_checkpoint(path, straight, **settings)
    monkeypatch.setattr(quantize, "pack_file", interrupted_at(f"model-0000{at}-of-00003.safetensors"))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(path, out, **settings)
    monkeypatch.undo()
    assert not out.exists()
    written = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out.partial").glob("*.safetensors")}
    assert len(written) == at - 1
    with pytest.raises(ValueError, match="unfinished run with other settings"):
        quantize_checkpoint(path, out, **settings, ignore=["lm_head", "model.layers.0.mlp.down_proj"])
    quantize_checkpoint(path, out, **settings)
    assert written.items() <= {file.name: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}.items()
    files = {file.relative_to(straight) for file in straight.rglob("*") if file.is_file()}
    assert {file.relative_to(out) for file in out.rglob("*") if file.is_file()} == files
    for file in files - {Path("start/adapter_config.json")}:  # it names its base by path
        assert (out / file).read_bytes() == (straight / file).read_bytes(), file
    assert not (tmp_path / "out.partial").exists()


def test_a_full_disk_is_one_line_and_the_next_run_completes(make_checkpoint, tmp_path, capsys):
    command = ["--device", "cpu", "--model", str(make_checkpoint(vocab_size=160)), "--output", str(tmp_path / "out")]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))  # a block fits, the embeddings do not
    try:
        assert program(["quantize", *command]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "model-00001-of-00003.safetensors" in error
    assert program(["quantize", *command]) == 0


@pytest.mark.parametrize("family", NAMES)
def test_every_parameter_of_a_block_is_listed_once_and_every_matrix_is_of_a_known_kind(family):
    model = empty_model(tiny_config(family), torch.bfloat16)
    listed = list(block_weights(model))
    assert [weight.name for weight in listed] == [name for name, _ in model.named_parameters() if block_of(name)]
    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {weight.name for weight in listed if weight.kind == "linear"} == linears - {"lm_head.weight"}


def test_stacked_experts_are_refused_and_not_left_dense_without_a_word():
    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=32))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.\S+ \[4, .* expected linears and convolutions"):
        list(block_weights(model))


def test_fused_linears_form_groups_in_order():
    names = ["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj", "b.gate_proj", "b.up_proj", "b.down_proj", "lm_head"]
    assert fused_groups(names[:2], {*names[:2], "model.layers.9.self_attn.v_proj"}) == {names[0]: names[:2]}
    assert list(fused_groups(names).values()) == [names[:3], names[3:4], names[4:6], names[6:7], names[7:]]


def test_a_regular_expression_ignores_from_the_start_of_the_name(make_checkpoint, tmp_path):
    reports = quantize_checkpoint(make_checkpoint(), tmp_path / "out", ignore=["lm_head", r"re:model\.layers\.0\."])
    assert {report.name.split(".")[2] for report in reports} == {"1"}
    reports = quantize_checkpoint(make_checkpoint(), tmp_path / "head", ignore=[r"re:model\."])
    assert [report.name for report in reports] == ["lm_head"]
    load_base(tmp_path / "head", dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        (["lm_heat"], "'lm_heat' matches no linear"),
        (["lm_head", "model.layers.0.self_attn.k_proj"], "engines fuse .* not only .*k_proj"),
        ([], "lm_head shares its weight with the embeddings"),
        (["re:.*"], "leaves no linear"),
        (["re:("], r"'re:\(' is no regular expression"),
    ],
)
def test_an_ignore_list_that_cannot_work_is_refused(make_checkpoint, tmp_path, ignore, message):
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(make_checkpoint(tied=True), tmp_path / "out", ignore=ignore)
    assert list(tmp_path.glob("out*")) == []


def test_the_command_prints_one_line_for_what_a_user_can_mend(make_checkpoint, tmp_path, capsys):
    path, out = str(make_checkpoint()), tmp_path / "out"

    def fails_with(message: str, *arguments: str) -> None:
        capsys.readouterr()
        assert program(["quantize", "--device", "cpu", "--output", str(out), *arguments]) in (1, 2)
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert message in error

    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        program(["quantize", "--model", str(tmp_path / "nowhere"), "--output", str(out)])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"there is no folder {tmp_path / 'nowhere'}" in error
    assert program(["quantize", "--device", "cpu", "--model", path, "--output", str(out)]) == 0
    assert "14 linears packed" in capsys.readouterr().out
    fails_with("is not an empty folder", "--model", path)
    out = tmp_path / "again"
    fails_with("is quantised already", "--model", str(tmp_path / "out"))
    fails_with("matches no linear", "--model", path, "--ignore", "nothing")
    out = Path("/proc/out")
    fails_with("/proc/out", "--model", path)


def test_an_unknown_format_or_method_is_refused_by_the_parser(capsys):
    for option in (["--format", "int3"], ["--method", "guess"]):
        with pytest.raises(SystemExit) as exit_info:
            program(["quantize", "--model", ".", "--output", "o", *option])
        assert exit_info.value.code == 2
        assert "invalid choice" in capsys.readouterr().err


def with_number(weight: Tensor, number: float) -> Tensor:
    changed = weight.clone()
    changed.view(-1)[7] = number
    return changed


OF_BLOCK, NORM, EMBEDDING = "layers.0.mlp.up_proj.weight", "layers.0.input_layernorm.weight", "embed_tokens.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (EMBEDDING, lambda weight: with_number(weight, float("nan")), "NAME holds NaN or infinity"),
        (OF_BLOCK, lambda weight: with_number(weight, float("inf")), "NAME holds NaN or infinity"),
        (OF_BLOCK, lambda weight: with_number(weight, 3e38), r"NAME holds .*e\+38; expected weights of at most"),
        (OF_BLOCK, lambda weight: weight[:-1], r"NAME is BF16 .* expects floating point and \[.*\] for it"),
        (NORM, lambda weight: weight[:-1], r"NAME is BF16 .* expects floating point and \[.*\] for it"),
        (NORM, lambda weight: weight.to(torch.int8), "NAME is I8 .* expects floating point"),
        (OF_BLOCK, None, "is an incomplete checkpoint: NAME missing"),
        ("norm.weight", None, "is an incomplete checkpoint: NAME missing"),
    ],
)
def test_weights_that_no_model_has_are_refused_by_name_and_nothing_is_left(
    make_checkpoint, tmp_path, name, change, message
):
    path = make_checkpoint("qwen3")
    tensors = read_all(path)
    weight = tensors.pop(f"model.{name}")
    rewrite(path, tensors if change is None else {**tensors, f"model.{name}": change(weight).contiguous()})
    with pytest.raises(ValueError, match=message.replace("NAME", f"model.{name}")) as refused:
        quantize_checkpoint(path, tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("out*"))


# ---- calibrated methods ----------------------------------------------------------------------------------------------


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(CALIBRATION.tokens).logits.float()


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["qwen2", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3", "llama"))]
)
def test_gptq_is_better_than_rounding_to_nearest(make_checkpoint, tmp_path, architecture):
    path = make_checkpoint(architecture, dtype=torch.float32)
    dense = logits(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    errors, gaps = {}, {}
    for method in get_args(Method):
        layers = quantize_checkpoint(path, tmp_path / method, method=method, calibration=CALIBRATION)
        # Only in the first block do both methods have the same inputs; inputs of later blocks depend on the method.
        errors[method] = sum((layer.output_error or 0.0) ** 2 for layer in layers if "layers.0." in layer.name)
        packed = load_base(tmp_path / method, dtype=torch.float32, device="cpu")
        gaps[method] = (logits(packed) - dense).square().mean().item()
    assert errors["gptq"] < errors["rtn"]
    assert gaps["gptq"] < gaps["rtn"]


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
    quantize_checkpoint(path, tmp_path / "out", method="gptq", calibration=CALIBRATION)
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert report["method"] == "gptq"
    assert report["calibration"] == {"source": "random tokens", "shape": [16, 64]}
    assert len(report["layers"]) == 2 * 7


def test_gptq_without_what_it_needs_is_refused(make_checkpoint, tmp_path):
    path = make_checkpoint()
    with pytest.raises(ValueError, match="gptq needs calibration data"):
        quantize_checkpoint(path, tmp_path / "out", method="gptq")
    ignore = ["model.layers.0.mlp.down_proj"]
    with pytest.raises(ValueError, match=r"decoder blocks only; add \['lm_head'\] to ignore"):
        quantize_checkpoint(path, tmp_path / "out", method="gptq", ignore=ignore, calibration=CALIBRATION)


def test_the_command_calibrates(make_checkpoint, tmp_path, capsys):
    path, text = make_checkpoint(), tmp_path / "text.txt"
    text.write_text("abcdefghijklmnopqrstuvwxyz0123456789" * 20)
    command = ["quantize", "--model", str(path), "--device", "cpu", "--calibration", str(text), "--length", "32"]
    assert program([*command, "--output", str(tmp_path / "out"), "--samples", "8"]) == 0
    assert json.loads((tmp_path / "out" / "quantization_report.json").read_text())["method"] == "gptq"
    assert "relative output error on calibration data at most 0." in capsys.readouterr().out
    assert program([*command, "--output", str(tmp_path / "more"), "--method", "gptq", "--samples", "99"]) == 2
    assert "lower --samples or --length" in capsys.readouterr().err


def test_a_finished_file_that_is_gone_is_an_error_and_is_not_counted_as_finished_again(tmp_path):
    folder = OutputFolder(tmp_path / "out", {})
    for name in ("a.safetensors", "b.safetensors"):
        folder.add(name, {name: torch.ones(2)})
    (folder.partial / "a.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.safetensors"), folder:
        folder.finish(tmp_path, {})
    assert not (tmp_path / "out").exists()
    assert [*OutputFolder(tmp_path / "out", {}).done] == ["b.safetensors"]
