"""Log completions to those Lightning loggers that accept texts; Lightning's own ``self.log`` accepts only numbers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

COLUMNS = ("reward", "scores", "question", "completion", "answer", "tokens", "finished")


def log_at(loggers: Iterable[Logger], values: Mapping[str, float], *, step: int) -> None:
    """Log scalars at one step only; Lightning's ``self.log`` would repeat them at every step until they change."""
    for logger in loggers:
        logger.log_metrics(dict(values), step=step)


def log_completions(loggers: Iterable[Logger], tag: str, rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
    """Log records of completions: a text in TensorBoard, a table in Weights & Biases, and a file (artifact) of the run
    in MLflow."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(tag, as_markdown(rows), step)
        elif isinstance(logger, WandbLogger):
            logger.log_table(tag, columns=list(COLUMNS), data=[_cells(row) for row in rows], step=step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_text(logger.run_id, as_markdown(rows), f"{tag}/{step:06d}.md")


def as_markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format completions as Markdown in which the text of models and data sets is shown verbatim."""
    return "\n\n---\n\n".join(_as_markdown(row) for row in rows)


def scores_of(row: Mapping[str, Any]) -> str:
    """Format the rewards of one completion, with their reasons, e.g. ``accuracy 0 (no number), format 1``."""
    reasons = row.get("reasons", {})
    return ", ".join(
        f"{name} {'not scored' if score is None else f'{score:.3g}'}"
        + (f" ({reasons[name]})" if reasons.get(name) else "")
        for name, score in row.get("rewards", {}).items()
    )


def question_of(row: Mapping[str, Any]) -> str:
    """Return the question in a completion's record or, if it has none, its prompt as the chat template wrote it."""
    return str(row.get("question") or row["prompt"])


def _as_markdown(row: Mapping[str, Any]) -> str:
    cut = "" if row.get("finished", True) else ", cut off"
    head = f"reward {row['reward']}: {scores_of(row)}; answer {row['answer']}; {row['num_tokens']} tokens{cut}"
    return "\n\n".join((_code(head), "question", _code(question_of(row)), "completion", _code(row["completion"])))


def _code(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines()) or "    "


def _cells(row: Mapping[str, Any]) -> list[Any]:
    texts = (scores_of(row), question_of(row), row["completion"], str(row["answer"]))
    return [row["reward"], *texts, row["num_tokens"], row.get("finished", True)]
