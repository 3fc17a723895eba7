"""A start prints which settings it changes, and keeps the old ones."""

import pytest
import yaml

from qerl_pl.settings.changes import changed_settings, keep_old_config


def test_changes_are_listed_by_their_key():
    before = {"model": {"lr": 1.0, "engine": {"class_path": "a"}, "gone": 1}, "list": [1, {"a": 2}], "ckpt_path": None}
    now = {"model": {"lr": 2.0, "engine": {"class_path": "a"}, "new": {}}, "list": [1, {"a": 3}], "ckpt_path": "last"}
    assert changed_settings(before, now) == [
        "list: [1, {'a': 2}] -> [1, {'a': 3}]",
        "model.gone: 1 -> (not set)",
        "model.lr: 1.0 -> 2.0",
        "model.new: (not set) -> {}",
    ]
    assert changed_settings(before, before) == []


def test_callbacks_are_compared_one_by_one():
    def settings(**init_args: int) -> dict:
        return {"callbacks": [{"class_path": "a.B"}, {"class_path": "c.D", "init_args": init_args}]}

    assert changed_settings(settings(x=1, y=2), settings(x=3, y=2)) == ["callbacks[c.D].init_args.x: 1 -> 3"]
    fewer = {"callbacks": settings()["callbacks"][:1]}
    assert changed_settings(settings(), fewer) == [
        "callbacks[c.D]: there -> (not set)",
        "callbacks[c.D].init_args: {} -> (not set)",
    ]


def test_no_old_config_is_ever_overwritten(tmp_path):
    config = tmp_path / "config.yaml"
    assert keep_old_config(config, "a: 1") == ([], None)
    texts = [f"a: {n}\n" for n in range(4)]
    for text in texts:
        changes, kept = keep_old_config(config, text)
        assert (kept is None) == (not config.exists()) == (not changes)
        config.write_text(text)
    assert keep_old_config(config, texts[-1]) == ([], None)
    assert [(tmp_path / f"config.{n}.yaml").read_text() for n in (1, 2, 3)] == texts[:3]
    config.write_text("a: [")
    changes, kept = keep_old_config(config, yaml.safe_dump({"a": 1}))
    assert "cannot be read" in changes[0]
    assert kept is not None
    assert kept.read_text() == "a: ["


@pytest.mark.parametrize("file", [None, "a: 2\n", "a: 3\n"], ids=["removed", "edited as the start", "edited otherwise"])
def test_what_changes_is_told_from_what_the_run_was_trained_with(tmp_path, file):
    config, now = tmp_path / "config.yaml", "a: 2\n"
    if file:
        config.write_text(file)
    changes, kept = keep_old_config(config, now, before="a: 1\n")
    assert changes == ["a: 1 -> 2"]
    assert kept is not None
    assert kept.read_text() == "a: 1\n"
    copies = [path.read_text() for path in sorted(tmp_path.glob("config.*.yaml"))]
    assert copies == ["a: 1\n", "a: 3\n"] if file == "a: 3\n" else ["a: 1\n"]
    assert keep_old_config(tmp_path / "other" / "config.yaml", now, before=now) == ([], None)


def test_what_changes_the_goal_comes_first_and_says_so():
    before = {"a": 1, "model": {"sampling": {"temperature": 1.0, "num_completions": 8}, "objective": {"preset": None}}}
    now = {"a": 2, "model": {"sampling": {"temperature": 0.9, "num_completions": 4}, "objective": {"preset": "dapo"}}}
    result = changed_settings(before, now)
    marked = [change.startswith("ATTENTION, what is optimised changes: model.") for change in result]
    assert marked == [True] * 3 + [False]
    assert result[-1] == "a: 1 -> 2"


def test_a_reward_that_changes_is_named():
    def rewards(*weights):
        listed = [{"name": f"r{n}", "weight": weight, "reward": "m.a" * 100} for n, weight in enumerate(weights)]
        return {"model": {"rewards": listed}}

    assert changed_settings(rewards(1.0, 0.2), rewards(1.0, 0.5)) == [
        "ATTENTION, what is optimised changes: model.rewards[r1].weight: 0.2 -> 0.5"
    ]
    removed, *of_reward = changed_settings(rewards(1.0, 0.2), rewards(1.0))
    assert removed.endswith("model.rewards: r0, r1 -> r0")
    assert len(of_reward) == 3


def test_a_change_of_the_runs_length_says_what_it_moves():
    [change] = changed_settings({"trainer": {"max_steps": 48}}, {"trainer": {"max_steps": 64}})
    assert change.startswith("trainer.max_steps: 48 -> 64; schedules of learning rate and noise")


def test_problems_of_validation_are_not_what_is_optimised():
    before, now = ({"data": {"val_limit": value, "batch_size": value}} for value in (1, 2))
    assert changed_settings(before, now) == [
        "ATTENTION, what is optimised changes: data.batch_size: 1 -> 2",
        "data.val_limit: 1 -> 2",
    ]
