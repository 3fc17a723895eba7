"""Different spellings of the path of a run's folder mean the same run."""

from argparse import ArgumentTypeError

import pytest

from qerl_pl.__main__ import main
from qerl_pl.common.run_folder import read_run_config, run_folder


@pytest.mark.parametrize(
    "written", ["/work/runs/a", "/work/runs/a/", "$PLACE/a", "~/../work/runs/./a", "/work//runs/a"]
)
def test_one_folder_has_one_path(monkeypatch, written):
    monkeypatch.setenv("PLACE", "/work/runs")
    monkeypatch.setenv("HOME", "/home")
    assert run_folder(written) == "/work/runs/a"


@pytest.mark.parametrize("written", ["", "  ", "$NOT_SET_ANYWHERE/a", "${NOT_SET_ANYWHERE}", "~nobody-has-this-name/a"])
def test_a_folder_that_cannot_be_known_is_refused(written):
    with pytest.raises(ArgumentTypeError, match="run_dir is"):
        run_folder(written)


@pytest.mark.parametrize("command", [["fit", "-c"], ["plan", "-c"], ["report"], ["study"]])
def test_a_name_of_5000_letters_is_refused_in_one_short_line(command, capsys):
    assert main([*command, "a" * 5000]) == 1
    said = capsys.readouterr().err
    assert "the name is too long" in said
    assert said.count("\n") == 1
    assert len(said) < 400


@pytest.mark.parametrize(
    "text", ["trainer: {}", "[1]", "model: {base: 1}", "model: {base: b}", "a: !!python/object/apply:os.getcwd []", "{"]
)
def test_a_config_that_no_run_wrote_is_refused_in_a_line(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"config\.yaml") as refused:
        read_run_config(file, "data")
    assert len(str(refused.value).splitlines()) == 1
