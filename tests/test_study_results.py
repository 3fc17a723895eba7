"""The page of the study's results, and the README's sentences about it, follow from the numbers in docs/results."""

from __future__ import annotations

import csv
from collections import defaultdict

import pytest

from docs.study_results import (
    DECIDING,
    PAGE,
    README,
    RESULTS,
    _compared,
    _readouts,
    claim,
    filled,
    page,
    rates,
    verdict,
)
from qerl_pl.study.statistics import compare, holm
from qerl_pl.study.study_file import read_study
from tests.program import ROOT

STUDY = read_study(ROOT / "configs" / "studies" / "noise.yaml")


def test_page_and_readme_are_what_the_script_makes_of_the_results():
    assert PAGE.read_text() == page()
    assert filled(README.read_text()) == README.read_text()
    assert " ".join(claim().split()) in " ".join(README.read_text().split())


def test_every_run_that_was_registered_is_there_and_no_other():
    rows = _readouts()
    assert sorted((row["arm"], int(row["seed"])) for row in rows) == sorted((run.arm, run.seed) for run in STUDY.runs())
    assert all(row[name] for row in rows for name in (DECIDING, "reach: pass@64", "validation: pass@64"))


def test_the_decided_differences_follow_from_the_readouts_of_the_runs():
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for row in _readouts():
        values[row["arm"]][row["seed"]] = float(row[DECIDING])
    decided = {(each["one"], each["other"]): each for each in _compared() if each["readout"] == DECIDING}
    assert list(decided) == STUDY.comparisons
    found = [compare([[values[one][seed] - values[other][seed] for seed in values[one]]]) for one, other in decided]
    for each, mine, adjusted in zip(decided.values(), found, holm([mine.p for mine in found]), strict=True):
        assert each["value"] == pytest.approx(mine.difference.value)
        assert (each["low"], each["high"]) == pytest.approx((mine.difference.low, mine.difference.high))
        assert (each["p"], each["p_holm"]) == pytest.approx((mine.p, adjusted))


def test_the_rates_of_the_study_are_those_that_its_pilot_chose():
    pilot = read_study(ROOT / "configs" / "studies" / "pilot.yaml")
    with (RESULTS / "pilot.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(pilot.runs())
    chosen = {arm: float(rate) for arm, rate in rates().items()}
    assert chosen == {arm: STUDY.arms[arm]["model"]["optimizer"]["init_args"]["lr"] for arm in pilot.arms}
    (grid,) = pilot.grid.values()
    assert set(chosen.values()) == {max(grid)}, "the page says that the best rate is the highest"


def test_what_the_page_says_in_words_is_in_the_numbers():
    compared = _compared()
    entropy = [each for each in compared if "entropy" in each["readout"] and each["p_holm"] is not None]
    assert entropy
    assert all(each["p_holm"] >= 0.05 for each in entropy), "no difference in entropy was seen"
    scores = [each for each in compared if "accuracy" in each["readout"] or "pass@" in each["readout"]]
    gains = [each for each in scores if each["p_holm"] is not None and each["p_holm"] < 0.05 and each["value"] > 0]
    assert not [each for each in gains if "nvfp4" in each["one"] or "aqn" in each["one"]], "no gain was seen"
    (nvfp4,) = [
        each for each in compared if (each["readout"], each["one"], each["other"]) == (DECIDING, "nvfp4", "bf16")
    ]
    assert nvfp4["high"] < 0.005


def test_the_verdict_names_what_is_accepted():
    rows = [{"one": "a", "other": "b", "p_holm": 0.04}, {"one": "c", "other": "b", "p_holm": 0.2}]
    assert verdict(rows) == "Accepted of the 2 registered hypotheses: `a` differs from `b`."
    assert verdict(rows[1:]) == "None of the 1 registered hypotheses is accepted."


def test_the_page_is_on_the_site():
    text = (ROOT / "mkdocs.yml").read_text()
    assert "docs/study_results.md" in text.replace('"', "")
