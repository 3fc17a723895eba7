"""The study's registration in docs/study.md agrees with the configuration files of the study."""

import csv
import re
from typing import Any

import pytest
import yaml

from qerl_pl.study.statistics import compare, holm, pairs_to_accept, smallest_size
from qerl_pl.study.study_file import Study, read_study
from tests.program import ROOT

PAGE = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
REGISTERED = PAGE.split("## Registered", 1)[1].split("### Run it", 1)[0]
RATE = "model.optimizer.init_args.lr"


def study(name: str) -> Study:
    return read_study(ROOT / "configs" / "studies" / f"{name}.yaml")


def noise_of(arm: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the settings of AQN in an arm."""
    callbacks = arm.get("trainer", {}).get("callbacks+", [])
    return [each["init_args"] for each in callbacks if each["class_path"] == "callbacks.aqn.AdaptiveQuantizationNoise"]


def without_rate(arm: dict[str, Any]) -> dict[str, Any]:
    model = {key: value for key, value in arm.get("model", {}).items() if key != "optimizer"}
    return {**{key: value for key, value in arm.items() if key != "model"}, **({"model": model} if model else {})}


def test_every_row_of_the_table_is_what_the_files_say():
    noise, pilot, large = study("noise"), study("noise_pilot"), study("noise_1.5b")
    (config,) = noise.config
    task = yaml.safe_load((ROOT / config).read_text())
    model, optimizer = task["model"], task["model"]["optimizer"]
    steps, sampling = noise.settings["trainer"], {**model["sampling"], **noise.settings["model"]["sampling"]}
    first, second = optimizer["init_args"]["betas"]
    samples = {
        name: f"{name}: {each['model']['val_sampling']['num_completions']} samples per problem"
        if "model" in each
        else f"{name}: greedily"
        for name, each in noise.evaluations.items()
    }
    table = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", REGISTERED, re.MULTILINE))
    assert table.pop("setting") == "value"
    assert table == {
        "model": noise.settings["model"]["base"],
        "adapter": f"LoRA of rank {model['lora']['rank']}, alpha {model['lora']['alpha']}",
        "objective": model["objective"]["preset"],
        "rollout": f"{noise.settings['data']['batch_size']} prompts x {sampling['num_completions']} completions of at "
        f"most {sampling['max_tokens']} tokens, temperature {sampling['temperature']}",
        "training": f"{steps['max_steps']} rollouts, AdamW with betas {first} and {second}, weight decay "
        f"{optimizer['init_args']['weight_decay']}, learning rate {model['lr_schedule']} after "
        f"{model['warmup_steps']} steps",
        "validation": f"every {steps['val_check_interval']} rollouts, greedily, on the "
        f"{task['data']['val_batch_size']} test problems",
        "evaluations": "; ".join(samples.values()),
        "pilot": f"{len(pilot.arms)} arms; learning rates {', '.join(f'{rate:g}' for rate in pilot.grid[RATE])}; seeds "
        f"{', '.join(map(str, pilot.seeds))}",
        "arms": ", ".join(noise.arms),
        "seeds": f"{noise.seeds[0]} to {noise.seeds[-1]}",
        "decided by": noise.analysis.metric,
        "runs": f"{len(pilot.runs())} of the pilot, {len(noise.runs())} of the study",
        "1.5B": f"{', '.join(large.arms)}; seeds {large.seeds[0]} to {large.seeds[-1]}; {len(large.runs())} runs",
    }
    assert task["data"]["held_out"] == 0
    assert "val_sampling" not in model, "validation is greedy by default"


def test_the_hypotheses_are_the_comparisons_and_can_be_accepted():
    noise, large = study("noise"), study("noise_1.5b")
    stated = re.findall(r"^\d\. `([^`]+)` differs from `([^`]+)`", REGISTERED, re.MULTILINE)
    assert sorted(stated) == sorted(noise.comparisons)
    assert large.comparisons == stated[:2]
    for each in (noise, large):
        assert len(each.seeds) >= pairs_to_accept(len(each.comparisons))


def test_the_pilot_tries_what_the_study_runs_and_shares_no_seed_with_it():
    noise, pilot = study("noise"), study("noise_pilot")
    assert not set(noise.seeds) & set(pilot.seeds)
    assert not pilot.comparisons
    for name in ("config", "settings", "gpu_memory"):
        assert getattr(noise, name) == getattr(pilot, name)
    rates: dict[str, set[float]] = {}
    for name, arm in noise.arms.items():
        assert set(arm["model"]["optimizer"]["init_args"]) == {"lr"}
        rates.setdefault(name.partition("+")[0], set()).add(arm["model"]["optimizer"]["init_args"]["lr"])
        if name in pilot.arms and name != "bf16+aqn+strong":
            assert without_rate(arm) == pilot.arms[name]
    assert all(len(of_base) == 1 and of_base <= set(pilot.grid[RATE]) for of_base in rates.values())
    assert {"bf16", "nvfp4", "nvfp4+aqn", "bf16+aqn", "bf16+aqn+strong"} <= set(pilot.arms)
    assert noise.arms["bf16+temperature"]["model"] == noise.arms["bf16"]["model"]
    (tried,) = zip(*(noise_of(arm) for name, arm in pilot.arms.items() if "aqn" in name), strict=True)
    assert sorted({each["sigma_start"] for each in tried}) == [0.01, 0.02, 0.04]
    assert all(each["sigma_end"] == pytest.approx(each["sigma_start"] / 20) for each in tried)


def test_the_larger_model_has_the_arms_and_settings_of_the_smaller_one():
    noise, large = study("noise"), study("noise_1.5b")
    assert {name: arm for name, arm in noise.arms.items() if name in large.arms} == large.arms
    assert large.config == noise.config
    base = {"base": "Qwen/Qwen2.5-Coder-1.5B-Instruct"}
    assert large.settings == {**noise.settings, "model": {**noise.settings["model"], **base}}
    assert large.evaluations.items() <= noise.evaluations.items()


def test_the_table_of_the_toy_study_follows_from_its_readouts():
    with (ROOT / "docs" / "results" / "noise-words-0" / "readouts.csv").open(newline="") as file:
        values = {(row["arm"], row["seed"]): float(row["area under accuracy"]) for row in csv.DictReader(file)}
    seeds = sorted({seed for _, seed in values})
    toy = PAGE.split("## Before it", 1)[1]
    rows = re.findall(r"^\| (\S+) - (\S+) \| (\S+) \[(\S+), (\S+)\] \| (\S+) \| (\S+) \|$", toy, re.MULTILINE)
    found = [compare([values[one, seed] - values[other, seed] for seed in seeds]) for one, other, *_ in rows]
    assert len(rows) == 5
    for row, (difference, p, _), adjusted in zip(rows, found, holm([each.p for each in found]), strict=True):
        assert row[2:] == (*(f"{value:+.2g}" for value in difference[:3]), f"{p:.2g}", f"{adjusted:.2g}")
    size = max(each.spread for each in found) * smallest_size(len(seeds), len(rows))
    assert f"a true difference of {size:.3f}" in toy


def test_the_temperature_follows_the_quantised_run_of_the_same_seed():
    noise = study("noise")
    (matched,) = noise.arms["bf16+temperature"]["trainer"]["callbacks+"]
    assert matched["class_path"] == "callbacks.matched_temperature.MatchedTemperature"
    for run in noise.runs():
        if run.arm == "bf16+temperature":
            before = noise.run_before(run)
            assert before is not None
            assert str(before.folder) == matched["init_args"]["curve"].replace("$seed", str(run.seed))
