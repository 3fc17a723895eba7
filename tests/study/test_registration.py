"""The study's registration in docs/study.md agrees with the configuration files of the study."""

from __future__ import annotations

import csv
import re

from qerl_pl.study.statistics import compare, holm, pairs_to_accept, smallest_size
from qerl_pl.study.study_file import Study, read_study
from tests.program import ROOT

PAGE = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
REGISTERED = PAGE.split("## Registered", 1)[1].split("### Run it", 1)[0]


def study(name: str) -> Study:
    return read_study(ROOT / "configs" / "studies" / f"{name}.yaml")


def test_the_hypotheses_are_the_comparisons_and_can_be_accepted():
    noise, large = study("noise"), study("noise_1.5b")
    stated = re.findall(r"^\d\. `([^`]+)` differs from `([^`]+)`", REGISTERED, re.MULTILINE)
    assert sorted(stated) == sorted(noise.comparisons)
    assert large.comparisons == stated[:2]
    for each in (noise, large):
        assert len(each.seeds) >= pairs_to_accept(len(each.comparisons))


def test_the_table_of_the_toy_study_follows_from_its_readouts():
    with (ROOT / "docs" / "results" / "noise-words-0" / "readouts.csv").open(newline="") as file:
        values = {(row["arm"], row["seed"]): float(row["area under accuracy"]) for row in csv.DictReader(file)}
    seeds = sorted({seed for _, seed in values})
    toy = PAGE.split("## Before it", 1)[1]
    rows = re.findall(r"^\| (\S+) - (\S+) \| (\S+) \[(\S+), (\S+)\] \| (\S+) \| (\S+) \|$", toy, re.MULTILINE)
    found = [compare([values[one, seed] - values[other, seed] for seed in seeds]) for one, other, *_ in rows]
    assert len(rows) == 5
    for row, (difference, p, _), adjusted in zip(rows, found, holm([each.p for each in found]), strict=True):
        assert row[2:] == (*(f"{value:+.2g}" for value in difference[:3]), f"{p:.2g}", f"{adjusted:.2g}")
    size = max(each.spread for each in found) * smallest_size(len(seeds), len(rows))
    assert f"a true difference of {size:.3f}" in toy


def test_the_temperature_follows_the_quantised_run_of_the_same_seed():
    noise = study("noise")
    (matched,) = noise.arms["bf16+temperature"]["trainer"]["callbacks+"]
    assert matched["class_path"] == "callbacks.matched_temperature.MatchedTemperature"
    for run in noise.runs():
        if run.arm == "bf16+temperature":
            before = noise.run_before(run)
            assert before is not None
            assert str(before.folder) == matched["init_args"]["curve"].replace("$seed", str(run.seed))
