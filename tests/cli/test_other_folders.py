"""Paths and modules in a configuration are searched for in the working directory. If they are in the folder of the
configuration file instead, errors and warnings say so."""

import sys
from importlib import import_module

import pytest

import train
from qerl_pl.cli.other_folders import module_elsewhere, other_modules, path_elsewhere
from qerl_pl.common.files import searched

REWARDS = "model:\n  rewards:\n    - {name: digits, weight: 1.0, reward: own_points.score}  # not own_other.score\n"
SCORE = "def score(prompts, completions): return [1.0 for _ in completions]\n"


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Write a configuration and its module to a folder in the working directory; returns the command line's words."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sums.yaml").write_text(REWARDS)
    (tmp_path / "own" / "own_points.py").write_text(SCORE)
    (tmp_path / "own" / "own_other.py").write_text(SCORE)
    monkeypatch.chdir(tmp_path)
    for name in ("own_points", "own_other"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return ["fit", "-c", "quickstart", "-c", "own/sums.yaml"]


def test_a_path_or_module_in_the_folder_of_a_configuration_or_above_it_is_found(arguments, tmp_path):
    own = tmp_path / "own"
    assert module_elsewhere("own_points", arguments) == (
        f". own_points is in {own}: start the command there, or set PYTHONPATH={own}"
    )
    assert module_elsewhere("own_third.part", arguments) == ""
    (own / "data").mkdir()
    (own / "data" / "a.yaml").touch()
    for config in ("own/sums.yaml", "own/data/a.yaml"):
        hint = path_elsewhere(f"there is no file {searched('sums.yaml')}, which", ["fit", "-c", config])
        assert hint == f". sums.yaml is in {own}: start the command there, or give the whole path"
    assert path_elsewhere(f"there is no file {searched('gone.yaml')}, which", arguments) == ""
    assert path_elsewhere("there is no file sums.yaml", arguments) == ""


def test_only_a_relative_path_is_followed_by_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert searched("a/b") == f"a/b (searched in {tmp_path})"
    assert searched("/a/b") == "/a/b"
    assert searched("~/b") == "~/b"


@pytest.mark.slow
def test_an_error_names_the_folder_that_was_searched_and_the_one_to_start_in(arguments, tmp_path, monkeypatch, capsys):
    own = tmp_path / "own"
    monkeypatch.setattr("sys.argv", ["train.py"])
    with pytest.raises(SystemExit):
        train.exit_status(arguments)
    said = capsys.readouterr().err.splitlines()[-1]
    assert "there is no module own_points (own/sums.yaml, line 3)" in said
    assert f"modules are searched for in the working directory {tmp_path} and among" in said
    assert said.endswith(f"own_points is in {own}: start the command there, or set PYTHONPATH={own}")
    (own / "models" / "tiny-0-nvfp4").mkdir(parents=True)
    monkeypatch.syspath_prepend(own)
    said = str(train.exit_status(arguments))
    assert f"there is no folder models/tiny-0-nvfp4 (searched in {tmp_path}); give" in said
    assert said.endswith(f"models/tiny-0-nvfp4 is in {own}: start the command there, or give the whole path")


@pytest.mark.usefixtures("arguments")
def test_a_module_of_the_same_name_that_is_imported_from_elsewhere_is_told(tmp_path, monkeypatch):
    arguments, own = ["fit", "-c", "own/sums.yaml"], tmp_path / "own" / "own_points.py"
    for name in ("own_points", "own_other"):
        (tmp_path / f"{name}.py").write_text(SCORE)
    with monkeypatch.context() as first:
        first.syspath_prepend(tmp_path / "own")
        import_module("own_points")

        assert list(other_modules(arguments)) == []
    del sys.modules["own_points"]
    monkeypatch.syspath_prepend(tmp_path)
    assert list(other_modules(arguments)) == [], "it is not imported"
    import_module("own_points")
    import_module("own_other")

    [sentence] = other_modules(arguments)
    assert sentence == (
        f"own/sums.yaml names the module own_points, which is imported from {tmp_path / 'own_points.py'} and not from "
        f"{own}; to use the latter, start the command in {own.parent}"
    )
    monkeypatch.chdir(own.parent)
    [sentence] = other_modules(["fit", "-c", "sums.yaml"])
    assert sentence.endswith(f"and not from {own}; to use the latter, rename it")
