"""Call a reward: its parameters get prompts, completions and columns of the data set by their names.

A reward whose parameters are ``prompts`` and ``completions``, in any order, or whose ``completions`` are annotated with
``Completion``, gets ``Prompt`` and ``Completion``. Any other reward is called as TRL 1.16 calls reward functions:
``completions`` are texts or lists of messages. Every column of the data set is an argument.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from qerl_pl.common.types import Completion, Prompt

OBJECTS = {"prompts", "completions"}
SAMPLED = ("prompts", "completions", "completion_ids")
LONGEST_NOTE = 200  # characters of a value that a reward logs for a row
_NO_COLUMN = ("prompt", "completion", "completion_ids")  # TRL gives these columns no argument of their name
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Progress(NamedTuple):
    """Progress of the run, which rewards in TRL's form may read in ``trainer_state``."""

    step: int = 0
    """Optimizer steps done."""
    max_steps: int = 0
    """Optimizer steps of the whole run."""


class _State:
    """``transformers.TrainerState`` of the run; it is made when an attribute is first read, because its import takes
    seconds and few rewards read it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __getattr__(self, name: str) -> Any:
        from transformers import TrainerState

        vars(self).update(vars(TrainerState(global_step=self._progress.step, max_steps=self._progress.max_steps)))
        return object.__getattribute__(self, name)


class Called(NamedTuple):
    """Result of one call of a reward, with the values that it logged."""

    scores: Any
    """Return value of the reward, not checked."""
    notes: list[str]
    """[B] values that the reward logged for each row by ``log_extra``; empty texts if there are none."""
    metrics: dict[str, list[float]]
    """Numbers that the reward logged for the batch by ``log_metric``."""


def takes_objects(name: str, reward: Callable[..., Any]) -> bool:
    """Return whether a reward gets ``Prompt`` and ``Completion``; otherwise it is called as TRL calls it.

    Args:
        name: name of the reward, for the error.
        reward: a function or another callable; of a class, the signature of its ``__call__`` is read.

    Raises:
        ValueError: the parameters name neither prompts nor completions.
    """
    signature = _signature(name, reward)
    names = {each.name for each in signature.parameters.values() if each.kind not in _VARIADIC}
    is_open = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
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
    """Call a reward with a batch. A coroutine, which TRL also accepts as a reward, is run to its end.

    Args:
        name: name of the reward, for errors.
        reward: a reward without a ``judge`` method.
        prompts: [B] the prompt of each row.
        completions: [B] the completions, with their text.
        messages: whether a reward in TRL's form gets lists of messages (True) or texts (False); None: messages if the
            data set's question is a list of messages, as in TRL.
        progress: given to rewards in TRL's form as ``trainer_state``.

    Raises:
        ValueError: a parameter has no default and names no column of the data set.
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

    given = _columns(prompts) | _sampled(prompts, completions, messages)
    given |= {"trainer_state": _State(progress), "log_extra": log_extra, "log_metric": log_metric}
    try:
        scores = _finished(_called(name, reward, given))
    except AttributeError as error:
        if str(error).startswith(("'str' object", "'list' object")):
            more = ", ".join(key for key in _signature(name, reward).parameters if key not in OBJECTS)
            error.args = (f"{error}; a reward with parameters besides prompts and completions ({more}) gets texts",)
        raise
    return Called(scores, ["; ".join(row) for row in logged], metrics)


def check_columns(name: str, reward: Callable[..., Any], prompts: Sequence[Prompt]) -> None:
    """Check that the data set has the columns that a reward's parameters name; the reward is not called.

    Raises:
        ValueError: it lacks one; the message has the names that there are.
    """
    more = () if takes_objects(name, reward) else (*SAMPLED, "trainer_state", "log_extra", "log_metric")
    _bound(name, reward, dict.fromkeys((*_columns(prompts), *sorted(OBJECTS), *more)))


def _columns(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Return the columns of the data set, [B] values each, None where a row lacks one; ``answer`` is the known answer
    if the data set has no column of that name."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.row if name not in _NO_COLUMN)
    found = {name: [prompt.row.get(name) for prompt in prompts] for name in names}
    return {"answer": [prompt.answer for prompt in prompts], **found}


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
    return {"prompts": asked, "completions": answered, "completion_ids": tokens}


def _called(name: str, reward: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a reward by keywords, as TRL does, since a decorator's wrapper may have its parameters in another order than
    the function whose signature it shows. A wrapper that takes no keywords gets them in that function's order."""
    bound = _bound(name, reward, given)
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


def _bound(name: str, reward: Callable[..., Any], given: Mapping[str, Any]) -> inspect.BoundArguments:
    signature = _signature(name, reward)
    bound = signature.bind_partial()
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            rest = {key: value for key, value in given.items() if key not in signature.parameters}
            bound.arguments[parameter.name] = rest
        elif parameter.name in given and parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            bound.arguments[parameter.name] = given[parameter.name]
        elif parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            raise ValueError(
                f"reward {name!r} takes {parameter.name!r}, which the data does not have; expected one of "
                f"{', '.join(given)}"
            )
    return bound


def _signature(name: str, reward: Callable[..., Any]) -> inspect.Signature:
    try:
        if not inspect.isclass(reward):
            return inspect.signature(reward)
        if not any("__call__" in vars(each) for each in inspect.getmro(reward)):
            raise TypeError("its instances cannot be called")
        whole = inspect.signature(reward.__call__)
        return whole.replace(parameters=list(whole.parameters.values())[1:])  # without self
    except (TypeError, ValueError):  # of a function written in C, say
        raise ValueError(
            f"reward {name!r} does not say which parameters it has; expected a Python function of prompts and "
            "completions, or a class with such a __call__"
        ) from None


def _finished(found: Any) -> Any:
    return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found


async def _awaited(found: Any) -> Coroutine[Any, Any, Any]:
    return await found
