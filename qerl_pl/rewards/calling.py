"""Call a reward function with prompts, completions and columns of the data set as keyword arguments, as its parameters
name them.

A reward with the parameters ``prompts`` and ``completions``, in any order, or whose ``completions`` are annotated with
``Completion``, gets lists of ``Prompt`` and ``Completion``. Any other is called as TRL 1.16 calls reward functions:
``completions`` are texts or lists of messages, and every column of the data set is an argument of its name. Letter B:
number of completions in the batch.
"""

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from qerl_pl.common.isolation import loaded
from qerl_pl.common.types import Completion, Prompt

OBJECTS = {"prompts", "completions"}
SAMPLED = ("prompts", "completions", "completion_ids")
LONGEST_NOTE = 200  # characters; a longer value that a reward logs by ``log_extra`` is cut to this length
_NO_COLUMN = ("prompt", "completion", "completion_ids")  # columns that TRL does not pass as arguments of their names
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Progress(NamedTuple):
    """Number of optimizer steps that a run has done so far and will have done at its end. Rewards that are called as
    TRL calls them can read both from their argument ``trainer_state``."""

    step: int = 0
    max_steps: int = 0


class _State:
    """Substitute for ``transformers.TrainerState``, which rewards written for TRL may read. transformers, which takes
    seconds to import, is imported only when an attribute is first read."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __getattr__(self, name: str) -> Any:
        from transformers import TrainerState

        vars(self).update(vars(TrainerState(global_step=self._progress.step, max_steps=self._progress.max_steps)))
        return object.__getattribute__(self, name)


class Called(NamedTuple):
    """Result of one call of a reward on B completions, with the values that the reward logged."""

    scores: Any
    """Return value of the reward, not yet checked."""
    notes: list[str]
    """[B] texts with the values that the reward logged for each row by ``log_extra``."""
    metrics: dict[str, list[float]]
    """Numbers that the reward logged for the batch by ``log_metric``, by name."""


def takes_objects(name: str, reward: Callable[..., Any]) -> bool:
    """Return whether a reward is called with ``Prompt`` and ``Completion`` objects; if not, it is called as TRL calls
    rewards. Raises ValueError, with the reward's ``name``, if its parameters name neither prompts nor completions."""
    signature = _signature(name, reward)
    kinds = {parameter.name: parameter.kind for parameter in signature.parameters.values()}
    names = {parameter for parameter, kind in kinds.items() if kind not in _VARIADIC}
    is_open = inspect.Parameter.VAR_KEYWORD in kinds.values()
    if not is_open and not names & set(SAMPLED):
        raise ValueError(
            f"reward {name!r} takes {signature}; expected two parameters named prompts and completions, or, as TRL "
            f"calls rewards, some of {', '.join(SAMPLED)} and columns of the data set"
        )
    annotated = "completions" in names and re.search(
        r"\bCompletion\b", str(signature.parameters["completions"].annotation)
    )
    return bool(annotated) or (not is_open and names == OBJECTS)


def call(
    name: str,
    reward: Callable[..., Any],
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    messages: bool | None = None,
    progress: Progress = Progress(),  # noqa: B008  (a NamedTuple is constant)
) -> Called:
    """Call a reward without a ``judge`` method on a batch; returns its return value and the values that it logged by
    ``log_extra`` and ``log_metric``. A coroutine, which TRL also accepts, is run to its end.

    A reward that is called as TRL calls rewards gets prompts and completions as lists of messages if ``messages`` is
    True, as texts if it is False, and as TRL does if it is None: as messages if the questions in the data set are lists
    of messages. It gets ``progress``, the numbers of optimizer steps done and in all, as ``trainer_state``. Raises
    ValueError if a parameter without a default is not the name of a column.
    """
    if takes_objects(name, reward):
        objects = {"prompts": list(prompts), "completions": list(completions)}
        return Called(_finished(_called(name, reward, _columns(prompts) | objects)), [""] * len(prompts), {})
    logged: list[list[str]] = [[] for _ in prompts]
    metrics: dict[str, list[float]] = {}

    def log_extra(column: str, values: Sequence[Any]) -> None:
        if len(values) != len(logged):
            raise ValueError(f"log_extra({column!r}) has {len(values)} values for {len(logged)} rows")
        for row, value in zip(logged, values, strict=True):
            row.append(f"{column}: {' '.join(str(value).split())[:LONGEST_NOTE]}")

    def log_metric(metric: str, value: float) -> None:
        metrics.setdefault(metric, []).append(float(value))

    arguments = _columns(prompts) | _sampled(prompts, completions, messages)
    arguments |= {"trainer_state": _State(progress), "log_extra": log_extra, "log_metric": log_metric}
    try:
        scores = _finished(_called(name, reward, arguments))
    except AttributeError as error:
        if str(error).startswith(("'str' object", "'list' object")):
            others = ", ".join(key for key in _signature(name, reward).parameters if key not in OBJECTS)
            error.args = (f"{error}; a reward with parameters besides prompts and completions ({others}) gets texts",)
        raise
    return Called(scores, ["; ".join(row) for row in logged], metrics)


def check_columns(name: str, reward: Callable[..., Any], prompts: Sequence[Prompt]) -> None:
    """Raise ValueError if the data set lacks a column that the reward's parameters name."""
    others = () if takes_objects(name, reward) else (*SAMPLED, "trainer_state", "log_extra", "log_metric")
    _bound(name, reward, dict.fromkeys((*_columns(prompts), *sorted(OBJECTS), *others)))


def _columns(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Return the data set's columns by name, [B] values each. If no column is named ``answer``, this key has the known
    answers."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.row if name not in _NO_COLUMN)
    columns = {name: [prompt.row.get(name) for prompt in prompts] for name in names}
    return {"answer": [prompt.answer for prompt in prompts], **columns}


def _sampled(
    prompts: Sequence[Prompt], completions: Sequence[Completion], messages: bool | None
) -> dict[str, list[Any]]:
    if messages is None:
        messages = any(prompt.conversational for prompt in prompts)
    asked = [[dict(message) for message in prompt.messages] for prompt in prompts]
    answered = [[{"role": "assistant", "content": completion.text}] for completion in completions]
    if not messages:
        asked = [chat[-1]["content"] if chat else "" for chat in asked]
        answered = [completion.text for completion in completions]
    tokens = [list(completion.tokens) for completion in completions]
    named = {"completion_ids": tokens} if any(tokens) else {}  # the completions of a file are texts without tokens
    return {"prompts": asked, "completions": answered, **named}


def _called(name: str, reward: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    # Arguments are passed by keyword, as TRL does, because a decorator's wrapper may have its parameters in another
    # order than the function whose signature it shows. A wrapper that takes no keyword arguments gets the arguments in
    # the order of the wrapped function's parameters.
    bound = _bound(name, reward, values)
    first, named = [], {}
    for parameter in bound.signature.parameters.values():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            first.append(bound.arguments.get(parameter.name, parameter.default))
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= bound.arguments[parameter.name]
        elif parameter.name in bound.arguments:
            named[parameter.name] = bound.arguments[parameter.name]
    try:
        inspect.signature(reward, follow_wrapped=False).bind(*first, **named)
    except TypeError:
        return reward(*bound.args, **bound.kwargs)
    return reward(*first, **named)


def _bound(name: str, reward: Callable[..., Any], values: Mapping[str, Any]) -> inspect.BoundArguments:
    signature = _signature(name, reward)
    bound = signature.bind_partial()
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[parameter.name] = {key: values[key] for key in values if key not in signature.parameters}
        elif parameter.name in values:
            bound.arguments[parameter.name] = values[parameter.name]
        elif parameter.default is inspect.Parameter.empty:
            raise ValueError(
                f"reward {name!r} takes {parameter.name!r}, which the data does not have; expected one of "
                f"{', '.join(values)}"
            )
    return bound


def _signature(name: str, reward: Callable[..., Any]) -> inspect.Signature:
    kind: Any = reward if inspect.isclass(reward) else type(reward)
    torch = loaded("torch")
    # a module of torch passes any arguments on to its method ``forward``
    method = "forward" if torch is not None and issubclass(kind, torch.nn.Module) else "__call__"
    try:
        if not inspect.isclass(reward):
            return inspect.signature(getattr(reward, method) if method == "forward" else reward)
        if not any("__call__" in vars(base) for base in inspect.getmro(reward)):
            raise TypeError("its instances cannot be called")
        whole = inspect.signature(getattr(reward, method))
        return whole.replace(parameters=list(whole.parameters.values())[1:])  # without self
    except (TypeError, ValueError):  # e.g. a function written in C has no signature
        raise ValueError(
            f"reward {name!r} does not say which parameters it has; expected a Python function of prompts and "
            "completions, or a class with such a __call__"
        ) from None


def _finished(scores: Any) -> Any:
    async def awaited() -> Any:
        return await scores

    return asyncio.run(awaited()) if inspect.isawaitable(scores) else scores
