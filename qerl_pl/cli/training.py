"""Training and evaluation: LightningCLI with one folder per run and each value given once."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from callbacks.close_engine import CloseEngine
from callbacks.graceful_stop import GracefulStop
from callbacks.rng_state import RNGState
from callbacks.run_lock import RunLock
from callbacks.stop_together import StopTogether
from datamodules.prompts import PromptDataModule
from qerl_pl.base.folder import base_folder
from qerl_pl.checkpoint import LAST
from qerl_pl.cli.console import quieten
from qerl_pl.cli.errors import of_error
from qerl_pl.cli.shipped import BASE_CONFIG, with_paths
from qerl_pl.cli.smoke import HELP, shorten
from qerl_pl.cli.words import Parser, accept_words, spelt_out
from qerl_pl.cli.yaml_files import check_yaml_files, config_files
from qerl_pl.common.os_errors import in_words
from qerl_pl.common.run_folder import keep_metrics, run_folder, run_named_after
from qerl_pl.module import QeRLModule
from qerl_pl.objective.published import DERIVED
from qerl_pl.settings.changes import keep_old_config
from qerl_pl.settings.hyperparameters import hyperparameters, log_hyperparameters
from qerl_pl.settings.trainer import check_trainer

SUBCOMMANDS = ("fit", "validate", "test", "predict")


class SaveAcceptedConfig(SaveConfigCallback):
    """Writes config.yaml once a run has begun: a start that the checkpoint refuses leaves the record as it was."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = trainer.log_dir  # asked for by all ranks: the first one tells the others
        if trainer.is_global_zero and folder is not None:
            text = self.parser.dump(self.config, skip_none=False)
            changes, kept = keep_old_config(Path(folder, self.config_filename), text)
            if changes:
                listed = "".join(f"\n  {change}" for change in changes)
                rank_zero_warn(f"this start changes settings of the run (the old ones are in {kept}):{listed}")
            log_hyperparameters(trainer.loggers, hyperparameters(yaml.safe_load(text)))
        super().setup(trainer, pl_module, "fit")


class QeRLCLI(LightningCLI):
    """LightningCLI with one folder per run and each value given once.

    Args:
        run_now: False builds everything and runs nothing.
        more: arguments of LightningCLI, as ``named`` are.
    """

    def __init__(self, *more: Any, run_now: bool, **named: Any) -> None:
        self._run_now = run_now
        super().__init__(*more, **named)

    def _run_subcommand(self, subcommand: str) -> None:
        if self._run_now:
            super()._run_subcommand(subcommand)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        text = "folder of the run (default: runs/ and the names of the -c files); each evaluation has a folder in it"
        parser.add_argument("--run_dir", type=run_folder, default="runs/default", help=text)
        parser.add_argument("--smoke", action="store_true", help=HELP)
        parser.link_arguments("run_dir", "trainer.default_root_dir")
        parser.link_arguments("run_dir", "trainer.logger.init_args.save_dir")
        parser.link_arguments("seed_everything", "model.seed")
        parser.link_arguments("seed_everything", "data.seed")
        parser.link_arguments(("model.base", "model.base_format"), "data.tokenizer", compute_fn=base_folder)
        parser.link_arguments("data.max_prompt_tokens", "model.max_prompt_tokens")
        # What is not given follows from what is: the values that it had without anything given must not count as given.
        parser.set_defaults({f"model.objective.{name}": None for name in DERIVED})

    def before_instantiate_classes(self) -> None:
        """Give an evaluation its own folder in the run's: its curves and completions are not those of the training.

        Each policy has one, named by its checkpoint, and the base has one.
        """
        command = str(self.subcommand)
        config = self.config[command]
        loggers = config.trainer.logger if isinstance(config.trainer.logger, list) else [config.trainer.logger]
        if not config.trainer.logger:
            raise ValueError("trainer.logger is off; curves and folders of a run are its logger's: leave that on")
        check_trainer(config.trainer, command=command)
        self._smoke = config.pop("smoke")
        if self._smoke:
            if command != "fit":
                raise ValueError(f"--smoke tries a training and not {command}; for few problems: --data.val_limit 4")
            shorten(config)
        if command == "fit":
            last = Path(config.run_dir, "checkpoints", LAST)
            if config.ckpt_path is None and last.exists():
                raise ValueError(
                    f"{config.run_dir} has a run already ({last}): go on with it by --ckpt_path last, or start another "
                    "by --run_dir"
                )
            self._log_to(config.run_dir, loggers)
            return
        if config.ckpt_path in ("last", "best"):
            config.ckpt_path = str(Path(config.run_dir, "checkpoints", f"{config.ckpt_path}.ckpt"))
        source = config.data.source
        name = source.init_args.get("name", source.class_path.rsplit(".", 1)[-1])
        policy = f"-{Path(config.ckpt_path).stem}" if config.ckpt_path else ""
        folder = str(Path(config.run_dir, command, name.lower() + policy))
        config.trainer.default_root_dir = folder
        self._log_to(folder, loggers)

    def after_fit(self) -> None:
        """Say how a smoke run ended."""
        if self._smoke and not self.trainer.interrupted:
            rank_zero_info(
                f"smoke: {self.trainer.global_step} optimizer steps with validation and checkpoint went well; see "
                f"{self.config[str(self.subcommand)].run_dir}"
            )

    def _log_to(self, folder: str, loggers: Sequence[Namespace]) -> None:
        for logger in loggers:
            if "save_dir" not in logger.get("init_args", {}):
                continue
            logger.init_args.save_dir = folder
            name, version = logger.init_args.get("name"), logger.init_args.get("version")
            if self._run_now and logger.class_path.endswith("CSVLogger") and isinstance(version, str):
                keep_metrics(Path(folder, name or "", version))

    def _parse_ckpt_path(self) -> None:
        """Checkpoints hold no hyperparameters that could override the YAML; config.yaml is the record."""


def main(args: list[str], *, run_now: bool = True) -> QeRLCLI:
    """Run one subcommand, or only build what it needs."""
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
        seed_everything_default=0,
        auto_configure_optimizers=False,
        save_config_callback=SaveAcceptedConfig,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={"callbacks": [RunLock(), RNGState(), StopTogether(), CloseEngine()]},
    )


def command_line(args: list[str]) -> list[str]:
    """Put configs/base.yaml, and a run_dir for settings that name none, before what was typed."""
    if args and args[0] in SUBCOMMANDS:
        own = ["--config", str(BASE_CONFIG), "--run_dir", run_named_after(config_files(args))]
        if args[0] in ("validate", "test"):
            own += ["--verbose", "false"]  # callbacks.evaluation.EvaluationReport prints the table
        args = [args[0], *own, *args[1:]]
    return spelt_out(args)


def exit_status(args: list[str]) -> int | str:
    """Run the program.

    Returns:
        0; 128 plus the number of the signal that ended the run; or a message about what the user can mend (status 1).
    """
    try:
        cli = main(args)
    except SIGTERMException:
        return 128 + signal.SIGTERM
    except (ValueError, ArgumentTypeError) as error:
        return f"error: {of_error(error, sys.argv[1:])}"
    except OSError as error:
        return f"error: {in_words(error)}"
    callbacks: list[object] = getattr(cli.trainer, "callbacks", [])
    return next((stop.exit_status for stop in callbacks if isinstance(stop, GracefulStop)), 0)
