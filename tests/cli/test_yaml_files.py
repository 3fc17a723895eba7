"""Configurations can be given as files, or by name if the package contains them. Mistakes that YAML itself accepts,
such as a key that is given twice, are refused with the file and the line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qerl_pl.cli.yaml_files import FOLDER, check_yaml, check_yaml_files, config_path, with_paths

ROOT = Path(__file__).parents[2]
BOMB = "data: &a0 [1, 2, 3]\n" + "".join(f"x{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(12))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {}\ntrainer: {}\nmodel: {}\n", "line 3: 'model' is given a second time .first in line 1."),
        ("model:\n  lora:\n    rank: 3\n    rank: 4\n", "line 4: 'rank' is given a second time .first in line 3."),
        ("modell: {}\n", r"line 1: 'modell' is no setting; did you mean model\?"),
        ("x: {}\n", "line 1: 'x' is no setting; expected one of run_dir, model"),
        (
            "data:\n  batch_size: 4\n  seed: 5\n",
            "line 3: data.seed cannot be set: it follows from seed_everything; set",
        ),
        ("trainer: {default_root_dir: here}\n", "line 1: trainer.default_root_dir .* follows from run_dir; set that"),
        ("model: {stop: [a]}\n", "line 1: model.stop cannot be set: it follows from data.stop; set that"),
        ("data: {tokenizer: here}\n", "data.tokenizer .* follows from model.base, model.base_format; set that"),
        ("data:\n  <<: {seed: 5}\n", "line 2: data.seed cannot be set: it follows from seed_everything; set"),
        ("model:\n", "line 1: model has no value"),
        ("data: {}\nrun_dir: null\n", "line 2: run_dir has no value"),
        ("model: &a\n  lora: *a\n", "line 1: an alias"),
        ("model: &a [1, *a]\n", "line 1: an alias"),
        ("model: {\n", "line 2: this is not YAML"),
        ("model: [1\ndata: 3\n", "this is not YAML"),
        ("\tmodel: 3\n", "this is not YAML"),
        ("- model\n", "expected settings as"),
        ("model\n", "expected settings as"),
        ("? [model]\n: 3\n", "a key is a list"),
        ("model: {on: 1}\n", "the key .on. as a bool; expected a word: put it in quotes"),
        ("model: {null: 1}\n", "the key .null. as a null"),
        ("", "is empty; expected settings as"),
        ("# nothing\n", "is empty; expected settings as"),
        (BOMB, "aliases .*. stand for [0-9]+ values; expected at most"),
        ("model: {a: \x00}\n", "not a YAML text file"),
        ("model: " + "[" * 3000, "nested too deep|not YAML"),
    ],
)
def test_it_is_refused_with_file_and_line(tmp_path, text, said):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    for arguments in (["-c", str(path)], [f"--config={path}"], ["--trainer.max_steps", "3", "--config", str(path)]):
        with pytest.raises(ValueError, match=said) as refused:
            check_yaml_files(arguments)
        assert str(refused.value).startswith(str(path))
        assert "\n" not in str(refused.value)


def test_a_faulty_file_is_refused_before_anything_slow_is_imported(tmp_path):
    (tmp_path / "run.yaml").write_text("modell: {}\n")
    program = """
import sys
from qerl_pl.__main__ import main
for command in ("fit", "plan"):
    for file in ("run.yaml", "gone.yaml"):
        assert main([command, "-c", file]) == 1
assert not {"torch", "lightning", "jsonargparse"} & set(sys.modules)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    wrong = "error: run.yaml, line 1: 'modell' is no setting; did you mean model?"
    assert done.stderr.splitlines() == [wrong, "error: there is no file gone.yaml"] * 2


def test_files_of_this_repository_are_taken():
    paths = [path for path in ROOT.glob("configs/**/*.yaml") if path.parent.name not in ("rewards", "studies")]
    assert len(paths) > 15
    for path in paths:
        check_yaml(path)


@pytest.mark.parametrize("text", ["{}\n", "model: &a {lora: {rank: 3}}\nckpt_path: null\n"])
def test_what_is_in_order_is_taken(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    check_yaml(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gsm8k", "tasks/gsm8k"),
        ("eval/gsm8k", "eval/gsm8k"),
        ("aime24", "eval/aime24"),
        ("qwen2.5-7b", "models/qwen2.5-7b"),
        ("nvfp4_aqn", "arms/nvfp4_aqn"),
        ("quickstart", "quickstart"),
    ],
)
def test_a_name_is_that_of_a_shipped_configuration(tmp_path, monkeypatch, name, path):
    monkeypatch.chdir(tmp_path)
    assert config_path(name) == FOLDER / f"{path}.yaml"


def test_a_file_of_that_name_comes_first_wherever_it_stands_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").write_text("run_dir: here\n")
    given = ["fit", "-c", "gsm8k", "--config=nf4", "--config", "quickstart", "--run_dir", "gsm8k", "-c"]
    arms, quickstart = FOLDER / "arms" / "nf4.yaml", FOLDER / "quickstart.yaml"
    expected = ["fit", "-c", "gsm8k", f"--config={arms}", "--config", str(quickstart), "--run_dir", "gsm8k", "-c"]
    assert with_paths(given) == expected


def test_an_unknown_name_is_told_those_that_there_are_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"'qwen2.5-7' is neither .* did you mean qwen2.5-7b\? .*tasks/gsm8k") as error:
        config_path("qwen2.5-7")
    assert "\n" not in str(error.value)
    assert "studies/" not in str(error.value), "files for the command `study` are no configurations"
    with pytest.raises(ValueError, match=r"there is no file mine\.yaml"):
        config_path("mine.yaml")
