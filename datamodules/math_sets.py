"""Training sets of mathematical problems with checkable answers; each is a function that YAML can name as a data
source.

The argument ``path`` is the name of a data set on the hub, or a .jsonl or .parquet file with the same columns;
``bad_rows`` is as in ``datamodules.table.Table``.
"""

from __future__ import annotations

from typing import Literal

from datamodules.filters import Value
from datamodules.rows import OnBadRows
from datamodules.table import Table


def big_math(
    levels: Literal["3-5", "4-5"] = "3-5",
    path: str = "open-r1/Big-Math-RL-Verified-Processed",
    solve_rate: tuple[float, float] | None = None,
    validation_share: float = 0.005,
    bad_rows: OnBadRows = "refuse",
) -> Table:
    """Create Big-Math (arXiv 2502.17387) by difficulty: QeRL trains 7B and 14B on levels 3-5, 32B on levels 4-5.

    Args:
        levels: subset of the hub data set; not used for a file.
        path: data set with the columns prompt, solution and, for solve_rate, llama8b_solve_rate.
        solve_rate: lowest and highest share of attempts in which Llama-3.1-8B solved the problem, because problems
            that are always or never solved teach nothing.
    """
    return Table(
        path,
        validation_share=validation_share,
        question="prompt",
        answer="solution",
        subset={"3-5": "level_3_4_5", "4-5": "level_4_5"}[levels],
        between=None if solve_rate is None else {"llama8b_solve_rate": solve_rate},
        bad_rows=bad_rows,
    )


def dapo_math(
    language: Literal["en", "cn", "all"] = "en",
    path: str = "open-r1/DAPO-Math-17k-Processed",
    validation_share: float = 0.02,
    bad_rows: OnBadRows = "refuse",
) -> Table:
    """Create DAPO-Math-17k (arXiv 2503.14476) without duplicates; the answers are integers.

    Args:
        language: subset of the hub data set; not used for a file.
        path: data set with the columns prompt (only the question) and solution (only the answer).
    """
    return Table(
        path,
        validation_share=validation_share,
        question="prompt",
        answer="solution",
        subset=language,
        bad_rows=bad_rows,
    )


def miromind(
    path: str = "miromind-ai/MiroMind-M1-RL-62K", validation_share: float = 0.01, bad_rows: OnBadRows = "refuse"
) -> Table:
    """Create MiroMind-M1-RL-62K (arXiv 2507.14683); ``path`` has the columns problem and clean_answer."""
    return Table(path, validation_share=validation_share, question="problem", answer="clean_answer", bad_rows=bad_rows)


def math(
    levels: list[int] | None = None,
    train_path: str = "DigitalLearningGmbH/MATH-lighteval",
    validation_path: str = "DigitalLearningGmbH/MATH-lighteval",
    bad_rows: OnBadRows = "refuse",
) -> Table:
    """Create MATH (arXiv 2103.03874), 12 500 competition problems; the answer is the box at the end of the solution.

    Args:
        levels: difficulties of the training problems, 1 to 5; None takes all.
        train_path: data set with the columns problem, level ("Level 5") and solution.
        validation_path: the same for the test split, of which all levels are used.
    """
    only: dict[str, list[Value]] | None = None if levels is None else {"level": [f"Level {level}" for level in levels]}
    return Table(
        train_path, validation_path, question="problem", answer="solution", marker="boxed", only=only, bad_rows=bad_rows
    )
