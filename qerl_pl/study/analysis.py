"""Analyse the runs of a study: a table of arms, paired comparisons, and the files to which they are written."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from qerl_pl.common.files import write_whole
from qerl_pl.results.curves import SURPRISAL
from qerl_pl.study import state
from qerl_pl.study.decision import holm, pairs_to_accept
from qerl_pl.study.readouts import Curves, curves_of, entropy_at, equal_reward, readouts
from qerl_pl.study.statistics import Comparison, Estimate, compare, mean, seeds_needed, smallest_size
from qerl_pl.study.study_file import Run, Study

TINY_DIFFERENCE = 0.02  # the table has the number of seeds that would show this difference in accuracy


class Group(NamedTuple):
    """Finished runs of an arm with one combination of values of the options in the study's grid (a point of the
    grid)."""

    arm: str
    point: str
    """Values of the grid's options as text."""
    runs: dict[int, dict[str, float]]
    """Readouts by seed. Runs of two arms with equal seeds are a pair."""
    curves: dict[int, Curves]

    @property
    def name(self) -> str:
        """Arm and point."""
        return f"{self.arm} {self.point}".strip()

    def values(self, readout: str) -> list[float]:
        """Return a measured quantity (readout) of these runs, ordered by seed, NaN where a run has none."""
        return [values.get(readout, math.nan) for _, values in sorted(self.runs.items())]


class Judged(NamedTuple):
    """Comparison of two arms in one readout, a number that summarises a run."""

    one: Group
    other: Group
    readout: str
    comparison: Comparison
    adjusted: float
    """P-value with Holm's adjustment over all comparisons in the same readout."""


def gather(study: Study) -> list[Group]:
    """Read the finished runs of a study, grouped by arm and point of the grid.

    Raises:
        ValueError: no run is finished, or a run's event files cannot be read.
    """
    groups: dict[tuple[str, str], Group] = {}
    for run in study.runs():
        if not state.is_finished(study, run):
            continue
        point = study.name_of(run.point)
        group = groups.setdefault((run.arm, point), Group(run.arm, point, {}, {}))
        curves = curves_of(run)
        group.curves[run.seed] = curves
        group.runs[run.seed] = readouts(study, run, curves)
    if not groups:
        raise ValueError(f"no run in {study.output} is finished: there is nothing to analyse yet")
    level = equal_reward([curves for group in groups.values() for curves in group.curves.values()])
    for group in groups.values():
        for seed, curves in group.curves.items():
            entropy = None if level is None else entropy_at(curves, level)
            if entropy is not None:
                group.runs[seed]["entropy at equal reward"] = entropy
    arms = list(study.arms)
    return sorted(groups.values(), key=lambda group: arms.index(group.arm))


def compared(study: Study, groups: Sequence[Group], readout: str) -> list[Judged]:
    """Test the paired difference of two arms in one measured quantity, for each pair of arms that the study names.

    Arms are compared at equal settings (points of the grid), for all settings with which both were run.
    """
    by_name = {(group.arm, group.point): group for group in groups}
    points = list(dict.fromkeys(group.point for group in groups))
    found: list[tuple[Group, Group, Comparison]] = []
    for point in points:
        for one, other in study.comparisons:
            if (one, point) in by_name and (other, point) in by_name:
                pair = by_name[one, point], by_name[other, point]
                found.append((*pair, compare(differences(*pair, readout))))
    adjusted = holm([comparison.p for *_, comparison in found])
    return [Judged(one, other, readout, each, p) for (one, other, each), p in zip(found, adjusted, strict=True)]


def differences(one: Group, other: Group, readout: str) -> list[float]:
    """Compute the differences of a readout in pairs of runs with equal seeds, ``one`` minus ``other``; a run whose
    partner is missing is left out."""
    seeds = sorted(one.runs.keys() & other.runs.keys())
    return [one.runs[seed].get(readout, math.nan) - other.runs[seed].get(readout, math.nan) for seed in seeds]


def rank_collapsed_last(groups: Sequence[Group], readout: str) -> None:
    """Give each run whose deciding readout is NaN or infinite the lowest finite value of any run, in place, so that a
    run that collapsed counts against its arm. The analysis names these runs."""
    finite = [value for group in groups for value in group.values(readout) if math.isfinite(value)]
    for group in groups:
        for values in group.runs.values():
            if finite and not math.isfinite(values.get(readout, 0.0)):
                values[readout] = min(finite)


def names_of(groups: Sequence[Group]) -> list[str]:
    """List the names of readouts (numbers that summarise a run) that any run has, in order of first occurrence."""
    return list(dict.fromkeys(name for group in groups for run in group.runs.values() for name in run))


def all_compared(study: Study, groups: Sequence[Group]) -> list[Judged]:
    """Compare the study's pairs of arms in every readout; the readout that decides the study comes first."""
    names = sorted(names_of(groups), key=lambda name: name != study.analysis.metric)
    return [judged for name in names for judged in compared(study, groups, name)]


def tables(study: Study, groups: Sequence[Group], judged: Sequence[Judged], collapsed: Sequence[str] = ()) -> str:
    """Format the whole analysis as Markdown.

    Args:
        study: the study.
        groups: finished runs by arm, from ``gather``.
        judged: comparisons of arms, from ``all_compared``.
        collapsed: lines about readouts that are not finite, from ``not_finite``.
    """
    runs = study.runs()
    left = {run.name: state.failure(run) for run in runs if not state.is_finished(study, run)}
    lines = [
        "# " + study.output.name,
        "",
        f"{len(runs) - len(left)} of {len(runs)} runs are finished. Means over seeds with Student's 95 % intervals; "
        "differences are means over pairs of equal seeds, with the values that the sign-flip test does not reject.",
        "",
        _times([run for run in runs if run.name not in left]),
    ]
    if left:
        lines += ["", f"Left out, {len(left)} runs that are not finished:", ""]
        lines += [f"- {name}: {text.splitlines()[0] if text else 'not finished'}" for name, text in left.items()]
    names = names_of(groups)
    rows = [[name, *(_shown(mean(group.values(name))) for group in groups)] for name in names]
    lines += collapsed
    counts = ["seeds", *(str(len(group.runs)) for group in groups)]
    lines += ["", "## Readouts", "", *_table(["", *(group.name for group in groups)], [counts, *rows])]
    lines += _best_points(study, groups)
    lines += ["", f"## Decided by: {study.analysis.metric}", ""]
    lines += _comparisons([each for each in judged if each.readout == study.analysis.metric])
    lines += ["", "## Other readouts, not decided by", ""]
    lines += _comparisons([each for each in judged if each.readout != study.analysis.metric])
    return "\n".join(lines) + "\n"


def _times(runs: Sequence[Run]) -> str:
    """Say how long the commands of finished runs took, all together and in the median run."""
    done = [state.seconds_done(run) for run in runs]
    hours: dict[str, float] = {}
    for seconds in done:
        for name, each in seconds.items():
            hours[name] = hours.get(name, 0.0) + each / 3600
    parts = ", ".join(f"{name} {total:.2f}" for name, total in hours.items())
    usual = median(sum(seconds.values()) for seconds in done)
    return (
        f"Their processes took {sum(hours.values()):.2f} hours in all ({parts}), and {usual:.0f} s in the median run."
    )


def not_finite(study: Study, groups: Sequence[Group]) -> list[str]:
    """Name the runs of which a readout is NaN or infinite, and these readouts."""
    found = []
    for group in groups:
        for seed, values in sorted(group.runs.items()):
            if lost := [f"{name} ({value})" for name, value in values.items() if not math.isfinite(value)]:
                found.append(f"- {group.name}, seed {seed}: {', '.join(lost)}")
    head = (
        f"{len(found)} runs have readouts that are not finite. In the deciding one, {study.analysis.metric}, they get "
        "the lowest value of all runs; means and comparisons of others leave them out:"
    )
    return ["", head, "", *found] if found else []


def _best_points(study: Study, groups: Sequence[Group]) -> list[str]:
    """Name the point of the grid with the highest mean of the deciding readout, for each arm that ran at several."""
    metric = study.analysis.metric
    lines: list[str] = []
    for arm in study.arms:
        means = {
            group.point: sum(values) / len(values)
            for group in groups
            if group.arm == arm and (values := [each for each in group.values(metric) if math.isfinite(each)])
        }
        if len(means) > 1:
            best = max(means, key=means.__getitem__)
            lines.append(f"- {arm}: {best} (mean {_number(means[best])}; {len(means)} points)")
    return ["", f"## Best points of the grid, by {metric}", "", *lines] if lines else []


def _comparisons(found: Sequence[Judged]) -> list[str]:
    if not found:
        return ["No two arms have runs to be compared yet."]
    head = [
        "readout",
        "arms",
        "difference",
        "pairs",
        "p",
        "p (Holm)",
        "sd",
        "seen from",
        f"seeds for {TINY_DIFFERENCE}",
    ]
    in_readout = Counter(each.readout for each in found)
    rows = []
    for one, other, readout, (difference, p, spread), adjusted in found:
        number = in_readout[readout]
        seeds = None if math.isnan(spread) else seeds_needed(TINY_DIFFERENCE, spread, number)
        rows.append(
            [
                *(readout, f"{one.name} - {other.name}", _shown(difference), str(difference.num)),
                *(_number(value) for value in (p, adjusted, spread, seen_from(difference.num, spread, number))),
                "-" if math.isnan(spread) else str(seeds or "> 10000"),
            ]
        )
    return [
        *_table(head, rows),
        "",
        "p: sign-flip permutation test, two-sided; the interval has all differences that it does not reject at 5 % "
        f"and is infinite below {pairs_to_accept(1)} pairs. Holm: over the comparisons of one readout. seen from: the "
        "true difference that is accepted with 80 % probability in Holm's first step, for normal differences.",
    ]


def seen_from(pairs: int, spread: float, comparisons: int) -> float:
    """Compute the smallest true difference that the deciding test is likely to see: accepted, with Holm's adjustment
    over ``comparisons``, with a probability of 80 %; NaN if so few pairs can accept nothing."""
    return smallest_size(pairs, comparisons) * spread if spread == spread else math.nan


def write_files(study: Study, groups: Sequence[Group], folder: Path) -> str:
    """Write analysis.md, readouts.csv, comparisons.jsonl and the arms' entropies; returns the text of analysis.md.

    surprisal/ARM_POINT.json has the sampling entropy per rollout, in nats per token, averaged over the arm's runs.
    """
    collapsed = not_finite(study, groups)
    rank_collapsed_last(groups, study.analysis.metric)
    judged = all_compared(study, groups)
    text = tables(study, groups, judged, collapsed)
    write_whole(folder / "analysis.md", text)
    names = names_of(groups)
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    writer.writerow(["arm", "point", "seed", *names])
    for group in groups:
        for seed, values in sorted(group.runs.items()):
            writer.writerow([group.arm, group.point, seed, *(values.get(name, "") for name in names)])
    write_whole(folder / "readouts.csv", rows.getvalue())
    numbers = Counter(each.readout for each in judged)
    records = [_record(each, numbers[each.readout]) for each in judged]
    write_whole(folder / "comparisons.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    for group in groups:
        curves = [each[SURPRISAL].values for each in group.curves.values() if SURPRISAL in each]
        if curves:
            together = zip(*curves, strict=False)  # as many rollouts as all of them have
            means = [sum(values) / len(values) for values in together]
            write_whole(folder / "surprisal" / f"{group.name.replace(' ', '_')}.json", json.dumps(means) + "\n")
    return text


def _record(judged: Judged, comparisons: int) -> Mapping[str, Any]:
    comparison = judged.comparison
    found: dict[str, Any] = {"readout": judged.readout, "one": judged.one.name, "other": judged.other.name}
    found |= comparison.difference._asdict() | {"p": comparison.p, "p_holm": judged.adjusted}
    seen = seen_from(comparison.difference.num, comparison.spread, comparisons)
    found |= {"sd": comparison.spread, "seen_from": seen}
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in found.items()
    }


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
