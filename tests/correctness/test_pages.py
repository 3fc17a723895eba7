"""Tests that docs/correctness.md and docs/scorers.md are what the scripts write from the recorded lines."""

import json

from tests.bench.report import RESULTS
from tests.correctness import page
from tests.rewards import agreement


def test_the_page_about_correctness_is_made_of_its_lines():
    assert page.PAGE.read_text() == page.document()


def test_the_page_about_scorers_is_made_of_its_lines():
    lines = [json.loads(line) for line in (RESULTS / "scorers.jsonl").read_text().splitlines()]
    assert agreement.PAGE.read_text() == agreement.document(lines)
