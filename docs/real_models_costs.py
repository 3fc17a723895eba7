"""Make the sections of docs/real_models.md about seconds, speed and memory of runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

import numpy as np

from docs.real_models_lines import NOTHING, Line, groups, model_of, named, spread, typical
from qerl_pl.study.readouts import smooth
from tests.bench.report import TABLES, table

WINDOW = 10  # rollouts of the running mean of a reward that a trainer has to reach


def by_jobs(lines: list[Line]) -> dict[tuple[str, str, str, int], list[Line]]:
    """Group runs that are not long by model, task, arm and the number of runs at a time on one GPU."""
    found: dict[tuple[str, str, str, int], list[Line]] = {}
    for key, runs in groups(lines).items():
        for run in runs:
            found.setdefault((*key, run["jobs"]), []).append(run)
    return found


def trl(lines: list[Line]) -> str:
    """Compare TRL's runs with our runs alone on a GPU of the same kind, of the same model and task."""
    rows = []
    theirs = [line for line in named(lines, "task") if line["name"] == "task/trl"]
    for line in theirs:
        shape = line["shape"]
        ours = [
            run
            for (model, task, _, jobs), runs in by_jobs(lines).items()
            for run in runs
            if (model, task, jobs, run["device"]) == (shape["model"], shape["task"], 1, line["device"])
        ]
        compared = [
            (f"TRL {line['versions']['trl']}", line, line["curve"]["strict"], line["curve"]["train_s"]),
            *((run["shape"]["arm"], run, run["curves"]["strict"], np.cumsum(run["curves"]["step_s"])) for run in ours),
        ]
        level = min(max(smooth(rewards, WINDOW)[WINDOW - 1 :], default=0.0) for _, _, rewards, _ in compared)
        for name, run, rewards, seconds in compared:
            of_trl = run is line
            points = run["evaluations" if of_trl else "validations"]
            memory = run["peak_gib"] if of_trl else run["memory_gib"]["driver"]
            steps = run["curve"]["step_s"] if of_trl else run["curves"]["step_s"]
            start = run["startup_s"] if of_trl else (run["start_s"] or [float("nan")])[0]
            rows.append(
                [shape["model"], name, line["device"].removeprefix("NVIDIA ").split()[0], len(steps), f"{start:.0f}"]
                + [f"{median(steps):.1f}", f"{seconds[-1]:.0f}", f"{100 * points[-1]['strict']:.1f}"]
                + [f"{level:.2f}", reached(rewards, seconds, level), f"{memory:.1f}" if memory else ""]
            )
    head = ["model", "trainer", "GPU", "rollouts", "start, s", "rollout, s", "all, s", "strict after, %"]
    return table([*head, "reward", "reached after, s", "GPU, GiB"], rows) if rows else NOTHING


def reached(rewards: Sequence[float], seconds: Sequence[float], level: float) -> str:
    """Return the seconds at which the running mean of a reward first reaches a level; empty if it never does."""
    whole = smooth(rewards, WINDOW)[WINDOW - 1 :]  # of a full window
    found = np.flatnonzero(whole >= level - 1e-9)
    return f"{seconds[int(found[0]) + WINDOW - 1]:.0f}" if len(found) else ""


def speeds(lines: list[Line]) -> str:
    """Show rollout speeds of the shapes of these models, and those of the runs."""
    sizes = {name.upper() for name in re.findall(r"\d+\.\d+b", " ".join(map(model_of, named(lines, "real_runs"))))}
    chosen = [line for line in named(lines, "rollout") if line["shape"]["model"] in (sizes or {"0.5B", "1.5B"})]
    selected = TABLES["rollouts"].select(chosen)
    rows = []
    for key, runs in by_jobs(lines).items():
        rates = [median(run["curves"]["rollout_tokens_per_s"]) for run in runs if run["steps"]]
        rows.append([*key, spread(rates, 0)])
    found = [TABLES["rollouts"].markdown(selected)] if selected else []
    found += [table(["model", "task", "arm", "runs at a time", "rollout tokens/s"], rows)] if rows else []
    return "\n\n".join(found) or NOTHING


def costs(lines: list[Line]) -> str:
    """Show minutes, seconds of the parts, and memory."""
    rows = []
    for key, runs in by_jobs(lines).items():
        minutes = [run["run_s"] / 60 for run in runs if run["finished"]]
        starts = [run["start_s"][0] for run in runs if run["start_s"]]
        steps = [run["median_step_s"] for run in runs if run["steps"]]
        tests = [seconds for run in runs for seconds in run["validation_s"]]
        phases = [typical(runs, f"{phase}_s") for phase in ("rollout", "train", "check", "reward", "between")]
        memory = max(run["memory_gib"]["planned"] or 0 for run in runs)
        rows.append(
            [*key, spread(minutes, 1), spread([each / key[-1] for each in minutes], 1)]
            + [f"{median(starts):.0f}" if starts else "", spread(steps, 1), "/".join(f"{each:.1f}" for each in phases)]
            + [f"{median(tests):.1f}" if tests else "", f"{memory:.1f}" if memory else ""]
        )
    head = ["model", "task", "arm", "runs at a time", "minutes", "GPU minutes", "start, s", "rollout, s"]
    head += ["sampling/update/checks/rewards/rest, s", "validation, s", "planned, GiB"]
    return table(head, rows) if rows else NOTHING


def long_runs(lines: list[Line]) -> str:
    """Show quarters of long runs: the seconds of a step and the memory should not grow."""
    rows = []
    for key, runs in groups(lines, is_long=True).items():
        for run in runs:
            cells = [
                " ".join(f"{scale * median(quarter):.{digits}f}" for quarter in np.array_split(values, 4))
                if len(values := run["curves"].get(name, [])) >= 4
                else ""
                for name, scale, digits in (("step_s", 1, 2), ("gpu_gib", 1, 2), ("host_bytes", 2**-30, 2))
            ]
            silent = "no" if run["alarm"] is None else "yes"
            rows.append([*key, f"{run['steps']} of {run['shape']['rollouts']}", *cells, silent, len(run["warnings"])])
    head = ["model", "task", "arm", "rollouts", "step, s", "GPU, GiB", "host, GiB", "alarm", "warnings"]
    return table(head, rows) if rows else NOTHING
