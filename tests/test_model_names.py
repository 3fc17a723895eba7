"""A run needs only the name of a model on the Hugging Face hub: the model is downloaded, and quantised at first use.
Memory plans need neither its weights nor a network."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoConfig

from qerl_pl.__main__ import main as command
from qerl_pl.base.digest import base_digest
from qerl_pl.base.prepared import prepared_base
from qerl_pl.memory.shape import checkpoint_shape, config_shape, planned_shape
from qerl_pl.model.hub import hub_folder, is_hub_name
from qerl_pl.model.known_models import KNOWN, known_config
from qerl_pl.model.quantization import Quantization, quantization_of
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.quant.quantize import quantize_checkpoint
from tests.quant.conftest import make_checkpoint
from tests.test_export import make_run

__all__ = ["make_checkpoint"]
ROOT = Path(__file__).parent.parent
NVFP4_RTN = Quantization(format="nvfp4")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prevent the hub's client from using the network, and make all caches empty. Returns the folder of the client's
    cache."""
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def in_hub_cache(hub: Path, name: str, folder: Path) -> Path:
    """Copy the folder of a model to where the hub's client would have put this model after a download. Returns this
    place."""
    model = hub / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    return Path(shutil.copytree(folder, model / "snapshots" / ("0" * 40)))


def test_names_and_folders_are_told_apart(tmp_path):
    assert is_hub_name("Qwen/Qwen3-8B")
    assert not any(map(is_hub_name, ["gpt2", "models/qwen", "./a/b", "/a/b", "a/b/c", "../b", "~/b", "a/"]))
    (tmp_path / "owner").mkdir()
    assert not is_hub_name("owner/model"), "a folder of that name is here"


def test_a_name_is_a_base_from_the_hubs_cache_and_is_quantised_once(make_checkpoint, offline, tmp_path, caplog):
    source = make_checkpoint("qwen3")
    snapshot = in_hub_cache(offline, "Someone/Tiny-3", source)
    assert prepared_base("Someone/Tiny-3") == str(snapshot)
    with caplog.at_level("INFO"):
        first = Path(prepared_base("Someone/Tiny-3", None, NVFP4_RTN))
        assert prepared_base(str(source), None, NVFP4_RTN).endswith(first.name.rpartition("-")[2]), "by content"
    assert first.parent == tmp_path / "cache"
    assert first.name.startswith("Tiny-3-nvfp4-")
    assert sum("is quantised to nvfp4 once" in record.message for record in caplog.records) == 2, "two names"
    caplog.clear()
    assert prepared_base("Someone/Tiny-3", None, NVFP4_RTN) == str(first)
    assert "quantised" not in caplog.text
    assert prepared_base(str(first), None, NVFP4_RTN) == str(first), "it has the format already"
    quantize_checkpoint(source, tmp_path / "explicit")
    assert base_digest(tmp_path / "explicit") == base_digest(first), "a run may go on from either"


def test_an_export_names_the_quantised_base_that_the_adapter_belongs_to(make_checkpoint, tmp_path):
    path = make_checkpoint("qwen3")
    digest = base_digest(Path(prepared_base(str(path), None, NVFP4_RTN)))
    run = make_run(tmp_path / "run", str(path), torch.ones(4, 64), features=96, digest=digest, quantize="nvfp4")
    assert command(["export", "--run", str(run), "--output", str(tmp_path / "out")]) == 0
    named = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == prepared_base(str(path), None, NVFP4_RTN)


def test_method_and_calibration_are_settings_and_part_of_the_key(make_checkpoint, tmp_path):
    base, text = str(make_checkpoint("qwen3")), tmp_path / "text.txt"
    text.write_text("a few words of calibration text " * 50)
    settings = {"format": "nvfp4", "calibration": str(text), "samples": 4, "length": 16}
    first = prepared_base(base, None, quantization_of(settings))
    assert prepared_base(base, None, quantization_of({**settings, "method": "gptq"})) == first, "the default"
    assert prepared_base(base, None, quantization_of({**settings, "method": "rtn"})) != first
    text.write_text("other words of calibration text " * 50)
    assert prepared_base(base, None, quantization_of(settings)) != first, "the text counts, not its path"
    assert prepared_base(base, None, NVFP4_RTN) != first
    report = json.loads((Path(first) / "quantization_report.json").read_text())
    assert (report["method"], report["calibration"]["shape"]) == ("gptq", [4, 16])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "int4"}, "model.quantize.format is 'int4'; expected one of nvfp4, mxfp4, nf4"),
        ({"method": "gptq"}, "needs calibration data: set model.quantize.calibration"),
        ({"samples": 0}, "samples 0 and length 2048; expected at least 1"),
    ],
)
def test_settings_of_the_quantiser_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        quantization_of(settings)


def test_contradictions_are_refused(make_checkpoint, tmp_path):
    path = str(make_checkpoint())
    with pytest.raises(ValueError, match=r"base_format is 'nvfp4' and model.quantize 'nvfp4'; .* give one of them"):
        prepared_base(path, "nvfp4", NVFP4_RTN)
    with pytest.raises(ValueError, match=r"give --model\.quantize nvfp4"):
        prepared_base("Qwen/Qwen3-8B", "nvfp4")
    quantize_checkpoint(Path(path), tmp_path / "own")
    with pytest.raises(ValueError, match=r"model\.quantize is 'mxfp4' and .* is in nvfp4 already"):
        prepared_base(str(tmp_path / "own"), None, Quantization(format="mxfp4"))


@pytest.mark.parametrize("load", [prepared_base, hub_folder], ids=["base", "folder"])
def test_a_name_without_network_is_told_in_one_line(load, tmp_path):
    with pytest.raises(ValueError, match=r"no folder Someone/Unknown .*, and the hub cannot be reached") as refused:
        load("Someone/Unknown")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "cache").exists()


def test_a_mixture_of_experts_on_the_hub_is_refused_by_its_config_alone(offline, tmp_path):
    folder = tmp_path / "moe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 8}))
    in_hub_cache(offline, "Someone/Moe", folder)
    with pytest.raises(ValueError, match="mixture of experts"):
        prepared_base("Someone/Moe", None, NVFP4_RTN)
    with pytest.raises(ValueError, match="mixture of experts"):
        planned_shape("Someone/Moe", None, None, torch.bfloat16)


def test_a_plan_of_a_base_that_will_be_quantised_is_that_of_the_quantised_one(make_checkpoint, offline, tmp_path):
    path = make_checkpoint("qwen3")
    quantize_checkpoint(path, tmp_path / "own")
    expected = checkpoint_shape(tmp_path / "own", torch.bfloat16)
    assert planned_shape(str(path), None, NVFP4_RTN, torch.bfloat16) == expected
    assert planned_shape(str(path), "nvfp4", None, torch.bfloat16) == expected, "before the copy is there"
    assert planned_shape(str(tmp_path / "own"), None, NVFP4_RTN, torch.bfloat16) == expected
    in_hub_cache(offline, "Someone/Tiny-3", path)
    assert planned_shape("Someone/Tiny-3", None, NVFP4_RTN, torch.bfloat16) == expected


def test_known_models_are_found_by_every_name_that_people_give_them():
    expected = known_config("Qwen/Qwen2.5-7B-Instruct")
    assert expected is not None
    for name in ("models/qwen2.5-7b", "models/Qwen2.5-7B-Instruct/", "RedHatAI/Qwen2.5-7B-Instruct-NVFP4"):
        assert known_config(name) == expected
    assert known_config("Someone/Unknown") is None
    shape = config_shape(AutoConfig.for_model(**expected), NVFP4, torch.bfloat16)
    assert planned_shape("models/qwen2.5-7b", "nvfp4", None, torch.bfloat16) == shape
    assert planned_shape("nvidia/Qwen2.5-7B-Instruct-NVFP4", None, None, torch.bfloat16) == shape


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen/Qwen2.5-7B-Instruct", 7.6156), ("Qwen/Qwen3-8B", 8.1907), ("Qwen/Qwen3-0.6B", 0.5960),
     ("Qwen/Qwen2.5-32B-Instruct", 32.7639), ("Qwen/Qwen3-32B", 32.7621), ("meta-llama/Llama-3.1-8B-Instruct", 8.0303),
     ("meta-llama/Llama-3.2-1B-Instruct", 1.2358),
     ("mistralai/Mistral-7B-Instruct-v0.3", 7.2480), ("microsoft/phi-4", 14.6595), ("HuggingFaceTB/SmolLM3-3B", 3.0751),
     ("google/gemma-3-1b-it", 0.9999), ("google/gemma-3-4b-it", 3.8803), ("google/gemma-3-12b-it", 11.7660),
     ("google/gemma-3-27b-it", 27.0094), ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", 23.5724),
     ("Qwen/Qwen2.5-3B-Instruct", 3.0859)],
)  # fmt: skip
def test_known_models_have_as_many_weights_as_published(name, billions):
    assert name in KNOWN
    known = known_config(name)
    assert known is not None
    shape = config_shape(AutoConfig.for_model(**known), None, torch.bfloat16)
    assert shape.base_bytes / 2 / 1e9 == pytest.approx(billions, rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        ("gsm8k", "qwen2.5-3b", "mxfp4"),
        ("gsm8k", "qwen2.5-7b", "nvfp4_aqn"),
        ("big_math", "qwen2.5-14b", "nf4"),
        ("big_math", "qwen2.5-32b", "bf16"),
    ],
    ids="_".join,
)
def test_recipes_are_planned_without_network_and_weights(recipe, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.setenv("COLUMNS", "200")
    files = [word for name in recipe for word in ("-c", name)]
    assert command(["plan", *files, "--gpu-memory", "141"]) in (0, 1), capsys.readouterr().err
    assert "the smallest GPU" in capsys.readouterr().out
