"""What YAML lets pass is refused with the file and the line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qerl_pl.cli.yaml_files import check_yaml, check_yaml_files

ROOT = Path(__file__).parents[2]
BOMB = "data: &a0 [1, 2, 3]\n" + "".join(f"x{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(12))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {}\ntrainer: {}\nmodel: {}\n", "line 3: 'model' is given a second time .first in line 1."),
        ("model:\n  lora:\n    rank: 3\n    rank: 4\n", "line 4: 'rank' is given a second time .first in line 3."),
        ("modell: {}\n", r"line 1: 'modell' is no setting; did you mean model\?"),
        ("x: {}\n", "line 1: 'x' is no setting; expected one of run_dir, model"),
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


@pytest.mark.parametrize("command", ["fit", "plan"])
@pytest.mark.parametrize(("text", "said"), [(None, "there is no file "), ("modell: {}\n", "did you mean model?")])
def test_a_faulty_file_is_refused_before_anything_slow_is_imported(tmp_path, command, text, said):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    program = f"""
import sys
from qerl_pl.__main__ import main
assert main([{command!r}, "-c", {str(path)!r}]) == 1
print(sorted({{"torch", "lightning", "jsonargparse"}} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
    assert said in found.stderr
    assert found.stderr.startswith("error: ")
    assert found.stderr.count("\n") == 1


def test_files_of_this_repository_are_taken():
    paths = [path for path in ROOT.glob("configs/**/*.yaml") if path.parent.name not in ("rewards", "studies")]
    assert len(paths) > 15
    for path in paths:
        check_yaml(path)


@pytest.mark.parametrize("text", ["{}\n", "model: &a {lora: {rank: 3}}\nckpt_path: null\n"])
def test_what_is_in_order_is_taken(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    check_yaml(tmp_path / "run.yaml")
