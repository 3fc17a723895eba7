"""Read recorded lines about real models, group them, and format numbers, for docs/real_models.md."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

Line = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
FILES = ("real_runs", "real_checks", "four_bits", "trl_real", "rollout")
ARMS = ("bf16", "nvfp4", "nvfp4_aqn")
TASK, RECIPE = "gsm8k_verl", "gsm8k_boxed"
LONG = 400  # rollouts from which a run counts as a long one
NOTHING = "*Not measured yet.*"


def read(folder: Path = RESULTS) -> list[Line]:
    """Read the lines of all files that there are; of several with one name and setting, the last one."""
    paths = [path for name in FILES if (path := folder / f"{name}.jsonl").exists()]
    lines = [json.loads(text) for path in paths for text in path.read_text().splitlines() if text]
    keys = ("name", "shape", "variant", "calibration", "format", "seed", "noise", "engine")
    speeds = [line for line in lines if line["name"].startswith("rollout/")]  # pairs of these are found by commit
    others = (line for line in lines if not line["name"].startswith("rollout/"))
    return [*speeds, *{json.dumps([line.get(key) for key in keys]): line for line in others}.values()]


def named(lines: Iterable[Line], kind: str) -> list[Line]:
    """Select the lines of a kind, ordered by model, task, arm and seed where they have these."""
    order = {arm: place for place, arm in enumerate(ARMS)}

    def key(line: Line) -> tuple[Any, ...]:
        shape = line["shape"]
        return line["name"], shape.get("task") != TASK, order.get(shape.get("arm"), 0), shape.get("seed", 0)

    return sorted((line for line in lines if line["name"].startswith(f"{kind}/")), key=key)


def model_of(line: Line) -> str:
    """Return the name of a line's model."""
    return line["name"].split("/", 1)[1]


def groups(lines: Iterable[Line], *, is_long: bool = False) -> dict[tuple[str, str, str], list[Line]]:
    """Group runs by model, task and arm; long runs are apart from others, and so are those with further settings."""
    found: dict[tuple[str, str, str], list[Line]] = {}
    for line in named(lines, "real_runs"):
        shape = line["shape"]
        if (shape["rollouts"] >= LONG) == is_long and line["validations"]:
            task = "+".join([shape["task"], *shape["config"]])
            found.setdefault((model_of(line), task, shape["arm"]), []).append(line)
    return found


def rollouts_of(run: Line) -> int:
    """Return the rollouts before a run's last validation."""
    return run["validations"][-1]["rollouts"]


def typical(runs: list[Line], name: str) -> float:
    """Return the median of a curve over all rollouts of all runs."""
    return median([value for run in runs for value in run["curves"].get(name, [])] or [0.0])


def spread(values: Sequence[float], digits: int) -> str:
    """Format the mean of several seeds, with the lowest and the highest value."""
    if not values:
        return ""
    low, high = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return f"{mean(values):.{digits}f}" + (f" ({low} to {high})" if low != high else "")


def wrapped(text: str) -> str:
    """Break a paragraph into lines."""
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)
