"""Every YAML file in configs/ can be parsed with the current code, and misspelt settings are refused by name."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser, capture_parser

import train
from qerl_pl.base.folder import base_folder
from qerl_pl.common.run_folder import run_named_after
from qerl_pl.objective import Objective
from qerl_pl.objective.objective import completed

CONFIGS = Path(__file__).parent.parent / "configs"
RECIPES = sorted(path for path in CONFIGS.glob("*.yaml") if path.name != "base.yaml")
TASKS, MODELS, ARMS, BENCHMARKS = (
    sorted((CONFIGS / kind).glob("*.yaml")) for kind in ("tasks", "models", "arms", "eval")
)
LEVELS = CONFIGS / "tasks" / "levels_4-5.yaml"
VERL, BOXED, HEAL = (CONFIGS / "tasks" / f"{name}.yaml" for name in ("gsm8k_verl", "gsm8k_boxed", "heal"))
TASKS = [path for path in TASKS if path not in (LEVELS, VERL, BOXED, HEAL)]  # the paper's
MODEL = CONFIGS / "models" / "qwen2.5-7b.yaml"
ARM = CONFIGS / "arms" / "nvfp4.yaml"
CHANGED_BY_AN_ARM = {"model.optimizer.class_path", "model.optimizer.init_args.lr"}


@pytest.fixture(autouse=True)
def own_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    """The parser of ``train.py``, built once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py"])
        return capture_parser(train.main, ["fit"])


@pytest.fixture
def resolved(parser: ArgumentParser, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict]:
    """Return a function that parses arguments of `train.py fit` and returns the resulting configuration with all
    defaults. Nothing of the run is created. Arguments that are refused raise ValueError."""

    def resolve(*arguments: str | Path) -> dict:
        try:
            found = parser.parse_args(train.command_line(["fit", *map(str, arguments)]))
        except SystemExit:
            raise ValueError(capsys.readouterr().err) from None
        return yaml.safe_load(parser.dump(found, skip_none=False))["fit"]

    return resolve


def files(*paths: Path) -> list[str]:
    """Make the command-line arguments that name these configuration files."""
    return [argument for path in paths for argument in ("-c", str(path))]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_parses_and_keeps_the_callbacks_of_base_yaml(recipe, resolved):
    config = resolved("-c", recipe)
    names = [callback["class_path"] for callback in config["trainer"]["callbacks"]]
    assert "callbacks.statistics.RolloutStatistics" in names
    assert len(names) == len(set(names))
    assert config["trainer"]["max_steps"] > 0


def difference(left: dict, right: dict, path: str = "") -> set[str]:
    """Find the dotted keys at which two configurations differ."""
    keys: set[str] = set()
    for key in left.keys() | right.keys():
        one, other = left.get(key), right.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            keys |= difference(one, other, f"{path}{key}.")
        elif one != other:
            keys.add(path + key)
    return keys


def keys(settings: Any, path: str = "") -> set[str]:
    """Return the dotted keys, such as model.lora.rank, of all settings in a YAML file. ``settings`` may also be a part
    of a file's content; its keys then begin with ``path``."""
    if isinstance(settings, Path):
        settings = yaml.safe_load(settings.read_text())
    if not isinstance(settings, dict):
        return {path}
    return {key for name, value in settings.items() for key in keys(value, f"{path}.{name}".lstrip("."))}


def test_a_task_a_model_and_an_arm_set_different_things_so_that_every_combination_is_the_sum_of_its_files():
    tasks, models, arms = ([keys(path) for path in paths] for paths in ([*TASKS, VERL, BOXED, HEAL], MODELS, ARMS))
    for task, model, arm in itertools.product(tasks, models, arms):
        assert not task & model
        assert not model & arm
        assert task & arm <= CHANGED_BY_AN_ARM


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS, ids=lambda path: path.stem)
def test_arms_differ_in_what_they_compare_alone(task, resolved):
    arms = {path.stem: resolved(*files(task, MODEL, path)) for path in ARMS}
    model, data = arms["nvfp4"]["model"], arms["nvfp4"]["data"]
    rollouts = arms["nvfp4"]["trainer"]["max_steps"] // model["updates_per_rollout"]
    assert rollouts == {"gsm8k": 600, "big_math": 1000}[task.stem]
    assert data["batch_size"] * model["sampling"]["num_completions"] == 128, "the paper's batch"
    assert difference(arms["nvfp4"], arms["nvfp4_aqn"]) == {"run_dir", "trainer.callbacks"}
    assert difference(arms["bf16"], arms["bf16_aqn"]) == {"run_dir", "trainer.callbacks"}
    assert difference(arms["nvfp4"], arms["mxfp4"]) == {"run_dir", "model.quantize"}
    assert difference(arms["nvfp4"], arms["nf4"]) == {"run_dir", "model.quantize"}
    assert difference(arms["nvfp4"], arms["bf16"]) == {"run_dir", "model.quantize", "model.optimizer.init_args.lr"}
    added = arms["nvfp4_aqn"]["trainer"]["callbacks"][len(arms["nvfp4"]["trainer"]["callbacks"]) :]
    assert [callback["class_path"] for callback in added] == ["callbacks.aqn.AdaptiveQuantizationNoise"]
    assert {name: arm["run_dir"] for name, arm in arms.items()} == {
        path.stem: f"runs/{task.stem}_{MODEL.stem}_{path.stem}" for path in ARMS
    }


@pytest.mark.slow
def test_verls_recipe_is_verls_whichever_base_it_trains(resolved):
    """This project's recipe for comparisons with verl has the settings of verl's script, whose logs of GRPO with LoRA
    on GSM8K are published. Only the base differs between its two variants."""
    recipes = [resolved(*files(VERL, MODEL)), resolved(*files(VERL, MODEL, ARM))]
    assert difference(*recipes) == {"run_dir", "model.quantize"}
    model, data = recipes[0]["model"], recipes[0]["data"]
    assert data["batch_size"] * recipes[0]["trainer"]["max_steps"] == 7424, "one epoch of the 7473 problems"
    assert (model["sampling"]["num_completions"], model["sampling"]["max_tokens"]) == (5, 1024)
    assert (model["lora"]["rank"], model["lora"]["alpha"], model["updates_per_rollout"]) == (32, 32, 1)
    assert model["optimizer"]["init_args"]["lr"] == 3e-5
    objective = Objective(**model["objective"])
    assert (objective.surrogate, objective.aggregation, objective.correction) == ("clipped", "token", "none")
    assert (objective.clip_low, objective.clip_high, objective.max_ratio) == (0.2, 0.2, 3.0)
    assert (objective.kl_coefficient, objective.kl, objective.entropy_coefficient) == (1e-3, "k3", 1e-3)
    assert {reward["name"]: reward["weight"] for reward in model["rewards"]} == {"strict": 1.0, "lenient": 0.0}


@pytest.mark.slow
def test_models_differ_in_their_base_and_levels_in_their_level_alone(resolved):
    usual = resolved(*files(CONFIGS / "tasks" / "big_math.yaml", MODEL, ARM))
    for model in MODELS:
        settings = yaml.safe_load(model.read_text())
        assert keys(settings) == {"model.base"}
        assert settings["model"]["base"].lower() == f"qwen/{model.stem}-instruct"
    other = resolved(
        *files(CONFIGS / "tasks" / "big_math.yaml", next(model for model in MODELS if model != MODEL), ARM)
    )
    assert difference(usual, other) == {"run_dir", "model.base"}
    harder = resolved(*files(CONFIGS / "tasks" / "big_math.yaml", LEVELS, MODEL, ARM))
    level = "data.source.init_args.training.init_args.source.init_args.levels"
    assert difference(usual, harder) == {"run_dir", level}


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_changes_what_is_sampled_and_how_alone(benchmark, resolved):
    recipe = (CONFIGS / "tasks" / "gsm8k.yaml", MODEL, ARM)
    changed = difference(resolved(*files(*recipe)), resolved(*files(*recipe, benchmark)))
    assert "model.val_sampling" in changed
    assert all(
        key.startswith(("data.source", "data.val_batch_size", "data.held_out", "model.val_sampling")) for key in changed
    ), changed


def test_all_training_data_have_one_prompt():
    assert len({yaml.safe_load(path.read_text())["data"]["system_prompt"] for path in TASKS}) == 1


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
def test_unknown_keys_and_values_are_refused_by_name(wrong, resolved):
    with pytest.raises(ValueError, match=wrong[0].rsplit(".", 1)[-1]):
        resolved("-c", "configs/quickstart.yaml", *wrong)


def objective_of(resolved: Callable[..., dict], *arguments: str) -> dict:
    return resolved("-c", "configs/quickstart.yaml", *arguments)["model"]["objective"]


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
def test_a_published_objective_is_one_word(name, expected, resolved):
    found = objective_of(resolved, "--model.objective", name)
    parts = ("surrogate", "aggregation", "baseline", "clip_low", "clip_high")
    assert tuple(found[part] for part in parts) == expected
    assert Objective(**found).resolve() == Objective(preset=name).resolve(), "what is printed is what is in force"


def test_single_settings_stand_on_top_of_the_word_wherever_either_is_given(resolved, tmp_path):
    (tmp_path / "word.yaml").write_text("model:\n  objective: gspo\n")
    (tmp_path / "mapping.yaml").write_text("model:\n  objective: {preset: gspo, clip_high: 0.7}\n")
    expected = completed(vars(Objective(preset="gspo"))) | {"clip_high": 0.7}
    one = "--model.objective.clip_high"
    assert objective_of(resolved, "-c", str(tmp_path / "word.yaml"), one, "0.7") == expected
    assert objective_of(resolved, "-c", str(tmp_path / "mapping.yaml")) == expected
    assert objective_of(resolved, "--model.objective=gspo", f"{one}=0.7") == expected


def test_what_is_not_given_follows_from_what_is(resolved):
    given = "--model.objective."
    assert objective_of(resolved, given + "surrogate", "sequence")["aggregation"] == "sequence"
    assert objective_of(resolved, given + "aggregation", "constant")["baseline"] == "centered"
    assert objective_of(resolved, given + "kl_in", "reward", given + "kl_coefficient", "0.1")["kl"] == "k1"
    both = objective_of(resolved, given + "surrogate", "sequence", given + "aggregation", "token")
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
def test_a_setting_that_contradicts_the_objectives_name_is_refused(arguments, said, resolved):
    with pytest.raises(ValueError, match=said):
        objective_of(resolved, *arguments)


def test_the_base_file_may_be_named_again(resolved):
    once = resolved("-c", "configs/quickstart.yaml")
    twice = resolved("-c", "configs/base.yaml", "-c", "configs/quickstart.yaml")
    assert once == twice


def test_a_default_that_is_the_member_of_an_enum_is_written_by_its_value_and_read_again(resolved, tmp_path):
    timer = {"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"duration": "00:01:00:00"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks+": [timer]}}))
    written = resolved("-c", "configs/quickstart.yaml", "-c", tmp_path / "mine.yaml")
    assert written["trainer"]["callbacks"][-1]["init_args"]["interval"] == "step"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    assert resolved("-c", tmp_path / "config.yaml") == written


def test_dapo_accepts_by_the_right_answer_and_punishes_length_up_to_the_sampling_limit(resolved):
    model = resolved(*files(CONFIGS / "tasks" / "big_math.yaml", MODEL, ARM))["model"]
    names = [reward["name"] for reward in model["rewards"]]
    assert model["dynamic_sampling"]["metric"] == "accuracy" == names[0]
    [overlong] = [reward["reward"] for reward in model["rewards"] if "SoftOverlong" in str(reward["reward"])]
    assert overlong["init_args"]["max_tokens"] is None, "linked"
    assert overlong["init_args"]["buffer"] == round(model["sampling"]["max_tokens"] / 5)


def test_a_base_format_names_the_copy_beside_the_base_and_says_how_to_make_it(tmp_path):
    base = tmp_path / "qwen"
    base.mkdir()
    assert base_folder(str(base), None) == str(base)
    assert base_folder("not/downloaded", "nvfp4") == "not/downloaded-nvfp4"
    with pytest.raises(ValueError, match=rf"quantize --model {base} --output {base}-nvfp4 --format nvfp4"):
        base_folder(str(base), "nvfp4")
    (tmp_path / "qwen-nvfp4").mkdir()
    assert base_folder(f"{base}/", "nvfp4") == f"{base}-nvfp4"


def test_a_run_is_named_after_its_files_and_not_after_those_of_an_evaluation():
    names = [MODEL, ARM, BENCHMARKS[0], CONFIGS / "base.yaml"]
    assert run_named_after(names) == "runs/qwen2.5-7b_nvfp4"
    assert run_named_after([]) == "runs/default"
