"""Every YAML that ships parses against the code as it is, and misspelt ones are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import train

ROOT = Path(__file__).parent.parent
RECIPES = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.name != "base.yaml")


@pytest.fixture(autouse=True)
def own_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])


def resolved(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """The whole configuration of `train.py fit`, parsed and not built."""
    with pytest.raises(SystemExit) as stop:
        train.main(["fit", *arguments, "--print_config"])
    captured = capsys.readouterr()
    if stop.value.code:
        raise ValueError(captured.err)
    return yaml.safe_load(captured.out)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_parses_and_keeps_the_callbacks_of_base_yaml(recipe, capsys):
    config = resolved(capsys, "-c", str(recipe))
    names = [callback["class_path"] for callback in config["trainer"]["callbacks"]]
    assert "callbacks.statistics.RolloutStatistics" in names
    assert len(names) == len(set(names))
    assert config["trainer"]["max_steps"] > 0


@pytest.mark.parametrize(
    "wrong",
    [
        ("--model.updates_per_rolout", "2"),
        ("--model.objective.clip_hgh", "0.2"),
        ("--trainer.max_stpes", "3"),
        ("--model.objective.surrogate", "ppo"),
        ("--model.sampling.num_completions", "many"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_unknown_keys_and_values_are_refused_by_name(wrong, capsys):
    with pytest.raises(ValueError, match=wrong[0].rsplit(".", 1)[-1]):
        resolved(capsys, "-c", "configs/quickstart.yaml", *wrong)


def test_the_base_file_may_be_named_again(capsys):
    once = resolved(capsys, "-c", "configs/quickstart.yaml")
    twice = resolved(capsys, "-c", "configs/base.yaml", "-c", "configs/quickstart.yaml")
    assert once == twice
