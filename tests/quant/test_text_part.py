"""Checkpoints with a vision part can be bases: their text model is used."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from qerl_pl.__main__ import main as command
from qerl_pl.base.digest import base_digest
from qerl_pl.base.prepared import prepared_base
from qerl_pl.memory.shape import checkpoint_shape
from qerl_pl.model.files import NOT_USED, Checkpoint, model_config, text_name
from qerl_pl.model.quantization import Quantization
from qerl_pl.quant.convert import convert_checkpoint
from qerl_pl.quant.experts import packed_experts
from qerl_pl.quant.loading import load_base
from qerl_pl.quant.published import conversion_reasons
from tests.combinations import first_of
from tests.families import WHOLE, tiny_config, with_vision
from tests.quant.published import compressed, edit_config
from tests.rollout.conftest import save_dense
from tests.test_export import make_run

ROW = torch.arange(8, 40).unsqueeze(0)
of_one_family = first_of("whole", [*WHOLE])


@pytest.fixture(params=WHOLE)
def whole(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a random model with a vision part; a test runs once for each family whose models have one."""
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    save_dense(tmp_path / "whole", with_vision(tiny_config(request.param)))
    return tmp_path / "whole"


@pytest.fixture
def expected(whole: Path) -> torch.Tensor:
    """Compute the logits of a text by transformers' class for the whole checkpoint."""
    model = AutoModelForImageTextToText.from_pretrained(whole, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=ROW).logits


def logits_of(path: str | Path) -> torch.Tensor:
    with torch.no_grad():
        return load_base(path, dtype=torch.float32, device="cpu")(input_ids=ROW).logits


def test_the_text_model_alone_computes_what_the_whole_does(whole, expected, caplog):
    torch.testing.assert_close(logits_of(whole), expected)
    with caplog.at_level(logging.INFO):
        folder = Path(prepared_base(str(whole)))
    assert folder.name.startswith("whole-text-")
    assert caplog.text.count(NOT_USED) == 1
    torch.testing.assert_close(logits_of(folder), expected)
    config = json.loads((folder / "config.json").read_text())
    assert WHOLE[config["model_type"]] == json.loads((whole / "config.json").read_text())["model_type"]
    assert config["architectures"] == [type(load_base(folder, dtype=torch.float32, device="cpu")).__name__]
    assert not any("vision" in name or "projector" in name for name in Checkpoint(folder).names())
    assert prepared_base(str(folder)) == str(folder)


@of_one_family
def test_quantisation_reads_the_text_model_of_a_folder(whole, caplog):
    with caplog.at_level(logging.INFO):
        folder = Path(prepared_base(str(whole), quantization=Quantization()))
    assert NOT_USED in caplog.text
    assert folder.name.startswith("whole-nvfp4-")
    assert logits_of(folder).isfinite().all()
    assert conversion_reasons(folder) == []


@of_one_family
def test_the_command_says_what_it_leaves_out(whole, tmp_path, capsys):
    assert command(["quantize", "--model", str(whole), "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count(NOT_USED) == 1


@of_one_family
def test_an_export_names_the_text_model_that_its_adapter_fits(whole, tmp_path):
    base = Path(prepared_base(str(whole)))
    features, inputs = Checkpoint(base).shape("model.layers.1.self_attn.q_proj.weight")
    adapter = {"weight": torch.ones(4, inputs), "features": features, "layer": 1}
    run = make_run(tmp_path / "run", str(whole), digest=base_digest(base), **adapter)
    assert command(["export", "--run", str(run), "--output", str(tmp_path / "out")]) == 0
    named = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == prepared_base(str(whole)) != str(whole)


def test_a_checkpoint_by_tensor_names_of_transformers_5_is_the_same(whole, expected):
    tensors = load_file(whole / "model.safetensors")
    newer = {f"model.{name}" if text_name(name) is None else name: tensor for name, tensor in tensors.items()}
    for name in tensors:
        if name.startswith("language_model.model."):
            newer["model.language_model." + name.removeprefix("language_model.model.")] = newer.pop(name)
        elif name.startswith("language_model.lm_head."):
            newer[name.removeprefix("language_model.")] = newer.pop(name)
    save_file(newer, whole / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits_of(whole), expected)


@pytest.mark.usefixtures("_compressed_tensors_without_its_compiler")
def test_a_published_nvfp4_checkpoint_becomes_a_base_of_its_text_model(whole, tmp_path):
    decompressed = compressed(whole, lambda name: "NVFP4" if text_name(f"{name}.weight") else None)
    reasons = conversion_reasons(whole)
    assert reasons[0] == NOT_USED
    assert convert_checkpoint(whole, tmp_path / "out") == reasons
    base = load_base(tmp_path / "out", dtype=torch.bfloat16, device="cpu")
    linears: dict[str, Any] = {**dict(base.named_modules()), **dict(packed_experts(base))}
    for name, weight in decompressed.items():
        module = linears[str(text_name(f"{name}.weight")).removesuffix(".weight")]
        assert torch.equal(module.dense(torch.bfloat16), weight.bfloat16()), name


def test_memory_is_planned_from_a_config_that_leaves_sizes_to_defaults(tmp_path):
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "eos_token_id": 1}))
    shape = checkpoint_shape(tmp_path, torch.bfloat16)
    assert (shape.vocabulary, shape.num_heads, shape.num_key_heads, shape.num_layers) == (262208, 8, 4, 2)


def test_a_head_that_is_stored_is_not_tied_whatever_the_config_leaves_out(tmp_path):
    save_dense(tmp_path / "untied", with_vision(tiny_config("mistral")))
    config = json.loads((tmp_path / "untied" / "config.json").read_text())
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
    (tmp_path / "untied" / "config.json").write_text(json.dumps(config))
    assert model_config(tmp_path / "untied")["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": {"model_type": "gpt2"}}, "'gpt2' model; expected one of qwen2"),
        ({"text_config": {"model_type": "siglip_vision_model"}}, "model_type 'siglip_vision_model', not a text model"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}}, "not to NVFP4"),
    ],
)
def test_what_cannot_be_a_base_is_refused_in_one_line(tmp_path, changes, message):
    save_dense(tmp_path / "whole", with_vision(tiny_config("mistral")))
    edit_config(tmp_path / "whole", **changes)
    with pytest.raises(ValueError, match=message) as refused:
        prepared_base(str(tmp_path / "whole"))
    assert "\n" not in str(refused.value)


@of_one_family
def test_half_of_a_checkpoint_is_refused_and_nothing_is_written(whole, tmp_path):
    tensors = load_file(whole / "model.safetensors")
    place = r"model\.layers\.1\.mlp\.(experts\.0\.)?up_proj\.weight"
    del tensors[next(name for name in tensors if re.fullmatch(place, text_name(name) or ""))]
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"incomplete checkpoint: {place} missing"):
        convert_checkpoint(whole, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
