"""Tests that docs/real_models.md and docs/real_completions.md are what the script writes from the recorded lines."""

from docs.real_models import OF_COMPLETIONS, PAGE, PICTURE, completions_page, groups, page, read


def test_pages_are_what_the_script_makes_of_the_results():
    lines = read()
    assert PAGE.read_text() == page(lines)
    assert OF_COMPLETIONS.read_text() == completions_page(lines)
    assert PICTURE.exists() == bool(groups(lines))
