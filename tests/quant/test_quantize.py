"""The offline quantiser: what it writes, what it shares, how it stops and continues."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from safetensors.torch import load_file, save_file
from torch import Tensor

from qerl_pl.quant import quantize
from qerl_pl.quant.layouts import WRITERS
from qerl_pl.quant.loading import load_base
from qerl_pl.quant.nvfp4 import NVFP4, NVFP4Weight, dequantize_reference, tensor_scale
from qerl_pl.quant.quantize import VERSION, quantize_checkpoint
from qerl_pl.quant.rounding import report_layer
from qerl_pl.quant.selection import OutputFile, fused_groups
from qerl_pl.tools.quantize import main
from tests.packed import quantize_nvfp4
from tests.quant.published import rewrite


def read_all(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def interrupted_at(name: str) -> Callable[..., Any]:
    """The function that packs a file, which Ctrl-C interrupts at the file of this name."""
    original = quantize.pack_file

    def pack(file: OutputFile, *more: Any) -> Any:
        if file.name == name:
            raise KeyboardInterrupt
        return original(file, *more)

    return pack


def dense_of(tensors: dict[str, Tensor], name: str) -> Tensor:
    parts = (tensors[f"{name}.{leaf}"] for leaf in ("weight_packed", "weight_scale", "weight_global_scale"))
    codes, scale, divisor = parts
    return dequantize_reference(NVFP4Weight(codes, scale.view(torch.uint8), 1 / divisor[0].double()))


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
        assert 0.05 < report.weight_error < 0.15  # Gaussian weights in NVFP4
    on_disk = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert [layer["name"] for layer in on_disk["layers"]] == [report.name for report in reports]
    assert (on_disk["format"], on_disk["method"], on_disk["version"]) == ("nvfp4", "rtn", VERSION)


def test_an_all_zero_weight_is_reported_without_error():
    report = report_layer("zero", torch.zeros(2, 32), quantize_nvfp4(torch.zeros(2, 32)), NVFP4)
    assert report.weight_error == 0


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


def test_small_files_are_copied_and_foreign_weights_are_not(make_checkpoint, tmp_path):
    path = make_checkpoint(shard="60KB")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "merges_of_mine.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"weights")
    out = tmp_path / "out"
    quantize_checkpoint(path, out)
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (out / "generation_config.json").read_bytes() == (path / "generation_config.json").read_bytes()
    assert (out / "merges_of_mine.json").exists()
    assert not (out / "pytorch_model.bin").exists()
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {file.name for file in out.glob("*.safetensors")}
    assert index.keys() == read_all(out).keys()
    source, written = (json.loads((folder / "config.json").read_text()) for folder in (path, out))
    assert written.pop("quantization_config")["format"] == "nvfp4-pack-quantized"
    assert written == source


def test_a_stopped_run_continues_and_ends_with_the_same_bytes(make_checkpoint, tmp_path, monkeypatch):
    path = make_checkpoint()
    quantize_checkpoint(path, tmp_path / "straight")
    monkeypatch.setattr(quantize, "pack_file", interrupted_at("model-00003-of-00003.safetensors"))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(path, tmp_path / "out")
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    finished = tmp_path / "out.partial" / "model-00002-of-00003.safetensors"
    written_at = finished.stat().st_mtime_ns
    with pytest.raises(ValueError, match="unfinished run with other settings"):
        quantize_checkpoint(path, tmp_path / "out", ignore=["lm_head", "model.layers.0.mlp.down_proj"])
    quantize_checkpoint(path, tmp_path / "out")
    out, straight = tmp_path / "out", tmp_path / "straight"
    assert (out / finished.name).stat().st_mtime_ns == written_at
    assert {file.name for file in out.iterdir()} == {file.name for file in straight.iterdir()}
    for file in straight.iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    assert not (tmp_path / "out.partial").exists()


def test_a_full_disk_is_one_line_and_the_next_run_completes(make_checkpoint, tmp_path, capsys):
    command = ["--device", "cpu", "--model", str(make_checkpoint(vocab_size=160)), "--output", str(tmp_path / "out")]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))  # a block fits, the embeddings do not
    try:
        assert main(command) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "model-00001-of-00003.safetensors" in error
    assert main(command) == 0


def test_only_the_head_can_be_packed(make_checkpoint, tmp_path):
    reports = quantize_checkpoint(make_checkpoint(), tmp_path / "out", ignore=[r"re:model\."])
    assert [report.name for report in reports] == ["lm_head"]
    load_base(tmp_path / "out", dtype=torch.bfloat16, device="cpu")


def test_fused_linears_form_groups_in_order():
    names = ["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj", "b.gate_proj", "b.up_proj", "b.down_proj", "lm_head"]
    assert fused_groups(names[:2], {*names[:2], "model.layers.9.self_attn.v_proj"}) == {names[0]: names[:2]}
    assert list(fused_groups(names).values()) == [names[:3], names[3:4], names[4:6], names[6:7], names[7:]]


def test_a_regular_expression_ignores_from_the_start_of_the_name(make_checkpoint, tmp_path):
    reports = quantize_checkpoint(make_checkpoint(), tmp_path / "out", ignore=["lm_head", r"re:model\.layers\.0\."])
    assert {report.name.split(".")[2] for report in reports} == {"1"}


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        (["lm_heat"], "'lm_heat' matches no linear"),
        (["lm_head", "model.layers.0.self_attn.k_proj"], "engines fuse .* not only .*k_proj"),
        ([], "lm_head shares its weight with the embeddings"),
        (["re:.*"], "leaves no linear"),
    ],
)
def test_an_ignore_list_that_cannot_work_is_refused(make_checkpoint, tmp_path, ignore, message):
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(make_checkpoint(tied=True), tmp_path / "out", ignore=ignore)
    assert list(tmp_path.glob("out*")) == []


def test_the_command_returns_2_and_one_line_for_what_a_user_can_mend(make_checkpoint, tmp_path, capsys):
    path, out = str(make_checkpoint()), tmp_path / "out"

    def fails_with(message: str, *arguments: str) -> None:
        capsys.readouterr()
        assert main(["--device", "cpu", "--output", str(out), *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert message in error

    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main(["--model", str(tmp_path / "nowhere"), "--output", str(out)])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"there is no folder {tmp_path / 'nowhere'}" in error
    assert main(["--device", "cpu", "--model", path, "--output", str(out)]) == 0
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
            main(["--model", ".", "--output", "o", *option])
        assert exit_info.value.code == 2
        assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"])
def test_weights_that_no_model_has_are_refused_and_named(make_checkpoint, tmp_path, name, number):
    path = make_checkpoint()
    tensors = load_file(path / "model.safetensors")
    tensors[name][1, 2] = number
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name):
        quantize_checkpoint(path, tmp_path / "out")
    assert not list(tmp_path.glob("out*")), "nothing that would be in the way of the next model"


@pytest.mark.parametrize("change", [lambda weight: weight[:-1], lambda weight: weight.to(torch.int8)])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"])
def test_weights_of_another_shape_or_of_integers_are_refused_before_work(make_checkpoint, tmp_path, name, change):
    path = make_checkpoint()
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, name: change(tensors[name]).contiguous()}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} is .* expects floating point and \[.*\] for it"):
        quantize_checkpoint(path, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_code_in_a_models_folder_is_not_carried_over(make_checkpoint, tmp_path):
    path = make_checkpoint()
    for name in ("modeling.py", "run.sh", "lib.so", "weights.pkl", "program", "LICENSE", "chat_template.jinja"):
        (path / name).write_text("text")
    quantize_checkpoint(path, tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"LICENSE", "chat_template.jinja", "tokenizer.json"} <= names
    assert not names & {"modeling.py", "run.sh", "lib.so", "weights.pkl", "program"}


def test_files_have_the_permissions_of_any_new_file(make_checkpoint, tmp_path):
    quantize_checkpoint(make_checkpoint(), tmp_path / "out")
    (tmp_path / "new").write_text("")
    assert {file.stat().st_mode for file in (tmp_path / "out").iterdir()} == {(tmp_path / "new").stat().st_mode}


def test_a_bad_regular_expression_is_refused(make_checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"'re:\(' is no regular expression"):
        quantize_checkpoint(make_checkpoint(), tmp_path / "out", ignore=["re:("])


@pytest.mark.parametrize("name", ["layers.1.mlp.down_proj.weight", "layers.0.mlp.up_proj.weight", "norm.weight"])
def test_half_a_checkpoint_is_refused_and_nothing_is_written(make_checkpoint, tmp_path, name):
    path = make_checkpoint("qwen3")
    tensors = read_all(path)
    del tensors[f"model.{name}"]
    rewrite(path, tensors)
    with pytest.raises(ValueError, match=f"is half a checkpoint: model.{name} missing") as refused:
        quantize_checkpoint(path, tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda scale: 0 * scale, r"weight_global_scale is \[0.0\], .*; expected a finite factor above 0"),
        (lambda scale: -scale, r"weight_global_scale is \[-.*; expected a finite factor above 0"),
        (lambda scale: scale.repeat(2), "weight_global_scale"),
    ],
)
def test_a_tensor_scale_that_is_no_positive_number_is_refused(make_checkpoint, tmp_path, change, said):
    quantize_checkpoint(make_checkpoint(), tmp_path / "out")
    file = tmp_path / "out" / "model-00002-of-00003.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("weight_global_scale"))
    save_file({**tensors, name: change(tensors[name])}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=said):
        load_base(tmp_path / "out", dtype=torch.float32, device="cpu")


def test_a_config_whose_groups_are_not_those_of_the_weights_is_refused(make_checkpoint, tmp_path):
    quantize_checkpoint(make_checkpoint(), tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    file.write_text(file.read_text().replace('"group_size": 16', '"group_size": 32'))
    with pytest.raises(ValueError, match="group_size 32; its format has 16 weights to a scale"):
        load_base(tmp_path / "out", dtype=torch.float32, device="cpu")
