"""Write generated word problems as JSON Lines, for use with other software."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from qerl_pl.common.files import write_whole
from qerl_pl.common.program import CommandParser, called_as
from qerl_pl.tasks.quantities import Split
from qerl_pl.tasks.word_problems import (
    MAX_OPERATIONS,
    MIN_OPERATIONS,
    VERSION,
    WordProblem,
    check_operations,
    draw_sets,
)
from qerl_pl.tools.paths import at_least


def main(argv: Sequence[str]) -> int:
    """Parse the command line and write the problem sets (training, validation, reach); returns the exit status."""
    parser = CommandParser(prog=called_as("problems"), description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for train, validation and reach .jsonl")
    parser.add_argument("--seed", type=at_least(0), default=0, help="which problems are drawn (default: 0)")
    for split, num in (("train", 8192), ("validation", 512), ("reach", 512)):
        parser.add_argument(f"--{split}", type=at_least(0), default=num, help=f"problems of this set (default: {num})")
    for names, which, default in (
        (["--operations"], "", (MIN_OPERATIONS, MAX_OPERATIONS)),
        (["--reach-operations", "--reach_operations"], " of the reach set", (12, MAX_OPERATIONS)),
    ):
        parser.add_argument(
            *names,
            type=int,
            nargs=2,
            default=default,
            metavar=("FEWEST", "MOST"),
            help=f"of a problem{which} (default: {default[0]} {default[1]})",
        )
    options = parser.parse_args(argv)
    sizes: dict[Split, int] = {name: getattr(options, name) for name in ("train", "validation", "reach")}
    common, reach = tuple(options.operations), tuple(options.reach_operations)
    try:
        if min(sizes.values()) < 1:
            raise ValueError(f"set sizes are {list(sizes.values())}; expected at least 1 problem each")
        for each in (common, reach):
            check_operations(each)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    sets = draw_sets(seed=options.seed, sizes=sizes, operations={"train": common, "validation": common, "reach": reach})
    for split, problems in sets.items():
        path = options.output / f"{split}.jsonl"
        write_whole(path, "".join(json.dumps(record(problem)) + "\n" for problem in problems))
        print(f"{path}: {len(problems)} problems of {len({problem.structure for problem in problems})} structures")
    return 0


def record(problem: WordProblem) -> dict[str, object]:
    """Convert a word problem to a row with the columns that ``datamodules.table.Table`` reads, and the problem's
    structure."""
    return {
        "id": problem.identity,
        "question": problem.question,
        "answer": str(problem.answer),
        "solution": problem.solution,
        "operations": problem.num_operations,
        "structure": problem.structure,
        "version": VERSION,
    }
