"""Tests of the lines of bench_real_runs, for runs that finished, were interrupted, or were stopped by a check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

from qerl_pl.study import state
from qerl_pl.study.study_file import FIT, Run, read_study
from tests.bench.bench_real_runs import ARMS, left_open, main
from tests.integration.conftest import ROOT


def completions(right: str, lenient: str) -> list[dict]:
    """Greedy completions with these verdicts."""
    return [
        {
            "question": f"What is {index}?",
            "answer": str(index),
            "completion": f"{index} ",
            "rewards": {"strict": float(strict), "lenient": float(other)},
            "num_tokens": 10 + index,
            "finished": index > 0,
        }
        for index, (strict, other) in enumerate(zip(right, lenient, strict=True))
    ]


def write(file: Path, rows: list[dict]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Return a command line that reads the only run in a folder."""
    (tmp_path / "model").mkdir()
    names = {"models": "model", "problems": "gsm8k_train.jsonl", "folder": "runs", "output": "lines.jsonl"}
    return [
        *(word for name, path in names.items() for word in (f"--{name}", str(tmp_path / path))),
        *("--arms", "nvfp4", "--seeds", "0", "--completions", "2", "--read"),
    ]


@pytest.fixture
def started(words: list[str], tmp_path: Path) -> Run:
    """Make the folder of a run that was interrupted after two rollouts."""
    main(words)
    [run] = read_study(tmp_path / "runs" / "gsm8k_verl.yaml").runs()
    for done, right in ((0, "0100"), (2, "0110")):
        write(run.folder / "completions" / f"validate-{done:06d}.jsonl", completions(right, "0111"))
    sampling = {"num_completions": 5, "max_tokens": 1024}
    model = {"dtype": "bfloat16", "sampling": sampling, "optimizer": {"init_args": {"lr": 3e-5}}}
    settings = {"model": model, "trainer": {"max_steps": 116}, "data": {"batch_size": 64}}
    (run.folder / "config.yaml").write_text(yaml.safe_dump(settings))
    with SummaryWriter(str(run.folder)) as events:
        for step in (0, 1):
            events.add_scalar("time/step_s", 4.0 + step, step)
            events.add_scalar("train/strict", 0.123456789, step)
    log = state.log_of(run.folder, FIT)
    log.parent.mkdir(parents=True)
    log.write_text("rollout 1 of 116\n")
    return run


def lines(tmp_path: Path) -> list[dict]:
    file = tmp_path / "lines.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_run_that_was_cut_has_a_line_only_where_it_is_asked_for(words, started, tmp_path):
    main(words)
    assert lines(tmp_path) == []
    main([*words, "--partial"])
    run, compared = lines(tmp_path)
    assert (run["name"], run["finished"], run["steps"], run["alarm"]) == ("real_runs/model", False, 2, None)
    assert run["curves"] == {"strict": [0.12346] * 2, "step_s": [4.0, 5.0]}
    assert [point["rollouts"] for point in run["validations"]] == [0, 2]
    assert run["shape"]["rollouts"] == 116
    assert compared["rollouts"] == [0, 2]


def test_a_finished_run_is_reported_once(words, started, tmp_path):
    state.succeeded(started.folder, FIT, 321.0)
    for _ in range(2):
        main(words)
    run, _ = lines(tmp_path)
    assert (run["finished"], run["run_s"], run["lr"], run["bits_per_weight"]) == (True, 321.0, 3e-5, 16.0)


def test_a_check_that_ended_a_start_is_an_alarm_though_the_run_went_on(words, started, tmp_path):
    log = state.log_of(started.folder, FIT)
    log.write_text("stopped: the rollout engine does not compute with the current policy\nrollout 116 of 116\n")
    state.succeeded(started.folder, FIT, 1.0)
    main(words)
    assert lines(tmp_path)[0]["alarm"].startswith("stopped: the rollout engine")


@pytest.mark.parametrize("task", ["gsm8k_verl", "gsm8k_boxed"])
def test_arms_change_the_base_and_the_noise_and_nothing_that_the_task_sets(task):
    settings_of_task = yaml.safe_load((ROOT / "configs" / "tasks" / f"{task}.yaml").read_text())
    arms = {arm: yaml.safe_load((ROOT / "configs" / "arms" / f"{arm}.yaml").read_text()) for arm in ARMS}
    assert "optimizer" in arms["bf16"]["model"], "else there is nothing to leave out"
    left = {arm: left_open(settings, settings_of_task) for arm, settings in arms.items()}
    assert [left[arm]["model"] for arm in ARMS] == [{"quantize": None}, {"quantize": "nvfp4"}, {"quantize": "nvfp4"}]
    assert [arm for arm in ARMS if "trainer" in left[arm]] == ["nvfp4_aqn"]
    assert left["nvfp4_aqn"]["trainer"] == arms["nvfp4_aqn"]["trainer"]
