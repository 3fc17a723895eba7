"""Find the date that the chat template of a run writes into its prompts: the date of the run's first start."""

from pathlib import Path
from pickle import UnpicklingError

from jsonargparse import Namespace

from datamodules.prompts import PromptDataModule
from qerl_pl.checkpoint import Damaged, read_checkpoint
from qerl_pl.common.clock import today
from qerl_pl.common.run_folder import LAST, PREVIOUS, date_in, plain_yaml
from qerl_pl.model.tokenizer import read_tokenizer, reads_clock


def run_date(config: Namespace, *, fits: bool) -> str | None:
    """Return the date, in ISO form, that a command passes to the chat template; None if the template writes no date, or
    cannot be read (a later check reports that). It is the first of: ``data.date``; the date in the checkpoint that the
    command loads; that in the run's config.yaml (of a run killed before its first checkpoint); and today's. A ``fit``
    that loads no checkpoint begins a new run, and uses ``data.date`` or today's date."""
    if config.data.date is not None:
        return str(config.data.date)
    try:
        if not reads_clock(read_tokenizer(config.data.tokenizer)):
            return None
    except Exception:  # a later check reports what is wrong with the tokenizer's files
        return None
    path, run = config.ckpt_path, Path(config.run_dir)
    if path is not None:
        files = [run / "checkpoints" / LAST, run / "checkpoints" / PREVIOUS] if path == "last" else [Path(path)]
        if date := next(filter(None, map(_date_of_checkpoint, files)), None):
            return date
    if path is not None or not fits:
        return date_in(plain_yaml(run / "config.yaml")) or today()
    return today()


def _date_of_checkpoint(path: Path) -> str | None:
    try:
        return read_checkpoint(path, "cpu").get(PromptDataModule.__qualname__, {}).get("date")
    except (OSError, RuntimeError, EOFError, UnpicklingError, Damaged):
        return None  # loading the checkpoint reports a file that is missing or damaged
