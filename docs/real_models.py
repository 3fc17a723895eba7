"""Write docs/real_models.md, docs/real_completions.md and their picture: python docs/real_models.py

The numbers are those of docs/results: real_runs.jsonl of tests/bench/bench_real_runs.py, real_checks.jsonl of
tests/bench/bench_real_checks.py, four_bits.jsonl of tests/bench/bench_four_bits.py, rollout.jsonl of
tests/bench/bench_rollout.py, and trl_real.jsonl of TRL's runs. Of several lines with one name and shape the last one
counts. A section without lines says that nothing was measured.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

import numpy as np
from scipy import stats

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from docs.real_models_costs import costs, long_runs, speeds, trl  # noqa: E402  (the script is run by its path)
from docs.real_models_lines import (  # noqa: E402
    ARMS,
    NOTHING,
    RECIPE,
    TASK,
    Line,
    groups,
    model_of,
    named,
    read,
    rollouts_of,
    spread,
    wrapped,
)
from docs.real_models_text import COMPLETIONS, TEXT  # noqa: E402
from qerl_pl.common.files import replacing  # noqa: E402
from qerl_pl.study.readouts import smooth  # noqa: E402
from tests.bench.report import table  # noqa: E402

DOCS = ROOT / "docs"
PAGE, OF_COMPLETIONS, PICTURE = DOCS / "real_models.md", DOCS / "real_completions.md", DOCS / "real_models.png"
PAIRS = (("nvfp4", "bf16"), ("nvfp4_aqn", "nvfp4"), ("nvfp4_aqn", "bf16"))
ENDS = 10  # rollouts at a run's beginning and end over which a curve is averaged
LIMIT = 2.0  # points that NVFP4 may lose
COLOURS: dict[str, str] = dict(zip(ARMS, ("tab:gray", "tab:blue", "tab:orange"), strict=True))


def page(lines: list[Line]) -> str:
    """Make docs/real_models.md."""
    parts: dict[str, Callable[[list[Line]], str]] = {
        "models": models,
        "curves": curves,
        "differences": differences,
        "recipe": recipe,
        "learnt": learnt,
        "trl": trl,
        "four_bits": four_bits,
        "speeds": speeds,
        "costs": costs,
        "long_runs": long_runs,
        "checks": checks,
    }
    return TEXT.format(**{name: part(lines) for name, part in parts.items()})


def models(lines: list[Line]) -> str:
    """Say what the models' weights were made from, and where the runs were made."""
    runs = named(lines, "real_runs")
    if not runs:
        return NOTHING
    bits = {model_of(line): line["bits_per_weight"] for line in runs}
    said = " and ".join(f"{bits[model]:.2f} bits ({model})" for model in sorted(bits))
    where = ", ".join(sorted({f"{line['device']} at commit {line['commit']}" for line in runs}))
    return wrapped(f"The files have weights of on average {said}. The runs were made on {where}.")


def curves(lines: list[Line]) -> str:
    """Show the picture, and a table with a row per model, task and arm."""
    rows = []
    for key, runs in groups(lines).items():
        most = max(map(rollouts_of, runs))
        whole = [run for run in runs if rollouts_of(run) == most]
        ends = [f"{name} {when}" for name in ("strict", "lenient") for when in ("before", "after")]
        accuracies = [spread([100 * validation_of(run, end) for run in whole], 1) for end in ends]
        training = [
            f"{mean(first):.{digits}f} to {mean(last):.{digits}f}" if first else ""
            for name, digits in (("strict", 2), ("entropy", 3), ("completion_tokens", 0))
            for first, last in [_ends(whole, name)]
        ]
        number = f"{len(whole)} of {len(runs)}" if len(whole) < len(runs) else len(runs)
        rows.append([*key, number, most, *accuracies, *training, alarms(runs)])
    if not rows:
        return NOTHING
    head = ["model", "task", "arm", "seeds", "rollouts", "strict before", "after", "lenient before", "after"]
    head += ["reward", "entropy", "tokens", "alarms"]
    title = "Accuracy on the test problems, entropy and length by rollout, with bands over the seeds"
    return f"![{title}]({PICTURE.name})\n\n{table(head, rows)}"


def _ends(runs: list[Line], name: str) -> tuple[list[float], list[float]]:
    """Return the values of a curve at the beginning and at the end of all runs."""
    found = [run["curves"].get(name, []) for run in runs]
    return [value for each in found for value in each[:ENDS]], [value for each in found for value in each[-ENDS:]]


def validation_of(run: Line, name: str) -> float:
    """Return an accuracy before or after training, e.g. "strict before"."""
    kind, when = name.split()
    return run["validations"][0 if when == "before" else -1][kind]


def alarms(runs: list[Line]) -> int:
    """Count the runs that a check or an error ended."""
    return sum(run["alarm"] is not None for run in runs)


def paired(one: list[Line], other: list[Line], kind: str, when: int) -> list[list[str]]:
    """Compare the verdicts of runs with equal seeds: one row with the mean difference in points and two intervals.

    Args:
        one, other: runs; those whose seed the other side lacks are left out.
        kind: "strict" or "lenient".
        when: 0 for the validation before training, -1 for that after it; pairs have the same number of rollouts.
    """
    found = [
        {
            (run["shape"]["seed"], point["rollouts"]): verdicts(point, kind)
            for run in runs
            for point in run["validations"][when:][:1]
        }
        for runs in (one, other)
    ]
    seeds = sorted(found[0].keys() & found[1].keys())
    if not seeds:
        return []
    first, second = (np.array([runs[seed] for seed in seeds]) for runs in found)
    moved = 100.0 * (first - second.astype(float))  # [seeds, problems]
    by_seed, by_problem = moved.mean(axis=1), moved.mean(axis=0)
    return [[str(len(seeds)), f"{moved.mean():+.1f}", interval(by_problem), interval(by_seed)]]


def verdicts(point: Line, kind: str) -> np.ndarray:
    """Return which problems a validation found right, [problems] of 0 and 1."""
    return np.frombuffer(point["verdicts"][kind].encode(), dtype=np.uint8) - ord("0")


def interval(values: np.ndarray) -> str:
    """Format the 95 % t interval of a mean; empty where there are fewer than two values, or they are all equal."""
    if len(values) < 2 or np.ptp(values) == 0:
        return ""
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return f"{low:+.1f} to {high:+.1f}"


def differences(lines: list[Line]) -> str:
    """Compare arms of a model and task."""
    found, rows, said = groups(lines), [], []
    for model, task in dict.fromkeys(key[:2] for key in found):
        for one, other in PAIRS:
            mine, theirs = (found.get((model, task, arm), []) for arm in (one, other))
            for kind, when, label in (("strict", 0, "before"), ("strict", -1, "after"), ("lenient", -1, "after")):
                new = paired(mine, theirs, kind, when)
                rows += [[model, task, f"{one} - {other}", f"{kind} {label}", *row] for row in new]
                if new and (one, other, kind, when, task) == ("nvfp4", "bf16", "strict", -1, TASK):
                    points = float(new[0][1])
                    verdict = "within" if abs(points) <= LIMIT else "not within"
                    said.append(f"{model}: NVFP4 ends {points:+.1f} points from bf16, {verdict} {LIMIT:g} points.")
    if not rows:
        return NOTHING
    head = ["model", "task", "arms", "accuracy", "seeds", "points", "over problems", "over seeds"]
    return f"{wrapped(' '.join(said))}\n\n{table(head, rows)}".lstrip()


def recipe(lines: list[Line]) -> str:
    """Compare the two tasks, in the accuracy that does not depend on where the answer is asked for."""
    found, rows = groups(lines), []
    for model, task, arm in found:
        if task == RECIPE:
            mine, theirs = found[model, RECIPE, arm], found.get((model, TASK, arm), [])
            for kind in ("strict", "lenient"):
                rows += [[model, arm, kind, *row] for row in paired(mine, theirs, kind, -1)]
    head = ["model", "arm", "accuracy", "seeds", "points", "over problems", "over seeds"]
    return table(head, rows) if rows else NOTHING


def learnt(lines: list[Line]) -> str:
    """Divide what changed into the place of the answer and the answer itself, as shares of the test problems."""
    rows = []
    for key, runs in groups(lines).items():
        runs = [run for run in runs if rollouts_of(run) == max(map(rollouts_of, runs))]
        shares = [changes(run) for run in runs if len(run["validations"]) > 1]
        if shares:
            cells = [f"{100 * mean(each[name] for each in shares):.1f}" for name in shares[0]]
            ends = [(run["validations"][0], run["validations"][-1]) for run in runs]
            for name, scale in (("completion_tokens", 1), ("truncated_share", 100)):
                before, after = (mean(scale * pair[side][name] for pair in ends) for side in (0, 1))
                cells.append(f"{before:.0f} to {after:.0f}" if scale == 1 else f"{before:.1f} to {after:.1f}")
            rows.append([*key, *cells])
    head = ["model", "task", "arm", "place learnt", "answer learnt", "lost", "any answer gained", "any answer lost"]
    return table([*head, "tokens", "cut, %"], rows) if rows else NOTHING


def changes(run: Line) -> dict[str, float]:
    """Return shares of problems whose verdict changed between the first and the last validation of a run."""
    (strict, lenient), (strict_then, lenient_then) = (
        [verdicts(run["validations"][place], kind).astype(bool) for kind in ("strict", "lenient")] for place in (0, -1)
    )
    gained = ~strict & strict_then
    return {
        "place": (gained & lenient).mean(),  # the answer was right before, and not where it was asked for
        "answer": (gained & ~lenient).mean(),
        "lost": (strict & ~strict_then).mean(),
        "any gained": (~lenient & lenient_then).mean(),
        "any lost": (lenient & ~lenient_then).mean(),
    }


def four_bits(lines: list[Line]) -> str:
    """Show how far variants of four bits are from the dense policy."""
    rows = []
    for line in named(lines, "four_bits"):
        cells = [error(line.get(name), 4) for name in ("kl", "kl_over_first", "entropy")]
        cells.append(f"{line['argmax_equal'][0]:.3f}" if "argmax_equal" in line else "")
        accuracy = line.get("strict")
        cells += [error(accuracy and [100 * each for each in accuracy[name]], 1) for name in ("accuracy", "over_dense")]
        rows.append([model_of(line), line["variant"], line["calibration"] and Path(line["calibration"]).name, *cells])
    head = ["model", "variant", "calibration", "KL", "KL - first", "entropy", "same token", "strict, %", "- dense"]
    return table(head, [[cell or "" for cell in row] for row in rows]) if rows else NOTHING


def error(pair: Sequence[float] | None, digits: int) -> str:
    """Format a mean with its standard error."""
    return "" if pair is None else f"{pair[0]:.{digits}f} +- {pair[1]:.{digits}f}"


def checks(lines: list[Line]) -> str:
    """Show what the checks read in healthy runs."""
    found: dict[tuple[str, ...], list[Line]] = {}
    for line in named(lines, "real_checks"):
        key = (model_of(line), line["format"] + (" + AQN" if line["noise"] else ""), line["engine"])
        found.setdefault(key, []).append(line)
    rows = []
    for key, runs in found.items():
        heard = sum(run["alarm"]["outcome"] != "silent" for run in runs)
        largest = [
            f"{max(values):.{digits}f}" if (values := [run[name][1] for run in runs if run.get(name)]) else ""
            for name, digits in (("probe_excess", 2), ("score_excess", 2), ("gap", 4), ("grad_norm_over_median", 1))
        ]
        rows.append([*key, len(runs), sum(run["rollouts"] for run in runs), heard, *largest])
    head = [
        "model",
        "policy",
        "engine",
        "runs",
        "rollouts",
        "alarms",
        "probe excess",
        "score excess",
        "gap",
        "gradient",
    ]
    return table(head, rows) if rows else NOTHING


def completions_page(lines: list[Line]) -> str:
    """Make docs/real_completions.md, of the first run of the smallest model with NVFP4 that has kept completions."""
    found = named(lines, "real_completions")
    chosen = sorted(found, key=lambda line: (line["shape"]["arm"] != "nvfp4", line["shape"]["task"] != TASK))
    if not chosen:
        return COMPLETIONS.format(about=NOTHING, completions="").rstrip() + "\n"
    line, shape = chosen[0], chosen[0]["shape"]
    about = (
        f"The run is of {model_of(line)}, arm {shape['arm']}, task {shape['task']}, seed {shape['seed']}. The "
        f"completions are of {len(line['completions'])} evenly spaced test problems, sampled greedily before the "
        f"first rollout and after {line['rollouts'][1]}."
    )
    texts = "\n\n".join(map(_completion, line["completions"]))
    return COMPLETIONS.format(about=wrapped(about), completions=texts) + "\n"


def _completion(row: Line) -> str:
    """Format one problem; what the model wrote is indented, so that nothing in it is Markdown."""
    parts = [f"## Problem {row['problem']}", quoted(row["question"]), f"The answer is {row['answer']}."]
    for when in ("before", "after"):
        side = row[when]
        scores = ", ".join(f"{name} {score:g}" for name, score in side["rewards"].items() if score is not None)
        cut = "" if side["finished"] else ", cut"
        parts += [f"**{when.capitalize()}** ({scores}; {side['num_tokens']} tokens{cut}):", quoted(side["completion"])]
    return "\n\n".join(parts)


def quoted(text: str) -> str:
    """Write text as an indented block of code of ASCII characters and lines of at most 120."""
    ascii_text = text.encode("ascii", "backslashreplace").decode()
    lines = [part for line in ascii_text.splitlines() or [""] for part in textwrap.wrap(line, 112) or [""]]
    return "\n".join(f"    {line}".rstrip() for line in lines)


def draw(lines: list[Line], file: Path) -> None:
    """Write the picture: a row per model; accuracy, entropy and length by rollout; a colour per arm, and the recipe's
    lines dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = groups(lines)
    names = list(dict.fromkeys(key[0] for key in found))
    panels = {
        "strict": "strict accuracy, test problems",
        "entropy": "entropy, nats per token",
        "completion_tokens": "tokens",
    }
    figure, axes = plt.subplots(
        len(names), len(panels), figsize=(11, 3.2 * len(names)), constrained_layout=True, squeeze=False
    )
    for (model, task, arm), runs in found.items():
        for axis, (name, title) in zip(axes[names.index(model)], panels.items(), strict=True):
            steps, values = _together(runs, name)
            if len(steps):
                style = "-" if task == TASK else "--"
                axis.plot(steps, values.mean(axis=0), style, color=COLOURS.get(arm), label=f"{arm}, {task}")
                low, high = values.min(axis=0), values.max(axis=0)
                axis.fill_between(steps, low, high, color=COLOURS.get(arm), alpha=0.2, linewidth=0)
            axis.set_title(f"{model}: {title}", fontsize=9)
            axis.set_xlabel("rollouts")
            axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=7)
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


def _together(runs: list[Line], name: str) -> tuple[Sequence[int], np.ndarray]:
    """Return the rollouts at which every run has a value, and the values [runs, rollouts]."""
    if name == "strict":  # of validations, not of rollouts
        each = [{point["rollouts"]: point["strict"] for point in run["validations"]} for run in runs]
    else:
        each = [dict(enumerate(smooth(run["curves"].get(name, [])).tolist())) for run in runs]
    steps = sorted(set.intersection(*map(set, each)))
    return steps, np.array([[run[step] for step in steps] for run in each])


def main() -> None:
    """Write both pages, and the picture if there are runs."""
    lines = read()
    PAGE.write_text(page(lines))
    OF_COMPLETIONS.write_text(completions_page(lines))
    if groups(lines):
        draw(lines, PICTURE)


if __name__ == "__main__":
    main()
