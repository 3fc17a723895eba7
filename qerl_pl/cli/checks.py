"""Check a parsed configuration for mistakes at which Lightning or jsonargparse would fail with a traceback."""

import inspect
import pkgutil
import typing
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from qerl_pl.common.run_folder import LAST
from qerl_pl.rewards.base import Judge
from qerl_pl.rewards.calling import takes_objects

OTHER_TRAINING = {
    "GradientAccumulationScheduler": "model.micro_batch_tokens sets the size of the passes of an optimizer step",
    "BatchSizeFinder": "data.batch_size is part of what is optimised; model.micro_batch_tokens is found by itself",
    "LearningRateFinder": "a loss says nothing about a learning rate here; set model.optimizer.init_args.lr",
    "StochasticWeightAveraging": "the engine samples with the trained weights",
    "WeightAveraging": "the engine samples with the trained weights",
    "EMAWeightAveraging": "the engine samples with the trained weights",
    "ModelPruning": "the base is frozen and may be packed",
    "BackboneFinetuning": "the base is frozen and may be packed",
    "BaseFinetuning": "the base is frozen and may be packed",
}
"""Callbacks of Lightning that change how or what is trained, which a run refuses, with the reason or what to do."""

VALIDATES_FIRST = "callbacks.validate_first.ValidateFirst"
LOGGED = ("aqn", "canary", "correction", "gap", "matched", "memory", "policy", "reward", "rollout", "router")
LOGGED += ("speculation", "teacher", "throughput", "time", "train", "val")
"""First parts of the names of the values that a callback of Lightning can read, as "val" in "val/reward"."""
NO_SCORES = ("completion_tokens", "truncated_share", "unscored_share")
"""Values of a validation that are no scores, so that a lower one may be the better one."""


def check_groups(groups: Iterable[str], config: Namespace) -> None:
    """Raise ValueError if a setting that needs a mapping of named settings has a plain value or a list, as in
    ``sampling: [1]``. ``groups`` are the names of the settings for which this is checked."""
    for name in groups:
        value = config.get(name, Namespace())
        if not isinstance(value, Namespace | Mapping):
            value = "null" if value is None else repr(value)
            raise ValueError(f"{name} is {value}; expected settings by their names below it, see --help")


def check_checkpoint(path: str | None, *, words: Collection[str] = ()) -> None:
    """Raise ValueError if a checkpoint path is neither an existing file, nor one of ``words``, nor None."""
    if path is None or path in words or Path(path).is_file():
        return
    if path == "best":
        raise ValueError("ckpt_path is 'best', with which fit cannot go on: it goes on from 'last', or from a file")
    raise ValueError(f"there is no checkpoint {path}; --ckpt_path is last, best (not for fit) or a file")


def check_run_is_new(run_dir: str, ckpt_path: str | None) -> None:
    """Raise ValueError if a run would start, without a checkpoint, in a folder that already holds a run."""
    last = Path(run_dir, "checkpoints", LAST)
    if ckpt_path is None and last.exists():
        raise ValueError(
            f"{run_dir} already holds a run ({last}): resume it with --ckpt_path last, or choose another folder with "
            "--run_dir"
        )


def usable_callbacks(callbacks: Any, *, always: Collection[str]) -> list[Namespace]:
    """Return the callbacks that a run uses, from the parsed setting ``trainer.callbacks``. If a class of this project's
    package ``callbacks`` is listed more than once, only its last entry is returned. Raises ValueError if a callback is
    part of every run anyway (``always`` has the class paths of these), or is one of Lightning's that does not work in
    this program."""
    usable: dict[object, Namespace] = {}
    for number, callback in enumerate(callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []):
        path = str(callback.class_path)
        name = path.rpartition(".")[2]
        if path in always:
            raise ValueError(f"trainer.callbacks has {path}, which is part of every run: leave it out")
        if path.startswith("lightning.") and name in OTHER_TRAINING:
            raise ValueError(f"trainer.callbacks has {path}, which does not work here: {OTHER_TRAINING[name]}")
        key = path if path.startswith("callbacks.") else number
        if key in usable:
            from lightning.pytorch.utilities.rank_zero import rank_zero_info  # not before a run needs it

            rank_zero_info(f"trainer.callbacks has {path} more than once: the settings of the last count")
        usable[key] = callback
    return list(usable.values())


def check_monitors(callbacks: Iterable[Namespace], of_validation: Iterable[str]) -> None:
    """Raise ValueError if a callback watches a value that no run logs (its setting ``monitor``), or if EarlyStopping
    watches a value that only rollouts log and a validation comes before the first rollout; Lightning would report this
    error only after that validation. ``of_validation`` are the names, without "val/", of the values that a validation
    logs. If there are callbacks of other packages than Lightning and this project, which may log further values,
    unknown names are accepted. If a callback of Lightning takes the lowest score for the best one, warn: this is its
    default."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # here: `score` needs no Lightning

    of_validation = list(of_validation)
    names = [f"val/{name}" for name in of_validation]
    callbacks = list(callbacks)
    validates_first = any(str(callback.class_path) == VALIDATES_FIRST for callback in callbacks)
    others = any(str(callback.class_path).partition(".")[0] not in ("callbacks", "lightning") for callback in callbacks)
    for callback in callbacks:
        path, monitor = str(callback.class_path), callback.get("init_args.monitor")
        group, _, name = str(monitor).partition("/")
        is_known = monitor in names or name.startswith("pass@") or group != "val"
        if not others and monitor not in (None, "epoch", "step") and not (group in LOGGED and name and is_known):
            raise ValueError(
                f"trainer.callbacks: {path} has monitor {monitor!r}, which no run logs; expected a value of "
                f"docs/metrics.md, such as {', '.join(names)}"
            )
        is_score = name.startswith("pass@") or (name in of_validation and name not in NO_SCORES)
        by_lightning = path.startswith("lightning.") and callback.get("init_args.mode") == "min"
        if by_lightning and is_score and group in ("train", "val"):
            rank_zero_warn(
                f"trainer.callbacks: {path} has mode 'min', so it takes the lowest {monitor} for the best; give it "
                "`mode: max`, unless lower scores are better"
            )
        is_needed = path.endswith(".EarlyStopping") and callback.get("init_args.strict") is not False
        if validates_first and is_needed and group != "val":
            raise ValueError(
                f"trainer.callbacks: {path} has monitor {monitor!r}, which the validation before the first rollout, by "
                f"{VALIDATES_FIRST}, does not have yet: give it `strict: false`, or a monitor such as val/reward"
            )


def check_class_paths(value: Any, place: str = "") -> None:
    """Raise ValueError if a ``class_path`` in a parsed configuration, or a part of it at ``place``, names neither a
    class nor a function with a return annotation. Without this, jsonargparse calls any object that is named where a
    callable is expected, and checks only its result. The class of a reward, also one that a function is annotated to
    return, must have a ``__call__`` with a reward's parameters; ``Callable`` is accepted unchecked."""
    for where, part in _parts(value, place):
        if isinstance(part, Namespace | Mapping) and isinstance(path := part.get("class_path"), str):
            _check_class_path(path, where)


def check_methods(config: Namespace) -> None:
    """Raise ValueError if a value in a parsed configuration is a method whose import path config.yaml cannot have."""
    for where, part in _parts(config):
        if inspect.ismethod(part) and not _can_be_written(part):
            name = part.__qualname__
            raise ValueError(
                f"{where} is {name}, a method, whose path config.yaml cannot have; give it a name in its module, such "
                f"as `{part.__name__} = {name}`, and name that"
            )


def _parts(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a part of a configuration, whose dotted name is ``place``, and then all parts inside of it, each with its
    dotted name; the entries of a list have the name of the list."""
    yield place, value
    if isinstance(value, Namespace | Mapping):
        for name, entry in (vars(value) if isinstance(value, Namespace) else value).items():
            yield from _parts(entry, f"{place}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _parts(entry, place)


def _can_be_written(value: object) -> bool:
    """Return whether jsonargparse writes an object as a path from which it imports the same object. It cannot do so for
    a method that is named by its class or object, because Python makes a new object at every access."""
    parser = ArgumentParser()
    parser.add_argument("--it", type=Callable)
    with warnings.catch_warnings(action="ignore"):
        return "Unable to serialize" not in parser.dump(Namespace(it=value))


def _check_class_path(path: str, place: str) -> None:
    try:
        made: Any = pkgutil.resolve_name(path) if "." in path else None  # a class may be inside of another
    except (ImportError, AttributeError):
        made = None
    if made is None:
        return  # a name without a module is a class of Lightning; jsonargparse has already checked other paths
    if not inspect.isclass(made):
        try:
            made = typing.get_type_hints(made).get("return")
        except (TypeError, NameError):
            made = None
        if typing.get_origin(made) is Callable or made in (Callable, typing.Callable):
            return
        if not inspect.isclass(made) or made is type(None):
            raise ValueError(
                f"{place} is {path}, a function that does not say what it makes; expected a class, or a function "
                "whose return annotation is a class or Callable (a reward that is a function is named without "
                "class_path and init_args)"
            )
    if place.rpartition(".")[2] == "reward" and not issubclass(made, Judge):
        takes_objects(path, made)
