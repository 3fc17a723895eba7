"""Log texts and histograms to the Lightning loggers that support them, each through its own interface.

Lightning's ``self.log`` reaches every logger, but takes only numbers. TensorBoard, Weights & Biases and MLflow support
texts, and the first two support histograms; CSVLogger supports neither. Files in ``RUN/completions`` have the
completions whatever the loggers are. A logger's package is imported only if the run uses it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import Tensor

COLUMNS = ("reward", "scores", "question", "completion", "answer", "tokens", "finished")
BINS = 60  # number of bins of a histogram
# bytes; a record of an event file has the data's length, a checksum of the length, the data, and a checksum of the data
LENGTH, CHECKSUM = 8, 4


def log_at(loggers: Iterable[Logger], values: Mapping[str, float], *, step: int) -> None:
    """Log scalars at one step. Lightning's ``log`` would repeat their values at later steps, until they are logged
    again."""
    for logger in loggers:
        logger.log_metrics(dict(values), step=step)


def log_completions(loggers: Iterable[Logger], tag: str, rows: Sequence[Mapping[str, Any]], *, step: int) -> None:
    """Log sampled completions with their rewards: as a text in TensorBoard, a table in Weights & Biases, and a file
    (artifact) of the run in MLflow.

    Args:
        loggers: the trainer's loggers.
        tag: name of the text or table, e.g. completions/train.
        rows: one record per completion (prompt, completion, rewards), as in ``ScoredBatch.rows``.
        step: position on the x axis.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(tag, as_markdown(rows), step)
        elif isinstance(logger, WandbLogger):
            logger.log_table(tag, columns=list(COLUMNS), data=[_cells(row) for row in rows], step=step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_text(logger.run_id, as_markdown(rows), f"{tag}/{step:06d}.md")


def log_histogram(loggers: Iterable[Logger], tag: str, values: Tensor, *, step: int) -> None:
    """Log a histogram of [N] finite values; log nothing if N is 0.

    Args:
        loggers: the trainer's loggers.
        tag: name of the histogram.
        values: [N], on any device.
        step: position on the x axis.
    """
    if not len(values):
        return
    found = values.double().cpu().numpy()
    low, high = float(found.min()), float(found.max())
    if high - low <= 1e-6 * max(1.0, abs(low), abs(high)):  # bins of values that are nearly equal would have no width
        low, high = low - 0.5, high + 0.5
    counts, edges = np.histogram(found, bins=BINS, range=(low, high))
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(tag, found, step, bins=edges)
        elif isinstance(logger, WandbLogger):
            logger.log_metrics({tag: import_module("wandb").Histogram(np_histogram=(counts, edges))}, step)


def decades(values: Tensor, *, smallest: float) -> Tensor:
    """Return log10 of the magnitudes of values of any shape [...], for a histogram on a logarithmic axis.

    TensorBoard and Weights & Biases draw histograms on a linear axis, on which values of very different orders of
    magnitude would fall into one bar at 0.

    Args:
        values: values of either sign; nan and infinity remain nan and infinity.
        smallest: positive magnitude to which smaller magnitudes are raised.
    """
    return values.double().abs().clamp(min=smallest).log10()


def as_markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format completions as Markdown in which the text of models and data sets is shown verbatim."""
    return "\n\n---\n\n".join(_one(row) for row in rows)


def scores_of(row: Mapping[str, Any]) -> str:
    """Format the rewards of one completion, with the reasons that reward functions gave, e.g. ``accuracy 0 (no number),
    format 1``."""
    reasons = row.get("reasons", {})
    found = []
    for name, score in row.get("rewards", {}).items():
        reason = f" ({reasons[name]})" if reasons.get(name) else ""
        found.append(f"{name} {'not scored' if score is None else f'{score:.3g}'}{reason}")
    return ", ".join(found)


def question_of(row: Mapping[str, Any]) -> str:
    """Return the question of a completion's record. If the record has no question, return its prompt, to which the chat
    template was applied."""
    return str(row.get("question") or row["prompt"])


def _one(row: Mapping[str, Any]) -> str:
    cut = "" if row.get("finished", True) else ", cut off"
    head = f"reward {row['reward']}: {scores_of(row)}; answer {row['answer']}; {row['num_tokens']} tokens{cut}"
    return "\n\n".join((_code(head), "question", _code(question_of(row)), "completion", _code(row["completion"])))


def _code(text: str) -> str:
    """Format a text as a Markdown code block, which shows it verbatim."""
    return "\n".join("    " + line for line in text.splitlines()) or "    "


def _cells(row: Mapping[str, Any]) -> list[Any]:
    finished = row.get("finished", True)
    shown = (scores_of(row), question_of(row), row["completion"], str(row["answer"]))
    return [row["reward"], *shown, row["num_tokens"], finished]


def remove_empty_event_files(loggers: Iterable[Logger]) -> None:
    """Delete the event files that this process has opened and that hold only one record, the version of TensorBoard's
    format.

    Lightning opens an event file before a run is set up. Call this on one rank, after the loggers are closed.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            for path in Path(logger.log_dir).glob(f"events.out.tfevents.*.{os.getpid()}.*"):
                if _is_empty(path):
                    path.unlink()


def _is_empty(path: Path) -> bool:
    """Return whether an event file has no record after the first one, which is the version of the format."""
    with path.open("rb") as file:
        first = int.from_bytes(file.read(LENGTH), "little")
    return path.stat().st_size <= LENGTH + CHECKSUM + first + CHECKSUM
