"""Advice on which settings to change so that a run fits on a GPU."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from qerl_pl.memory.fitting import fitted, usable
from qerl_pl.memory.plan import MOMENTS, Plan
from qerl_pl.memory.settings import DEFAULT_BATCHED_TOKENS, EngineMemory, RunMemory
from qerl_pl.memory.shape import ModelShape


@dataclass(frozen=True)
class Change:
    """Advice to change one setting."""

    key: str
    """Key of the setting in the YAML file, such as ``model.micro_batch_tokens``."""
    value: Any
    """New value of the setting. If it is a number, it is the largest of value/2, value/4, ... that makes the run
    fit."""
    peak: int
    """Peak bytes of the run with this change and the changes listed before it."""


class Lever(NamedTuple):
    """Setting that can be changed to save memory."""

    key: str
    values: Callable[[RunMemory], Iterator[Any]]
    """Function that yields the values of the setting that save memory, starting with the one that costs the run least;
    it yields nothing if the run already has such a value."""
    apply: Callable[[RunMemory, Any], RunMemory]


def plan_for(shape: ModelShape, run: RunMemory, gpu_bytes: int) -> Plan:
    """Plan the memory of a run that is about to start; warn if it may not fit.

    Training passes that are too large only cause a warning, because the run halves them when memory runs out
    (``retry.MicroBatchBudget``). A rollout engine that is too large is an error, because it cannot be made smaller
    after its start.

    Raises:
        ValueError: the rollout engine does not fit, even with a KV cache for a single sequence of the longest length.
    """
    found = fitted(shape, run, gpu_bytes)
    if found.peak > usable(gpu_bytes):
        said = (
            f"{found.summary()}, more than {usable(gpu_bytes) / 2**30:.1f} of the GPU's {gpu_bytes / 2**30:.1f} GiB; "
            + advice_text(advice(shape, run, gpu_bytes), gpu_bytes)
        )
        if max(found.total("start"), found.total("rollout")) > gpu_bytes:
            raise ValueError(said)
        warnings.warn(said, RuntimeWarning, stacklevel=2)
    return found


def advice(shape: ModelShape, run: RunMemory, gpu_bytes: int) -> list[Change]:
    """List the changes of settings that together make a run fit on a GPU, in the order of ``LEVERS``, which starts with
    the ones that cost the run least.

    A change is left out if it does not lower the bytes by which the run exceeds the GPU's memory, or if the other
    changes suffice without it. If all changes together do not suffice, ``peak`` of the last one is above
    ``fitting.usable``.
    """

    def planned(chosen: Sequence[tuple[Lever, Any]]) -> Plan:
        changed = run
        for lever, value in chosen:
            changed = lever.apply(changed, value)
        return fitted(shape, changed, gpu_bytes)

    def excess(chosen: Sequence[tuple[Lever, Any]]) -> int:
        found = planned(chosen)
        return sum(max(0, found.total(moment) - usable(gpu_bytes)) for moment in MOMENTS)

    chosen: list[tuple[Lever, Any]] = []
    lowest = excess(chosen)
    for lever in LEVERS:
        best = None
        for value in lever.values(run) if lowest else ():
            found = excess([*chosen, (lever, value)])
            if found < lowest:
                best, lowest = (lever, value), found
            if not found:
                break
        if best:
            chosen.append(best)
    for change in list(chosen):
        others = [other for other in chosen if other is not change]
        if not excess(others):
            chosen = others
    return [Change(lever.key, value, planned(chosen[: i + 1]).peak) for i, (lever, value) in enumerate(chosen)]


def advice_text(changes: Sequence[Change], gpu_bytes: int) -> str:
    """Put the changes into a sentence for the user."""
    if not changes:
        return "no setting would help: take a smaller base, a 4-bit one, or a GPU with more memory"
    said = ", ".join(f"{change.key}: {_in_yaml(change.value)}" for change in changes)
    peak = changes[-1].peak
    fits = f"fits ({peak / 2**30:.1f} GiB)" if peak <= usable(gpu_bytes) else f"still takes {peak / 2**30:.1f} GiB"
    return f"with {said} it {fits}"


def _in_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _halved(value: int | None, smallest: int) -> Iterator[int]:
    while value is not None and value > smallest:
        value = max(smallest, value // 2)
        yield value


def _once(value: Any, *, wanted: bool) -> Iterator[Any]:
    return iter([value] if wanted else [])


def _with_completions(run: RunMemory, tokens: int) -> RunMemory:
    """Set the maximum length of training completions, and the one of evaluation completions if both were equal.

    Both are equal if model.val_sampling is null.
    """
    follows = run.evaluation_tokens == run.completion_tokens
    return replace(run, completion_tokens=tokens, evaluation_tokens=tokens if follows else run.evaluation_tokens)


def _of_engine(
    name: str,
    values: Callable[[EngineMemory], Iterator[Any]],
    change: Callable[[Any], dict[str, Any]],
) -> Lever:
    def apply(run: RunMemory, value: Any) -> RunMemory:
        assert run.engine is not None
        return replace(run, engine=replace(run.engine, **change(value)))

    return Lever(f"model.engine.init_args.{name}", lambda run: values(run.engine) if run.engine else iter([]), apply)


LEVERS = (
    Lever(
        "model.micro_batch_tokens",
        lambda run: _halved(run.micro_batch_tokens, run.longest_row),
        lambda run, tokens: replace(run, micro_batch_tokens=tokens),
    ),
    _of_engine(
        "kv_cache_bytes",
        lambda engine: _once(None, wanted=engine.kv_cache_bytes is not None),
        lambda size: {"kv_cache_bytes": size},
    ),
    _of_engine(
        "sleep_level",
        lambda engine: _once(1, wanted=engine.sleep_level == 0),
        lambda level: {"sleep_level": level},
    ),
    Lever(
        "model.gradient_checkpointing",
        lambda run: _once("auto", wanted=run.gradient_checkpointing != "auto"),
        lambda run, setting: replace(run, gradient_checkpointing=setting, offload_checkpoints=False),
    ),
    _of_engine(
        "max_num_batched_tokens",
        lambda engine: _halved(engine.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS, 1024),
        lambda tokens: {"max_num_batched_tokens": tokens},
    ),
    Lever(
        "model.optimizer",
        lambda run: _once("bitsandbytes.optim.AdamW8bit", wanted=run.state_bytes > 2),
        lambda run, _: replace(run, state_bytes=2),
    ),
    _of_engine(
        "max_num_seqs",
        lambda engine: _halved(engine.max_num_seqs, 8),
        lambda number: {"max_num_seqs": number},
    ),
    _of_engine(
        "kv_cache_dtype",
        lambda engine: _once("fp8", wanted=not engine.kv_cache_dtype.startswith("fp8")),
        lambda dtype: {"kv_cache_dtype": dtype},
    ),
    _of_engine(
        "enforce_eager",
        lambda engine: _once(True, wanted=not engine.enforce_eager),
        lambda on: {"enforce_eager": on},
    ),
    Lever(
        "model.sampling.max_tokens",
        lambda run: _halved(run.completion_tokens, 256),
        _with_completions,
    ),
)
"""Settings that ``advice`` may change, the least harmful first."""
