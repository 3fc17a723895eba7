"""The folder of an exported adapter names the base that it belongs to, and is written completely or not at all."""

import json
import resource
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import save_file
from torch.utils.tensorboard import SummaryWriter

from qerl_pl.__main__ import main as command
from qerl_pl.base.digest import base_digest
from qerl_pl.checkpoint import SafeCheckpointIO
from qerl_pl.tools.tiny import make_tiny

IDENTITY = {
    "base": "0123456789abcdef",
    "seed": 7,
    "lora.rank": 4,
    "lora.alpha": 8.0,
    "lora.dropout": 0.0,
    "lora.targets": ["q_proj"],
    "lora.rslora": False,
    "lora.train_norms": False,
}


def make_run(
    folder: Path,
    base: str,
    weight: torch.Tensor,
    *,
    features: int = 8,
    layer: int = 0,
    digest: str | None = None,
    **model: str,
) -> Path:
    """Write the folder of a run whose adapter changes q_proj of one layer, by the LoRA matrix A ``weight`` [r, K] and a
    matrix B of zeros [features, r]. ``digest`` is that of the base; ``model`` has further settings."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"base": base, **model}}))
    linear = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
    state = {f"{linear}.lora_A.weight": weight, f"{linear}.lora_B.weight": torch.zeros(features, len(weight))}
    identity = IDENTITY if digest is None else {**IDENTITY, "base": digest}
    parts = {"state_dict": state, "identity": identity, "optimizer_states": [], "global_step": 12}
    SafeCheckpointIO().save_checkpoint(parts, folder / "checkpoints" / "last.ckpt")
    return folder


def export(run: Path, output: Path) -> int:
    return command(["export", "--run", str(run), "--output", str(output)])


def test_a_card_names_the_base_and_what_the_adapter_is(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run", "base", torch.ones(4, 8))
    assert export(run, tmp_path / "out") == 0
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base"), "a relative path is wrong from elsewhere"
    card = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "peft"
    for said in (str(tmp_path / "base"), IDENTITY["base"], "| optimizer steps | 12 |", "| 4, 8 |", "| seed | 7 |"):
        assert said in card
    assert "left no curves that can be read" in card
    assert not list(tmp_path.glob("*.tmp"))


def test_the_base_is_the_copy_that_the_adapter_was_trained_on(tmp_path):
    (tmp_path / "base-nvfp4").mkdir()
    run = make_run(tmp_path / "run", str(tmp_path / "base"), torch.ones(4, 8), base_format="nvfp4")
    assert export(run, tmp_path / "out") == 0
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base-nvfp4")


def test_a_card_has_what_the_run_measured_and_its_checks_found(tmp_path):
    run = make_run(tmp_path / "run", "base", torch.ones(4, 8))
    with SummaryWriter(str(run)) as writer:
        for step, accuracy in enumerate((0.25, 0.5, 0.75)):
            writer.add_scalar("val/accuracy", accuracy, step)
            writer.add_scalar("canary/tensors_checked", 21, step)
    assert export(run, tmp_path / "out") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| accuracy (held out), first | 0.25 |" in card
    assert "| accuracy (held out), last | 0.75 |" in card
    assert "- Canary: After each of 3 rollouts 21 tensors were read back" in card
    assert "- Ledger: It did not run" in card


@pytest.mark.parametrize("target", ["k_proj", "q_proj"])
def test_an_adapter_of_keys_that_serve_as_values_is_said_to_need_merging_for_vllm(
    tmp_path, capsys, monkeypatch, target
):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "gemma4_text", "attention_k_eq_v": True}))
    monkeypatch.setitem(IDENTITY, "lora.targets", [target])
    assert export(make_run(tmp_path / "run", str(tmp_path / "base"), torch.ones(4, 8)), tmp_path / "out") == 0
    assert ("adapts the keys alone" in capsys.readouterr().out) == (target == "k_proj")


def test_a_base_that_is_a_name_stays_a_name(tmp_path):
    assert export(make_run(tmp_path / "run", "someone/model", torch.ones(4, 8)), tmp_path / "out") == 0
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "someone/model"


def test_a_base_of_the_hub_is_named_with_the_commit_that_was_trained_on(tmp_path, monkeypatch, capsys):
    cache, commit = tmp_path / "hub", "0" * 40
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    model = cache / "models--someone--model"
    folder = model / "snapshots" / commit
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes}))
    save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
    monkeypatch.setitem(IDENTITY, "base", base_digest(folder))
    run = make_run(tmp_path / "run", "someone/model", torch.ones(4, 8))
    assert export(run, tmp_path / "out") == 0
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("someone/model", commit)

    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    assert export(run, tmp_path / "other") == 2
    assert "model.base: the run has" in (said := capsys.readouterr().err)
    assert "the model's main branch on the hub has moved" in said
    assert not (tmp_path / "other").exists()


def test_an_adapter_that_is_not_finite_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "run", "base", torch.tensor([[float("nan")]]))
    assert export(run, tmp_path / "out") == 2
    assert "state_dict holds numbers that are not finite" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lora_B.weight": torch.zeros(127, 4)}, r"lora_B.weight is [127, 4], and the base's weight is [128, 128]"),
        ({"lora_A.weight": torch.zeros(4, 8)}, r"lora_A.weight is [4, 8], and the base's weight is [128, 128]"),
        ({"extra": torch.zeros(2)}, "extra is [2], and the base has no such weight"),
        ({}, None),
    ],
)
def test_an_adapter_whose_shapes_are_not_those_of_the_base_is_refused(tmp_path, capsys, changed, said):
    make_tiny(tmp_path / "base", sft_steps=0)
    run = make_run(tmp_path / "run", str(tmp_path / "base"), torch.ones(4, 128), digest=base_digest(tmp_path / "base"))
    saved = SafeCheckpointIO().load_checkpoint(run / "checkpoints" / "last.ckpt")
    linear = "base_model.model.model.layers.0.self_attn.q_proj"
    state = {f"{linear}.lora_A.weight": torch.zeros(4, 128), f"{linear}.lora_B.weight": torch.zeros(128, 4)}
    saved["state_dict"] = state | {f"{linear}.{name}": tensor for name, tensor in changed.items()}
    SafeCheckpointIO().save_checkpoint(saved, run / "checkpoints" / "last.ckpt")
    assert export(run, tmp_path / "out") == (2 if said else 0)
    assert said is None or said in capsys.readouterr().err
    assert (tmp_path / "out").exists() == (said is None)


def test_a_full_disk_leaves_nothing_and_is_said_in_a_line(tmp_path, capsys):
    run = make_run(tmp_path / "run", "base", torch.ones(4, 25000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # a write beyond it fails, as on a full disk
    try:
        assert export(run, tmp_path / "out") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert "could not write" in said
    assert said.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


def test_a_part_of_the_output_path_that_is_a_file_is_said(tmp_path, capsys):
    run = make_run(tmp_path / "run", "base", torch.ones(4, 8))
    with pytest.raises(SystemExit):
        export(run, run / "config.yaml" / "out")
    assert "config.yaml is a file; expected a folder" in capsys.readouterr().err


class Refusing(BaseHTTPRequestHandler):
    """Answers every request as a hub does that does not know the user."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(params=["offline", "no network", "not logged in"])
def hub_fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Imitate a Hugging Face hub that cannot be used, for one of three causes. Yields words that the program's error
    message should have."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", request.param == "offline")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    if request.param != "not logged in":
        yield "the hub cannot be reached"
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield "log in by `hf auth login`"
        server.shutdown()


def test_an_export_that_cannot_be_pushed_is_complete_and_says_how_to_push_it(tmp_path, capsys, hub_fault):
    run = make_run(tmp_path / "run", "someone/model", torch.ones(4, 8))
    output = tmp_path / "out"
    assert command(["export", "--run", str(run), "--output", str(output), "--push", "someone/adapter"]) == 1
    said = capsys.readouterr().err
    assert hub_fault in said
    assert f"hf upload someone/adapter {output}" in said
    assert said.count("\n") == 1
    assert {file.name for file in output.iterdir()} == {"README.md", "adapter_config.json", "adapter_model.safetensors"}


def test_a_name_that_no_hub_has_is_refused_before_anything_is_written(tmp_path, capsys):
    run = make_run(tmp_path / "run", "someone/model", torch.ones(4, 8))
    assert command(["export", "--run", str(run), "--output", str(tmp_path / "out"), "--push", "adapter"]) == 2
    assert "--push is 'adapter'; expected OWNER/NAME" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
