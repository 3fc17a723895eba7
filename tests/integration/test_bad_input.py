"""Mistakes of users are refused before the first rollout, with the reason."""

import json
import re
import resource
import shutil
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file, save_file

from qerl_pl.results.curves import read_curves
from qerl_pl.tools.export import export_adapter
from tests.integration.conftest import IN_BACKGROUND, SHORT, launch, load_last


def test_a_run_too_short_for_its_noise_is_refused_before_the_base_is_read(run, bases, tmp_path):
    base = shutil.copytree(bases["nvfp4"], tmp_path / "base")
    for file in base.glob("*.safetensors"):
        if "model.norm.weight" in (tensors := load_file(file)):
            save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * torch.nan}, file)
    with pytest.raises(ValueError, match="3 rollouts for 4 noise stages"):
        run("fit", tmp_path / "run", "--model.base", str(base), "--trainer.max_steps", "3")
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds NaN"):
        run("fit", tmp_path / "run", "--model.base", str(base))


def test_a_base_that_is_no_model_or_of_an_unknown_format_is_refused(run, bases, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"config\.json"):
        run("fit", tmp_path / "a", "--model.base", str(empty))

    odd = tmp_path / "odd"
    shutil.copytree(bases["dense"], odd)
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq", "bits": 4}}))
    with pytest.raises(ValueError, match="awq"):
        run("fit", tmp_path / "b", "--model.base", str(odd))


@pytest.mark.parametrize("kind", ["dense", "nvfp4"])
def test_a_base_with_a_norm_in_whole_numbers_is_refused(run, bases, tmp_path, kind):
    base = tmp_path / "base"
    shutil.copytree(bases[kind], base)
    for file in base.glob("*.safetensors"):
        tensors = load_file(file)
        whole = {name: tensor.to(torch.int8) for name, tensor in tensors.items() if name == "model.norm.weight"}
        save_file(tensors | whole, file)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is (torch\.int8|I8) \[128\]"):
        run("fit", tmp_path / "run", "--model.base", str(base))


def test_a_start_that_is_refused_leaves_no_empty_curves(run, tmp_path):
    """Lightning opens the event file before data and base are checked."""
    for more in (("--data.batch_size", "100"), ("--model.lora.targets", "[none]"), ("--data.max_prompt_tokens", "4")):
        with pytest.raises(ValueError, match=more[0].removeprefix("--")):
            run("fit", tmp_path / "run", *more)
    assert not list(tmp_path.rglob("events.out.tfevents.*"))


@pytest.mark.slow
def test_a_start_that_is_refused_keeps_the_curves_of_the_starts_before(run, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    files = {path: path.read_bytes() for path in folder.glob("events.out.tfevents.*")}
    assert files
    with pytest.raises(ValueError, match="another run"):
        run("fit", folder, "--ckpt_path", "last", "--model.lora.rank", "8")
    assert {path: path.read_bytes() for path in folder.glob("events.out.tfevents.*")} == files


@pytest.mark.slow
def test_a_run_that_fails_keeps_its_curves(run, tmp_path, monkeypatch):
    class Failing(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 1:
                raise ValueError("later")

    monkeypatch.setattr("tests.integration.toy.Failing", Failing, raising=False)
    with pytest.raises(ValueError, match="later"):
        run("fit", tmp_path, *SHORT, "--trainer.callbacks+=tests.integration.toy.Failing")
    assert read_curves(tmp_path)["train/reward"].steps == [0]


@pytest.mark.slow
def test_another_run_is_not_resumed_and_everything_that_differs_is_listed(run, bases, finished):
    other = ("--model.lora.rank", "8", "--seed_everything", "1", "--model.base", str(bases["dense"]))
    with pytest.raises(ValueError, match="this checkpoint is of another run") as refused:
        run("fit", finished, "--ckpt_path", "last", *other, "--model.updates_per_rollout", "2")
    for said in (
        "model.lora.rank: the run has 4, this start has 8",
        "seed_everything: the run has 0, this start has 1",
        "model.base: the run has",
        "updates_per_rollout: the run has 1, this start has 2",
    ):
        assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 5


@pytest.mark.slow
def test_a_run_is_not_replaced_by_one_that_starts_anew(run, finished):
    with pytest.raises(ValueError, match=r"already holds a run.*--ckpt_path last.*--run_dir"):
        run("fit", finished)


@pytest.mark.slow
def test_a_start_that_is_refused_changes_nothing_that_was_written(run, finished, tmp_path):
    run_dir, output = tmp_path / "run", tmp_path / "adapter"
    shutil.copytree(finished, run_dir)
    config = (run_dir / "config.yaml").read_text()
    with pytest.raises(ValueError, match=r"lora\.alpha: the run has 8\.0, this start has 64\.0"):
        run("fit", run_dir, "--ckpt_path", "last", "--model.lora.alpha", "64")
    assert (run_dir / "config.yaml").read_text() == config
    (run_dir / "config.yaml").write_text(config.replace("alpha: 8.0", "alpha: 64.0"))
    assert export_adapter(run_dir, output).alpha == 8, "an adapter is scaled as it was trained"
    modes = {path.stat().st_mode for path in output.iterdir()}
    assert len(modes) == 1, "who may read the settings may read the weights"


@pytest.mark.slow
def test_a_truncated_checkpoint_is_named_and_the_one_before_it_goes_on(run, finished, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    last = run_dir / "checkpoints" / "last.ckpt"
    whole = load_last(run_dir)
    last.write_bytes(last.read_bytes()[:-2000])
    previous = last.with_name("previous.ckpt").read_bytes()
    with pytest.warns(UserWarning, match=f"{last} is damaged"):
        run("fit", run_dir, "--ckpt_path", "last")
    assert last.with_name("previous.ckpt").read_bytes() == previous, "a damaged file took the place of a whole one"
    assert load_last(run_dir)["global_step"] == whole["global_step"]
    (last.parent / "best.ckpt").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match=r"best\.ckpt is damaged"):
        run("fit", run_dir, "--ckpt_path", "last", "--trainer.max_steps", "9")
    assert load_last(run_dir)["global_step"] == 9
    for path in last.parent.glob("*.ckpt"):
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged(.|\n)*previous\.ckpt is damaged"):
        run("fit", run_dir, "--ckpt_path", str(last))


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), IN_BACKGROUND])
def test_a_full_disk_leaves_the_previous_checkpoint_whole(finished, bases, tmp_path, how):
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    before = load_last(run_dir)["global_step"]
    size = (run_dir / "checkpoints" / "last.ckpt").stat().st_size

    # A file may not grow beyond half a checkpoint: the write fails as it does on a full disk.
    no_room = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size // 2, size // 2))
    more = ("--ckpt_path", "last", "--trainer.max_steps", "12", *how)
    process = launch("fit", bases["nvfp4"], run_dir, *more, before=no_room)
    output, _ = process.communicate()
    assert process.returncode != 0
    assert re.search(r"could not write the checkpoint .*: File too large; .* raise the limit \(ulimit -f", output), (
        output
    )
    assert "unexpected pos" not in output
    assert load_last(run_dir)["global_step"] == before
    assert not list((run_dir / "checkpoints").glob("*.tmp"))


@pytest.mark.slow
def test_checkpoints_hold_the_adapter_and_not_the_base(finished, bases):
    saved = load_last(finished)
    assert all("lora_" in name for name in saved["state_dict"])
    numbers = sum(tensor.numel() for tensor in saved["state_dict"].values())
    moments = saved["optimizer_states"][0]["state"].values()
    assert sum(moment["exp_avg"].numel() for moment in moments) == numbers
    assert load_file(next(iter(bases["nvfp4"].glob("*.safetensors"))))  # the base is where it was
