"""How often the scorers agree with labels: docs/scorers.md.

    python -m tests.bench.scorers > docs/results/scorers.jsonl
    python -m tests.bench.bench_verifier --rows 10000 --hanging 50 --kills 10 >> docs/results/scorers.jsonl
    python -m tests.bench.scorers --write docs/scorers.md < docs/results/scorers.jsonl

One JSON line a set and scorer: its confusion table, and the cases of other opinion. ``tests/rewards`` has the sets.
The second command adds what hanging rows and killed workers cost.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl_pl.rewards.math import MathAnswer, NumericAnswer
from tests.bench.harness import emit

FOLDER = Path(__file__).parents[1] / "rewards"
SETS = ("cases", "held_out", "model_outputs")
FILLER = "We think about it, line by line.\n"
LABELS, SCORES = (1, 0, None), (1.0, 0.0, None)
Scorer = NumericAnswer | MathAnswer


def make_scorers(time_limit: float) -> dict[str, Scorer]:
    """As ``python -m qerl_pl score`` sets them up, with a time limit of our own."""
    return {
        "gsm8k": NumericAnswer(marker="any", fallback="last_number"),
        "math": MathAnswer(fallback="last_math", num_workers=2, time_limit=time_limit),
        "dapo": MathAnswer("line", num_workers=1, time_limit=time_limit),
    }


def read_cases(name: str) -> list[dict]:
    """The labelled rows of a set: kind, reward, completion, answer, label (1, 0, or null for unscored).

    ``pad`` characters of other text stand before the completion.
    """
    cases = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").open()]
    return [{**case, "completion": _padding(case.get("pad", 0)) + case["completion"]} for case in cases]


def confusion(scorer: Scorer, cases: Sequence[dict]) -> tuple[Counter[tuple], list[dict]]:
    """How often each (label, score) came up, and the cases where they differ, with the score and its reason."""
    verdicts = scorer.judge([case["completion"] for case in cases], [case["answer"] for case in cases])
    table = Counter((case["label"], verdict.score) for case, verdict in zip(cases, verdicts, strict=True))
    wrong = [
        {"completion": case["completion"], "answer": case["answer"], "label": case["label"], **verdict._asdict()}
        for case, verdict in zip(cases, verdicts, strict=True)
        if verdict.score != case["label"]
    ]
    return table, wrong


def main(argv: list[str] | None = None) -> int:
    """Measure, or write the document from what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write the document there from JSON lines on stdin")
    args = parser.parse_args(argv)
    if args.write:
        args.write.write_text(document([json.loads(line) for line in sys.stdin]))
        return 0
    version = importlib.metadata.version("math-verify")
    for name in SETS:
        cases = read_cases(name)
        for reward, scorer in make_scorers(time_limit=3.0).items():
            rows = [case for case in cases if case["reward"] == reward]
            table, wrong = confusion(scorer, rows)
            counts = [[table[label, score] for score in SCORES] for label in LABELS]
            emit(name, {"rows": len(rows)}, "-", reward=reward, counts=counts, unlike=wrong, math_verify=version)
    return 0


def document(lines_read: Sequence[dict[str, Any]]) -> str:
    """docs/scorers.md."""
    results = [line for line in lines_read if line["name"] in SETS]
    lines = [HEAD.format(**results[0])]
    for result in results:
        right = sum(counts[place] for place, counts in enumerate(result["counts"]))
        total = result["shape"]["rows"]
        for label, counts in zip(("right", "wrong", "unscored"), result["counts"], strict=True):
            first = [result["name"], result["reward"], f"{right / total:.1%}"] if label == "right" else ["", "", ""]
            lines.append(f"| {' | '.join([*first, label, *map(str, counts)])} |")
    lines.append("\nNot as labelled:\n\n| set | scorer | completion | known answer | label | score |")
    lines.append("| --- | --- | --- | --- | ---: | ---: |")
    for result in results:
        for row in result["unlike"]:
            texts = [f"`{row[key]}`".replace("|", "\\|").replace("\n", " ") for key in ("completion", "answer")]
            lines.append(
                f"| {result['name']} | {result['reward']} | {' | '.join(texts)} | {row['label']} | {row['score']:g} |"
            )
    lines += [VERIFIER.format(**line, **line["shape"]) for line in lines_read if line["name"] == "verifier"]
    return "\n".join([*lines, ""])


def _padding(size: int) -> str:
    return FILLER * (size // len(FILLER))


HEAD = """# Do the scorers agree with people?

Written by `tests/bench/scorers.py` at commit {commit}, math-verify {math_verify}; change the script, not this file.

A label says what a careful reader makes of a completion, given the known answer. Three sets, in `tests/rewards`:

- `cases`: what the scorers were developed on. Answers of public benchmarks in other forms and with wrong values, and
  hand-written ones, rows that hang a parser and 100 kB of text among them.
- `held_out`: how models write, each case written and labelled before the scorers had seen it. General gaps that it
  showed were closed; odd single cases were left, so it is no longer blind.
- `model_outputs`: how models of public leaderboards write, whole completions by hand in their formats. Written,
  labelled and followed up as `held_out` was.

Scorers are set up as `python -m qerl_pl score` does it. Rows are labels, columns scores; the share is of rows scored
as labelled.

| set | scorer | agreement | label | 1 | 0 | unscored |
| --- | --- | ---: | --- | ---: | ---: | ---: |"""

VERIFIER = """
## Rows that hang

{rows} rows, of which {hanging} hang, with {workers} workers on {cores} cores and {time_limit_s:g} s of processor time a
row; {killed} workers were killed with SIGKILL on the way. In {seconds:.0f} s every row got its verdict, those that hang
the score 0, {unscored} none; {processes_started} processes were started, none was left. Measured by
`python -m tests.bench.bench_verifier` at commit {commit}."""


if __name__ == "__main__":
    sys.exit(main())
