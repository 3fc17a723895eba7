"""Write docs/real_models.md, docs/real_completions.md and their picture: python docs/real_models.py

The text of the page is tests/bench/pages/real_models.md. The numbers are those of docs/results: real_runs.jsonl of
tests/bench/bench_real_runs.py, real_checks.jsonl of tests/bench/bench_real_checks.py, four_bits.jsonl of
tests/bench/bench_four_bits.py, rollout.jsonl of tests/bench/bench_rollout.py, and trl_real.jsonl of TRL's runs. Of
several lines with equal fields ``name`` and ``shape`` the last one counts. A section without lines says that nothing
was measured.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from docs.real_completions import completions_page  # noqa: E402  (the script is run by its path)
from docs.real_lines import (  # noqa: E402
    DOCS,
    NOTHING,
    RECIPE,
    TASK,
    Line,
    by_jobs,
    groups,
    model_of,
    named,
    read,
    verdicts,
    whole,
    wrapped,
)
from docs.real_picture import draw  # noqa: E402
from qerl_pl.study.readouts import smooth  # noqa: E402
from tests.bench.report import TABLES, table  # noqa: E402

PAGE, OF_COMPLETIONS, PICTURE = DOCS / "real_models.md", DOCS / "real_completions.md", DOCS / "real_models.png"
TEXT = ROOT / "tests" / "bench" / "pages" / "real_models.md"
PAIRS = (
    ("nvfp4", "bf16"),
    ("nvfp4_gptq32", "bf16"),
    ("nvfp4_gptq32", "nvfp4"),
    ("nvfp4_aqn", "nvfp4"),
    ("nvfp4_aqn", "bf16"),
)
TEACHER = "distill"  # name of the further settings of runs that learn from a teacher instead of rewards
FIRST_AND_LAST = (slice(None, 10), slice(-10, None))  # rollouts over which a curve is averaged
WINDOW = 10  # rollouts of the running mean of a reward that a trainer has to reach
LIMIT = 2.0  # points that NVFP4 may lose

# ---- sections -------------------------------------------------------------------------------------------------------


def page(lines: list[Line]) -> str:
    """Make docs/real_models.md."""
    parts = (
        *(models, curves, differences, recipe, taught, learnt, invented, trl),
        *(four_bits, speeds, costs, long_runs, checks),
    )
    return TEXT.read_text().format(**{part.__name__: part(lines) or NOTHING for part in parts})


def models(lines: list[Line]) -> str:
    """Say what the models' weights were made from, and where the runs were made."""
    runs = named(lines, "real_runs")
    bits = {model_of(line): line["bits_per_weight"] for line in runs if line["bits_per_weight"] < 16}
    listed = " and ".join(f"{bits[model]:.2f} bits ({model})" for model in sorted(bits))
    devices, commits = (", ".join(sorted({line[name] for line in runs})) for name in ("device", "commit"))
    text = f"The files have weights of on average {listed}. The runs were made on {devices}, at commits {commits}."
    return wrapped(text) if runs else ""


def curves(lines: list[Line]) -> str:
    """Show the picture, and a table with a row per model, task and arm."""
    rows = []
    for key, runs in groups(lines).items():
        ended = whole(runs)
        points = [
            [100 * run["validations"][end][kind] for run in ended] for kind in ("strict", "lenient") for end in (0, -1)
        ]
        cells = [spread(values, 1) for values in points]
        for name, digits in (("strict", 2), ("entropy", 3), ("completion_tokens", 0)):
            values = [run["curves"].get(name, []) for run in ended]
            first, last = ([value for curve in values for value in curve[part]] for part in FIRST_AND_LAST)
            cells.append(f"{mean(first):.{digits}f} to {mean(last):.{digits}f}" if first else "")
        number = f"{len(ended)} of {len(runs)}" if len(ended) < len(runs) else len(runs)
        alarms = sum(run["alarm"] is not None for run in runs)
        rows.append([*key, number, ended[0]["validations"][-1]["rollouts"], *cells, alarms])
    head = "model | task | arm | seeds | rollouts | strict before | after | lenient before | after | reward | entropy"
    title = "Accuracy on the test problems, entropy and length by rollout, with bands over the seeds"
    return f"![{title}]({PICTURE.name})\n\n{tabled(f'{head} | tokens | alarms', rows)}" if rows else ""


def paired(one: list[Line], other: list[Line], kind: str, when: int) -> list[list[str]]:
    """Compare the verdicts of pairs of runs with equal seeds: one row with the number of pairs, the mean difference in
    points, and its 95 % intervals over problems and over seeds.

    Args:
        one, other: runs; a run is left out if the other side has none with the same seed and the same number of
            rollouts before the validation.
        kind: "strict" or "lenient".
        when: 0 for the validation before training, -1 for that after it.
    """
    first, second = (
        {
            (run["shape"]["seed"], point["rollouts"]): verdicts(point, kind)
            for run in runs
            for point in run["validations"][when:][:1]
        }
        for runs in (one, other)
    )
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return []
    moved = 100.0 * np.array([first[seed] - second[seed].astype(float) for seed in seeds])  # [seeds, problems]
    return [[str(len(seeds)), f"{moved.mean():+.1f}", interval(moved.mean(axis=0)), interval(moved.mean(axis=1))]]


def interval(values: np.ndarray) -> str:
    """Format the 95 % t interval of a mean; empty where there are fewer than two values, or they are all equal."""
    if len(values) < 2 or np.ptp(values) == 0:
        return ""
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return f"{low:+.1f} to {high:+.1f}"


def differences(lines: list[Line]) -> str:
    """Compare arms of a model and task."""
    grouped, rows, results = groups(lines), [], []
    for model, task in dict.fromkeys(key[:2] for key in grouped):
        for one, other in PAIRS:
            mine, theirs = (grouped.get((model, task, arm), []) for arm in (one, other))
            for kind, when, label in (("strict", 0, "before"), ("strict", -1, "after"), ("lenient", -1, "after")):
                new = paired(mine, theirs, kind, when)
                rows += [[model, task, f"{one} - {other}", f"{kind} {label}", *row] for row in new]
                if new and (other, kind, when, task) == ("bf16", "strict", -1, TASK):
                    points = float(new[0][1])
                    change = f"{'loses' if points < 0 else 'gains'} {abs(points):.1f} points with the arm `{one}`"
                    results.append(f"{model} {change}{', more than that' if points < -LIMIT else ''}.")
    if results:
        aim = f"After training, an NVFP4 base should cost at most {LIMIT:g} points of strict accuracy against bf16."
        results.insert(0, aim)
    head = "model | task | arms | accuracy | seeds | points | over problems | over seeds"
    return f"{wrapped(' '.join(results))}\n\n{tabled(head, rows)}".strip()


def recipe(lines: list[Line]) -> str:
    """Compare the two tasks, in the accuracy that does not depend on where the answer is asked for."""
    grouped = groups(lines)
    rows = [
        [model, arm, kind, *row]
        for (model, task, arm), runs in grouped.items()
        if task == RECIPE
        for kind in ("strict", "lenient")
        for row in paired(runs, grouped.get((model, TASK, arm), []), kind, -1)
    ]
    return tabled("model | arm | accuracy | seeds | points | over problems | over seeds", rows)


def taught(lines: list[Line]) -> str:
    """Compare what a policy learns from a teacher with what it learns from rewards, validation by validation."""
    of_rewards, rows = groups(lines), []
    for (model, task, arm), runs in groups(lines, config=[TEACHER]).items():
        for label, group in (("teacher", whole(runs)), ("rewards", whole(of_rewards.get((model, task, arm), [])))):
            by_rollouts = [{point["rollouts"]: 100 * point["strict"] for point in run["validations"]} for run in group]
            steps = sorted(set.intersection(*map(set, by_rollouts))) if by_rollouts else []
            accuracies = [f"{step}: {spread([run[step] for run in by_rollouts], 1)}" for step in steps]
            seconds = [f"{median(run['median_step_s'] for run in group):.1f}"] if group else [""]
            rows.append([model, task, arm, label, len(group), ", ".join(accuracies), *seconds])
    return tabled("model | task | arm | learns from | seeds | strict accuracy by rollout | rollout, s", rows)


def learnt(lines: list[Line]) -> str:
    """Divide what changed into the place of the answer and the answer itself, as shares of the test problems."""
    rows = []
    for key, runs in groups(lines).items():
        runs = whole(runs)
        shares = [changes(run) for run in runs if len(run["validations"]) > 1]
        if shares:
            cells = [f"{100 * mean(share[name] for share in shares):.1f}" for name in shares[0]]
            for name, scale, digits in (("completion_tokens", 1, 0), ("truncated_share", 100, 1)):
                before, after = (mean(scale * run["validations"][end][name] for run in runs) for end in (0, -1))
                cells.append(f"{before:.{digits}f} to {after:.{digits}f}")
            rows.append([*key, *cells])
    head = "model | task | arm | place learnt | answer learnt | lost | any answer gained | any answer lost | tokens"
    return tabled(f"{head} | cut, %", rows)


def invented(lines: list[Line]) -> str:
    """Show, validation by validation, how many completions have a program's output that the model made up, in runs of
    which any completion had one."""
    names = ("strict", "lenient", "invented_share", "lenient_invented", "lenient_other")
    rows = [
        [*key, run["shape"]["seed"], point["rollouts"]]
        + ["" if point[name] is None else f"{100 * point[name]:.1f}" for name in names]
        for key, runs in groups(lines).items()
        for run in runs
        if any(point.get("invented_share") for point in run["validations"])
        for point in run["validations"]
    ]
    head = "model | task | arm | seed | rollouts | strict | lenient | with invented output | right of these"
    return tabled(f"{head} | right of the others", rows)


def changes(run: Line) -> dict[str, float]:
    """Return shares of problems whose verdict changed between the first and the last validation of a run."""
    (strict, lenient), (strict_then, lenient_then) = (
        [verdicts(run["validations"][end], kind).astype(bool) for kind in ("strict", "lenient")] for end in (0, -1)
    )
    gained = ~strict & strict_then
    return {
        "place": (gained & lenient).mean(),  # the answer was right before, and not where it was asked for
        "answer": (gained & ~lenient).mean(),
        "lost": (strict & ~strict_then).mean(),
        "any gained": (~lenient & lenient_then).mean(),
        "any lost": (lenient & ~lenient_then).mean(),
    }


class Course(NamedTuple):
    """Values of one run, of TRL or of this program, that the table with TRL shows."""

    name: str
    curve: Line
    seconds: Sequence[float]
    """Seconds of training until the end of each rollout's update."""
    start: float
    phases: Mapping[str, float]
    validations: list[Line]
    memory: float | None


def course_of_trl(line: Line) -> Course:
    """Read a line of tests/bench/bench_trl_task.py."""
    curve, name = line["curve"], f"TRL {line['versions']['trl']}"
    return Course(
        name, curve, curve["train_s"], line["startup_s"], line["phases_s"], line["evaluations"], line["peak_gib"]
    )


def course_of_run(run: Line) -> Course:
    """Read a line of tests/bench/bench_real_runs.py."""
    curve, start = run["curves"], (run["start_s"] or [float("nan")])[0]
    phases = {phase: median(curve[f"{phase}_s"]) for phase in ("rollout", "logprob", "train")}
    seconds, memory = np.cumsum(curve["step_s"]).tolist(), run["memory_gib"]["driver"]
    return Course(run["shape"]["arm"], curve, seconds, start, phases, run["validations"], memory)


def trl(lines: list[Line]) -> str:
    """Compare TRL's runs with our runs alone on a GPU of the same kind, of the same model and task."""
    rows = []
    for line in (line for line in named(lines, "task") if line["name"] == "task/trl"):
        shape, gpu = line["shape"], line["device"].removeprefix("NVIDIA ").split()[0]
        ours = [
            run
            for (model, task, _, jobs), runs in by_jobs(lines).items()
            for run in runs
            if (model, task, jobs, run["device"]) == (shape["model"], shape["task"], 1, line["device"])
        ]
        courses = [course_of_trl(line), *map(course_of_run, ours)]
        rewards = [course.curve["strict"] for course in courses]
        level = min(max(smooth(each, WINDOW)[WINDOW - 1 :], default=0.0) for each in rewards)
        is_long = min(map(len, rewards)) > 2 * WINDOW  # in fewer rollouts the reward hardly changes
        for course in courses:
            steps, phases = course.curve["step_s"], course.phases
            accuracy = f"{100 * course.validations[-1]['strict']:.1f}" if course.validations else ""
            rows.append(
                [shape["model"], course.name, gpu, len(steps), f"{course.start:.0f}", f"{median(steps):.1f}"]
                + [f"{phases['rollout']:.1f}", f"{phases['logprob'] + phases['train']:.1f}"]
                + [f"{course.seconds[-1]:.0f}", accuracy]
                + ([f"{level:.2f}", reached(course.curve["strict"], course.seconds, level)] if is_long else ["", ""])
                + [f"{course.memory:.1f}" if course.memory else ""]
            )
    head = "model | trainer | GPU | rollouts | start, s | rollout, s | sampling, s | update, s | all, s"
    return tabled(f"{head} | strict after, % | reward | reached after, s | GPU, GiB", rows)


def reached(rewards: Sequence[float], seconds: Sequence[float], level: float) -> str:
    """Return the seconds at which the running mean of a reward first reaches a level; empty if it never does."""
    means = smooth(rewards, WINDOW)[WINDOW - 1 :]  # of a full window
    places = np.flatnonzero(means >= level - 1e-9)
    return f"{seconds[int(places[0]) + WINDOW - 1]:.0f}" if len(places) else ""


def four_bits(lines: list[Line]) -> str:
    """Show how far variants of four bits are from the dense policy."""

    def error(pair: Sequence[float] | None, digits: int, scale: int = 1) -> str:
        return f"{scale * pair[0]:.{digits}f} +- {scale * pair[1]:.{digits}f}" if pair else ""

    rows = []
    for line in named(lines, "four_bits"):
        cells = [error(line.get(name), 4) for name in ("kl", "kl_over_first", "entropy")]
        cells.append(f"{line['argmax_equal'][0]:.3f}" if "argmax_equal" in line else "")
        accuracy = line.get("strict") or {}
        cells += [error(accuracy.get(name), 1, 100) for name in ("accuracy", "over_dense")]
        tokens, calibration = line["shape"]["tokens"], Path(line["calibration"] or "").name
        rows.append([model_of(line), line["variant"], calibration, str(tokens), *cells])
    head = "model | variant | calibration | tokens | KL | KL - first | entropy | same token | strict, % | - dense"
    return tabled(head, rows)


def speeds(lines: list[Line]) -> str:
    """Show rollout speeds of the shapes of these models, and those of the runs."""
    sizes = {name.upper() for name in re.findall(r"\d+\.\d+b", " ".join(map(model_of, named(lines, "real_runs"))))}
    chosen = [line for line in named(lines, "rollout") if line["shape"]["model"] in (sizes or {"0.5B", "1.5B"})]
    selected = TABLES["rollouts"].select(chosen)
    rows = [
        [*key, spread([median(run["curves"]["rollout_tokens_per_s"]) for run in runs if run["steps"]], 0)]
        for key, runs in by_jobs(lines).items()
    ]
    table = tabled("model | task | arm | runs at a time | rollout tokens/s", rows)
    if not selected:
        return table
    about = (
        "The following tables have sampled tokens per second of whole rollout calls by number of sequences, for models "
        "with random weights and the shapes of this page's models, alone on a GPU."
    )
    return f"{table}\n\n{wrapped(about)}\n\n{TABLES['rollouts'].markdown(selected)}".strip()


def costs(lines: list[Line]) -> str:
    """Show minutes, seconds of the parts, and memory."""
    rows = []
    for key, runs in by_jobs(lines).items():
        minutes = [run["run_s"] / 60 for run in runs if run["finished"]]
        starts = [run["start_s"][0] for run in runs if run["start_s"]]
        tests = [seconds for run in runs for seconds in run["validation_s"]]
        of_phases = [
            [seconds for run in runs for seconds in run["curves"].get(f"{phase}_s", [])] or [0.0]
            for phase in ("rollout", "train", "check", "reward", "between")
        ]
        memory = max(run["memory_gib"]["planned"] or 0 for run in runs)
        rows.append(
            [*key, spread(minutes, 1), spread([of_run / key[-1] for of_run in minutes], 1)]
            + [
                f"{median(starts):.0f}" if starts else "",
                spread([run["median_step_s"] for run in runs if run["steps"]], 1),
            ]
            + ["/".join(f"{median(seconds):.1f}" for seconds in of_phases)]
            + [f"{median(tests):.1f}" if tests else "", f"{memory:.1f}" if memory else ""]
        )
    head = "model | task | arm | runs at a time | minutes | GPU minutes | start, s | rollout, s"
    return tabled(f"{head} | sampling/update/checks/rewards/rest, s | validation, s | planned, GiB", rows)


def long_runs(lines: list[Line]) -> str:
    """Show quarters of long runs: the seconds of a step and the memory should not grow."""
    rows = []
    for key, run in ((key, run) for key, runs in groups(lines, is_long=True).items() for run in runs):
        cells = [
            " ".join(f"{scale * median(quarter):.2f}" for quarter in np.array_split(values, 4))
            if len(values := run["curves"].get(name, [])) >= 4
            else ""
            for name, scale in (("step_s", 1), ("gpu_gib", 1), ("host_bytes", 2**-30))
        ]
        alarm = "no" if run["alarm"] is None else "yes"
        rows.append([*key, f"{run['steps']} of {run['shape']['rollouts']}", *cells, alarm, len(run["warnings"])])
    return tabled("model | task | arm | rollouts | step, s | GPU, GiB | host, GiB | alarm | warnings", rows)


def checks(lines: list[Line]) -> str:
    """Show what the checks read in healthy runs."""
    grouped: dict[tuple[str, ...], list[Line]] = {}
    for line in named(lines, "real_checks"):
        key = (model_of(line), line["format"] + (" + AQN" if line["noise"] else ""), line["engine"])
        grouped.setdefault(key, []).append(line)
    rows = []
    for key, runs in grouped.items():
        ended = [sum(run["alarm"]["outcome"] == outcome for run in runs) for outcome in ("stopped", "warned")]
        largest = [
            f"{max(values):.{digits}f}" if (values := [run[name][1] for run in runs if run.get(name)]) else ""
            for name, digits in (("probe_excess", 2), ("score_excess", 2), ("gap", 4), ("grad_norm_over_median", 1))
        ]
        rows.append([*key, len(runs), sum(run["rollouts"] for run in runs), *ended, *largest])
    head = "model | policy | engine | runs | rollouts | stopped | warned | probe excess | score excess | gap | gradient"
    return tabled(head, rows)


# ---- texts ----------------------------------------------------------------------------------------------------------


def tabled(head: str, rows: list[list[Any]]) -> str:
    """Format a Markdown table; empty without rows."""
    return table(head.split(" | "), rows) if rows else ""


def spread(values: Sequence[float], digits: int) -> str:
    """Format the mean of several seeds, with the lowest and the highest value."""
    if not values:
        return ""
    low, high = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return f"{mean(values):.{digits}f}" + (f" ({low} to {high})" if low != high else "")


if __name__ == "__main__":
    every = read()
    PAGE.write_text(page(every))
    OF_COMPLETIONS.write_text(completions_page(every))
    if groups(every):
        draw(every, PICTURE)
