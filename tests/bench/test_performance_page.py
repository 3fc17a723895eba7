"""Tests that docs/performance.md and the README's table are what the script writes from the recorded lines."""

import re

from tests.bench.report import PAGE, README, headline_table, page, results, with_speeds


def test_the_page_is_what_the_script_makes_of_the_results():
    text = PAGE.read_text()
    assert text == page(results())
    assert len(text.splitlines()) < 200
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))


def test_the_readmes_table_has_what_the_results_say():
    readme = README.read_text()
    assert with_speeds(readme, results()) == readme


def test_the_readmes_first_facts_are_in_its_table():
    readme = README.read_text()
    cells = {
        row[0]: row[1:] for line in headline_table(results()).splitlines() if (row := line.strip("| ").split(" | "))
    }
    decoding, steps = re.findall(
        r"is (\d\.\d) times as fast .* whole training steps are (\d\.\d) times", " ".join(readme.split())
    )[0]
    assert (decoding, steps) == (f"{float(cells['7B'][0]):.1f}", f"{float(cells['7B'][4]):.1f}")
    assert f"{cells['32B'][-1]} GiB" in " ".join(readme.split())
