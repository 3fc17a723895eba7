"""The training and evaluation commands: a LightningCLI that writes all files of a run to one folder. If several
settings must have the same value, the user sets one of them, and the command line copies the value to the others."""

import inspect
import os
import pkgutil
import signal
import socket
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from callbacks.graceful_stop import GracefulStop
from callbacks.process import CloseEngine, RunLock, StopTogether
from callbacks.rng_state import RNGState
from callbacks.signal_report import SignalReport
from datamodules.loader import check_batch_size
from datamodules.prompts import PromptDataModule
from qerl_pl.base.folder import base_folder, check_base
from qerl_pl.cli.checks import (
    check_checkpoint,
    check_class_paths,
    check_groups,
    check_methods,
    check_monitors,
    check_run_is_new,
    usable_callbacks,
)
from qerl_pl.cli.console import quieten
from qerl_pl.cli.errors import of_error
from qerl_pl.cli.evaluation_folder import evaluation_folder
from qerl_pl.cli.help_text import DESCRIPTIONS, FORM
from qerl_pl.cli.other_folders import other_modules
from qerl_pl.cli.parser import Parser, accept_words, spelt_out
from qerl_pl.cli.run_date import run_date
from qerl_pl.cli.smoke import HELP, WholeRun, shorten
from qerl_pl.cli.yaml_files import BASE_CONFIG, FOLLOWING, check_yaml_files, config_files, plain_settings, with_paths
from qerl_pl.common.checks import EXIT_STATUS, CheckFailed, require_at_least
from qerl_pl.common.files import in_words, traceback_file, write_whole
from qerl_pl.common.packages import not_installed
from qerl_pl.common.phases import phase
from qerl_pl.common.program import called_as, quoted_from_environment
from qerl_pl.common.run_folder import check_places, keep_metrics, run_folder, run_named_after
from qerl_pl.evaluation.evaluation import OF_ROWS
from qerl_pl.module import QeRLModule
from qerl_pl.quant.families import check_length
from qerl_pl.results.curves import read_scalars
from qerl_pl.settings.changes import keep_old_config
from qerl_pl.settings.trainer import check_processes, check_trainer

SUBCOMMANDS = tuple(DESCRIPTIONS)
KEEPS = "callbacks.last_checkpoint.LastCheckpoint"
RUN_DIR = "RUN_DIR"
"""First part of a logger's ``save_dir`` that is replaced by the folder of the run or evaluation."""
IN_EVERY_RUN = (RunLock, RNGState, StopTogether, SignalReport, CloseEngine)
ALWAYS = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in IN_EVERY_RUN)


class SaveAcceptedConfig(SaveConfigCallback):
    """Callback that writes config.yaml to the run's folder, atomically, when training begins. A start that fails before
    that leaves the old file unchanged. Checkpoints also contain the text of config.yaml. A resumed run compares its
    settings with this text, because the file may have been edited or removed, or may belong to another run."""

    _trained_with: str | None = None  # text of config.yaml from the checkpoint; None in a new run

    def state_dict(self) -> dict[str, Any]:
        return {"config": self._text}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._trained_with = state_dict["config"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" and (path := self._path(trainer)):
            write_whole(path, self._text)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if path := self._path(trainer):
            if trainer.global_step and self._trained_with is None and not path.exists():
                rank_zero_warn(
                    f"neither {path} nor the checkpoint has the settings of the {trainer.global_step} optimizer steps "
                    "before this start, so it is not known what changes"
                )
            changes, kept = keep_old_config(path, self._text, before=self._trained_with)
            if changes:
                listed = "".join(f"\n  {change}" for change in changes)
                rank_zero_warn(f"this start changes settings of the run (the old ones are in {kept}):{listed}")
            for logger in trainer.loggers:
                if not isinstance(logger, TensorBoardLogger | CSVLogger):  # their folder has config.yaml
                    logger.log_hyperparams(yaml.safe_load(self._text))
            write_whole(path, self._text)

    def _path(self, trainer: Trainer) -> Path | None:
        """Return the path of config.yaml on rank 0, None on the others."""
        return Path(trainer.default_root_dir, self.config_filename) if trainer.is_global_zero else None

    @cached_property
    def _text(self) -> str:
        return self.parser.dump(self.config, skip_none=False)


class QeRLCLI(LightningCLI):
    """LightningCLI that writes all files of a run to one folder, and sets settings that follow from others. With
    ``run_now=False``, it builds module, data and trainer without running the subcommand."""

    def __init__(self, *args: Any, run_now: bool, **named: Any) -> None:
        self._run_now = run_now
        with ExitStack() as self._starting:
            self._starting.enter_context(phase("reading the settings, and what they name"))
            super().__init__(*args, **named)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommand with which the command line begins; all subcommands if it begins with none."""
        every = LightningCLI.subcommands()  # building the parsers of the other subcommands takes 0.4 s
        return {name: every[name] for name in sys.argv[1:2] if name in every} or every

    def _run_subcommand(self, subcommand: str) -> None:
        self._starting.close()
        if not self._run_now:
            return
        self.model.built = self._built
        try:
            super()._run_subcommand(subcommand)
        except BaseException as error:
            self._remove_empty_curves()
            # After Ctrl-C, Lightning raises SystemExit(1), but the program's exit status has to be 130.
            if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise

    def _remove_empty_curves(self) -> None:
        """Remove the event files of this process that hold no value, which Lightning creates before settings and data
        are checked: a start that ends with an error would leave a run without curves in TensorBoard."""
        of_process = f"events.out.tfevents.*.{socket.gethostname()}.{os.getpid()}.*"
        folders = [Path(logger.log_dir) for logger in self.trainer.loggers if isinstance(logger, TensorBoardLogger)]
        for folder in folders:
            for path in folder.glob(of_process):
                if read_scalars(path) == ([], 0):
                    path.unlink()

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        text = "folder of the run (default: runs/ and the names of the -c files); each evaluation has a folder in it"
        parser.add_argument("--run_dir", type=run_folder, default="runs/default", help=text)
        parser.add_argument("--smoke", action="store_true", help=HELP)
        for name, sources in FOLLOWING.items():
            parser.link_arguments(sources, name, compute_fn=base_folder if name == "data.tokenizer" else None)
        parser.set_defaults(plain_settings("trainer"))  # base.yaml sets them in any case; so --help shows them

    def before_instantiate_classes(self) -> None:
        """Raise ValueError for settings with which the command cannot work, and choose the folder that loggers write
        to: for ``fit`` the run's, for an evaluation RUN_DIR/COMMAND/DATASET-CHECKPOINT (without -CHECKPOINT for the
        base model), or a numbered one next to it if that holds a different evaluation."""
        command = str(self.subcommand)
        config = self.config[command]
        if config.get("weights_only") is False:
            raise ValueError("weights_only is false; checkpoints are always read without pickled objects: leave it out")
        check_class_paths(config)
        check_methods(config)
        for sentence in other_modules(sys.argv[1:]):
            rank_zero_warn(sentence)
        loggers = config.trainer.logger if isinstance(config.trainer.logger, list) else [config.trainer.logger]
        if not config.trainer.logger:
            raise ValueError("trainer.logger is off; curves and files of a run are written by its loggers: leave it on")
        if config.trainer.logger is True:
            raise ValueError("trainer.logger is true; expected a logger by its class_path, or leave it out")
        for logger in loggers:
            every = logger.get("init_args.flush_logs_every_n_steps")
            require_at_least(1, section=f"trainer.logger: {logger.class_path}: ", flush_logs_every_n_steps=every)
        check_trainer(config.trainer, command=command)
        config.trainer.callbacks = usable_callbacks(config.trainer.callbacks, always=ALWAYS)
        rewards = [str(reward.get("name")) for reward in config.model.rewards or ()]
        check_monitors(config.trainer.callbacks, [*OF_ROWS, *rewards])
        if config.ckpt_path:
            config.ckpt_path = os.path.expanduser(config.ckpt_path)
        self._whole: WholeRun | None = None
        self._built: str | None = None  # engine and rewards of an evaluation as text
        if config.pop("smoke"):
            if command != "fit":
                raise ValueError(
                    f"--smoke works with fit, not with {command}; to evaluate few problems: --data.val_limit 4"
                )
            check_places(Path(config.run_dir))
            check_checkpoint(config.ckpt_path, words=("last",))
            self._whole = shorten(config)
        check_places(Path(config.run_dir), trains=command == "fit")
        check_groups(self._parser(command).groups or (), config)
        if start := getattr(config.model.lora, "start", None):
            config.model.lora.start = os.path.expanduser(start)
        if command == "fit":
            if not any(str(callback.class_path) == KEEPS for callback in config.trainer.callbacks):
                rank_zero_warn(f"trainer.callbacks has no {KEEPS}, so this run cannot be resumed; append by callbacks+")
            check_checkpoint(config.ckpt_path, words=("last",))
            if self._run_now:
                check_run_is_new(config.run_dir, config.ckpt_path)
            config.data.date = run_date(config, fits=True)
            self._log_to(config.run_dir, loggers)
            return
        if config.ckpt_path in ("last", "best"):
            config.ckpt_path = str(Path(config.run_dir, "checkpoints", f"{config.ckpt_path}.ckpt"))
        check_checkpoint(config.ckpt_path)
        config.data.date = run_date(config, fits=False)
        source = config.data.source
        name = source.init_args.get("name", source.class_path.rsplit(".", 1)[-1])
        policy = f"-{Path(config.ckpt_path).stem}" if config.ckpt_path else ""
        settings = yaml.safe_load(self._parser(command).dump(config, skip_none=False))
        # a function's text in a Namespace has its address in memory, which is another one in every process
        self._built = str([settings["model"]["engine"], settings["model"]["rewards"]])
        folder = str(evaluation_folder(Path(config.run_dir, command, name.lower() + policy), settings))
        config.trainer.default_root_dir = folder
        self._log_to(folder, loggers)

    def before_fit(self) -> None:
        """Check that the model supports the lengths of the run that a smoke test stands for."""
        if self._whole:
            check_length(check_base(self.model.settings.folder), longest=self._whole.longest)

    def after_fit(self) -> None:
        """Check that there are enough prompts for the run that a smoke test stands for, and report its end."""
        if self._whole and not self.trainer.interrupted:
            check_batch_size(self._whole.batch_size, self.datamodule.num_train_prompts)
            rank_zero_info(
                f"smoke: {self.trainer.global_step} optimizer steps with validation and checkpoint finished without an "
                f"error; see {self.config[str(self.subcommand)].run_dir}"
            )

    def instantiate_trainer(self, **settings: Any) -> Trainer:
        """Build the trainer; its checkpoints go to the run's folder, not to that of the first logger."""
        try:
            trainer = super().instantiate_trainer(**settings)
        except (RuntimeError, TypeError) as error:  # Lightning's for hardware, or for variables of Slurm
            raise ValueError(f"the trainer cannot be made: {error}") from error
        check_processes(trainer)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(Path(trainer.default_root_dir, "checkpoints"))
        return trainer

    def instantiate_classes(self) -> None:
        """Build module, data and trainer. In the configuration, and so in config.yaml, the folder of loggers is written
        as ``RUN_DIR`` afterwards, so that other commands that read config.yaml do not log to this folder."""
        super().instantiate_classes()
        for settings, save_dir in self._save_dirs:
            settings.save_dir = save_dir

    def _log_to(self, folder: str, loggers: Sequence[Namespace]) -> None:
        """Set the folder that the loggers write to; a logger whose ``save_dir`` the user has set keeps that folder."""
        run = self.config[str(self.subcommand)].run_dir
        self._save_dirs: list[tuple[Namespace, str]] = []
        for logger in loggers:
            if "save_dir" not in logger.get("init_args", {}):
                continue
            settings = logger.init_args
            if settings.save_dir in (None, run, folder, _default_of(logger.class_path, "save_dir")):
                settings.save_dir = RUN_DIR
            top, slash, below = str(settings.save_dir).partition("/")
            if top != RUN_DIR:
                continue
            self._save_dirs.append((settings, settings.save_dir))
            settings.save_dir = folder + slash + below
            is_csv = logger.class_path.endswith("CSVLogger")
            if (is_csv or logger.class_path.endswith("TensorBoardLogger")) and settings.version is None:
                settings.version = ""  # with None, Lightning makes a new folder at every start
                settings.name = "" if settings.name == "lightning_logs" else settings.name
            if self._run_now and is_csv and isinstance(settings.version, str) and rank_zero_only.rank == 0:
                keep_metrics(Path(settings.save_dir, settings.name or "", settings.version))

        written = [(logger.class_path, str(logger.get("init_args"))) for logger in loggers]
        if len(set(written)) < len(written):
            raise ValueError("trainer.logger has a logger twice, and both would write the same files: leave one out")

    def _parse_ckpt_path(self) -> None:
        """Do nothing. Lightning's method reads settings from the checkpoint; here they come from the command."""

    def _add_instantiators(self) -> None:
        """Do nothing. Lightning's method collects settings for ``save_hyperparameters``, which is not called here."""


def _default_of(class_path: str, name: str) -> Any:
    default = inspect.signature(pkgutil.resolve_name(class_path)).parameters[name].default
    return None if default is inspect.Parameter.empty else default


def main(args: list[str], *, run_now: bool = True) -> QeRLCLI:
    """Run one training command, the first of the words ``args``; with ``run_now=False``, only build its objects."""
    args = with_paths(args)
    check_yaml_files(args)
    quieten()
    accept_words()
    sys.argv[1:] = args = command_line(args)  # LightningCLI warns when it gets both
    return QeRLCLI(
        QeRLModule,
        PromptDataModule,
        run_now=run_now,
        parser_class=Parser,
        parser_kwargs={name: {"description": f"{DESCRIPTIONS[name]}{FORM}"} for name in QeRLCLI.subcommands()},
        seed_everything_default=0,
        auto_configure_optimizers=False,
        save_config_callback=SaveAcceptedConfig,
        trainer_defaults={"callbacks": [kind() for kind in IN_EVERY_RUN]},
    )


def command_line(args: list[str]) -> list[str]:
    """Insert configs/base.yaml and the default ``run_dir`` before the user's arguments, which override them."""
    if args and args[0] in SUBCOMMANDS:
        defaults = ["--config", str(BASE_CONFIG), "--run_dir", run_named_after(config_files(args))]
        if args[0] in ("validate", "test"):
            defaults += ["--verbose", "false"]  # callbacks.evaluation.EvaluationReport prints the table
        args = [args[0], *defaults, *args[1:]]
    return spelt_out(args)


def out_of_memory(error: RuntimeError) -> str:
    """Return a message of one line for a run whose GPU ran out of memory; it names a file with the traceback."""
    text = " ".join(str(error).split())[:600]
    return (
        f"error: {text}. `{called_as('plan')}` predicts how much memory the run needs; if other programs leave it "
        "less, set model.gpu_memory to what they leave. The same command with --ckpt_path last continues from the last "
        f"checkpoint (traceback: {traceback_file(error)})"
    )


def exit_status(args: list[str]) -> int | str:
    """Run a training command and return its exit status: 0, 4 if a check of the rollouts ended the run, or 128 plus the
    number of a signal. After an error that the user can correct, the message is returned instead (exit status 1)."""
    try:
        cli = main(args)
    except CheckFailed as stop:
        if rank_zero_only.rank == 0:
            print(f"stopped: {stop}", file=sys.stderr)
        return EXIT_STATUS
    except SIGTERMException:
        return 128 + signal.SIGTERM
    except (ValueError, ArgumentTypeError, MisconfigurationException) as error:
        of_number = str(error).startswith(("invalid literal for int", "could not convert string to float"))
        return f"error: {of_error(error, sys.argv[1:])}{quoted_from_environment(error) if of_number else ''}"
    except RuntimeError as error:
        if "on metric" in str(error) and "is not available" in str(error):  # EarlyStopping's, for its `monitor`
            return f"error: trainer.callbacks: {error}"
        if "out of memory" in str(error):  # torch's for a tensor, vLLM's when it wakes up, or ours with an advice
            return out_of_memory(error)
        raise
    except ModuleNotFoundError as error:
        if how := not_installed(error.name or ""):
            return f"error: {how}"
        raise
    except OSError as error:
        return f"error: {in_words(error)}"
    callbacks: list[object] = getattr(cli.trainer, "callbacks", [])
    return next((stop.exit_status for stop in callbacks if isinstance(stop, GracefulStop)), 0)
