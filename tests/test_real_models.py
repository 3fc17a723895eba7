"""Tests that docs/real_models.md and docs/real_completions.md are what the script writes from the recorded lines."""

import re

from docs.real_models import OF_COMPLETIONS, PAGE, PICTURE, ROOT, completions_page, groups, page, read


def test_pages_are_what_the_script_makes_of_the_results():
    lines = read()
    assert PAGE.read_text() == page(lines)
    assert OF_COMPLETIONS.read_text() == completions_page(lines)
    assert PICTURE.exists() == bool(groups(lines))


def test_the_readmes_accuracies_are_those_of_the_page():
    readme = " ".join((ROOT / "README.md").read_text().split())
    pairs = re.findall(r"from ([\d.]+) to ([\d.]+) % with an? (bf16|NVFP4) base", readme)
    assert len(pairs) == 2
    for before, after, base in pairs:
        row = rf"\| qwen2.5-coder-0.5b \| gsm8k_boxed \| {base.lower()} \| \d+ \| 116 \| {before}\b[^|]*\| {after}\b"
        assert re.search(row, PAGE.read_text()), (base, before, after)
