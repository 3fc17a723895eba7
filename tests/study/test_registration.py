"""The registration of the study in docs/study.md says what its configuration files and the code do."""

from __future__ import annotations

import math
import re
from copy import deepcopy
from inspect import signature
from typing import Any

import pytest
import yaml

from datamodules.word_problems import WordProblems
from qerl_pl.pretraining.fit import Settings
from qerl_pl.pretraining.measure import MIN_PASS_AT_N, PASS_AT_1
from qerl_pl.pretraining.sizes import LEARNING_RATES, SHAPES
from qerl_pl.study.statistics import holm
from qerl_pl.study.study_file import Study, commands_of, files_of, read_study
from qerl_pl.tools import pretrain
from qerl_pl.tools.options import pretrain_options
from tests.program import ROOT

PAGE = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
REGISTERED, EXPLORATORY = PAGE.split("## Registered", 1)[1].split("## Run the study", 1)[0].split("## Exploratory", 1)
RATE = "model.optimizer.init_args.lr"


@pytest.fixture(scope="module")
def noise() -> Study:
    return read_study(ROOT / "configs" / "studies" / "noise.yaml")


@pytest.fixture(scope="module")
def pilot() -> Study:
    return read_study(ROOT / "configs" / "studies" / "pilot.yaml")


@pytest.fixture(scope="module")
def formats() -> Study:
    return read_study(ROOT / "configs" / "studies" / "formats.yaml")


@pytest.fixture(scope="module")
def formats_pilot() -> Study:
    return read_study(ROOT / "configs" / "studies" / "formats_pilot.yaml")


def pretraining(**changes: Any) -> tuple[Any, Settings]:
    """The options and settings of `pretrain` with its defaults."""
    words = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    options = pretrain_options().parse_args(["--output", "models/words-0", *words])
    return options, pretrain._settings(options)


def habit() -> Settings:
    """The settings of the further training, from the page's command."""
    (command,) = re.findall(r"--start models/skilled-\$1 --size \$2 --seed \$3 \\\n +(.*)\n", PAGE)
    options = pretrain_options().parse_args(["--output", "models/words-0", *command.split()])
    return pretrain._settings(options)


def noise_of(arm: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings of AQN in an arm."""
    callbacks = arm.get("trainer", {}).get("callbacks+", [])
    return [each["init_args"] for each in callbacks if each["class_path"] == "callbacks.aqn.AdaptiveQuantizationNoise"]


def table_of(section: str) -> dict[str, str]:
    """The section's table of settings."""
    table = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", section, re.MULTILINE))
    assert table.pop("setting") == "value"
    return table


def rate_of(study: Study, arm: str) -> float:
    """The learning rate of an arm."""
    return study.arms[arm]["model"]["optimizer"]["init_args"]["lr"]


def expected(noise: Study, pilot: Study) -> dict[str, str]:
    """The rows of the table, from configurations and code."""
    options, settings = pretraining(size="10m", seed=0)
    further = habit()
    common = yaml.safe_load((ROOT / "configs" / "word_problems.yaml").read_text())
    model, optimizer, shape = common["model"], common["model"]["optimizer"], SHAPES[settings.size]
    steps = {**common["trainer"], **noise.settings["trainer"]}
    samples = {name: each["model"]["val_sampling"] for name, each in noise.evaluations.items()}
    (sampling,) = {(each["num_completions"], each["temperature"]) for each in samples.values()}
    (limit,) = {each["data"]["val_limit"] for each in noise.evaluations.values()}
    found = [each for study in (noise, pilot) for arm in study.arms.values() for each in noise_of(arm)]
    aqn, rates = found[0], ", ".join(f"{rate:g}" for rate in pilot.grid[RATE])
    assert all(each == aqn for each in found)
    assert optimizer["class_path"] == "torch.optim.AdamW"
    first, second = optimizer["init_args"]["betas"]
    held = model["val_sampling"]
    held_out = signature(WordProblems).parameters["num_validation"].default
    assert "num_validation" not in common["data"]["source"]["init_args"]
    return {
        "policy": f"size {settings.size}, seed {settings.seed}: {shape['num_hidden_layers']} blocks of width "
        f"{shape['hidden_size']}, vocabulary of {settings.vocab_size} tokens",
        "pretraining": f"{settings.steps} steps of {settings.batch_size} problems with {settings.operations[0]} to "
        f"{settings.operations[1]} operations ({100 * settings.rare:g} % with more), learning rate "
        f"{LEARNING_RATES[settings.size]:g}",
        "habit": f"{further.steps} further steps of {further.batch_size} problems, learning rate "
        f"{further.learning_rate:g}, in which a line of a solution is left out with probability {further.left_out:g}",
        "measured on": f"{options.measure_problems} problems for each number of operations, {options.samples} samples "
        "of each",
        "reach set": f"those of {options.reach_problems} problems, with 1 to {pretrain.REACH} operations more than "
        f"those of RL, that {options.samples} samples solved 0 times",
        "adapter": f"LoRA of rank {model['lora']['rank']}, alpha {model['lora']['alpha']}",
        "objective": model["objective"]["preset"],
        "rollout": f"{common['data']['batch_size']} prompts x {model['sampling']['num_completions']} completions, "
        f"temperature {model['sampling']['temperature']}",
        "training": f"{steps['max_steps']} rollouts, AdamW with betas {first} and {second}, weight decay "
        f"{optimizer['init_args']['weight_decay']}, learning rate {model['lr_schedule']} after "
        f"{model['warmup_steps']} steps",
        "AQN": f"sigma from {aqn['sigma_start']:g} to {aqn['sigma_end']:g} in {aqn['num_stages']} stages",
        "validation": f"every {steps['val_check_interval']} rollouts, on {held_out} problems, "
        f"{held['num_completions']} sample of each at temperature {held['temperature']}",
        "evaluations": f"{' and '.join(samples)}: {limit} problems, {sampling[0]} samples of each at temperature "
        f"{sampling[1]}",
        "pilot": f"{', '.join(pilot.arms)}; learning rates {rates}; seeds {', '.join(map(str, pilot.seeds))}",
        "arms": ", ".join(noise.arms),
        "seeds": f"{noise.seeds[0]} to {noise.seeds[-1]}",
        "decided by": noise.analysis.metric,
        "starts of a failing run": str(noise.attempts),
        "runs": f"{len(pilot.runs())} of the pilot, {len(noise.runs())} of the study",
    }


def test_every_row_of_the_table_is_what_files_and_code_say(noise, pilot):
    assert table_of(REGISTERED) == expected(noise, pilot)
    assert noise.seeds == list(range(noise.seeds[0], noise.seeds[-1] + 1))


def test_the_hypotheses_are_the_comparisons_of_the_analysis(noise):
    stated = re.findall(r"^\d\. `([^`]+)` differs from `([^`]+)`", REGISTERED, re.MULTILINE)
    assert stated == noise.comparisons
    assert len(stated) == 5, "the words of the plan say five"
    assert f'("{noise.analysis.metric}")' in REGISTERED


def test_the_pilot_tries_what_the_study_runs_and_shares_no_seed_with_it(noise, pilot):
    assert not set(noise.seeds) & set(pilot.seeds)
    assert noise.config == pilot.config
    assert noise.settings == pilot.settings
    assert noise.gpu_memory == pilot.gpu_memory
    for name, arm in pilot.arms.items():
        rate = noise.arms[name]["model"]["optimizer"]["init_args"]
        assert set(rate) == {"lr"}
        assert rate["lr"] in pilot.grid[RATE]
        assert noise_of(arm) == noise_of(noise.arms[name])
        assert arm.get("model", {}).get("base_format") == noise.arms[name]["model"].get("base_format")


def test_the_arm_with_the_temperature_follows_the_pilots_noisy_runs_at_their_rate(noise, pilot):
    temperature, noisy, plain = (noise.arms[name] for name in ("bf16+temperature", "bf16+aqn", "bf16"))
    (matched,) = temperature["trainer"]["callbacks+"]
    rate = noisy["model"]["optimizer"]["init_args"]["lr"]
    folder = pilot.output / "analysis" / "surprisal"
    assert matched["init_args"]["curve"] == str(folder / f"bf16+aqn_lr={rate}.json")
    assert temperature["model"] == plain["model"]


def test_the_page_says_the_limits_of_room_and_how_each_policy_is_made():
    low, high = (f"{100 * value:g}" for value in PASS_AT_1)
    assert f"pass@1 of {low} to {high} %" in REGISTERED
    assert f"pass@64 above {100 * MIN_PASS_AT_N:g} %" in " ".join(REGISTERED.split())
    commands = re.findall(r"pretrain --output models/skilled-(\S+) --size (\S+) --seed (\d+)", PAGE)
    assert commands == [("0", "10m", "0"), ("1", "10m", "1"), ("30m-0", "30m", "0"), ("30m-1", "30m", "1")]
    assert re.findall(r"^habit (\S+) (\S+) (\d+)$", PAGE, re.MULTILINE) == commands
    for _, size, seed in commands:
        assert pretraining(size=size, seed=seed)[1].learning_rate == LEARNING_RATES[size]


def test_the_exploratory_study_has_the_runs_of_the_deciding_one(noise, formats):
    assert formats.output == noise.output
    assert formats.analysis.folder != noise.analysis.folder
    assert not set(formats.evaluations) & set(noise.evaluations)
    assert formats.seeds == noise.seeds
    assert formats.analysis.metric == noise.analysis.metric
    mine = {run.folder: run for run in formats.runs()}
    for run in noise.runs():
        files = files_of(formats, mine[run.folder])
        shared = [run.folder / "study" / name for name in ("settings.yaml", "arm.yaml")]
        assert [files[path] for path in shared] == [files_of(noise, run)[path] for path in shared]
        theirs, ours = (commands_of(study, each)[0] for study, each in ((noise, run), (formats, mine[run.folder])))
        assert theirs == ours


def test_every_row_of_the_exploratory_table_is_what_the_files_say(noise, formats, formats_pilot):
    common = yaml.safe_load((ROOT / "configs" / "word_problems.yaml").read_text())
    table = table_of(EXPLORATORY)
    kinds = ("arms of noise.yaml", "further arms", "equal entropy", "rounded noise", "unbounded weights", "DAPO")
    assert table["arms of noise.yaml"] == ", ".join(noise.arms)
    assert ", ".join(table.pop(kind) for kind in kinds) == ", ".join(formats.arms)
    samples = {name: each["model"]["val_sampling"] for name, each in formats.evaluations.items()}
    (sampling,) = {(each["num_completions"], each["temperature"]) for each in samples.values()}
    (limit,) = {each["data"]["val_limit"] for each in formats.evaluations.values()}
    training = formats.settings["trainer"]["max_steps"] * common["data"]["batch_size"]
    rates = ", ".join(f"{rate:g}" for rate in formats_pilot.grid[RATE])
    further = len(formats.runs()) - len(noise.runs())
    smallest = holm([2 / 2 ** len(formats.seeds)] * len(formats.comparisons))[0]
    assert smallest < 0.05, "no comparison could be accepted"
    assert table == {
        "arms of the pilot": ", ".join(formats_pilot.arms),
        "pilot": f"learning rates {rates}; seeds {', '.join(map(str, formats_pilot.seeds))}",
        "evaluations": f"{' and '.join(samples)}: {limit} problems, {sampling[0]} samples of each at temperature "
        f"{sampling[1]}",
        "completions of a run with GRPO": f"{training * common['model']['sampling']['num_completions']} to train, "
        f"{len(samples) * limit * sampling[0]} in the evaluations",
        "smallest adjusted p-value": f"{smallest:.3g}",
        "runs": f"{len(formats_pilot.runs())} of the pilot, {len(noise.runs())} of noise.yaml, {further} further",
    }


def test_the_exploratory_evaluations_are_those_of_the_deciding_study_with_256_samples(noise, formats):
    for name, evaluation in noise.evaluations.items():
        other = deepcopy(formats.evaluations[f"{name}-256"])
        assert other["model"]["val_sampling"].pop("num_completions") == 256
        rows = 256 * other["data"].pop("val_batch_size")
        assert rows == evaluation["model"]["val_sampling"]["num_completions"] * evaluation["data"]["val_batch_size"]
        kept = {key: value for key, value in evaluation["data"].items() if key != "val_batch_size"}
        assert other == {"model": {"val_sampling": {"temperature": 1.0}}, "data": kept}


def test_the_exploratory_comparisons_are_those_of_the_analysis(noise, formats):
    stated = re.findall(r"^\d+\. `([^`]+)` differs from `([^`]+)`", EXPLORATORY, re.MULTILINE)
    assert stated == formats.comparisons
    assert not {frozenset(pair) for pair in stated} & {frozenset(pair) for pair in noise.comparisons}
    assert {arm for pair in stated for arm in pair} >= set(formats.arms) - set(noise.arms)


def test_an_exploratory_arm_differs_from_its_base_in_what_its_name_says(formats, noise):
    for name, arm in formats.arms.items():
        base, *variant = name.split("+")
        assert arm["model"].get("base_format", "bf16") == base
        changed = {key: value for key, value in arm["model"].items() if key not in ("base_format", "optimizer")}
        dapo = {"objective": {"preset": "dapo"}, "dynamic_sampling": {"metric": "accuracy"}}
        capped = {"objective": {"correction_high": math.inf}}
        assert changed == (dapo if "dapo" in variant else capped if "aqn-uncapped" in variant else {})
        rounded = {"noise_precision": "compute"} if "aqn-rounded" in variant else {}
        (aqn,) = noise_of(noise.arms["bf16+aqn"])
        noisy = any(part.startswith("aqn") for part in variant)
        assert noise_of(arm) == [{**aqn, **rounded}] * noisy
        assert len(arm.get("trainer", {}).get("callbacks+", [])) == len(set(variant) - {"dapo"}) <= 1
        like = {"temperature": base, "aqn-rounded": f"{base}+aqn", "aqn-uncapped": f"{base}+aqn"}
        if variant and variant[-1] in like:
            assert rate_of(formats, name) == rate_of(formats, like[variant[-1]])


def test_the_exploratory_pilot_is_like_the_first_and_has_the_arms_whose_rates_it_chooses(pilot, formats, formats_pilot):
    for name in ("config", "settings", "gpu_memory", "grid", "seeds", "evaluations"):
        assert getattr(formats_pilot, name) == getattr(pilot, name)
    for name, arm in formats_pilot.arms.items():
        model = formats.arms[name]["model"]
        assert arm["model"] == {key: value for key, value in model.items() if key != "optimizer"}
        assert rate_of(formats, name) in formats_pilot.grid[RATE]
        assert noise_of(arm) == noise_of(formats.arms[name])
    rates = {name: rate_of(formats, f"{name}+aqn") for name in ("nvfp4", "mxfp4", "nf4")}
    for name, rate in rates.items():
        folder = (pilot if name in pilot.arms else formats_pilot).output / "analysis" / "surprisal"
        (matched,) = formats.arms[f"{name}+temperature"]["trainer"]["callbacks+"]
        assert matched["init_args"] == {"curve": str(folder / f"{name}+aqn_lr={rate}.json")}
