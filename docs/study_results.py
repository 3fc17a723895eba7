"""Write docs/study_results.md and the README's sentence about the study: python docs/study_results.py

The numbers are those of docs/results/noise-words-0. These are copied from the folders of a study and of its pilot study
by ``python docs/study_results.py STUDY PILOT GPUS NAME``, with the number of GPUs and the name of their kind, after
``study --analyse``.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
import textwrap
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from qerl_pl.study.statistics import ALPHA, Estimate, interquartile_mean  # noqa: E402  (the script is run by its path)
from qerl_pl.tools.curves import read_curves  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "noise-words-0"
SPEEDS = ROOT / "docs" / "results" / "study_speed.jsonl"
PAGE, README = ROOT / "docs" / "study_results.md", ROOT / "README.md"
DECIDING = "area under accuracy"
SHOWN = (
    ["accuracy at step 0", "final accuracy", DECIDING, "final reward", "area under reward", "entropy at step 0"]
    + ["mean sampling entropy", "entropy at equal reward", "gap", "gap, noise"]
    + [f"{name}: pass@{k}" for name in ("validation", "reach") for k in (1, 8, 64)]
    + ["seconds per step", "seconds of the run", "GPU memory, GiB"]
)
PICTURES = {
    "differences.png": "Differences between the arms in the mean accuracy over training, with intervals",
    "curves.png": "Reward, accuracy, entropy and gap by rollout for each arm",
    "pass_at_k.png": "pass@k after training, on validation problems and on those out of the policy's reach",
    "entropy_by_reward.png": "Entropy against reward",
}
_PLACE = re.compile(r"(<!-- study -->\n).*?(<!-- end -->)", re.DOTALL)
TEXT = """\
# Results: does 4-bit noise help?

These are the results of the study that [study.md](study.md) registers, with the policy words-0. `python
docs/study_results.py` writes this page; its numbers come from `docs/results/noise-words-0`, which `study --analyse`
made from the event files of the runs. {runs}

## The hypotheses

{verdict}

{hypotheses}

Differences are means over pairs of runs with equal seeds, in the area under accuracy: the mean accuracy on held-out
problems over the steps of training. Intervals are 95 % bootstrap intervals; p is of a two-sided sign-flip permutation
test, and "p (Holm)" is adjusted over the five hypotheses. "Seen from" is the true difference that so many pairs show
with a probability of 80 %, by a test without this adjustment. A difference of {largest} is therefore the most that any
of the comparisons is likely to have missed, and smaller ones may exist.

{differences}

## The arms

Interquartile means over seeds, with 95 % intervals. Entropies and gaps are in nats per token. The evaluation "reach"
has problems of which the policy solved none in 64 samples when it was made.

{arms}

{curves}

{pass_at_k}

{entropy_by_reward}

## Other differences

These decide no hypothesis. The table has the differences in other readouts whose p-value is below 0.05 after Holm's
adjustment over the five comparisons in one readout. It is not adjusted over the many readouts, so some of them may be
there by chance. "gap, decode" is measured only at temperature 1, and so in few rollouts of bf16+temperature.

{others}

## What this says, and what it does not

- NVFP4 and AQN were not seen to raise entropy, at step 0, over training or at equal reward, nor to raise accuracy or
  pass@k. NVFP4's interval leaves room for a small loss, and not for a gain that matters.
- AQN, with the sigmas of the QeRL paper, is a small disturbance of this policy: its noise changes the log-probability
  of a sampled token by {noise} nats on average (nvfp4+aqn). Stronger noise was not tested.
- For every arm the best learning rate of the pilot study is {rate}, the highest that was tried, so higher ones may be
  better still.
- This is one policy of 10 million parameters with a habit that RL removes. The further policies of the plan, and its
  exploratory arms (other formats, rounded noise, unbounded weights, DAPO), have not been run.
- Nothing follows for models of 3B and more that were pretrained on text. `python -m qerl_pl study` runs the same
  comparison on any model, with a copy of `configs/studies/noise.yaml`.

## What it took

{cost}
"""

Row = dict[str, Any]


def collect(study: Path, pilot: Path, gpus: int, name: str) -> None:
    """Copy what the page needs from the folders of a study and its pilot, and note how long each run took."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for file in ("readouts.csv", "comparisons.jsonl", *PICTURES):
        shutil.copyfile(study / "analysis" / file, RESULTS / file)
    shutil.copyfile(pilot / "analysis" / "readouts.csv", RESULTS / "pilot.csv")
    lines = [_times(kind, state) for kind, folder in (("pilot", pilot), ("study", study)) for state in _states(folder)]
    head = {"gpus": gpus, "device": name}
    (RESULTS / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))


def _states(folder: Path) -> list[Path]:
    return sorted(folder.glob("runs/**/study.json"))


def _times(kind: str, state: Path) -> Row:
    """Note the seconds of a run's commands, and when its last event was logged, in seconds since 1970."""
    folders = sorted({path.parent for path in state.parent.rglob("events.out.tfevents.*")})
    times = [time for folder in folders for curve in read_curves(folder).values() for time in curve.times]
    return {
        "kind": kind,
        "run": "/".join(state.parts[state.parts.index("runs") + 1 : -1]),
        "seconds": json.loads(state.read_text())["done"],
        "ended": round(max(times), 1),
    }


def page() -> str:
    """Make the page from the text and the results."""
    readouts, compared = _readouts(), _compared()
    decided = [each for each in compared if each["readout"] == DECIDING]
    others = [each for each in compared if each["readout"] != DECIDING and (each["p_holm"] or 1.0) < ALPHA]
    values = {
        "runs": f"It has {len(readouts)} runs, of {len({row['seed'] for row in readouts})} seeds.",
        "verdict": verdict(decided),
        "hypotheses": _differences(decided),
        "largest": f"{max(each['seen_from'] for each in decided):.3f}",
        "arms": _arms(readouts),
        "others": _differences(others, readout=True),
        "noise": f"{_estimate(readouts, 'nvfp4+aqn', 'gap, noise').value:.2g}",
        "rate": " and ".join(dict.fromkeys(rates().values())),
        "cost": _wrapped(cost()),
    }
    for file, title in PICTURES.items():
        values[file.removesuffix(".png")] = f"![{title}](results/{RESULTS.name}/{file})"
    return TEXT.format(**values)


def claim() -> str:
    """Make the README's sentences about the study."""
    decided = {(each["one"], each["other"]): each for each in _compared() if each["readout"] == DECIDING}
    seeds = min(each["num"] for each in decided.values())

    def of(one: str, other: str) -> str:
        return _interval(decided[one, other])

    return (
        f"**Does 4-bit noise help?** In a study that was registered before its runs, with {seeds} seeds per arm and a "
        "policy of 10 million parameters on generated word problems, the mean accuracy over training changed by "
        f"{of('nvfp4', 'bf16')} with NVFP4 in place of bf16, by {of('bf16+aqn', 'bf16')} with AQN on bf16, and by "
        f"{of('nvfp4+aqn', 'nvfp4')} with AQN on NVFP4 (differences with 95 % intervals). "
        f"{verdict(list(decided.values()))} Therefore the recipes on this page train without noise; the arms with "
        "`aqn` in their names, and the quickstart, add it. [docs/study_results.md](docs/study_results.md) says what "
        "follows for larger models, and what does not."
    )


def verdict(decided: list[Row]) -> str:
    """Say which hypotheses are accepted."""
    accepted = [f"`{each['one']}` differs from `{each['other']}`" for each in decided if each["p_holm"] < ALPHA]
    if not accepted:
        return f"None of the {len(decided)} registered hypotheses is accepted."
    return f"Accepted of the {len(decided)} registered hypotheses: {'; '.join(accepted)}."


def rates() -> dict[str, str]:
    """Return the learning rate with the highest mean accuracy over training in the pilot study, by arm."""
    found: dict[str, dict[str, list[float]]] = {}
    with (RESULTS / "pilot.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["arm"], {}).setdefault(row["point"].removeprefix("lr="), []).append(
                float(row[DECIDING])
            )
    return {arm: max(points, key=lambda point: sum(points[point])) for arm, points in found.items()}


def cost() -> str:
    """Say how long the runs took, and on what."""
    head, *runs = map(json.loads, (RESULTS / "runs.jsonl").read_text().splitlines())
    said = []
    for kind, what in (("pilot", "pilot study"), ("study", "study")):
        mine = [run for run in runs if run["kind"] == kind]
        seconds = [sum(run["seconds"].values()) for run in mine]
        began = min(run["ended"] - taken for run, taken in zip(mine, seconds, strict=True))
        span = max(run["ended"] for run in mine) - began
        said.append(
            f"The {len(mine)} runs of the {what} took {span * head['gpus'] / 3600:.2f} GPU hours, and "
            f"{median(seconds):.0f} s a run (median), with the start of its engine and its evaluations; on average "
            f"{sum(seconds) / span / head['gpus']:.0f} ran at a time on each GPU."
        )
    return f"On {head['gpus']} {head['device']}: {' '.join(said)} {_together()}"


def _together() -> str:
    """Say how fast several runs on one GPU are."""
    alone, *several = sorted(map(json.loads, SPEEDS.read_text().splitlines()), key=lambda line: line["shape"]["jobs"])
    rates = ", ".join(f"{line['shape']['jobs']} together {line['rollouts_per_s']:.2f}" for line in several)
    return (
        f"On one {alone['device']}, one run makes {alone['rollouts_per_s']:.2f} rollouts per second, {rates} "
        f"(`tests/bench/bench_study.py`, arm {alone['shape']['base']}, {alone['commit']}). So small a policy leaves "
        "most of a GPU idle. A run alone also has all CPU threads, which may slow it down: that was not examined."
    )


def _readouts() -> list[Row]:
    with (RESULTS / "readouts.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _compared() -> list[Row]:
    return [json.loads(line) for line in (RESULTS / "comparisons.jsonl").read_text().splitlines()]


def _estimate(readouts: list[Row], arm: str, name: str) -> Estimate:
    return interquartile_mean([[float(row[name]) for row in readouts if row["arm"] == arm and row[name]]])


def _arms(readouts: list[Row]) -> str:
    arms = list(dict.fromkeys(row["arm"] for row in readouts))
    rows = [[name, *(_shown(_estimate(readouts, arm, name)) for arm in arms)] for name in SHOWN]
    seeds = [str(sum(row["arm"] == arm for row in readouts)) for arm in arms]
    return _table(["", *arms], [["seeds", *seeds], *rows])


def _differences(compared: list[Row], *, readout: bool = False) -> str:
    head = [*(["readout"] if readout else []), "arms", "difference", "p", "p (Holm)", "seen from"]
    rows = [
        [
            *([each["readout"]] if readout else []),
            f"{each['one']} - {each['other']}",
            _interval(each),
            *(f"{each[key]:.2g}" for key in ("p", "p_holm", "seen_from")),
        ]
        for each in compared
    ]
    return _table(head, rows)


def _interval(each: Row) -> str:
    return f"{each['value']:+.2g} [{each['low']:+.2g}, {each['high']:+.2g}]"


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.3g} [{estimate.low:.3g}, {estimate.high:.3g}]"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *(["---:"] * (len(head) - 1))], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def filled(readme: str) -> str:
    """Replace the README's sentences about the study."""
    return _PLACE.sub(lambda place: f"{place[1]}{_wrapped(claim())}\n{place[2]}", readme)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)


def main(arguments: list[str]) -> None:
    """Copy the results, if folders are given, and write page and README."""
    if arguments:
        study, pilot, gpus, name = arguments
        collect(Path(study), Path(pilot), int(gpus), name)
    PAGE.write_text(page())
    README.write_text(filled(README.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
