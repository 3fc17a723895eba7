"""What the pages say of the studies follows from the numbers in docs/results."""

from __future__ import annotations

from docs.study_results import PAGE, README, claim, filled, toy


def test_pages_are_what_the_script_makes_of_the_results():
    page, readme = PAGE.read_text(), README.read_text()
    assert filled(page, "toy", toy()) == page
    assert filled(readme, "study", claim()) == readme
    assert toy() in page
    assert claim() in readme
