"""Training sets of mathematics with checkable answers. Each is a function that YAML names like a class.

The paths are names on the hub; a .jsonl or .parquet file with the same columns does as well.
"""

from __future__ import annotations

from typing import Literal

from datamodules.table import Table


def big_math(
    levels: Literal["3-5", "4-5"] = "3-5",
    path: str = "open-r1/Big-Math-RL-Verified-Processed",
    solve_rate: tuple[float, float] | None = None,
    validation_share: float = 0.005,
) -> Table:
    """Big-Math (arXiv 2502.17387) by difficulty: QeRL trains 7B and 14B on levels 3-5, 32B on levels 4-5.

    Args:
        levels: the subset of the hub data set; a file is taken as it is.
        path: columns prompt, solution and, for solve_rate, llama8b_solve_rate.
        solve_rate: lowest and highest share of attempts that Llama-3.1-8B got right: a problem that is always or never
            solved teaches nothing.
        validation_share: share that is held out, by the question's hash.
    """
    return Table(
        path,
        validation_share=validation_share,
        question="prompt",
        answer="solution",
        subset={"3-5": "level_3_4_5", "4-5": "level_4_5"}[levels],
        between=None if solve_rate is None else {"llama8b_solve_rate": solve_rate},
    )


def dapo_math(
    language: Literal["en", "cn", "all"] = "en",
    path: str = "open-r1/DAPO-Math-17k-Processed",
    validation_share: float = 0.02,
) -> Table:
    """DAPO-Math-17k (arXiv 2503.14476) without its repetitions; answers are integers.

    Args:
        language: the subset of the hub data set; a file is taken as it is.
        path: columns prompt (the bare question) and solution (the bare answer).
        validation_share: share that is held out, by the question's hash.
    """
    return Table(path, validation_share=validation_share, question="prompt", answer="solution", subset=language)


def miromind(path: str = "miromind-ai/MiroMind-M1-RL-62K", validation_share: float = 0.01) -> Table:
    """MiroMind-M1-RL-62K (arXiv 2507.14683).

    Args:
        path: columns problem and clean_answer.
        validation_share: share that is held out, by the question's hash.
    """
    return Table(path, validation_share=validation_share, question="problem", answer="clean_answer")


def math(
    levels: list[int] | None = None,
    train_path: str = "DigitalLearningGmbH/MATH-lighteval",
    validation_path: str = "DigitalLearningGmbH/MATH-lighteval",
) -> Table:
    """MATH (arXiv 2103.03874), 12 500 competition problems; the answer is what the solution puts in a box.

    Args:
        levels: difficulties of the training problems, 1 to 5; None takes all.
        train_path: columns problem, level ("Level 5") and solution.
        validation_path: the same for the test split; all levels validate.
    """
    return Table(
        train_path,
        validation_path,
        question="problem",
        answer="solution",
        marker="boxed",
        only=None if levels is None else {"level": [f"Level {level}" for level in levels]},
    )
