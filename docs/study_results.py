"""Write what the study of a toy policy showed into docs/study.md, and the README's sentences about the studies:
python docs/study_results.py

The numbers are computed from docs/results/noise-words-0/readouts.csv, which has the readouts of all of its runs.
"""

from __future__ import annotations

import csv
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from qerl_pl.study.statistics import ALPHA, Comparison, compare, holm, smallest_size  # noqa: E402  (the script is run by its path)  # noqa: E402

READOUTS = ROOT / "docs" / "results" / "noise-words-0" / "readouts.csv"
PAGE, README = ROOT / "docs" / "study.md", ROOT / "README.md"
PAIRS = [
    ("nvfp4", "bf16"),
    ("bf16+aqn", "bf16"),
    ("nvfp4+aqn", "nvfp4"),
    ("bf16+temperature", "bf16"),
    ("bf16+aqn", "bf16+temperature"),
]
DECIDING, ENTROPY = "area under accuracy", "mean sampling entropy"


def compared(readout: str, one: str, other: str) -> Comparison:
    """Compare two arms in a readout, paired by seed."""
    with READOUTS.open(newline="") as file:
        values = {(row["arm"], row["seed"]): float(row[readout]) for row in csv.DictReader(file)}
    seeds = sorted({seed for arm, seed in values if arm == one})
    return compare([values[one, seed] - values[other, seed] for seed in seeds])


def toy() -> str:
    """Make the section about the toy policy."""
    found = [compared(DECIDING, *pair) for pair in PAIRS]
    adjusted = holm([each.p for each in found])
    accepted = sum(p <= ALPHA for p in adjusted)
    size = max(each.spread for each in found) * smallest_size(found[0].difference.num, len(found))
    rows = [
        f"| {one} - {other} | {_shown(each)} | {each.p:.2g} | {p:.2g} |"
        for (one, other), each, p in zip(PAIRS, found, adjusted, strict=True)
    ]
    text = f"""
    The same question was asked first of a policy of 10 million parameters on generated word problems, with
    {found[0].difference.num} seeds per arm, registered before its runs. {accepted or "None"} of its {len(PAIRS)}
    hypotheses {"is" if accepted < 2 else "are"} accepted; a true difference of {size:.3f} in the mean accuracy over
    training would have been seen with a probability of 80 %, which is more than the paper's gain on a 3B model. It
    could not test the mechanism: AQN with the paper's sigmas changed the mean sampling entropy by
    {_shown(compared(ENTROPY, "bf16+aqn", "bf16"))} nats per token and NVFP4 by
    {_shown(compared(ENTROPY, "nvfp4", "bf16"))}, it had no positive control, and its arms with AQN corrected their
    gradients for the noise, which the release does not. Nothing follows from it for pretrained models, and its programs
    are no longer part of the project.
    """
    table = ["| arms | difference in mean accuracy | p | p (Holm) |", "|---|---:|---:|---:|", *rows]
    return "\n".join([textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False), "", *table])


def claim() -> str:
    """Make the README's sentences about the studies."""
    text = (
        "**Does quantisation noise help?** Not known yet. The paper's runs are single seeds with unequal learning "
        "rates, and our first study, of a policy of 10 million parameters, showed no gain and could not have seen the "
        "mechanism. The recipes on this page therefore train without noise; the arms with `aqn` in their names, and "
        "the quickstart, add it. A study of a pretrained model with 10 seeds per arm is registered in "
        "[docs/study.md](docs/study.md)."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _shown(each: Comparison) -> str:
    value, low, high, _ = each.difference
    return f"{value:+.2g} [{low:+.2g}, {high:+.2g}]"


def filled(text: str, name: str, section: str) -> str:
    """Replace what stands between the marks of a section."""
    place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    return place.sub(lambda found: f"{found[1]}{section}\n{found[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), "toy", toy()))
    README.write_text(filled(README.read_text(), "study", claim()))
