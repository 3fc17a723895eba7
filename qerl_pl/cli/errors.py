"""Shorten jsonargparse's error messages about a configuration to the wrong value, what was expected, and the most
similar known name. The messages are parsed as text, because jsonargparse's exceptions hold nothing but the message."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from qerl_pl.cli.other_folders import module_elsewhere, path_elsewhere
from qerl_pl.cli.other_names import usual_setting
from qerl_pl.cli.yaml_files import BASE_CONFIG, FOLLOWING, config_files, follows
from qerl_pl.common.packages import not_installed
from qerl_pl.common.run_folder import plain_yaml

MOST_LINES = 5
MAPPING = "a mapping such as "
OF_CLASSES = ("Not a valid subclass", "a class path", "a dict with")
GENERIC = (*OF_CLASSES, "Expected a ", "Errors:")
"""Beginnings of those lines in jsonargparse's messages that can be dropped. For a value of a union type, jsonargparse
reports an error for each member of the union; these lines are about members that the user probably did not mean."""
UNION = re.compile(r"Subtypes: \[(.*?)\]\s+Errors:.*Given value type: <class '(\w+)'>\s+Given value: (.*)", re.DOTALL)
"""Matches jsonargparse's message about a value of a union type: the types, the value's built-in type, and the value."""
LINK = re.compile(r"^.*\bcall to compute_fn of link .*? with args \(.*?\) failed: ", re.DOTALL | re.IGNORECASE)
"""Matches the beginning of jsonargparse's message about an error in a function that computes a setting from other
settings; the function's own message follows."""
KEY = r'[Pp]arser key "([^"]+)"'
TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "NoneType": "null",
    "pathlib.Path": "a path",
    "collections.abc.Iterable": "a list",
}
EXAMPLES = {
    "model.engine": "qerl_pl.rollout.vllm.VLLMEngine",
    "model.optimizer": "torch.optim.AdamW",
    "model.teacher": "{base: dense}",
    "trainer.logger": "lightning.pytorch.loggers.TensorBoardLogger",
    "model.rewards: reward": "my_reward.closeness or qerl_pl.rewards.math.NumericAnswer",
    "data.source": "datamodules.table.Table",
    "reward": "qerl_pl.rewards.math.MathAnswer (in short: gsm8k, math, dapo)",
}
"""Classes, functions and mappings that error messages show as examples, by the setting that expects one."""
PROTOCOLS = {"PromptSource": "datamodules.sources", "RolloutEngine": "qerl_pl.rollout.base"}
"""Modules of the protocols that classes named in a configuration have to implement."""
UNNAMED = ("QeRLCLI", "QeRLModule", "PromptDataModule", "Trainer", "WeightedReward")
"""Classes whose messages already name settings; the names of others are put in front of their messages."""


def in_short(message: str, *, keys: Iterable[str], arguments: Sequence[str]) -> str:
    """Shorten an error message of jsonargparse; if its kind is not known, the first five lines are returned. ``keys``
    are the dotted paths of all settings, from which the most similar one is suggested. ``arguments`` is the command
    line, whose YAML files are searched for the line with the error."""
    message = LINK.sub("", message)
    if unknown := re.search(
        r"(?:(?:Group '([\w.]+)' )?does not accept option '|unrecognized arguments: --)([\w.+-]+)", message
    ):
        return _unknown_key(".".join(filter(None, unknown.groups())).rstrip("+"), list(keys), arguments)
    if word := re.match(r"unrecognized arguments: ([^-\s]\S*)", message):
        return (
            f"{word[1]!r} is no option; a configuration is given by -c, such as -c quickstart, a setting by --KEY VALUE"
        )
    if linked := re.match(r'Linked "([^"]+)" must be given via |argument .* --> (\S+): invalid ', message):
        return follows(linked[1] or linked[2])
    if "arser key" in message:
        return of_the_value(message, arguments)
    return "\n".join(line[:300] for line in message.splitlines()[:MOST_LINES])


def of_the_value(message: str, arguments: Sequence[str] = ()) -> str:
    """Reduce jsonargparse's error message about the value of a setting to the cause. For a union type, the message has
    an error for each member of the union; only those for members that the user probably meant are kept. A message that
    is not about a setting's value is returned unchanged."""
    message = LINK.sub("", message)
    subject = re.search(KEY, message)
    if subject is None and "Subtypes:" not in message:
        return message
    place, body = (subject[1], message[subject.end() :]) if subject else ("", message)
    union = UNION.search(message)
    if union is not None and union[2] != "dict":
        kinds = _kinds(union[1], place)
        if any(kind.startswith(MAPPING) for kind in kinds):
            return _expected(place, union[3], " or ".join(kinds), arguments)
    if "Errors:" in body:
        body = body.partition("Errors:")[2].partition("Given value type:")[0]
    causes = [" ".join(cause.split()).strip(": ") for cause in re.split(r"^\s*- ", body, flags=re.MULTILINE)]
    causes = [cause for cause in causes if cause and not cause.startswith("Expected a path but")]
    if specific := next((cause for cause in causes if not cause.startswith(GENERIC)), None):
        return _of_the_cause(place, specific, arguments)
    kinds = [_kind(cause.removeprefix("Expected a ").partition(". Got value:")[0]) for cause in causes]
    inner = list(dict.fromkeys(re.findall(KEY, message)[1:]))
    paths = [kind for kind in kinds if kind.startswith("dot import path string: ")]
    if paths:
        kinds = [kind for kind in kinds if kind != paths[0]]
        place = ".".join([place, *inner])
        example = EXAMPLES.get(place, "callbacks.aqn.AdaptiveQuantizationNoise")
        kinds = kinds or [f"a class by its path, such as {example}"]
        return _expected(place, paths[0].split(": ")[1], " or ".join(dict.fromkeys(kinds)), arguments)
    value = re.search(r"Got value: (.*)", message) or re.search(r"Given value: (.*)", message)
    if not kinds or value is None:
        return message
    if len(inner) == 1:  # a setting inside of the one that was given as a mapping
        place = inner[0] if inner[0].startswith(f"{place}.") else f"{place}.{inner[0]}"
    if value[1] == "None" and union is not None and union[2] == "dict":  # null inside of a mapping
        kinds = [kind for kind in kinds if kind != "null"]
        return f"{place} has null in {union[3][:100]}; expected {' or '.join(dict.fromkeys(kinds))} there"
    return _expected(place, value[1], " or ".join(dict.fromkeys(kinds)), arguments)


def of_error(error: Exception, arguments: Sequence[str]) -> str:
    """Format an exception as ``CLASS: message``, with the class in the configuration whose constructor raised it."""
    if seed := re.fullmatch(r"(-?\d+) is not in bounds, numpy accepts (.*)", str(error)):
        return f"seed_everything is {seed[1]}; expected a whole number {seed[2]}"
    text, name = of_the_value(str(error), arguments), _constructor_of(error)
    text += path_elsewhere(text, arguments)
    return text if not name or name in UNNAMED or name in text else f"{name}: {text}"


def _constructor_of(error: BaseException) -> str:
    name, trace = "", error.__traceback__
    while trace is not None:
        code, variables = trace.tb_frame.f_code, trace.tb_frame.f_locals
        if "jsonargparse" in code.co_filename:
            name = ""
        elif not name and code.co_name in ("__init__", "__post_init__") and "self" in variables:
            name = type(variables["self"]).__name__
        trace = trace.tb_next
    earlier = error.__cause__ or error.__context__
    return _constructor_of(earlier) if name in ("", "QeRLCLI") and earlier is not None else name


def _of_the_cause(place: str, cause: str, arguments: Sequence[str]) -> str:
    """Rewrite jsonargparse's description of an error at a setting."""
    if "Dict must include a class_path" in cause:  # the settings of a class without the class
        example = EXAMPLES.get(place, "a class by its path")
        return f"{place} has settings and no class_path; give it first, as in --{place} {example}"
    if no_path := re.match(
        r"(?:Type typing.Callable.* but got|Does not implement protocol .* Got value:) (\S+)", cause
    ):
        return _expected(place, no_path[1].rstrip("."), f"a class by its path{_such_as(place)}", arguments)
    classes = re.findall(r"class_path[ =]'([\w.]+)'", cause)
    named = classes[:1] if classes[:1] != ["qerl_pl.rewards.base.WeightedReward"] else []
    place = ": ".join(filter(None, [place, *named, *re.findall(f"{KEY}:", cause)[-1:]]))
    if "'NoneType' object has no attribute 'keys'" in cause:
        return f"{place}: init_args has no value; give settings below it, or leave it out"
    if union := re.search(r"any of the Union subtypes Subtypes: \[(.*?)\] Errors", cause):
        return f"{place} has no usable value; expected {' or '.join(_kinds(union[1], place))}"
    if no_mapping := re.match(r"Unable to load config '(.*?)'", cause):
        return _expected(place, no_mapping[1], "a mapping of settings, or a YAML file with one", arguments)
    if option := re.search(r"Option '([\w.]+)' is not accepted", cause):
        known = _parameters(classes[-1]) if classes else []
        where = _where(rf"\b{option[1]}\s*:", arguments)
        return f"{place} has no setting {option[1]}{where}; {_nearest(option[1], known)}"
    if name := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", cause):
        where = _where(rf"{re.escape(name[1])}\.{name[2]}\b", arguments)
        return f"{place}: there is no {name[2]!r} in {name[1]}{where}; {_nearest(name[2], _members(name[1]))}"
    module = re.search(r"No module named '([\w.]+)'", cause)
    missing = module or re.search(r"Requirement '(\w+)[^']*' not met", cause)  # Lightning's hint has other versions
    if missing and (how := not_installed(missing[1])):
        return f"{place}: {how}"
    if module:
        where = _where(rf"\b{re.escape(module[1])}\b", arguments)
        return (
            f"{place}: there is no module {module[1]}{where}; modules are searched for in the working directory "
            f"{Path.cwd()} and among the installed packages{module_elsewhere(module[1], arguments)}"
        )
    if lacking := re.search(r"Import path ([\w.]+) does not implement protocol (\w+)", cause):
        methods = "; ".join(_methods_to_mend(lacking[1], lacking[2]))
        return f"{place} is {lacking[1]}; expected a class with these methods, annotated like this: {methods}"
    if other := re.search(r"Unexpected import object (.*)\. Got value: (.*)", cause):
        return f"{place} is {other[2]}, which is {other[1][:100]}; expected the path of a function or a class"
    if needed := re.search(r"the following arguments are required: (.+)", cause):
        return f"{place} needs {needed[1]} (under init_args)"
    if value := re.search(r"Expected a (.+?)\. Got value: (.*?)(?:\. Got value: |$)", cause):
        return _expected(place, value[2], _kind(value[1]), arguments)
    if path := re.search(r"Expected a dot import path string: (.+)", cause):
        return _expected(place, path[1], f"a function or class by its path{_such_as(place)}", arguments)
    if classes:
        cause = re.sub(r"^Problem with given class_path '[\w.]+': ", "", cause)
    return f"{place}: {cause[:300]}" if place else cause[:300]


def _expected(place: str, value: str, kinds: str, arguments: Sequence[str]) -> str:
    source = FOLLOWING.get(place)  # the user has set this one
    place = source if isinstance(source, str) else place
    if value == "None":
        only_base = all(path == BASE_CONFIG for path in config_files(arguments))
        start = "; give configurations by -c, such as -c quickstart" if only_base else ""
        return f"{place} is null, or not given; expected {kinds}{start}"
    name = re.escape(re.split(r"[.: ]+", place)[-1])
    where = _where(rf"\b(?:{name}|class_path)\b[\"']?\s*:.*(?<![\w.]){re.escape(value)}(?![\w.])", arguments)
    near = get_close_matches(value, re.findall(r"'(\w+)'", kinds), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{place} is {value[:100]!r}{where}; expected {kinds}{hint}"


def _such_as(place: str) -> str:
    return f", such as {EXAMPLES[place]}" if place in EXAMPLES else ""


def _kinds(types: str, place: str) -> list[str]:
    """Describe the types of a union, which jsonargparse lists as text, in words. ``place`` is the setting."""
    return [_kind(text.strip(), place) for text in re.findall(r"typing\.Literal\[.*?\]|[^,]+", types)]


def _kind(text: str, place: str = "") -> str:
    """Describe a type in words; a dataclass is written as a mapping."""
    if text.startswith(OF_CLASSES):
        return "a class by its path"
    if match := re.fullmatch(r"typing\.Literal\[(.*)\]|<class '([\w.]+)'>", text):
        return match[1] or TYPES.get(match[2]) or _mapping(match[2], place) or match[2]
    return text


def _mapping(path: str, place: str) -> str | None:
    """Describe a dataclass, given by its import path, as a mapping such as the example of a setting or, if it has none,
    the first default of the class. Returns None for other classes."""
    kind = pkgutil.resolve_name(path) if "." in path else None
    if not is_dataclass(kind):
        return None
    defaults = ({field.name: field.default} for field in fields(kind) if field.default not in (MISSING, None))
    return MAPPING + (EXAMPLES.get(place) or yaml.safe_dump(next(defaults, {}), default_flow_style=True).strip())


def _nearest(name: str, known: Sequence[str]) -> str:
    near = sorted(other for other in known if other.lower() == name.lower())[:1]  # a class comes before a module
    near = near or get_close_matches(name, known, n=2, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known names: {', '.join(known)[:200]}" if known else "--help lists all settings"


def _parameters(path: str) -> list[str]:
    """List the parameters of a class or function, given by its import path."""
    try:
        parameters = inspect.signature(pkgutil.resolve_name(path)).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return []
    return [parameter for parameter in parameters if parameter not in ("self", "args", "kwargs", "params")]


def _methods_to_mend(path: str, protocol: str) -> list[str]:
    """List a protocol's methods that the class ``path`` lacks or defines with another signature."""
    given, members = pkgutil.resolve_name(path), vars(pkgutil.resolve_name(f"{PROTOCOLS[protocol]}.{protocol}"))
    methods = [name for name, value in members.items() if inspect.isfunction(value) and not name.startswith("_")]
    expected = {name: f"{name}{inspect.signature(members[name])}" for name in methods}
    present = {name: f"{name}{inspect.signature(getattr(given, name))}" for name in methods if hasattr(given, name)}
    return [text.replace("'", "") for name, text in expected.items() if present.get(name) != text]


def _members(path: str) -> list[str]:
    """List the public classes, functions and submodules of a module."""
    try:
        module = importlib.import_module(path)
    except ImportError:
        return []
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "").startswith(path)
    ]
    names += [submodule.name for submodule in pkgutil.iter_modules(getattr(module, "__path__", []))]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def _where(pattern: str, arguments: Sequence[str]) -> str:
    """Find the first line that matches a pattern in the YAML files of a command line, as text such as `` (FILE, line
    3)``."""
    for path in config_files(arguments):
        if path.is_file():
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
                if re.search(pattern, line.partition("#")[0]):
                    return f" ({path}, line {number})"
    return ""


def _unknown_key(key: str, keys: Sequence[str], arguments: Sequence[str]) -> str:
    leaf = key.rpartition(".")[2]
    files = [argument for path in config_files(arguments) if _has(path, key) for argument in ("-c", str(path))]
    if usual := usual_setting(key):
        near = [usual]
    else:
        near = [other for other in keys if other.rpartition(".")[2] == leaf][:1]  # right name, wrong section
        near = near or get_close_matches(key, keys, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "--help lists all settings"
    where = _where(rf"\b{re.escape(leaf)}\+?[\"']?\s*:", files)
    return f"there is no setting {key}{where}; {hint}"


def _has(path: Path, key: str) -> bool:
    """Tell whether a YAML file sets a dotted key."""
    settings: Any = plain_yaml(path)
    for name in key.split("."):
        if not isinstance(settings, Mapping) or not {name, f"{name}+"} & settings.keys():
            return False
        settings = settings.get(name, settings.get(f"{name}+"))
    return True
