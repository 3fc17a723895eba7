"""Read the logged scalars of a run from its TensorBoard event files, and summarise them."""

import struct
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median_high
from typing import NamedTuple

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] (generated)
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.util.tensor_util import make_ndarray

SURPRISAL = "rollout/surprisal"
"""Name of the logged scalar that estimates the entropy of the distribution that completions are sampled from,
temperature and noise on the norm weights included."""
HEADER = 12  # bytes before the data of a record: the data's length, and a checksum of this length
FOOTER = 4  # bytes after the data of a record: the data's checksum


class Scalar(NamedTuple):
    """One value of a scalar."""

    tag: str
    step: int
    value: float
    time: float
    """Wall-clock time at which the scalar was logged, in seconds since the epoch."""


class Curve(NamedTuple):
    """Values of one logged scalar at the indices of rollouts."""

    steps: list[int]
    values: list[float]
    times: list[float]
    """Wall-clock time at which each value of the curve was logged, in seconds since the epoch."""


def read_curves(run: Path) -> dict[str, Curve]:
    """Read all scalars of a run from its TensorBoard event files, by name. Of several values at the same step, the
    latest is used. If there were validations before and after the first rollout, both are logged at step 0, and the
    first of them gets the step -1 here. A run that is started again from an older checkpoint repeats some steps; what
    its earlier starts logged for these steps is left out. Damaged parts of a file are skipped, with a warning on
    stderr. Raises ValueError if there is no event file, or none with a readable scalar."""
    files = sorted(run.glob("events.out.tfevents.*"))
    if not files:
        raise ValueError(_without_events(run))
    starts: list[list[Scalar]] = []
    for path in files:
        of_file, lost = read_scalars(path)
        starts += [_first_validation_apart(of_file)] if of_file else []
        if lost:
            print(f"warning: {path} is damaged or cut off: {lost} bytes of it are left out", file=sys.stderr)
    scalars: list[Scalar] = []
    for start in sorted(starts, key=lambda start: start[0].time):
        scalars = [scalar for scalar in scalars if scalar.step <= start[0].step] + start
    if not scalars:
        raise ValueError(f"the event files of {run} hold no scalars: the run logged none, or they are damaged")
    latest: dict[str, dict[int, Scalar]] = {}
    for scalar in sorted(scalars, key=lambda scalar: scalar.time):
        latest.setdefault(scalar.tag, {})[scalar.step] = scalar
    return {tag: _curve([by_step[step] for step in sorted(by_step)]) for tag, by_step in latest.items()}


def _first_validation_apart(scalars: list[Scalar]) -> list[Scalar]:
    """Set the step of the validation before the first rollout to -1 if there was also a validation after the first
    rollout (``trainer.val_check_interval`` 1), as Lightning logs both at step 0. ``scalars`` are those that one start
    of the run has logged."""
    left = Counter(scalar.tag for scalar in scalars if scalar.step == 0 and scalar.tag.startswith("val/"))
    apart = []
    for scalar in scalars:
        of_both = scalar.step == 0 and left[scalar.tag] > 1
        apart.append(scalar._replace(step=-1) if of_both else scalar)
        left[scalar.tag] -= of_both
    return apart


def at_every_step(curve: Curve) -> list[float]:
    """Return the values of a curve at all steps from 0 to its last one. Between two steps at which the scalar was
    logged, they are interpolated linearly; before the first such step, they are the value at that step."""
    return np.interp(range(curve.steps[-1] + 1), curve.steps, curve.values).tolist()


def _curve(scalars: list[Scalar]) -> Curve:
    return Curve([one.step for one in scalars], [one.value for one in scalars], [one.time for one in scalars])


def _without_events(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}; give the folder of a run, such as runs/quickstart"
    runs = sorted({str(path.parent) for path in folder.glob("*/events.out.tfevents.*")})
    if runs:
        return f"{folder} is no run but has runs in it; give one or several of them: {', '.join(runs)[:200]}"
    return f"{folder} holds no TensorBoard event files, which a run writes once it trains"


def read_scalars(path: Path) -> tuple[list[Scalar], int]:
    """Read the scalars of a TensorBoard event file in the order in which they were written. Records with a wrong
    checksum are skipped. Returns the scalars, and the number of bytes that could not be read, including those of
    skipped records."""
    data, scalars = path.read_bytes(), []
    place = lost = 0
    while place < len(data):
        start = place + HEADER
        length, checksum = struct.unpack("<QI", data[place:start].ljust(HEADER))
        end = start + length
        # after a damaged length, the start of the next record is unknown
        if checksum != masked_crc32c(data[place : place + 8]) or end + FOOTER > len(data):
            return scalars, lost + len(data) - place
        if data[end : end + FOOTER] == struct.pack("<I", masked_crc32c(data[start:end])):
            scalars += _scalars(Event.FromString(data[start:end]))
        else:
            lost += end + FOOTER - place
        place = end + FOOTER
    return scalars, lost


def _scalars(event: Event) -> list[Scalar]:
    scalars = []
    for value in event.summary.value:
        if value.HasField("simple_value"):
            scalars.append(Scalar(value.tag, event.step, value.simple_value, event.wall_time))
        elif value.HasField("tensor") and value.metadata.plugin_data.plugin_name == "scalars":
            scalars.append(Scalar(value.tag, event.step, float(make_ndarray(value.tensor)), event.wall_time))
    return scalars


def summarize(curves: Mapping[str, Curve]) -> dict[str, float]:
    """Compute the numbers that reports and model cards show for a run, by name, from the curves of its logged scalars:
    accuracy, reward, KL to the teacher, entropy, speed, and the difference between the log-probabilities of sampler and
    trainer. A number whose scalars the run did not log is left out."""
    summary: dict[str, float] = {}
    for name, tag, window in (
        ("accuracy (held out)", "val/accuracy", 1),
        ("reward (held out)", "val/reward", 1),
        ("reward (rollouts, mean of 5)", "train/reward", 5),
        ("KL to the teacher (nats per token, mean of 5)", "teacher/kl", 5),
        ("entropy (nats per token, mean of 5)", "policy/entropy", 5),
    ):
        if tag in curves:
            values = curves[tag].values
            summary |= {f"{name}, first": fmean(values[:window]), f"{name}, last": fmean(values[-window:])}
    if speed := curves.get("throughput/rollout_tokens_per_s"):
        summary["rollout tokens/s (median)"] = median_high(speed.values)
    if steps := curves.get("time/step_s"):
        seconds = at_every_step(steps)  # also of the steps that trainer.log_every_n_steps left out
        summary |= {"seconds in RL steps": sum(seconds), "RL steps": float(len(seconds))}
    sigma = curves.get("aqn/sigma")
    noise = dict(zip(sigma.steps, sigma.values, strict=True)) if sigma else {}
    for statistic in ("mean_abs", "max"):
        if gap := curves.get(f"gap/{statistic}"):
            quiet = [value for step, value in zip(gap.steps, gap.values, strict=True) if noise.get(step, 0.0) == 0]
            summary[f"logprob gap {statistic}, without noise (nats)"] = max(quiet, default=float("nan"))
            summary[f"logprob gap {statistic}, whole run (nats)"] = max(gap.values)
    return summary
