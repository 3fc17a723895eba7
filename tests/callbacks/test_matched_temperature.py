"""The callback MatchedTemperature sets the temperature of each rollout so that the entropy follows a given curve, and a
resumed run gets the same temperatures."""

import json
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from callbacks.matched_temperature import MatchedTemperature
from qerl_pl.results.curves import read_curves
from tests.integration.conftest import UNCHECKED, bases, run  # noqa: F401

SETTINGS = ("--model.optimizer.init_args.lr", "1e-6", "--trainer.max_steps", "6", "--trainer.limit_val_batches", "0")


def fit(run, folder, curve, *arguments: str) -> dict[str, list[float]]:  # noqa: F811
    callback = "--trainer.callbacks+=callbacks.matched_temperature.MatchedTemperature"
    run("fit", folder, *UNCHECKED, callback, f"--trainer.callbacks.curve={curve}", *SETTINGS, *arguments)
    return {tag: curve.values for tag, curve in read_curves(folder).items()}


@pytest.mark.slow
def test_the_entropy_comes_to_the_curve_and_a_stopped_run_goes_on_with_its_temperature(run, tmp_path):  # noqa: F811
    curve = tmp_path / "curve.json"
    curve.write_text(json.dumps([4.5]))  # a policy with random weights has log 272 = 5.6 nats
    whole = fit(run, tmp_path / "whole", curve)
    temperatures, surprisals = whole["matched/temperature"], whole["rollout/surprisal"]
    assert temperatures[0] == 1
    assert set(whole["matched/target"]) == {4.5}
    assert temperatures[-1] < temperatures[0]
    assert abs(surprisals[-1] - 4.5) < abs(surprisals[0] - 4.5)

    stop = ("--trainer.callbacks+=tests.integration.toy.CtrlC", "--trainer.callbacks.at=3")
    fit(run, tmp_path / "parts", curve, *stop)
    parts = fit(run, tmp_path / "parts", curve, "--ckpt_path", "last")
    assert parts["matched/temperature"] == temperatures
    assert parts["rollout/surprisal"] == surprisals


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("{", "is no JSON"),
        *((text, "no list of numbers") for text in ("[]", "[1, -1]", "[1, Infinity]", "[true]")),
    ],
)
def test_a_curve_that_is_none_is_refused(tmp_path, content, message):
    path = tmp_path / "curve.json"
    if content is not None:
        path.write_text(content)
    nothing: Any = None
    MatchedTemperature(str(path)).setup(nothing, nothing, "test")
    with pytest.raises(ValueError, match=message):
        MatchedTemperature(str(path)).setup(nothing, nothing, "fit")


def test_a_temperature_that_cannot_be_set_is_no_limit():
    with pytest.raises(ValueError, match=r"limits are \[0.001, 2.0\]; expected two temperatures from 0.01"):
        MatchedTemperature("curve.json", limits=(0.001, 2.0))


def test_a_resumed_run_keeps_the_curve_of_its_first_start_unless_it_names_another(tmp_path):
    nothing: Any = None
    path, other = tmp_path / "curve.json", tmp_path / "other.json"
    path.write_text("[0.5]")
    other.write_text("[0.75]")
    first = MatchedTemperature(str(path))
    first.setup(nothing, nothing, "fit")
    path.write_text("[0.25]")
    for curve, target in ((path, 0.5), (other, 0.75)):
        resumed = MatchedTemperature(str(curve))
        resumed.setup(nothing, nothing, "fit")
        resumed.load_state_dict(first.state_dict())
        assert resumed._target(0) == target


def test_the_curve_of_a_run_is_that_of_its_event_files(tmp_path):
    nothing: Any = None
    matched = MatchedTemperature(str(tmp_path))
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("train/reward", 1.0, 0)
    with pytest.raises(ValueError, match="did not log rollout/surprisal"):
        matched.setup(nothing, nothing, "fit")
    with SummaryWriter(str(tmp_path), filename_suffix=".2") as writer:
        for step, value in enumerate([0.5, 0.25]):
            writer.add_scalar("rollout/surprisal", value, step)
    matched.setup(nothing, nothing, "fit")
    assert [matched._target(rollout) for rollout in range(3)] == [0.5, 0.25, 0.25]


def test_a_curve_that_was_not_logged_in_every_rollout_is_read_by_its_steps(tmp_path):
    nothing: Any = None
    matched = MatchedTemperature(str(tmp_path))
    with SummaryWriter(str(tmp_path)) as writer:
        for step, value in ((1, 0.5), (3, 0.25)):  # as with trainer.log_every_n_steps 2
            writer.add_scalar("rollout/surprisal", value, step)
    matched.setup(nothing, nothing, "fit")
    assert [matched._target(rollout) for rollout in range(5)] == [0.5, 0.5, 0.375, 0.25, 0.25]


def test_a_run_that_sampled_without_any_entropy_is_no_curve(tmp_path):
    nothing: Any = None
    with SummaryWriter(str(tmp_path)) as writer:
        for step, value in enumerate([0.5, 0.0]):
            writer.add_scalar("rollout/surprisal", value, step)
    with pytest.raises(ValueError, match="is not above 0 in every rollout"):
        MatchedTemperature(str(tmp_path)).setup(nothing, nothing, "fit")
