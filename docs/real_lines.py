"""Recorded measurements of pretrained models, of which docs/real_models.py makes pages: the lines of docs/results that
belong to them, selected and grouped."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Line = dict[str, Any]
Groups = dict[tuple[str, str, str], list[Line]]

DOCS = Path(__file__).parent
FILES = ("real_runs", "real_checks", "four_bits", "trl_real", "rollout")
COLOURS = {  # of the arms, in order
    "bf16": "tab:gray",
    "nvfp4": "tab:blue",
    "nvfp4_gptq32": "tab:green",
    "nvfp4_aqn": "tab:orange",
}
TASK, RECIPE = "gsm8k_verl", "gsm8k_boxed"
NOTHING = "*Not measured yet.*"
LONG = 400  # rollouts from which a run counts as a long one


def read(folder: Path = DOCS / "results") -> list[Line]:
    """Read the lines of all files that there are; of several with one name and setting, the last one."""
    paths = [path for name in FILES if (path := folder / f"{name}.jsonl").exists()]
    lines = [json.loads(text) for path in paths for text in path.read_text().splitlines() if text]
    keys = ("name", "shape", "variant", "calibration", "format", "seed", "noise", "engine")
    speeds = [line for line in lines if line["name"].startswith("rollout/")]  # pairs of these are found by commit
    others = (line for line in lines if not line["name"].startswith("rollout/"))
    return [*speeds, *{json.dumps([line.get(key) for key in keys]): line for line in others}.values()]


def named(lines: Iterable[Line], kind: str) -> list[Line]:
    """Select the lines of a kind, ordered by model, task, arm and seed where they have these."""
    order = {arm: place for place, arm in enumerate(COLOURS)}

    def key(line: Line) -> tuple[Any, ...]:
        shape = line["shape"]
        return line["name"], shape.get("task") != TASK, order.get(shape.get("arm"), 0), shape.get("seed", 0)

    return sorted((line for line in lines if line["name"].startswith(f"{kind}/")), key=key)


def model_of(line: Line) -> str:
    """Return the name of a line's model."""
    return line["name"].split("/", 1)[1]


def groups(lines: Iterable[Line], *, is_long: bool = False, config: Sequence[str] = ()) -> Groups:
    """Group runs by model, task and arm; long runs are apart from others, and so are those with further settings, of
    which ``config`` has the names."""
    grouped: Groups = {}
    for line in named(lines, "real_runs"):
        shape = line["shape"]
        if (shape["rollouts"] >= LONG) == is_long and line["validations"] and shape["config"] == [*config]:
            grouped.setdefault((model_of(line), shape["task"], shape["arm"]), []).append(line)
    return grouped


def by_jobs(lines: list[Line]) -> dict[tuple[str, str, str, int], list[Line]]:
    """Group runs that are not long by model, task, arm and the number of runs at a time on one GPU."""
    grouped: dict[tuple[str, str, str, int], list[Line]] = {}
    for key, runs in groups(lines).items():
        for run in runs:
            grouped.setdefault((*key, run["jobs"]), []).append(run)
    return grouped


def whole(runs: list[Line]) -> list[Line]:
    """Select the runs that did as many rollouts as any."""
    done = [run["validations"][-1]["rollouts"] for run in runs]
    return [run for run, rollouts in zip(runs, done, strict=True) if rollouts == max(done)]


def verdicts(point: Line, kind: str) -> np.ndarray:
    """Return which problems a validation found right, [problems] of 0 and 1."""
    return np.frombuffer(point["verdicts"][kind].encode(), dtype=np.uint8) - ord("0")


def wrapped(text: str) -> str:
    """Break a paragraph into lines."""
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)
