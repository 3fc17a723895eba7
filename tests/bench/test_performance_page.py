"""Tests that docs/performance.md and the README's table are what the script writes from the recorded lines."""

import re

from tests.bench.report import PAGE, README, TABLES, by_size, headline_table, page, results, with_speeds
from tests.random_models import MODELS


def test_the_page_is_what_the_script_makes_of_the_results():
    text = PAGE.read_text()
    assert text == page(results())
    assert len(text.splitlines()) < 240
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


def test_rollouts_with_drafts_stand_next_to_the_same_ones_without():
    about = {"device": "NVIDIA H200", "torch": "2", "triton": "3", "commit": "a", "surprisal": 0.3}
    shape = {"base": "nvfp4", "prompts": 16, "completions": 8, "temperature": 1.0}
    lines = [
        {"name": "drafts/small", "shape": {**shape, "speculation": "off"}, "median_s": 3.0, **about},
        {"name": "drafts/small", "shape": {**shape, "speculation": "on"}, "median_s": 2.0, **about},
        {"name": "drafts/small", "shape": {**shape, "speculation": "on", "prompts": 1}, "median_s": 2.0, **about},
        {"name": "drafts/other", "shape": {**shape, "speculation": "on"}, "median_s": 2.0, **about},
    ]
    table = TABLES["rollouts_with_drafts"]
    chosen = table.select(lines)
    assert [line["plain_s"] for line in chosen] == [3.0]
    assert table.markdown(chosen).splitlines()[-1] == "| small | nvfp4 | 16 x 8 | 1.0 | 0.30 | 3.00 | 2.00 | 1.50 |"


def test_every_model_that_a_benchmark_can_have_is_sorted_by_its_size():
    ordered = sorted(MODELS, key=by_size)
    assert ordered[:2] == ["tiny", "0.5B"]
    assert ordered.index("7B") < ordered.index("14B") < ordered.index("30B-A3B")
