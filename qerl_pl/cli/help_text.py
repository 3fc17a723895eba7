"""Format ``--help`` of options built from type hints: short usage, types in words, no options that would be refused."""

import inspect
import re
import types
import typing
from argparse import Action
from collections.abc import Callable, Iterable
from typing import Any

from jsonargparse import DefaultHelpFormatter

from qerl_pl.settings.trainer import UNUSABLE

MEANINGS = {
    "config": "a YAML file, or the name of a shipped configuration, such as gsm8k; repeatable, later ones override "
    "earlier ones.",
    "seed_everything": "seeds everything that is drawn: the adapter, the order of the problems, completions, noise.",
    "trainer.max_steps": "length of the run, in optimizer steps.",
    "trainer.max_time": 'time limit, "DD:HH:MM:SS", counted from this start of the command: the run stops after the '
    "step that reaches it; resume with --ckpt_path last.",
    "trainer.val_check_interval": "number of rollouts between two validations.",
    "trainer.precision": "leave it at 32-true: the compute dtype is model.dtype.",
    "trainer.devices": "number of GPUs; each has its own engine and its share of the prompts.",
    "trainer.num_nodes": "number of machines, see docs/multi_node.md.",
    "trainer.accelerator": "auto (a GPU where there is one), cpu or gpu.",
    "ckpt_path": "last, best (not for fit) or a file. fit --ckpt_path last continues the run in run_dir, or starts a "
    "new one if there is none; without it, an evaluation evaluates the base model.",
}
"""Help texts of settings that replace Lightning's texts, which do not hold for this program."""
HIDDEN = {f"trainer.{name}" for name in UNUSABLE} | {
    "trainer.check_val_every_n_epoch",
    "trainer.enable_autolog_hparams",
    "trainer.model_registry",
    "trainer.sync_batchnorm",
    "trainer.use_distributed_sampler",
    "return_predictions",
    "verbose",
    "weights_only",
}
"""Settings that are refused or that have no effect in this program."""
TITLES = {
    "model": "model: the base, the adapter, what is sampled, and the objective",
    "data": "data: problems, and how they become prompts",
    "ckpt_path": "checkpoint",
    "trainer": "trainer: hardware and length of the run, callbacks and loggers (settings of Lightning)",
}
"""Titles of the sections of ``--help``, by the first setting of the section."""
DESCRIPTIONS = {
    "fit": "Train a policy",
    "validate": "Evaluate a policy on the validation problems of a recipe",
    "test": "Evaluate a policy on a test set, with intervals over problems",
    "predict": "Write completions of a policy to files",
}
FORM = (
    ". TASK, MODEL and ARM are YAML files or names of shipped configurations (`qerl --help` lists them). Every option "
    "below is a key of these files, too: --model.sampling.temperature 0.8 is `model: {sampling: {temperature: 0.8}}`."
)


class HelpFormatter(DefaultHelpFormatter):
    """Formats ``--help`` of a command whose options jsonargparse builds from type hints."""

    def add_usage(self, usage: str | None, actions: Iterable[Action], *args: Any, **named: Any) -> None:
        """Show a training command's usage as one pattern, without listing its two hundred options."""
        program, command = self._prog.split()[0], self._prog.split()[-1]
        if command in DESCRIPTIONS:
            program = "python train.py" if program.endswith("train.py") else "qerl"
            usage, actions = f"{program} {command} -c TASK -c MODEL -c ARM [--KEY VALUE ...]", []
        super().add_usage(usage, actions, *args, **named)

    def add_argument(self, action: Action) -> None:
        """Add a setting to the help, with its text in ``MEANINGS`` if there is one, except those in ``HIDDEN``."""
        if action.dest not in HIDDEN:
            action.help = MEANINGS.get(action.dest, action.help)
            super().add_argument(action)

    def _get_help_string(self, action: Action) -> str:
        return in_plain_text(super()._get_help_string(action))

    def _get_type_str(self, action: Action) -> str | None:
        if action.dest.endswith(".help"):
            return None
        hint = getattr(action, "_typehint", None) or getattr(action, "type", None)
        if inspect.isfunction(hint):
            hint = typing.get_type_hints(hint)["return"]
        return None if hint is None else words(hint)


def words(hint: Any, *, shown: Callable[[Any], str] = lambda kind: getattr(kind, "__name__", str(kind))) -> str:
    """Describe a type hint in words, e.g. ``int or null``; ``shown`` names a class, or a value of a Literal."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(shown(value) for value in inside)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(words(member, shown=shown) for member in inside)
    if inside and isinstance(origin, type) and issubclass(origin, Callable):
        return words(inside[-1], shown=shown)
    if inside:
        name = "list" if origin is tuple else origin.__name__
        return f"{name} of {' to '.join(words(member, shown=shown) for member in inside if member is not ...)}"
    return "null" if hint is type(None) else shown(hint)


def in_plain_text(text: str) -> str:
    """Convert reStructuredText to plain text for ``--help``, without defaults that the help states anyway."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text)
    text = re.sub(r"``(.*?)``", r"`\1`", text)
    return re.sub(r"\.?\s+Default: [`\w\".-]+\.? \((?=.*default: )", ". (", text, flags=re.DOTALL)
