"""Shipped configurations are found by name from any folder; files come first."""

from __future__ import annotations

import pytest

from qerl_pl.cli.yaml_files import FOLDER, config_path, with_paths


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
