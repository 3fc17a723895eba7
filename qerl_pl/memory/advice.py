"""Advice on which settings to change so that a run fits on a GPU."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qerl_pl.memory.fitting import fitted, usable
from qerl_pl.memory.plan import MOMENTS, Plan
from qerl_pl.memory.settings import EngineMemory, RunMemory, state_bytes
from qerl_pl.memory.shape import ModelShape


@dataclass(frozen=True)
class Change:
    """Advice to change one setting."""

    key: str
    """Key of the setting in the YAML file, such as ``model.micro_batch_tokens``."""
    value: Any
    """New value of the setting. If the present value is a number v, the new one is the largest of v/2, v/4, ... with
    which the run fits or, if it fits with none of them, the one that saves the most."""
    peak: int
    """Predicted peak of the run's GPU memory in bytes, with this change and all changes before it in the list."""


def plan_for(shape: ModelShape, run: RunMemory, gpu_bytes: int) -> Plan:
    """Plan the GPU memory of a run that is about to start, and warn if it may not fit: when memory runs out in training
    passes, the run continues with passes that need less (``retry.MicroBatchBudget``). Raises ValueError if the rollout
    engine, which cannot be made smaller after its start, does not fit with a KV cache for a single longest sequence."""
    planned = fitted(shape, run, gpu_bytes)
    if planned.peak > usable(gpu_bytes):
        message = (
            f"{planned.summary()}, more than {usable(gpu_bytes) / 2**30:.1f} of the GPU's {gpu_bytes / 2**30:.1f} GiB; "
            + advice_text(advice(shape, run, gpu_bytes), gpu_bytes)
        )
        if max(planned.total("start"), planned.total("rollout")) > gpu_bytes:
            raise ValueError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return planned


def advice(shape: ModelShape, run: RunMemory, gpu_bytes: int) -> list[Change]:
    """List the changes of settings that together make a run fit on a GPU, in the order of ``savings``: changes that
    harm the run least come first. A change is left out if it does not reduce the bytes that exceed the usable memory,
    or if the other changes suffice without it. If the run does not fit even with all changes, the ``peak`` of the last
    change, which is that with all listed changes, is larger than the part of the GPU's memory that a run may use
    (``fitting.usable``).
    """

    def planned(changes: Mapping[str, Any]) -> Plan:
        return fitted(shape, with_changes(run, changes), gpu_bytes)

    def excess(changes: Mapping[str, Any]) -> int:
        plan = planned(changes)
        return sum(max(0, plan.total(moment) - usable(gpu_bytes)) for moment in MOMENTS)

    chosen: dict[str, Any] = {}
    lowest = excess(chosen)
    for key, values in savings(run).items():
        tried = dict(chosen)
        for value in values if lowest else ():
            if (bytes_over := excess({**tried, key: value})) < lowest:
                chosen, lowest = {**tried, key: value}, bytes_over
            if not bytes_over:
                break
    for key in list(chosen):
        others = {other: value for other, value in chosen.items() if other != key}
        if not excess(others):
            chosen = others
    together: dict[str, Any] = {}
    return [Change(key, value, planned(together := {**together, key: value}).peak) for key, value in chosen.items()]


def advice_text(changes: Sequence[Change], gpu_bytes: int) -> str:
    """Put the changes into a sentence for the user."""
    if not changes:
        return "no setting would help: take a smaller base, a 4-bit one, or a GPU with more memory"
    values = ", ".join(
        f"{change.key}: {change.value if isinstance(change.value, str) else json.dumps(change.value)}"
        for change in changes
    )
    peak = changes[-1].peak
    fits = f"fits ({peak / 2**30:.1f} GiB)" if peak <= usable(gpu_bytes) else f"still takes {peak / 2**30:.1f} GiB"
    return f"with {values} it {fits}"


ENGINE = "model.engine.init_args."


def savings(run: RunMemory) -> dict[str, list[Any]]:
    """Return the settings whose change may make a run fit on a GPU, by their keys in the YAML file. Settings whose
    change harms a run least come first. Each has a list of values that need less memory than the present one, starting
    with the value closest to the present one; the list is empty if there is no such value."""
    engine = run.engine or EngineMemory()
    values_of = {
        "model.micro_batch_tokens": _halved(run.micro_batch_tokens, run.longest_row),
        ENGINE + "kv_cache_bytes": [] if engine.kv_cache_bytes is None else [None],
        ENGINE + "sleep_level": [1] if engine.sleep_level == 0 else [],
        "model.gradient_checkpointing": [] if run.gradient_checkpointing == "auto" else ["auto"],
        ENGINE + "max_num_batched_tokens": _halved(engine.batched_tokens, 1024),
        "model.optimizer": ["bitsandbytes.optim.AdamW8bit"] if run.state_bytes > 2 else [],
        ENGINE + "max_num_seqs": _halved(engine.max_num_seqs, 8),
        ENGINE + "kv_cache_dtype": [] if engine.kv_cache_dtype.startswith("fp8") else ["fp8"],
        ENGINE + "enforce_eager": [] if engine.enforce_eager else [True],
        "model.sampling.max_tokens": _halved(run.completion_tokens, 256),
    }
    return {key: values for key, values in values_of.items() if run.engine or not key.startswith(ENGINE)}


def with_changes(run: RunMemory, changes: Mapping[str, Any]) -> RunMemory:
    """Return a run's memory settings with some values changed. ``changes`` maps keys of the YAML file, which
    ``savings`` returns, to new values."""
    engine = {key.removeprefix(ENGINE): value for key, value in changes.items() if key.startswith(ENGINE)}
    if run.engine and engine:
        run = replace(run, engine=replace(run.engine, **engine))
    for name in ("micro_batch_tokens", "gradient_checkpointing"):
        run = replace(run, **{name: changes.get(f"model.{name}", getattr(run, name))})
    if "model.optimizer" in changes:
        run = replace(run, state_bytes=state_bytes(changes["model.optimizer"]))
    if tokens := changes.get("model.sampling.max_tokens"):
        # both lengths are equal if model.val_sampling is null; evaluations then follow training
        follows = run.evaluation_tokens == run.completion_tokens
        run = replace(run, completion_tokens=tokens, evaluation_tokens=tokens if follows else run.evaluation_tokens)
    return run


def _halved(value: int | None, smallest: int) -> list[int]:
    """Return value/2, value/4, ..., of which the last is ``smallest``; empty if ``value`` is None or not larger than
    ``smallest``."""
    halves = []
    while value is not None and value > smallest:
        value = max(smallest, value // 2)
        halves.append(value)
    return halves
