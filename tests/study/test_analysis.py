"""The analysis of a study whose event files were written with known results."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

from qerl_pl.__main__ import main as command
from qerl_pl.results.curves import Curve
from qerl_pl.study import state
from qerl_pl.study.analysis import (
    all_compared,
    compared,
    gather,
    not_finite,
    rank_collapsed_last,
    tables,
    write_files,
)
from qerl_pl.study.readouts import area, entropy_at, equal_reward, pass_at_k, readouts, smooth
from qerl_pl.study.study_file import Analysis, Run, Study

GAIN = {"bf16": 0.0, "nvfp4": 0.1, "nvfp4+aqn": 0.0}


def log(folder: Path, curves: dict[str, list[float]]) -> None:
    with SummaryWriter(str(folder)) as writer:
        for tag, values in curves.items():
            for step, value in enumerate(values):
                writer.add_scalar(tag, value, step)


def finish(study: Study, run: Run) -> None:
    """Write the files that a finished run would have written. Rewards rise by 0.1 per step, and entropies fall; the
    rewards of an arm are higher by its ``GAIN``."""
    noise = np.random.default_rng(run.seed).normal(0, 0.01) + run.seed
    of_run = np.random.default_rng(len(run.arm) + run.seed).normal(0, 0.002) + GAIN[run.arm]
    rewards = [0.1 * step + noise + of_run for step in range(11)]
    log(
        run.folder,
        {
            "train/reward": rewards,
            "val/accuracy": [value - 0.05 for value in rewards],
            "rollout/surprisal": [1.0 + 0.1 * run.seed] * 11,
            "policy/entropy": [2.0 - 0.1 * step for step in range(11)],
            "gap/mean_abs": [0.01] * 11,
            "ledger/kernel/mean_abs": [0.004] * 3,
            "memory/gpu_peak_bytes": [2.0**30, 2.0**31],
            "memory/process_bytes": [2.0**34],
            "time/step_s": [9.0] + [1.0] * 10,
        },
    )
    log(run.folder / "evaluations" / "reach" / "test" / "words-last", {"test/accuracy": [0.1], "test/pass@4": [0.3]})
    state.keep(run.folder, done={"fit": 20.0, "reach": 3.0})


@pytest.fixture
def study(tmp_path: Path) -> Study:
    study = Study(tmp_path / "out", {arm: {} for arm in GAIN}, list(range(6)), evaluations={"reach": {}})
    for run in study.runs():
        finish(study, run)
    return study


def test_readouts_are_what_the_curves_say(study):
    run = study.runs()[0]
    values = gather(study)[0].runs[0]
    assert values["area under accuracy"] == pytest.approx(values["accuracy at step 0"] + 0.5, abs=1e-5)
    assert values["final accuracy"] == pytest.approx(values["accuracy at step 0"] + 1, abs=1e-5)
    known = {
        "seconds per step": 1,
        "seconds of the run": 20,
        "GPU memory, GiB": 2,
        "entropy at step 0": 2.0,
        "gap": 0.01,
    }
    known |= {"gap, kernel": 0.004, "mean sampling entropy": 1.0, "reach: pass@1": 0.1, "reach: pass@4": 0.3}
    assert {name: values[name] for name in known} == pytest.approx(known)
    assert "entropy at equal reward" in values
    left = {"seconds of the run": 20, "reach: pass@1": 0.1, "reach: pass@4": 0.3}
    assert readouts(study, run, {}) == pytest.approx(left), "what was not logged is left out"
    folder = run.folder / "evaluations" / "reach" / "test"
    for number in (9, 10):
        log(folder / f"words-last-{number}", {"test/accuracy": [0.1 * number], "test/pass@2": [0.05 * number]})
        [file] = (folder / f"words-last-{number}").iterdir()
        file.rename(file.with_name(f"events.out.tfevents.9999999{number:03}.x"))
    assert pass_at_k(run, "reach") == pytest.approx({1: 1.0, 2: 0.5}), "the last of repeated evaluations counts alone"


def test_areas_means_and_the_entropy_at_equal_reward():
    assert area(Curve([0, 1, 3], [0.0, 1.0, 1.0], [])) == pytest.approx((0.5 + 2) / 3)
    assert area(Curve([7], [4.0], [])) == 4
    assert smooth([1, 2, 3, 4], 2).tolist() == [1, 1.5, 2.5, 3.5]
    rising = {"train/reward": Curve([0, 1, 2], [0.0, 1, 2], []), "policy/entropy": Curve([0, 1, 2], [3.0, 2, 1], [])}
    flat = {"train/reward": Curve([0, 1, 2], [0.25] * 3, [])}
    assert equal_reward([rising, flat]) == 0.25
    assert equal_reward([rising, {}]) is None
    assert entropy_at(rising, 0.5) == pytest.approx(2.5), "the running mean of the reward is 0.5 at step 1"
    assert entropy_at(rising, 9.0) is None
    assert entropy_at(flat, 0.1) is None


def test_a_paired_difference_is_found_although_seeds_differ_by_more(study):
    found = {judged.one.arm: judged for judged in compared(study, gather(study), "area under accuracy")}
    assert set(found) == {"nvfp4", "nvfp4+aqn"}
    better, same = found["nvfp4"], found["nvfp4+aqn"]
    assert better.comparison.difference.value == pytest.approx(0.1, abs=0.01)
    assert better.comparison.difference.low > 0.09
    assert better.comparison.p == pytest.approx(2 / 2**6)
    assert better.adjusted == pytest.approx(4 / 2**6)
    assert same.comparison.difference.low < 0.005
    assert "| nvfp4 - bf16 | " in tables(study, gather(study), [better])


def test_what_is_not_finished_is_left_out_and_named(study):
    missing = study.runs()[-1]
    state.keep(missing.folder, done={"fit": 1.0}, failure="reach ended with status 1\nmore")
    groups = gather(study)
    judged = compared(study, groups, "final reward")
    text = tables(study, groups, judged)
    assert "17 of 18 runs are finished" in text
    assert "took 0.11 hours in all (fit 0.09, reach 0.01), and 23 s in the median run" in text
    assert "- nvfp4+aqn/seed-5: reach ended with status 1" in text
    assert "| seeds | 6 | 6 | 5 |" in text
    assert {one.one.arm: one.comparison.difference.num for one in judged} == {"nvfp4": 6, "nvfp4+aqn": 5}


def test_the_best_point_of_a_grid_is_named_for_each_arm(tmp_path):
    output, grid = tmp_path / "out", {"model.optimizer.init_args.lr": [1e-4, 3e-4, 9e-4]}
    study = Study(output, {"bf16": {}, "nvfp4": {}}, [0, 1], grid=grid)
    best = {"bf16": 3e-4, "nvfp4": 9e-4}
    for run in study.runs():
        height = 0.4 if run.point["model.optimizer.init_args.lr"] == best[run.arm] else 0.3 + 0.05 * run.seed
        log(run.folder, {"val/accuracy": [0.0, height]})
        state.keep(run.folder, done={"fit": 1.0})
    text = tables(study, gather(study), [])
    assert "- bf16: lr=0.0003 (mean 0.2; 3 points)\n- nvfp4: lr=0.0009 (mean 0.2; 3 points)\n" in text
    one = replace(study, grid={"model.optimizer.init_args.lr": [3e-4]})
    assert "Best points" not in tables(one, gather(one), [])


@pytest.mark.slow
def test_the_command_writes_tables_and_curves_and_touches_no_run(study, tmp_path, capsys):
    path, other = tmp_path / "study.yaml", tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump({"arms": study.arms, "seeds": study.seeds, "evaluations": study.evaluations}))
    other.write_text(yaml.safe_dump({"arms": {"nvfp4": {}}, "seeds": [0, 1], "analysis": {"folder": "other"}}))
    before = {file: file.stat().st_mtime_ns for file in (study.output / "runs").rglob("*")}
    assert command(["study", str(path), "--output", str(study.output), "--analyse"]) == 0
    assert "## Decided by: area under accuracy" in capsys.readouterr().out
    folder = study.output / "analysis"
    names = {"analysis.md", "readouts.csv", "comparisons.jsonl", "surprisal", "curves.png"}
    assert {file.name for file in folder.iterdir()} == names
    curve = json.loads((folder / "surprisal" / "nvfp4+aqn.json").read_text())
    assert curve == pytest.approx([1.25] * 11), "the mean over the seeds"
    rows = list(csv.DictReader((folder / "readouts.csv").open()))
    assert len(rows) == 18
    assert float(rows[0]["reach: pass@4"]) == pytest.approx(0.3)
    lines = [json.loads(line) for line in (folder / "comparisons.jsonl").read_text().splitlines()]
    assert {line["readout"] for line in lines} >= {"area under accuracy", "reach: pass@4", "gap"}

    assert command(["study", str(other), "--output", str(study.output), "--analyse"]) == 0
    assert {path.name for path in study.output.iterdir()} == {"runs", "analysis", "other"}, "the runs are shared"
    assert "2 of 2 runs are finished" in (study.output / "other" / "analysis.md").read_text()
    assert {file: file.stat().st_mtime_ns for file in (study.output / "runs").rglob("*")} == before


def test_the_surprisal_of_an_arm_has_a_value_for_each_rollout_also_if_not_all_were_logged(tmp_path):
    study = Study(tmp_path / "out", {"bf16": {}}, [0, 1])
    for run in study.runs():
        state.keep(run.folder, done={"fit": 1.0})
        with SummaryWriter(str(run.folder)) as writer:
            for step in (1, 3):  # as with trainer.log_every_n_steps 2
                writer.add_scalar("rollout/surprisal", float(step + run.seed), step)
    write_files(study, gather(study), tmp_path)
    assert json.loads((tmp_path / "surprisal" / "bf16.json").read_text()) == [1.5, 1.5, 2.5, 3.5]


def test_a_study_without_a_finished_run_is_an_error(tmp_path, capsys):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({"arms": {"a": {}}, "seeds": [0]}))
    assert command(["study", str(path), "--output", str(tmp_path / "out"), "--analyse"]) == 2
    assert "there is nothing to analyse yet" in capsys.readouterr().err


def test_a_readout_that_is_not_finite_is_named_and_left_out_of_it_and_the_deciding_one_is_the_worst(study, tmp_path):
    metric, groups = study.analysis.metric, gather(study)
    nvfp4 = next(group for group in groups if group.name == "nvfp4")
    lowest = min(value for group in groups for value in group.values(metric))
    nvfp4.runs[2]["gap"] = float("nan")
    collapsed = not_finite(study, groups)
    judged = all_compared(study, groups)
    pairs = {one.readout: one.comparison.difference.num for one in judged if one.one.arm == "nvfp4"}
    assert pairs["gap"] == pairs["final reward"] - 1
    assert "1 runs have readouts that are not finite" in collapsed[1]
    assert "- nvfp4, seed 2: gap (nan)" in tables(study, groups, judged, collapsed)

    nvfp4.runs[2][metric] = float("nan")
    assert f"{metric} (nan)" in write_files(study, groups, tmp_path)
    assert nvfp4.runs[2][metric] == lowest
    records = map(json.loads, (tmp_path / "comparisons.jsonl").read_text().splitlines())
    [number] = [one["num"] for one in records if (one["readout"], one["one"]) == (metric, "nvfp4")]
    assert number == len(study.seeds)


def test_a_deciding_readout_that_no_run_has_is_said_with_those_that_there_are(study):
    misspelt = replace(study, analysis=Analysis(metric="area under acuracy"))
    groups = gather(misspelt)
    text = tables(misspelt, groups, all_compared(misspelt, groups))
    [said] = [line for line in text.splitlines() if line.startswith("No finished run has this readout")]
    assert "area under accuracy, " in said
    assert "No two arms" not in text


def test_a_collapsed_run_is_the_worst_also_if_lower_values_are_better(study):
    for metric, worst in (("gap", max), ("seconds per step", max), ("final reward", min)):
        groups = gather(study)
        groups[0].runs[1][metric] = 99.0 if worst is max else -99.0
        groups[1].runs[2][metric] = float("nan")
        rank_collapsed_last(groups, metric)
        assert groups[1].runs[2][metric] == worst(-99.0, 99.0), metric


def test_the_best_point_by_a_readout_of_which_less_is_better_has_the_lowest_mean(tmp_path):
    grid = {"model.optimizer.init_args.lr": [1e-4, 3e-4]}
    study = Study(tmp_path / "out", {"bf16": {}}, [0], grid=grid, analysis=Analysis(metric="gap"))
    for run in study.runs():
        log(run.folder, {"gap/mean_abs": [10 * run.point["model.optimizer.init_args.lr"]]})
        state.keep(run.folder, done={"fit": 1.0})
    assert "- bf16: lr=0.0001 (mean 0.001; 2 points)" in tables(study, gather(study), [])


def test_a_plan_that_can_accept_nothing_is_refused_before_its_runs(tmp_path, capsys):
    path = tmp_path / "study.yaml"
    pairs = [["b", "a"], ["c", "a"]]
    plan = {"arms": {name: {} for name in "abc"}, "seeds": list(range(6)), "output": str(tmp_path / "out")}
    message = "study.yaml: with 6 seeds and 2 comparisons the analysis can accept nothing"
    for changes, status, printed in (
        ({"analysis": {"comparisons": pairs}}, 2, f"error: {message}"),
        ({}, 0, f"warning: {message}"),
        ({"seeds": list(range(7))}, 0, ""),
        ({"analysis": {"comparisons": pairs[:1]}}, 0, ""),
        ({"analysis": {"comparisons": []}}, 0, ""),
    ):
        path.write_text(yaml.safe_dump(plan | changes))
        assert command(["study", str(path), "--dry-run"]) == status
        error = capsys.readouterr().err
        assert error.startswith(printed)
        assert bool(error) == bool(printed)
