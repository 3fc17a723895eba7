"""The ``--help`` of the training commands explains every option, so that somebody who has never seen the program can
use it."""

import re

import pytest
import yaml

import train
from qerl_pl.__main__ import COMMANDS, main
from qerl_pl.cli.help_text import DESCRIPTIONS
from qerl_pl.cli.training import QeRLCLI
from qerl_pl.cli.yaml_files import plain_settings
from qerl_pl.settings.trainer import UNUSABLE


@pytest.fixture
def help_of(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.argv", ["qerl"])

    def printed(command: str) -> str:
        with pytest.raises(SystemExit):
            train.main([command, "--help"])
        return capsys.readouterr().out

    return printed


def test_training_has_a_short_usage_own_settings_first_and_types_in_words(help_of):
    text = help_of("fit")
    assert text.startswith("usage: qerl fit -c TASK -c MODEL -c ARM [--KEY VALUE ...]\n\nTrain a policy.")
    assert not re.search(r"0x[0-9a-f]{6}|<class|<function|Optional\[|Union\[|Literal\[|:class:|:paramref:", text)
    folder = text[text.index("--run_dir") : text.index("--smoke")]
    assert "(type: str, default: runs/default)" in " ".join(folder.split())
    places = [text.index(f"\n{section}:") for section in ("model", "data", "trainer")]
    assert places == sorted(places)
    assert re.search(r"--trainer.max_steps MAX_STEPS\s+length of the run, in optimizer steps. \(type: int", text)
    defaults = dict(re.findall(r"--trainer\.(\w+) [^(]*\(type: [^)]*?, default: ([^)]*)\)", text))
    for name, value in plain_settings("trainer").items():
        if (name := name.partition(".")[2]) in defaults:
            assert yaml.safe_load(defaults[name]) == value, name
    assert {"devices", "precision", "val_check_interval"} <= defaults.keys()
    refused = [name for name in UNUSABLE if re.search(rf"--trainer\.{name} ", text)]
    assert refused == []


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_evaluation_has_no_options_without_an_effect(command, help_of):
    text = help_of(command)
    assert "--ckpt_path CKPT_PATH" in text
    assert not re.search(r"--(weights_only|verbose|return_predictions)\b", text)


def test_all_subcommands_are_listed_and_a_given_one_is_built_alone(help_of, monkeypatch):
    listed = help_of("--help")
    assert all(f"\n    {name} " in listed for name in DESCRIPTIONS)
    for words_given, built in (["fit", "-c", "x"], {"fit"}), (["test"], {"test"}), ([], {*DESCRIPTIONS}):
        monkeypatch.setattr("sys.argv", ["train.py", *words_given])
        assert QeRLCLI.subcommands().keys() == built


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_of_a_command_is_described(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    lines = text.partition("options:")[2].splitlines()
    assert len(lines) > 2
    bare = [
        line
        for line, following in zip(lines, [*lines[1:], ""], strict=True)
        if re.match("  -", line) and "  " not in line.strip() and not following.startswith("      ")
    ]
    assert bare == []
