"""Score a file of completions with a reward."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from qerl_pl.cli.checks import check_class_paths
from qerl_pl.cli.errors import in_short
from qerl_pl.cli.help_text import HelpFormatter
from qerl_pl.cli.yaml_files import with_values
from qerl_pl.common.files import replacing
from qerl_pl.common.json_lines import as_json, is_null, only_entry, read_json_lines, stored_text
from qerl_pl.common.phases import phase
from qerl_pl.common.program import called_as
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.base import Judge, Limited, WeightedReward, judge_rows
from qerl_pl.rewards.calling import takes_objects
from qerl_pl.tools.options import output_file

CHUNK = 1024  # number of rows that are in memory at a time; one completion may have 100 kB
NAMED = {
    name: json.dumps({"class_path": f"qerl_pl.rewards.math.{kind}", "init_args": settings})
    for name, kind, settings in (
        ("gsm8k", "NumericAnswer", {"marker": "any", "fallback": "last_number"}),
        ("math", "MathAnswer", {"marker": "any", "fallback": "last_math"}),
        ("dapo", "MathAnswer", {"marker": "line"}),
    )
}
"""Classes and settings of rewards, as JSON, by the short names that ``--reward`` takes for them."""
_EPILOG = """\
gsm8k and math accept unmarked answers: they read the tagged answer, else the last box, else the #### line, else a
sentence that states the answer, else the last number or formula. In training the same rewards give
unmarked answers 0 by default; to score that way: --reward math --reward.fallback none. --reward.marker answer accepts
only the <answer> tag.
"""

Row = dict[str, object]
_NO_TOKENS = "the reward needs tokens, which a file of completions does not have"


class _NoTokens(tuple[int, ...]):
    """Tokens of a prompt or completion that has only its text; a reward that reads them gets an error."""

    def _refuse(self, *_: object) -> Any:
        raise ValueError(_NO_TOKENS)

    __len__ = __iter__ = __getitem__ = _refuse


def main(argv: list[str]) -> int:
    """Score a file; returns the exit status."""
    parser = ArgumentParser(
        prog=called_as("score"),
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--reward",
        type=Callable[..., Any],
        required=True,
        help="gsm8k, math, dapo, or a path such as my_reward.closeness",
    )
    parser.add_argument(
        "--input",
        type=Path,
        required=True,
        help='JSON lines: {"completion": ..., "answer": ...}, and what the reward reads: the question ("question" or '
        '"prompt"), and the columns in prompt.row',
    )
    parser.add_argument("--output", type=output_file, required=True, help='the same rows with "score" and "reason"')
    try:
        parsed = parser.parse_args(with_values(argv, ["--reward"], lambda name: NAMED.get(name, name)))
        check_class_paths(parsed)
        arguments = parser.instantiate(parsed)
        term = WeightedReward("reward", arguments.reward, time_limit=None)
        counts, reasons = score_file(term, arguments.input, arguments.output)
    except ArgumentError as error:
        keys = [action.dest for action in parser._actions]
        parser.exit(2, f"error: {in_short(str(error), keys=keys, arguments=argv)}\n")
    rows, unscored = sum(counts.values()), counts[None]
    total = sum(score * count for score, count in counts.items() if score is not None)
    mean = f" with mean {total / (rows - unscored):.4f}" if rows > unscored else ""
    print(
        f"{rows} rows, {rows - unscored} scored{mean}, {unscored} unscored; mean {total / max(rows, 1):.4f} with "
        "unscored rows as 0"
    )
    for reason, count in reasons.most_common(5):
        print(f"  unscored {count}: {reason}")
    return 0


def score_file(term: WeightedReward, source: Path, target: Path) -> tuple[Counter[float | None], Counter[str]]:
    """Score every completion of the JSON Lines file ``source``, and write its rows with score and reason to ``target``;
    after an error, nothing is written. Returns two dicts: the number of rows by score, and, for rows without a score,
    the number of rows by reason. Raises ValueError if a row is malformed (the message names it), or the reward needs
    tokens."""
    if isinstance(term.reward, Limited):
        raise ValueError(_NO_TOKENS)
    by_objects = not isinstance(term.reward, Judge) and takes_objects(term.name, term.reward)
    tokens = _NoTokens() if by_objects else ()
    # read the whole file once, so that a malformed row is reported before any row is scored
    num_rows = sum(1 for _ in read_rows(source, lambda text: print(text, file=sys.stderr)))
    counts: Counter[float | None] = Counter()
    reasons: Counter[str] = Counter()
    with (
        replacing(target) as temporary,
        temporary.open("w") as file,
        phase("scoring", total=num_rows, unit="rows") as progress,
    ):
        rows = read_rows(source, lambda text: None)  # the blank lines were reported above
        while chunk := list(islice(rows, CHUNK)):
            prompts = [_prompt(row, tokens) for row in chunk]
            completions = [Completion(tokens, (), True, str(row["completion"])) for row in chunk]
            verdicts, _ = judge_rows(term, prompts, completions, finished=progress.update)
            for row, verdict in zip(chunk, verdicts, strict=True):
                file.write(as_json({**row, "score": verdict.score, "reason": verdict.reason}) + "\n")
                counts[verdict.score] += 1
                if verdict.score is None:
                    reasons[verdict.reason] += 1
    return counts, reasons


def read_rows(path: Path, say: Callable[[str], object]) -> Iterator[Row]:
    """Yield the rows of a JSON Lines file. Empty lines are skipped; if there are any, ``say`` is called with a sentence
    that has their number. Raises ValueError if there are no rows, or a line is no JSON object with a text "completion"
    and an "answer" that is a text or number."""
    for where, row in read_json_lines(path, say=say):
        for field in ("completion", "answer"):
            if field not in row:
                raise ValueError(
                    f"{where}: there is no {field!r}; the row has {', '.join(map(repr, row)) or 'no fields'}"
                )
        if not isinstance(row["completion"], str):
            raise ValueError(f"{where}: 'completion' is {repr(row['completion'])[:80]}; expected a text")
        _known_answer(row, where)
        yield row


def _prompt(row: Row, tokens: tuple[int, ...]) -> Prompt:
    """Make the prompt of a row from the text or the list of messages in its column ``question`` or, in a row without
    a question, ``prompt``; in a row without both, the prompt is empty."""
    asked: Any = row.get("prompt") if is_null(row.get("question")) else row["question"]
    is_chat = isinstance(asked, list) and all(
        isinstance(each, dict) and {"role", "content"} <= {*each} for each in asked
    )
    messages = asked if is_chat else [{"role": "user", "content": asked}] if isinstance(asked, str) else []
    text = "\n\n".join(str(message["content"]) for message in messages if message["role"] != "system")
    return Prompt(tokens, _known_answer(row), text=text, messages=tuple(messages), row=row, conversational=is_chat)


def _known_answer(row: Row, where: str = "the row") -> str:
    return stored_text(only_entry(row["answer"]), f"{where}: 'answer'")
