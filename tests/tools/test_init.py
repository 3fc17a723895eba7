"""``qerl init`` writes the files that the command it recommends next needs, and never overwrites a file. ``qerl
--version`` prints the version."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import train
from datamodules.table import Table
from qerl_pl import __version__
from qerl_pl.__main__ import main as command
from qerl_pl.common.program import called_as
from qerl_pl.tools import init
from qerl_pl.tools.doctor import _gpus
from qerl_pl.tools.tiny import make_tiny
from tests.integration.conftest import load_last


@pytest.mark.slow
def test_the_written_files_are_tried_by_smoke_at_once(tmp_path, monkeypatch, capsys):
    make_tiny(tmp_path / "base", sft_steps=0)
    folder = tmp_path / "own"
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    assert command(["init", str(folder), "--base", str(tmp_path / "base")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("#")[0].split() for line in lines[-3:]] == [
        ["cd", str(folder)],
        ["python", "-m", "qerl_pl", "fit", "-c", "mine.yaml", "--smoke"],
        ["python", "-m", "qerl_pl", "fit", "-c", "mine.yaml"],
    ]
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("my_reward", None)  # of another test
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    engine = ("--model.engine", "qerl_pl.rollout.hf.TransformersEngine", "--model.dtype", "float32")
    train.main([*lines[-2].split("#")[0].split()[3:], *engine])
    assert load_last(folder / "runs" / "mine-smoke")["global_step"] == 2


def test_files_that_exist_are_kept_and_none_is_added(tmp_path, capsys):
    own = tmp_path / "my_reward.py"
    own.write_text("mine")
    assert command(["init", str(tmp_path)]) == 2
    assert f"{own} exists already and is not overwritten" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["my_reward.py"]
    assert own.read_text() == "mine"
    assert command(["init", str(own)]) == 2
    assert f"{own} is a file; expected a folder" in capsys.readouterr().err


def test_after_an_error_nothing_is_left(tmp_path, monkeypatch):
    (tmp_path / "problems.jsonl.tmp").mkdir()  # so the last file cannot be written
    with pytest.raises(OSError, match="problems"):
        init.write_files(tmp_path, base="a/b")
    assert [path.name for path in tmp_path.iterdir()] == ["problems.jsonl.tmp"]


def test_the_problems_are_enough_for_a_batch_and_a_validation(tmp_path):
    init.write_files(tmp_path, base="a: b")
    settings = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert settings["model"]["base"] == "a: b"
    given = {**settings["data"]["source"]["init_args"], "train_path": str(tmp_path / "problems.jsonl")}
    source = Table(**given)
    assert len(source.train()) >= 2 * settings["data"]["batch_size"]
    assert source.validation()


def test_commands_in_messages_start_the_python_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(python))
    assert called_as("report") == f"{python} -m qerl_pl report"
    monkeypatch.chdir(tmp_path)
    assert called_as("report") == ".venv/bin/python -m qerl_pl report"
    monkeypatch.setenv("PATH", str(python.parent), prepend=os.pathsep)
    assert called_as("report") == "python -m qerl_pl report"
    monkeypatch.setattr("sys.argv", [".venv/bin/qerl"])
    assert called_as("report") == "qerl report"


def test_versions_are_told_without_importing_a_package():
    code = "import sys; from qerl_pl.__main__ import main; main(['--version']); assert 'torch' not in sys.modules"
    root = Path(__file__).parents[2]
    said = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    lines = said.splitlines()
    assert lines[0] == f"qerl-pl {__version__}"
    assert f"torch {version('torch')}" in lines
    assert f"transformers {version('transformers')}" in lines
    assert any(line.startswith("vllm") for line in lines)
    import torch

    cuda = torch.version.cuda
    assert f"cuda {cuda} (torch's)" in lines if cuda else "cuda none (torch's build)" in lines


def test_gpus_are_those_of_the_driver(tmp_path):
    assert _gpus(tmp_path) == ["gpu none"]
    for number in range(2):
        folder = tmp_path / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t 16\n")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\n")
    assert _gpus(tmp_path) == ["gpu NVIDIA H100 80GB HBM3", "gpu NVIDIA H100 80GB HBM3", "driver 580.95.05"]
