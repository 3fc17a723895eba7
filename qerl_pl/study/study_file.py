"""Read the YAML file of a study, and derive the runs and commands that it defines.

A study trains arms (named configurations) with several seeds and, optionally, with every point of a grid, which is one
combination of values of options.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import yaml

FIT = "fit"
SET_BY_STUDY = ("run_dir", "seed_everything", "ckpt_path")
"""Settings that the study itself sets for every run, so its file may not contain them."""
MOST_LETTERS = 80
"""Limit on the number of characters that the value of a grid's option takes in the name of a run's folder."""
KINDS = (
    ("a mapping", dict, ("arms", "after", "settings", "grid", "evaluations", "analysis")),
    ("a list", list, ("seeds", "config")),
)
_EXPONENT = re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+")  # a number in -c files, for some of which YAML 1.1 has text
Settings = dict[str, Any]
"""A part of a configuration, with the keys of a configuration file (as for ``-c``)."""


@dataclass(frozen=True)
class Analysis:
    """Settings of ``--analyse``: which arms of a study are compared, and by which readouts (numbers that summarise a
    run, see ``study/readouts.py``).

    Attributes:
        comparisons: pairs of arms, [arm, arm that it is compared with]; null: every arm with the first one.
        validation: name of the logged scalar that is the accuracy on held-out problems.
        metric: readout whose comparisons decide the study.
        folder: folder of the analysis inside the study's output. Two studies with the same output share the runs of
            their common arms, so each of them needs a different folder.
    """

    comparisons: list[list[str]] | None = None
    validation: str = "val/accuracy"
    metric: str = "area under accuracy"
    folder: str = "analysis"


@dataclass(frozen=True)
class Study:
    """The content of a study's YAML file.

    Attributes:
        output: folder of all runs and their analysis.
        arms: the compared configurations: maps the name of an arm to its settings, as in a configuration file. `$seed`
            in a text of an arm is replaced by the run's seed.
        after: maps an arm to another arm; runs of the first arm read files of runs of the second. A run of the first
            arm begins when the second arm's run with the same seed and options is finished.
        seeds: values of ``seed_everything``; every arm is run with each of them, so that runs of two arms are compared
            in pairs of equal seed.
        config: configuration files, or names of configurations of this package, that every run reads first, e.g.
            [configs/tasks/gsm8k.yaml].
        settings: further settings of every run, as in a configuration file.
        grid: maps options to lists of values, e.g. {model.optimizer.init_args.lr: [1.0e-4, 3.0e-4]}; every arm is run
            with every combination. A value that is a path appears in the names of the runs' folders by its last part,
            with a digest if two values have the same last part.
        evaluations: evaluations (``test``) of every finished run, e.g. with other problems or more samples: maps the
            name of an evaluation to its settings.
        gpu_memory: GiB of a GPU that a run may take (``model.gpu_memory``); null: runs do not share a GPU.
        jobs: number of runs at the same time per GPU, or on a machine without one; null: as many as memory and cores
            allow.
        attempts: number of times that a command of a run may fail before the run is given up.
        analysis: settings of the analysis, see ``Analysis``.
    """

    output: Path
    arms: dict[str, Settings]
    seeds: list[int]
    config: list[str] = field(default_factory=list)
    after: dict[str, str] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    evaluations: dict[str, Settings] = field(default_factory=dict)
    gpu_memory: float | None = None
    jobs: int | None = None
    attempts: int = 2
    analysis: Analysis = field(default_factory=Analysis)

    def __post_init__(self) -> None:
        arms, analysis = list(self.arms), self.analysis  # a list, because a wrong value may not be hashable
        _require(self.arms and self.seeds, "a study needs at least one arm and one seed")
        for seed in self.seeds:
            right = _is_number(seed, int) and 0 <= seed < 2**32
            _require(right, f"seeds has {seed!r}; expected whole numbers from 0 to {2**32 - 1}")
        _require(len(set(self.seeds)) == len(self.seeds), f"seeds are {self.seeds}; each may be there once")
        for name in (*self.arms, *self.evaluations, analysis.folder):
            right = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name)
            _require(right, f"{name!r} becomes the name of a folder; expected letters, digits and . _ + -")
        _require(FIT not in self.evaluations, f"an evaluation may not be called {FIT!r}")
        for name, kind in (("jobs", int), ("attempts", int), ("gpu_memory", (int, float))):
            value, what = getattr(self, name), "a whole number" if kind is int else "a number"
            right = value is None or (_is_number(value, kind) and 0 < value < math.inf)
            _require(right, f"{name} is {value!r}; expected {what} above 0")
        for word in (str(self.output), *self.config):
            right = isinstance(word, str) and word.strip()
            _require(right, f"config has {word!r}; expected -c files or shipped names")
            _require("$" not in word, f"{word!r} names a variable that the file does not define under `variables`")
        for arm, other in self.after.items():
            right = arm in arms and other in arms and other not in self.after
            expected = f"two of the arms {', '.join(arms)}, the second of which is not itself a key of after"
            _require(right, f"after has {arm}: {other}; expected {expected}")
        right = isinstance(analysis.comparisons, list | None)
        _require(right, f"analysis.comparisons is {analysis.comparisons!r}; expected a list of pairs of arms")
        for pair in analysis.comparisons or []:
            right = isinstance(pair, list) and len(pair) == 2 and all(arm in arms for arm in pair)
            text = f"comparison {pair} is not of two of the arms {', '.join(arms)}"
            _require(right and pair[0] != pair[1], text)
        for name in ("validation", "metric"):
            value = getattr(analysis, name)
            text = f"analysis.{name} is {value!r}; expected the name of a measured quantity, as text"
            _require(isinstance(value, str), text)
        self._check_settings()

    def _check_settings(self) -> None:
        """Raise ValueError for a setting that would have no effect, because every run gets its value from the study's
        ``grid`` or ``gpu_memory``, or from the program (for example the seed)."""
        sections = {f"arms.{name}": settings for name, settings in self.arms.items()}
        sections |= {f"evaluations.{name}": settings for name, settings in self.evaluations.items()}
        varied = [*self.grid, *(["model.gpu_memory"] if self.gpu_memory is not None else [])]
        for where, settings in {"settings": self.settings, **sections}.items():
            for name in SET_BY_STUDY:
                _require(name not in settings, f"{where} has {name}, which the study sets for every run; leave it out")
            for name in varied if where in sections else ():
                text = f"{where} has {name}, which grid or gpu_memory set for every run; leave out one of them"
                _require(not _has(settings, name), text)
        for key, values in self.grid.items():
            right = isinstance(key, str) and key not in SET_BY_STUDY and varied.count(key) == 1
            _require(right, f"grid has {key!r}; expected the name of a setting that the study does not set itself")
            texts = [_option(value) for value in values]
            for text in texts:
                _require(texts.count(text) == 1, f"grid.{key} has {text} more than once; each value may be there once")

    @property
    def comparisons(self) -> list[tuple[str, str]]:
        """Pairs of arms that are compared. The difference is the first arm's value minus the second's."""
        first, *others = self.arms
        pairs = self.analysis.comparisons
        return [(arm, first) for arm in others] if pairs is None else [(one, other) for one, other in pairs]

    def runs(self) -> list[Run]:
        """List all runs, ordered by seed, so that a study that is stopped early has complete comparisons for its first
        seeds."""
        points = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        return [self._run(arm, point, seed) for seed, point, arm in itertools.product(self.seeds, points, self.arms)]

    def run_before(self, run: Run) -> Run | None:
        """Return the run that has to be finished before ``run`` may begin; None if ``run`` depends on no other run."""
        return self._run(self.after[run.arm], run.point, run.seed) if run.arm in self.after else None

    def name_of(self, point: Mapping[str, Any]) -> str:
        """Return the folder's name for a point of the grid, e.g. ``lr=0.001,base=small.gguf``; empty without a grid."""
        name = ",".join(f"{key.rsplit('.', 1)[-1]}={_shown(value, self.grid[key])}" for key, value in point.items())
        return name if len(name) <= 2 * MOST_LETTERS else f"{name[:MOST_LETTERS]}-{_digest(name)}"

    def _run(self, arm: str, point: dict[str, Any], seed: int) -> Run:
        middle = [self.name_of(point)] if point else []
        return Run(arm, point, seed, self.output.joinpath("runs", arm, *middle, f"seed-{seed}"))


class Run(NamedTuple):
    """One run of a study."""

    arm: str
    point: dict[str, Any]
    """The values of the grid's options."""
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """Path of the run's folder relative to the folder ``runs`` of the study."""
        return "/".join(self.folder.parts[-3 if self.point else -2 :])


class Command(NamedTuple):
    """A command that is executed for a run of a study: the training, or an evaluation of the trained policy."""

    name: str
    arguments: list[str]


def read_study(path: Path, output: Path | None = None, variables: Mapping[str, str] | None = None) -> Study:
    """Read the YAML file of a study. It has the fields of ``Study`` and optionally ``variables``, a mapping of names to
    values that replace ``$NAME`` in all of its texts. The arguments ``output`` and ``variables`` override what the file
    says. Raises ValueError if the file is missing or no YAML, or a key or value is wrong."""
    _require(path.is_file(), f"there is no study {path}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    _require(isinstance(content, dict), f"{path} is no mapping; expected {_names(Study)}")
    content = _without_variables(content, path.name, variables or {})
    content = {key: value for key, value in content.items() if value is not None}
    _check_keys(content, Study, path.name)
    for what, kind, keys in KINDS:
        for key in keys:
            value = content.get(key, kind())
            _require(isinstance(value, kind), f"{path}: {key} is {value!r}; expected {what}")
    analysis = content.pop("analysis", None) or {}
    _check_keys(analysis, Analysis, f"{path.name}, analysis")
    if output is not None:
        content["output"] = str(output)
    for key in ("output", "arms", "seeds"):
        _require(key in content, f"{path} has no {key}")
    for key in ("arms", "evaluations"):
        content[key] = _named(content.get(key, {}), f"{path}: {key}")
    content["after"] = {str(arm): _name(other, f"{path}: after") for arm, other in content.get("after", {}).items()}
    written = content["output"]
    right = isinstance(written, str) and written.strip()
    _require(right, f"{path}: output is {written!r}; expected a folder, as text")
    for key, values in content.get("grid", {}).items():
        right = isinstance(values, list) and values
        _require(right, f"{path}: grid.{key} is {values!r}; expected a list of values")
        content["grid"][key] = [float(value) if _EXPONENT.fullmatch(str(value)) else value for value in values]
    return Study(**{**content, "output": Path(written), "analysis": Analysis(**analysis)})


def _named(sections: Mapping[Any, Any], where: str) -> dict[str, Settings]:
    """Check a mapping from names, such as those of arms, to settings, and return it; null means no settings."""
    for name, settings in sections.items():
        text = f"{where}.{name} is {settings!r}; expected settings by their names, as in a -c file"
        _require(isinstance(settings, dict | None), text)
    return {_name(name, where): settings or {} for name, settings in sections.items()}


def _name(name: object, where: str) -> str:
    right = isinstance(name, str) or _is_number(name, int)
    _require(right, f"{where} has {name!r}; expected a name: put a word that YAML reads otherwise in quotes")
    return str(name)


def _without_variables(content: Mapping[str, Any], where: str, values: Mapping[str, str]) -> dict[str, Any]:
    """Replace ``$NAME`` in all texts of a study's file by the values of variables."""
    known = content.get("variables") or {}
    _require(isinstance(known, dict), f"{where}: variables is {known!r}; expected a mapping")
    _require("seed" not in known, f"{where}: variables has `seed`, which is each run's seed; choose another name")
    for name, value in known.items():
        right = isinstance(name, str) and (isinstance(value, str) or _is_number(value, (int, float)))
        _require(right, f"{where}: variables has {name!r}: {value!r}; expected text or numbers by name")
    unknown = ", ".join(sorted(set(values) - set(known)))
    _require(not unknown, f"{where} has no variable {unknown}; it has: {', '.join(known) or 'none'}")

    values = {**known, **values, "seed": "$seed"}  # a run's seed, see ``files_of``

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            result = {replaced(key): replaced(part) for key, part in value.items()}
            text = f"{where}: of the keys {', '.join(map(str, value))} two are equal with these variables"
            _require(len(result) == len(value), text)
            return result
        if isinstance(value, list):
            return [replaced(part) for part in value]
        try:
            return Template(value).substitute(values) if isinstance(value, str) else value
        except (KeyError, ValueError) as error:
            raise ValueError(f"{where}: {value!r} names a variable that is not in variables: {error}") from error

    rest = {key: value for key, value in content.items() if key != "variables"}
    return replaced(rest) if known else rest


def files_of(study: Study, run: Run) -> dict[Path, str]:
    """Return the configuration files (for ``-c``) of a run, as a mapping of path to content."""
    sections = {"settings": study.settings, "arm": study.arms[run.arm]}
    sections |= {f"evaluate-{name}": settings for name, settings in study.evaluations.items()}
    texts = {name: yaml.safe_dump(settings, sort_keys=False) for name, settings in sections.items()}
    return {run.folder / "study" / f"{name}.yaml": _with_seed(text, run.seed) for name, text in texts.items()}


def commands_of(study: Study, run: Run) -> list[Command]:
    """List the commands of a run in order: ``fit``, then the evaluations of the policy in the last checkpoint."""
    written = run.folder / "study"
    files = [*study.config, *(str(written / f"{name}.yaml") for name in ("settings", "arm"))]
    options = ["--seed_everything", str(run.seed)]
    for key, value in run.point.items():
        options += [f"--{key}", _with_seed(_option(value), run.seed)]
    if study.gpu_memory is not None:
        options += ["--model.gpu_memory", str(study.gpu_memory)]
    configs = [word for file in files for word in ("-c", file)]
    commands = [Command(FIT, [FIT, *configs, *options, "--run_dir", str(run.folder), "--ckpt_path", "last"])]
    for name in study.evaluations:
        folder, last = run.folder / "evaluations" / name, run.folder / "checkpoints" / "last.ckpt"
        words = [*configs, "-c", str(written / f"evaluate-{name}.yaml"), *options, "--run_dir", str(folder)]
        commands.append(Command(name, ["test", *words, "--ckpt_path", str(last)]))
    return commands


def _option(value: Any) -> str:
    """Return the text of a value in the form that the command line reads."""
    return json.dumps(value) if isinstance(value, dict | list | bool) or value is None else str(value)


def _with_seed(text: str, seed: int) -> str:
    return re.sub(r"\$(seed\b|\{seed\})", str(seed), text)


def _shown(value: Any, values: list[Any]) -> str:
    """Return the text by which the name of a run's folder shows the run's ``value`` of an option: of a path the last
    part, followed by a digest if another of the study's ``values`` of this option has the same last part."""
    name = _last_part(value)
    clash = [_last_part(other) for other in values].count(name) > 1
    return f"{name}-{_digest(str(value))}" if clash else name


def _last_part(value: Any) -> str:
    last = str(value).rstrip("/").rsplit("/", 1)[-1]
    return "".join(letter if letter.isprintable() else "_" for letter in last)[-MOST_LETTERS:]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:6]


def _has(settings: Any, name: str) -> bool:
    """Tell whether nested settings contain the setting ``name``, whose parts are separated by dots."""
    first, _, rest = str(name).partition(".")
    return isinstance(settings, dict) and first in settings and (not rest or _has(settings[first], rest))


def _is_number(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _names(kind: type) -> str:
    return ", ".join(one.name for one in fields(kind))


def _check_keys(content: Mapping[str, Any], kind: type, where: str) -> None:
    unknown = [str(key) for key in content if key not in {one.name for one in fields(kind)}]
    _require(not unknown, f"{where} has the unknown keys {', '.join(unknown)}; expected some of {_names(kind)}")


def _require(right: object, message: str) -> None:
    if not right:
        raise ValueError(message)
