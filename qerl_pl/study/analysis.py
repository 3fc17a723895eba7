"""Analyse the runs of a study: a table of arms, paired comparisons, and the files to which they are written."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from qerl_pl.common.files import write_whole
from qerl_pl.study import state
from qerl_pl.study.readouts import SURPRISAL, Curves, curves_of, entropy_at, equal_reward, readouts
from qerl_pl.study.statistics import Comparison, Estimate, compare, holm, interquartile_mean, seeds_needed
from qerl_pl.study.study_file import Run, Study

Key = tuple[str, int]
"""Values of the options that the study pools (the stratum, e.g. a base model), and the seed. Runs of two arms with
equal keys are a pair."""
TINY_DIFFERENCE = 0.02  # the table has the number of seeds that would show this difference in accuracy


class Group(NamedTuple):
    """Finished runs of an arm with one combination of values of the options in the study's grid (a point of the
    grid)."""

    arm: str
    point: str
    """Values of the grid's options as text, without the options whose values are pooled (``Analysis.strata``)."""
    runs: dict[Key, dict[str, float]]
    """Readouts."""
    curves: dict[Key, Curves]

    @property
    def name(self) -> str:
        """Arm and point."""
        return f"{self.arm} {self.point}".strip()

    def strata(self, readout: str) -> list[list[float]]:
        """Return a measured quantity (readout) of these runs, ordered by seed, in one list per value of the options
        that the study pools, such as a base model. Values that are not finite are left out."""
        found: dict[str, list[float]] = {}
        for (stratum, _), values in sorted(self.runs.items()):
            if math.isfinite(values.get(readout, math.nan)):
                found.setdefault(stratum, []).append(values[readout])
        return list(found.values())


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
        point, stratum = _place(study, run)
        group = groups.setdefault((run.arm, point), Group(run.arm, point, {}, {}))
        curves = curves_of(run)
        group.curves[stratum, run.seed] = curves
        group.runs[stratum, run.seed] = readouts(study, run, curves)
    if not groups:
        raise ValueError(f"no run in {study.output} is finished: there is nothing to analyse yet")
    level = equal_reward([curves for group in groups.values() for curves in group.curves.values()])
    for group in groups.values():
        for key, curves in group.curves.items():
            entropy = None if level is None else entropy_at(curves, level)
            if entropy is not None:
                group.runs[key]["entropy at equal reward"] = entropy
    arms = list(study.arms)
    return sorted(groups.values(), key=lambda group: arms.index(group.arm))


def _place(study: Study, run: Run) -> tuple[str, str]:
    """Return the values of the grid's options in a run as two texts: those by which runs are compared, and those that
    are pooled (the stratum)."""
    strata = study.analysis.strata
    parts = ([], [])
    for key, value in run.point.items():
        parts[key in strata].append(f"{key.rsplit('.', 1)[-1]}={value}")
    return ",".join(parts[0]), ",".join(parts[1])


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


def differences(one: Group, other: Group, readout: str) -> list[list[float]]:
    """Compute the differences of a readout in pairs of runs, ``one`` minus ``other``, in one list per stratum; a run
    whose partner is missing, and a pair with a value that is not finite, are left out."""
    found: dict[str, list[float]] = {}
    for key in sorted(one.runs.keys() & other.runs.keys()):
        difference = one.runs[key].get(readout, math.nan) - other.runs[key].get(readout, math.nan)
        if math.isfinite(difference):
            found.setdefault(key[0], []).append(difference)
    return list(found.values())


def names_of(groups: Sequence[Group]) -> list[str]:
    """List the names of readouts (numbers that summarise a run) that any run has, in order of first occurrence."""
    return list(dict.fromkeys(name for group in groups for run in group.runs.values() for name in run))


def all_compared(study: Study, groups: Sequence[Group]) -> list[Judged]:
    """Compare the study's pairs of arms in every readout; the readout that decides the study comes first."""
    names = sorted(names_of(groups), key=lambda name: name != study.analysis.metric)
    return [judged for name in names for judged in compared(study, groups, name)]


def tables(study: Study, groups: Sequence[Group], judged: Sequence[Judged]) -> str:
    """Format the whole analysis as Markdown.

    Args:
        study: the study.
        groups: finished runs by arm, from ``gather``.
        judged: comparisons of arms, from ``all_compared``.
    """
    runs = study.runs()
    left = {run.name: state.failure(run) for run in runs if not state.is_finished(study, run)}
    lines = [
        "# " + study.output.name,
        "",
        f"{len(runs) - len(left)} of {len(runs)} runs are finished. Interquartile means over seeds with 95 % intervals "
        "(stratified bootstrap); differences are means over pairs of equal seeds.",
        "",
        _times([run for run in runs if run.name not in left]),
    ]
    if left:
        lines += ["", f"Left out, {len(left)} runs that are not finished:", ""]
        lines += [f"- {name}: {text.splitlines()[0] if text else 'not finished'}" for name, text in left.items()]
    names = names_of(groups)
    rows = [[name, *(_shown(interquartile_mean(group.strata(name))) for group in groups)] for name in names]
    lines += _not_finite(groups)
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


def _not_finite(groups: Sequence[Group]) -> list[str]:
    """Name the runs of which a readout is NaN or infinite, and these readouts."""
    found = []
    for group in groups:
        for (stratum, seed), values in sorted(group.runs.items()):
            if lost := [f"{name} ({value})" for name, value in values.items() if not math.isfinite(value)]:
                found.append(f"- {' '.join(filter(None, [group.name, stratum]))}, seed {seed}: {', '.join(lost)}")
    head = f"{len(found)} runs have readouts that are not finite; means and comparisons of these leave them out:"
    return ["", head, "", *found] if found else []


def _best_points(study: Study, groups: Sequence[Group]) -> list[str]:
    """Name the point of the grid with the highest mean of the deciding readout, for each arm that ran at several."""
    metric = study.analysis.metric
    lines: list[str] = []
    for arm in study.arms:
        means = {
            group.point: sum(values) / len(values)
            for group in groups
            if group.arm == arm and (values := [each for stratum in group.strata(metric) for each in stratum])
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
    rows = []
    for one, other, readout, (difference, p, spread, seen), adjusted in found:
        seeds = None if math.isnan(spread) else seeds_needed(TINY_DIFFERENCE, spread)
        rows.append(
            [
                *(readout, f"{one.name} - {other.name}", _shown(difference), str(difference.num)),
                *(_number(value) for value in (p, adjusted, spread, seen)),
                "-" if math.isnan(spread) else str(seeds or "> 10000"),
            ]
        )
    return [
        *_table(head, rows),
        "",
        "p: sign-flip permutation test, two-sided. Holm: over the comparisons of one readout. seen from: the true "
        "difference that so many pairs show with 80 % probability (paired t test, 5 %).",
    ]


def write_files(study: Study, groups: Sequence[Group], folder: Path) -> str:
    """Write analysis.md, readouts.csv, comparisons.jsonl and the arms' entropies; returns the text of analysis.md.

    surprisal/ARM_POINT.json has the sampling entropy per rollout, in nats per token, averaged over the arm's runs.
    """
    judged = all_compared(study, groups)
    text = tables(study, groups, judged)
    write_whole(folder / "analysis.md", text)
    names = names_of(groups)
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    writer.writerow(["arm", "point", "stratum", "seed", *names])
    for group in groups:
        for (stratum, seed), values in sorted(group.runs.items()):
            writer.writerow([group.arm, group.point, stratum, seed, *(values.get(name, "") for name in names)])
    write_whole(folder / "readouts.csv", rows.getvalue())
    write_whole(folder / "comparisons.jsonl", "".join(json.dumps(_record(each)) + "\n" for each in judged))
    for group in groups:
        curves = [each[SURPRISAL].values for each in group.curves.values() if SURPRISAL in each]
        if curves:
            together = zip(*curves, strict=False)  # as many rollouts as all of them have
            means = [sum(values) / len(values) for values in together]
            write_whole(folder / "surprisal" / f"{group.name.replace(' ', '_')}.json", json.dumps(means) + "\n")
    return text


def _record(judged: Judged) -> Mapping[str, Any]:
    comparison = judged.comparison
    found: dict[str, Any] = {"readout": judged.readout, "one": judged.one.name, "other": judged.other.name}
    found |= comparison.difference._asdict() | {"p": comparison.p, "p_holm": judged.adjusted}
    found |= {"sd": comparison.spread, "seen_from": comparison.seen}
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in found.items()}


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
