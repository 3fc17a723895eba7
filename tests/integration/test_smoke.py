"""``fit --smoke`` tries every part of a configuration in a short run with few prompts, and does not touch the files of
the real run."""

import json
import re

import pytest
import yaml

import train
from qerl_pl.cli.smoke import free_folder
from tests.integration.conftest import UNCHECKED, VLLM, arguments, load_last

OVERLONG = {"class_path": "qerl_pl.rewards.length.SoftOverlong", "init_args": {"buffer": 200, "max_tokens": 1000}}
LOW = "tests.integration.toy.low_tokens"


@pytest.mark.slow
def test_a_long_run_with_everything_on_is_tried_in_seconds(run, tmp_path):
    rewards = [{"name": "low", "reward": LOW}, {"name": "overlong", "weight": 0.5, "reward": OVERLONG}]
    changes = {
        "trainer": {"max_steps": 4000, "val_check_interval": 100},
        "model": {
            "rewards": rewards,
            "sampling": {"num_completions": 16, "max_tokens": 1000},
            "objective": {"preset": "dapo", "filter_truncated": True},
            "dynamic_sampling": {"metric": "low", "when_short": "error"},
            "updates_per_rollout": 2,
            "mini_batches": 2,
            "warmup_steps": 100,
            "micro_batch_tokens": 2000,
        },
        "data": {"batch_size": 8, "held_out": 6},
    }
    config = tmp_path / "changes.yaml"
    config.write_text(yaml.safe_dump(changes))
    more = ("-c", str(config), "--smoke", "--ckpt_path", "last")
    run("fit", tmp_path / "run", *more)
    assert not (tmp_path / "run").exists()
    folder = tmp_path / "run-smoke"
    assert load_last(folder)["global_step"] == 12, "three rollouts, as noise has at least three stages"
    assert (folder / "checkpoints" / "best.ckpt").exists()
    names = sorted(path.name for path in (folder / "completions").glob("*.jsonl"))
    assert sum(name.startswith("train-") for name in names) == 3
    assert sum(name.startswith("validate-") for name in names) >= 3
    rows = [json.loads(line) for line in (folder / "completions" / "train-000000.jsonl").read_text().splitlines()]
    assert len(rows) <= 8
    assert all(row["num_tokens"] <= 64 for row in rows)
    assert "smoke" not in yaml.safe_load((folder / "config.yaml").read_text())
    assert free_folder(str(folder)) == f"{folder}-2"
    (tmp_path / "run-smoke-2").mkdir()
    assert free_folder(str(folder)) == f"{folder}-2", "a start that failed leaves an empty folder, which is used again"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", ["{metric: zero, when_short: error}", pytest.param("null", marks=pytest.mark.long)]
)
def test_short_completions_that_earn_nothing_do_not_fail_the_trial(run, tmp_path, capsys, sampling):
    reward = "[{name: zero, reward: qerl_pl.rewards.format.think_answer_format}]"
    settings = (f"--model.rewards={reward}", f"--model.dynamic_sampling={sampling}", *UNCHECKED)
    run("fit", tmp_path / "run", "--smoke", *settings)
    assert load_last(tmp_path / "run-smoke")["global_step"] == 3
    said = capsys.readouterr().out
    assert re.search(r"signal: none of \d+ groups had one: all completions of each prompt earned the same", said)
    assert re.search(r"rewards: zero 0 for each of \d+\n", said)


@pytest.mark.parametrize("smoke", [True, False])
def test_vllm_starts_without_compilation_where_it_is_tried(bases, tmp_path, monkeypatch, smoke):
    monkeypatch.setattr("sys.argv", ["train.py"])
    more = (*VLLM, *(["--smoke"] if smoke else []))
    cli = train.main(arguments("fit", bases["nvfp4"], tmp_path / "run", *more), run_now=False)
    assert cli.model.engine.memory.enforce_eager == smoke


def test_smoke_is_for_training(run, tmp_path):
    with pytest.raises(ValueError, match=r"--smoke works with fit, not with test; .* --data\.val_limit"):
        run("test", tmp_path, "--smoke")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("--model.sampling.max_tokens", "100000"), "prompts and completions may reach 100"),
        (("--ckpt_path", "no-such.ckpt"), r"there is no checkpoint no-such\.ckpt"),
    ],
)
def test_what_the_whole_run_would_refuse_is_refused_before_the_trial(run, tmp_path, change, found):
    with pytest.raises(ValueError, match=found):
        run("fit", tmp_path / "run", *UNCHECKED, "--smoke", *change)


def test_a_folder_that_the_whole_run_cannot_have_is_refused(run, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="which is no folder"):
        run("fit", tmp_path / "run", *UNCHECKED, "--smoke")


@pytest.mark.slow
def test_too_few_prompts_for_the_whole_run_are_told(run, tmp_path):
    with pytest.raises(ValueError, match=r"data\.batch_size is 4096 but there are only \d+ training prompts"):
        run("fit", tmp_path / "run", *UNCHECKED, "--smoke", "--data.batch_size", "4096")
