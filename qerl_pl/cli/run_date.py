"""Find the date that the chat template of a run writes into its prompts: that of the run's first start."""

from pathlib import Path
from pickle import UnpicklingError

from jsonargparse import Namespace

from datamodules.prompts import PromptDataModule
from qerl_pl.checkpoint import Damaged, read_checkpoint
from qerl_pl.common.clock import today
from qerl_pl.common.run_folder import LAST, PREVIOUS, date_in, plain_yaml
from qerl_pl.model.tokenizer import read_tokenizer, reads_clock


def run_date(config: Namespace, *, fits: bool) -> str | None:
    """Return the value of data.date for a command, in ISO form: the date in the given settings, else in the checkpoint,
    else in the run's config.yaml (if the run was killed before its first checkpoint), else today's. ``fit`` (``fits``)
    without a checkpoint begins a new run and takes today's. None if the chat template writes no date, or cannot be
    read, which a later check reports."""
    if config.data.date is not None:
        return str(config.data.date)
    try:
        if not reads_clock(read_tokenizer(config.data.tokenizer)):
            return None
    except Exception:  # later checks of the base's files report whatever is wrong with them
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
