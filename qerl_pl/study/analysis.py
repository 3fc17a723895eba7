"""Analyse the runs of a study: a table of the results of each arm (named configuration), comparisons of two arms by
pairs of runs with equal seeds, and the files with these results. A readout is a number that summarises a run."""

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from qerl_pl.common.files import write_whole
from qerl_pl.results.curves import SURPRISAL, Curve, at_every_step, read_curves
from qerl_pl.study import state
from qerl_pl.study.readouts import Curves, entropy_at, equal_reward, readouts
from qerl_pl.study.statistics import (
    Comparison,
    Estimate,
    compare,
    holm,
    mean,
    pairs_to_accept,
    seeds_needed,
    smallest_size,
)
from qerl_pl.study.study_file import Run, Study

TINY_DIFFERENCE = 0.02  # difference in accuracy; tables say how many seeds would show it
HEAD = ["readout", "arms", "difference", "pairs", "p", "p (Holm)", "sd", "seen from", f"seeds for {TINY_DIFFERENCE}"]


class Group(NamedTuple):
    """Finished runs of one arm at one point of the study's grid (a combination of values of options). Runs of two arms
    with equal seeds form a pair."""

    arm: str
    point: str
    """Values of the grid's options as text."""
    runs: dict[int, dict[str, float]]
    """Maps the seed of a run to its readouts, by name."""
    curves: dict[int, Curves]

    @property
    def name(self) -> str:
        """Arm and point."""
        return f"{self.arm} {self.point}".strip()

    def values(self, readout: str) -> list[float]:
        """Return one readout of every run of the group, ordered by seed; NaN for a run without this readout."""
        return [values.get(readout, math.nan) for _, values in sorted(self.runs.items())]

    def mean_curves(self) -> Curves:
        """Average each logged scalar over the runs of the group, at the steps at which all of them logged it."""
        means: Curves = {}
        for tag in set.intersection(*(set(curves) for curves in self.curves.values())):
            runs = [dict(zip(run[tag].steps, run[tag].values, strict=True)) for run in self.curves.values()]
            steps = sorted(set.intersection(*(set(run) for run in runs)))
            means[tag] = Curve(steps, [fmean(run[step] for run in runs) for step in steps], [])
        return means


class Judged(NamedTuple):
    """Comparison of two arms by one readout (a number that summarises a run)."""

    one: Group
    other: Group
    readout: str
    comparison: Comparison
    adjusted: float
    """P-value of the comparison after Holm's adjustment for all comparisons by the same readout."""
    seen_from: float
    """Smallest true difference that would be found significant with a probability of 80 %, after Holm's adjustment for
    all comparisons by the same readout; NaN if there are too few pairs of runs for any significant result."""
    seeds: int | None
    """Number of pairs of runs with which a true difference of ``TINY_DIFFERENCE`` would be significant with a
    probability of 80 %; None if more than 10 000 are needed, or the standard deviation of the differences is
    unknown."""


def gather(study: Study) -> list[Group]:
    """Read the results of a study's finished runs, one ``Group`` for each arm and point of the grid. Raises ValueError
    if no run is finished, or the event files of a run cannot be read."""
    groups: dict[tuple[str, str], Group] = {}
    for run in study.runs():
        if state.is_finished(study, run):
            point = study.name_of(run.point)
            group = groups.setdefault((run.arm, point), Group(run.arm, point, {}, {}))
            group.curves[run.seed] = read_curves(run.folder)
            group.runs[run.seed] = readouts(study, run, group.curves[run.seed])
    if not groups:
        raise ValueError(f"no run in {study.output} is finished: there is nothing to analyse yet")
    level = equal_reward([curves for group in groups.values() for curves in group.curves.values()])
    for group in groups.values():
        for seed, curves in group.curves.items():
            if level is not None and (entropy := entropy_at(curves, level)) is not None:
                group.runs[seed]["entropy at equal reward"] = entropy
    arms = list(study.arms)
    return sorted(groups.values(), key=lambda group: arms.index(group.arm))


def compared(study: Study, groups: Sequence[Group], readout: str) -> list[Judged]:
    """Compare the study's pairs of arms by one readout, at each point of the grid at which both arms have finished
    runs."""
    by_name = {(group.arm, group.point): group for group in groups}
    points = list(dict.fromkeys(group.point for group in groups))
    pairs = [
        (by_name[one, point], by_name[other, point])
        for point in points
        for one, other in study.comparisons
        if {(one, point), (other, point)} <= by_name.keys()
    ]
    comparisons = [compare(differences(*pair, readout)) for pair in pairs]
    judged = []
    for pair, comparison, adjusted in zip(pairs, comparisons, holm([one.p for one in comparisons]), strict=True):
        known = not math.isnan(spread := comparison.spread)
        seen_from = smallest_size(comparison.difference.num, len(pairs)) * spread if known else math.nan
        seeds = seeds_needed(TINY_DIFFERENCE, spread, len(pairs)) if known else None
        judged.append(Judged(*pair, readout, comparison, adjusted, seen_from, seeds))
    return judged


def differences(one: Group, other: Group, readout: str) -> list[float]:
    """Compute the differences in a readout, ``one`` minus ``other``: one for each seed with which both groups have a
    finished run, NaN if one of the two lacks the readout."""
    seeds = sorted(one.runs.keys() & other.runs.keys())
    return [one.runs[seed].get(readout, math.nan) - other.runs[seed].get(readout, math.nan) for seed in seeds]


def less_is_better(readout: str) -> bool:
    """Return whether lower values of a readout are better, as they are of differences between trainer and sampler, of
    seconds and of memory."""
    return readout.startswith(("gap", "seconds", "GPU memory"))


def rank_collapsed_last(groups: Sequence[Group], readout: str) -> None:
    """Replace those values of a readout (a number that summarises a run) that are NaN or infinite by the worst finite
    value of all runs, in place, so that a run whose training collapsed counts against its configuration."""
    finite = [value for group in groups for value in group.values(readout) if math.isfinite(value)]
    for values in (values for group in groups for values in group.runs.values()):
        if finite and not math.isfinite(values.get(readout, 0.0)):
            values[readout] = max(finite) if less_is_better(readout) else min(finite)


def names_of(groups: Sequence[Group]) -> list[str]:
    """List the names of all readouts that any run has, in order of first occurrence."""
    return list(dict.fromkeys(name for group in groups for run in group.runs.values() for name in run))


def all_compared(study: Study, groups: Sequence[Group]) -> list[Judged]:
    """Compare the study's pairs of arms by every readout. The readout that decides the study comes first."""
    names = sorted(names_of(groups), key=lambda name: name != study.analysis.metric)
    return [judged for name in names for judged in compared(study, groups, name)]


def not_finite(study: Study, groups: Sequence[Group]) -> list[str]:
    """List, as lines of Markdown, the runs with readouts that are NaN or infinite."""
    runs = [
        f"- {group.name}, seed {seed}: {', '.join(lost)}"
        for group in groups
        for seed, values in sorted(group.runs.items())
        if (lost := [f"{name} ({value})" for name, value in values.items() if not math.isfinite(value)])
    ]
    head = (
        f"{len(runs)} runs have readouts that are not finite (NaN or infinite). In the readout that decides the study, "
        f"{study.analysis.metric}, these runs get the worst value of all runs; means and comparisons of other "
        "readouts leave them out:"
    )
    return ["", head, "", *runs] if runs else []


def tables(study: Study, groups: Sequence[Group], judged: Sequence[Judged], collapsed: Sequence[str] = ()) -> str:
    """Format the analysis of a study as Markdown. ``collapsed`` has the lines of ``not_finite``."""
    runs, metric = study.runs(), study.analysis.metric
    left = {run.name: state.state_of(run.folder).failure for run in runs if not state.is_finished(study, run)}
    lines = [
        "# " + study.output.name,
        "",
        f"{len(runs) - len(left)} of {len(runs)} runs are finished. Means over seeds have Student's 95 % intervals; "
        "differences are means over pairs of runs with equal seeds, with the interval of the values that the sign-flip "
        "test does not reject.",
        "",
        _times([run for run in runs if run.name not in left]),
    ]
    if left:
        lines += ["", f"Left out, {len(left)} runs that are not finished:", ""]
        lines += [f"- {name}: {text.splitlines()[0] if text else 'not finished'}" for name, text in left.items()]
    rows = [[name, *(_shown(mean(group.values(name))) for group in groups)] for name in names_of(groups)]
    counts = ["seeds", *(str(len(group.runs)) for group in groups)]
    lines += collapsed
    lines += ["", "## Readouts", "", *_table(["", *(group.name for group in groups)], [counts, *rows])]
    lines += _best_points(study, groups)
    lines += ["", f"## Decided by: {metric}", ""]
    if metric in names_of(groups):
        lines += _comparisons([one for one in judged if one.readout == metric])
    else:
        lines.append(f"No finished run has this readout (key `analysis`). There are: {', '.join(names_of(groups))}.")
    lines += ["", "## Other readouts, not decided by", ""]
    lines += _comparisons([one for one in judged if one.readout != metric])
    return "\n".join(lines) + "\n"


def _times(runs: Sequence[Run]) -> str:
    """Return a sentence on the duration of the finished runs, in total, for each command, and in the median."""
    done = [state.state_of(run.folder).done for run in runs]
    names = dict.fromkeys(name for seconds in done for name in seconds)
    hours = {name: sum(seconds.get(name, 0.0) for seconds in done) / 3600 for name in names}
    parts = ", ".join(f"{name} {total:.2f}" for name, total in hours.items())
    usual = median(sum(seconds.values()) for seconds in done)
    return (
        f"Their processes took {sum(hours.values()):.2f} hours in all ({parts}), and {usual:.0f} s in the median run."
    )


def _best_points(study: Study, groups: Sequence[Group]) -> list[str]:
    """Return lines that name, for each arm with runs at several points of the grid, the best point."""
    metric, lines = study.analysis.metric, []
    for arm in study.arms:
        means = {group.point: mean(group.values(metric)) for group in groups if group.arm == arm}
        means = {point: estimate.value for point, estimate in means.items() if estimate.num}
        if len(means) > 1:
            best = (min if less_is_better(metric) else max)(means, key=means.__getitem__)
            lines.append(f"- {arm}: {best} (mean {_number(means[best])}; {len(means)} points)")
    return ["", f"## Best points of the grid, by {metric}", "", *lines] if lines else []


def _comparisons(judged: Sequence[Judged]) -> list[str]:
    if not judged:
        return ["No two arms have runs to be compared yet."]
    rows = []
    for one, other, readout, (difference, p, spread), adjusted, seen_from, seeds in judged:
        cells = [readout, f"{one.name} - {other.name}", _shown(difference), str(difference.num)]
        cells += [_number(value) for value in (p, adjusted, spread, seen_from)]
        rows.append([*cells, "-" if math.isnan(spread) else str(seeds or "> 10000")])
    return [
        *_table(HEAD, rows),
        "",
        "p: p-value of the two-sided sign-flip permutation test; the interval has all differences that this test does "
        f"not reject at 5 %, and is infinite below {pairs_to_accept(1)} pairs. p (Holm): adjusted for the number of "
        "comparisons by one readout. seen from: smallest true difference that the test finds significant with a "
        "probability of 80 % in Holm's first step, if differences are normally distributed.",
    ]


def write_files(study: Study, groups: Sequence[Group], folder: Path) -> str:
    """Write the analysis of a study to files in ``folder``, and return the text of analysis.md. The other files are
    readouts.csv, comparisons.jsonl, and surprisal/ARM_POINT.json with the mean of -log p over the sampled tokens of
    each rollout, in nats, under the distribution that they were sampled from, averaged over the seeds of an arm with
    the same values of the study's ``grid``, POINT."""
    collapsed = not_finite(study, groups)
    rank_collapsed_last(groups, study.analysis.metric)
    judged = all_compared(study, groups)
    text = tables(study, groups, judged, collapsed)
    write_whole(folder / "analysis.md", text)
    names, rows = names_of(groups), io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    writer.writerow(["arm", "point", "seed", *names])
    for group in groups:
        for seed, values in sorted(group.runs.items()):
            writer.writerow([group.arm, group.point, seed, *(values.get(name, "") for name in names)])
    write_whole(folder / "readouts.csv", rows.getvalue())
    write_whole(folder / "comparisons.jsonl", "".join(json.dumps(_record(one)) + "\n" for one in judged))
    for group in groups:
        if (surprisal := group.mean_curves().get(SURPRISAL)) and surprisal.steps:
            file = folder / "surprisal" / f"{group.name.replace(' ', '_')}.json"
            write_whole(file, json.dumps(at_every_step(surprisal)) + "\n")
    return text


def _record(judged: Judged) -> dict[str, Any]:
    comparison = judged.comparison
    numbers = {**comparison.difference._asdict(), "p": comparison.p, "p_holm": judged.adjusted}
    numbers |= {"sd": comparison.spread, "seen_from": judged.seen_from}
    finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return {"readout": judged.readout, "one": judged.one.name, "other": judged.other.name, **finite}


def _shown(estimate: Estimate) -> str:
    if not estimate.num:
        return "-"
    if math.isnan(estimate.low):
        return _number(estimate.value)
    return f"{_number(estimate.value)} [{_number(estimate.low)}, {_number(estimate.high)}]"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]
