"""Training sets of mathematical problems with checkable answers. Each is a function that returns a source of problems,
and that YAML can name as ``data.source``.

The argument ``path`` of these functions is the name of a data set on the Hugging Face hub, or a .jsonl or .parquet file
with the columns of that data set. ``bad_rows`` says what happens to a row that cannot be used: "refuse" ends the run,
"drop" leaves the row out.
"""

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
    """Create a source of Big-Math (arXiv 2502.17387), restricted by difficulty. QeRL's authors trained 7B and 14B
    models on levels 3 to 5, and 32B models on levels 4 and 5.

    Args:
        levels: lowest and highest difficulty of the problems, which selects a subset of the hub data set. If ``path``
            is a file, the argument is not used.
        path: data set with the columns prompt, solution and, for solve_rate, llama8b_solve_rate.
        solve_rate: only problems are used that Llama-3.1-8B solved in a share of its attempts between these two
            numbers, because problems that are always or never solved teach nothing; null uses all problems.
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
    """Create a source of DAPO-Math-17k (arXiv 2503.14476), in the version without duplicates; the answers are integers.

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
    """Create a source of MiroMind-M1-RL-62K (arXiv 2507.14683); ``path`` has the columns problem and clean_answer."""
    return Table(path, validation_share=validation_share, question="problem", answer="clean_answer", bad_rows=bad_rows)


def math(
    levels: list[int] | None = None,
    train_path: str = "DigitalLearningGmbH/MATH-lighteval",
    validation_path: str = "DigitalLearningGmbH/MATH-lighteval",
    bad_rows: OnBadRows = "refuse",
) -> Table:
    """Create a source of MATH (arXiv 2103.03874), 12 500 competition problems; the answer is in the last ``\\boxed{}``
    of the solution.

    Args:
        levels: difficulties, from 1 to 5, of the training problems that are used; null uses all.
        train_path: data set with the columns problem, level ("Level 5") and solution.
        validation_path: data set with the test split, in the same columns; all its levels are used.
    """
    only: dict[str, list[Value]] | None = None if levels is None else {"level": [f"Level {level}" for level in levels]}
    return Table(
        train_path, validation_path, question="problem", answer="solution", marker="boxed", only=only, bad_rows=bad_rows
    )
