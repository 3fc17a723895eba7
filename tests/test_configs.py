"""Every YAML that ships parses against the code as it is, and misspelt ones are refused by name."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

import train
from configs.make_recipes import ARMS, MODELS, TASKS, path_of, recipes
from qerl_pl.objective import Objective

CONFIGS = Path(__file__).parent.parent / "configs"
RECIPES = sorted(path for path in CONFIGS.glob("*.yaml") if path.name != "base.yaml")
BENCHMARKS = sorted((CONFIGS / "eval").glob("*.yaml"))
GRID = sorted(path for task in TASKS for path in (CONFIGS / task.name).glob("*.yaml"))


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


def test_the_recipes_are_what_their_script_writes():
    assert {path.relative_to(CONFIGS): path.read_text() for path in GRID} == recipes()


def difference(left: dict, right: dict, path: str = "") -> set[str]:
    """The dotted keys at which two configurations differ."""
    return {
        found
        for key in left.keys() | right.keys()
        if left.get(key) != right.get(key)
        for found in (
            difference(left[key], right[key], f"{path}{key}.")
            if isinstance(left.get(key), dict) and isinstance(right.get(key), dict)
            else {path + key}
        )
    }


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_arms_differ_in_what_they_compare_alone(task, model, capsys):
    arms = {arm.name: resolved(capsys, "-c", str(CONFIGS / path_of(task, model, arm))) for arm in ARMS}
    steps = arms["nvfp4"]["trainer"]["max_steps"]
    assert steps // arms["nvfp4"]["model"]["updates_per_rollout"] == task.num_rollouts
    rows = arms["nvfp4"]["data"]["batch_size"] * arms["nvfp4"]["model"]["sampling"]["num_completions"]
    assert rows == 128, "the paper's batch"
    assert difference(arms["nvfp4"], arms["nvfp4_aqn"]) == {"run_dir", "trainer.callbacks"}
    assert difference(arms["bf16"], arms["bf16_aqn"]) == {"run_dir", "trainer.callbacks"}
    assert difference(arms["nvfp4"], arms["mxfp4"]) == {"run_dir", "model.base"}
    assert difference(arms["nvfp4"], arms["nf4"]) == {"run_dir", "model.base"}
    assert difference(arms["nvfp4"], arms["bf16"]) == {"run_dir", "model.base", "model.optimizer.init_args.lr"}
    added = arms["nvfp4_aqn"]["trainer"]["callbacks"][len(arms["nvfp4"]["trainer"]["callbacks"]) :]
    assert [callback["class_path"] for callback in added] == ["callbacks.aqn.AdaptiveQuantizationNoise"]
    assert {arm["run_dir"] for arm in arms.values()} == {
        f"runs/{path_of(task, model, arm).with_suffix('')}" for arm in ARMS
    }


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_changes_what_is_sampled_and_how_alone(benchmark, capsys):
    recipe = str(CONFIGS / path_of(TASKS[-1], MODELS[0], ARMS[0]))
    changed = difference(resolved(capsys, "-c", recipe), resolved(capsys, "-c", recipe, "-c", str(benchmark)))
    assert "model.val_sampling" in changed
    assert all(
        key.startswith(("data.source", "data.val_batch_size", "data.held_out", "model.val_sampling")) for key in changed
    ), changed


def test_all_training_data_have_one_prompt():
    prompts = {
        yaml.safe_load(path.read_text())["system_prompt"] for path in (CONFIGS / "shared").glob("*math_*-*.yaml")
    }
    prompts.add(yaml.safe_load((CONFIGS / "shared" / "gsm8k.yaml").read_text())["system_prompt"])
    assert len(prompts) == 1


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


def objective_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    return resolved(capsys, "-c", "configs/quickstart.yaml", *arguments)["model"]["objective"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dapo", ("clipped", "token", "normalized", 0.2, 0.28)),
        ("grpo", ("clipped", "sequence", "normalized", 0.2, 0.2)),
        ("dr_grpo", ("clipped", "constant", "centered", 0.2, 0.2)),
        ("gspo", ("sequence", "sequence", "normalized", 3e-4, 4e-4)),
        ("cispo", ("cispo", "token", "normalized", math.inf, 4.0)),
    ],
)
def test_a_published_objective_is_one_word(name, expected, capsys, tmp_path):
    file = tmp_path / "word.yaml"
    file.write_text(f"model:\n  objective: {name}\n")
    (tmp_path / "mapping.yaml").write_text(f"model:\n  objective: {{preset: {name}, clip_high: 0.7}}\n")
    found = objective_of(capsys, "--model.objective", name)
    parts = ("surrogate", "aggregation", "baseline", "clip_low", "clip_high")
    assert tuple(found[part] for part in parts) == expected
    assert found == asdict(Objective(preset=name)), "what is printed is what is in force"
    assert objective_of(capsys, "-c", str(file)) == found
    on_top = objective_of(capsys, "-c", str(file), "--model.objective.clip_high", "0.7")
    assert on_top == found | {"clip_high": 0.7}
    assert objective_of(capsys, "-c", str(tmp_path / "mapping.yaml")) == on_top
    assert objective_of(capsys, f"--model.objective={name}", "--model.objective.clip_high=0.7") == on_top


def test_what_is_not_given_follows_from_what_is(capsys):
    given = "--model.objective."
    assert objective_of(capsys, given + "surrogate", "sequence")["aggregation"] == "sequence"
    assert objective_of(capsys, given + "aggregation", "constant")["baseline"] == "centered"
    assert objective_of(capsys, given + "kl_in", "reward")["kl"] == "k1"
    both = objective_of(capsys, given + "surrogate", "sequence", given + "aggregation", "token")
    assert both["aggregation"] == "token", "said, so meant"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model.objective", "ppo"), "preset"),
        (("--model.objective", "gspo", "--model.objective.aggregation", "token"), "aggregation is 'token' and preset"),
        (("--model.objective", "grpo", "--model.objective.surrogate", "cispo"), "surrogate is 'cispo' and preset"),
        (("--model.objective.baseline", "centered", "--model.objective", "dapo"), "baseline is 'centered' and preset"),
    ],
    ids=["word", "aggregation", "surrogate", "baseline"],
)
def test_a_setting_that_contradicts_the_objectives_name_is_refused(arguments, said, capsys):
    with pytest.raises(ValueError, match=said):
        objective_of(capsys, *arguments)


def test_the_base_file_may_be_named_again(capsys):
    once = resolved(capsys, "-c", "configs/quickstart.yaml")
    twice = resolved(capsys, "-c", "configs/base.yaml", "-c", "configs/quickstart.yaml")
    assert once == twice


def test_dapo_accepts_by_the_right_answer_and_punishes_length_up_to_the_sampling_limit(capsys):
    model = resolved(capsys, "-c", str(CONFIGS / path_of(TASKS[-1], MODELS[0], ARMS[0])))["model"]
    names = [reward["name"] for reward in model["rewards"]]
    assert model["dynamic_sampling"]["metric"] == "accuracy" == names[0]
    [overlong] = [reward["reward"] for reward in model["rewards"] if "SoftOverlong" in str(reward["reward"])]
    assert overlong["init_args"]["max_tokens"] is None, "linked"
    assert overlong["init_args"]["buffer"] == round(model["sampling"]["max_tokens"] / 5)
