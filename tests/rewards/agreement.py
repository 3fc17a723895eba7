"""Measure how often the rewards that compare answers (scorers) agree with labels, for docs/scorers.md.

    python -m tests.rewards.agreement > docs/results/scorers.jsonl
    python -m tests.rewards.hanging --rows 10000 --hanging 50 --kills 10 >> docs/results/scorers.jsonl
    python -m tests.rewards.agreement --write

Prints one JSON line per set of labelled completions and scorer, with the counts of each label and score and the cases
whose score is not the label. The second command measures the cost of comparisons that do not end and of killed worker
processes, and the third one writes the page.
"""

import argparse
import importlib.metadata
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from qerl_pl.rewards.math import MathAnswer, NumericAnswer
from tests.bench.harness import emit
from tests.bench.report import RESULTS, ROOT, Line, table

FOLDER = Path(__file__).parent
TEXT, PAGE = FOLDER / "agreement.md", ROOT / "docs" / "scorers.md"
SETS = ("cases", "held_out", "model_outputs", "classes")
FILLER = "We think about it, line by line.\n"
VERIFIED = ("workers", "cores", "time_limit_s", "killed", "took_s", "unscored", "processes_started")
LABELS, SCORES = (1, 0, None), (1.0, 0.0, None)
Scorer = NumericAnswer | MathAnswer


def make_scorers(time_limit: float) -> dict[str, Scorer]:
    """Make the scorers with the settings of ``python -m qerl_pl score``, but with another limit of seconds per
    comparison."""
    return {
        "gsm8k": NumericAnswer(marker="any", fallback="last_number"),
        "math": MathAnswer(fallback="last_math", num_workers=2, time_limit=time_limit),
        "dapo": MathAnswer("line", num_workers=1, time_limit=time_limit),
    }


def read_cases(name: str) -> list[dict]:
    """Read the labelled completions of a set. Each row has a kind, the name of the reward that should score it,
    completion, answer, and label (1: right, 0: wrong, null: no score is possible).

    A row may also have ``pad``: so many characters of other text are put before its completion.
    """
    cases = [json.loads(line) for line in (FOLDER / f"{name}.jsonl").open()]
    return [{**case, "completion": _padding(case.get("pad", 0)) + case["completion"]} for case in cases]


def confusion(scorer: Scorer, cases: Sequence[dict]) -> tuple[Counter[tuple], list[dict]]:
    """Compare a scorer with the labels. Returns the number of rows for each pair (label, score), and the rows in which
    both differ, with the score and the scorer's reason."""
    verdicts = scorer.judge([case["completion"] for case in cases], [case["answer"] for case in cases])
    counts = Counter((case["label"], verdict.score) for case, verdict in zip(cases, verdicts, strict=True))
    wrong = [
        {"completion": case["completion"], "answer": case["answer"], "label": case["label"], **verdict._asdict()}
        for case, verdict in zip(cases, verdicts, strict=True)
        if verdict.score != case["label"]
    ]
    return counts, wrong


def document(lines: Sequence[Line]) -> str:
    """Make docs/scorers.md."""
    *results, verifier = lines
    counted, unlike = [], []
    for result in results:
        right = sum(counts[place] for place, counts in enumerate(result["counts"]))
        first = [result["name"], result["reward"], f"{right / result['shape']['rows']:.1%}"]
        for label, counts in zip(("right", "wrong", "unscored"), result["counts"], strict=True):
            counted.append([*first, label, *counts])
            first = ["", "", ""]
        for row in result["unlike"]:
            texts = [f"`{row[key]}`".replace("|", "\\|").replace("\n", " ") for key in ("completion", "answer")]
            unlike.append([result["name"], result["reward"], *texts, row["label"], f"{row['score']:g}"])
    return TEXT.read_text().format(
        **{name: results[0][name] for name in ("commit", "math_verify")},
        **{name: verifier[name] for name in VERIFIED},
        agreement=table(["set", "scorer", "agreement", "label", "1", "0", "unscored"], counted),
        unlike=table(["set", "scorer", "completion", "known answer", "label", "score"], unlike),
        hanging=verifier["shape"]["hanging"],
        all_rows=verifier["shape"]["rows"],
        verifier_commit=verifier["commit"],
    )


def main(argv: list[str] | None = None) -> None:
    """Print the lines, or with ``--write`` make the page from the recorded lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/scorers.md from docs/results/scorers.jsonl")
    if parser.parse_args(argv).write:
        lines = (RESULTS / "scorers.jsonl").read_text().splitlines()
        PAGE.write_text(document([json.loads(line) for line in lines]))
        return
    version = importlib.metadata.version("math-verify")
    for name in SETS:
        cases = read_cases(name)
        for reward, scorer in make_scorers(time_limit=1.0).items():
            rows = [case for case in cases if case["reward"] == reward]
            if not rows:
                continue
            found, wrong = confusion(scorer, rows)
            counts = [[found[label, score] for score in SCORES] for label in LABELS]
            emit(name, {"rows": len(rows)}, "-", reward=reward, counts=counts, unlike=wrong, math_verify=version)


def _padding(size: int) -> str:
    return FILLER * (size // len(FILLER))


if __name__ == "__main__":
    main()
