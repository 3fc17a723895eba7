"""Faults of rollout engines: the engine holds another policy than it was given, or computes with another one.

A fault is a function of an engine and an adapter that returns a faulty engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from qerl_pl.common.types import Completion
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine

Adapter = dict[str, Tensor]


class Instead:
    """Wraps an object and replaces some of its methods by other functions."""

    def __init__(self, real: Any, **others: Callable[..., Any]) -> None:
        self._real = real
        self._others = others

    def __getattr__(self, name: str) -> Any:
        return self._others[name] if name in self._others else getattr(self._real, name)


def loading(engine: Any, change: Callable[[Adapter], Adapter]) -> Any:
    """Make an engine that loads a changed adapter instead of the given one."""
    return Instead(engine, load_adapter=lambda adapter: engine.load_adapter(change(adapter)))


def old_adapter(engine: Any, adapter: Adapter) -> Any:
    """Keep ``adapter`` for good; adapters that are loaded later never reach the engine."""
    old = {name: tensor.clone() for name, tensor in adapter.items()}
    return loading(engine, lambda _: old)


def lost_update(engine: Any, adapter: Adapter) -> Any:
    """Lose the next adapter that is loaded; all later ones reach the engine."""
    arrived: list[Adapter] = []

    def load(new: Adapter) -> None:
        if arrived:
            engine.load_adapter(new)
        arrived.append(new)

    return Instead(engine, load_adapter=load)


def no_adapter(engine: Any, adapter: Adapter) -> Any:
    """Load matrices of zeros instead of every adapter."""
    zeros = {name: torch.zeros_like(tensor) if ".lora_" in name else tensor for name, tensor in adapter.items()}
    return loading(engine, lambda _: zeros)


def swapped_matrix(engine: Any, adapter: Adapter) -> Any:
    """Load the matrix A of o_proj of layer 0 also in layer 1."""
    wrong = "base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"
    return loading(engine, lambda new: {**new, wrong: new[wrong.replace("layers.1", "layers.0")]})


def unused_adapter(engine: Any, adapter: Adapter) -> Any:
    """Load the adapter, but sample from the base without it."""
    return Instead(engine, generate=lambda *new: engine.generate(*new, adapter=False))


def noise_left(engine: Any, adapter: Adapter) -> Any:
    """Add noise to the weights of the norms where there should be none, but report that no norm has noise."""

    def set_norm_noise(noise: NormNoise) -> int:
        return engine.set_norm_noise(replace(noise, sigma=noise.sigma or 0.1)) * (noise.sigma > 0)

    return Instead(engine, set_norm_noise=set_norm_noise)


def noise_missing(engine: Any, adapter: Adapter) -> Any:
    """Report that noise is on the norms, but remove it."""

    def set_norm_noise(noise: NormNoise) -> int:
        norms = engine.set_norm_noise(noise)
        engine.set_norm_noise(NormNoise())
        return norms

    return Instead(engine, set_norm_noise=set_norm_noise)


def other_noise(engine: Any, adapter: Adapter) -> Any:
    """Add noise that is drawn with another seed."""
    return Instead(engine, set_norm_noise=lambda noise: engine.set_norm_noise(replace(noise, seed=noise.seed + 1)))


def stale_prefixes(engine: Any, adapter: Adapter) -> Any:
    """Compute the keys and values of each prompt's beginning only once, and go on using them when another adapter is
    loaded.

    A vLLM engine gets this fault by never resetting its prefix cache. For an engine without such a cache the fault is
    imitated: completions of a prompt are sampled with the adapter that was loaded when, for the first time, completions
    of a prompt with the same first 16 tokens were sampled.
    """
    if isinstance(engine, VLLMEngine):
        engine._llm = Instead(engine._llm, reset_prefix_cache=lambda: True)  # pyright: ignore[reportAttributeAccessIssue]
        return engine
    loaded, of_beginning = [adapter], dict[tuple[int, ...], Adapter]()

    def load(new: Adapter) -> None:
        engine.load_adapter(new)
        loaded.append({name: tensor.clone() for name, tensor in new.items()})

    def generate(prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[list[Completion]]:
        groups = []
        for prompt in prompts:
            engine.load_adapter(of_beginning.setdefault(tuple(prompt[:16]), loaded[-1]))
            groups += engine.generate([prompt], sampling, seed)
        engine.load_adapter(loaded[-1])
        return groups

    return Instead(engine, load_adapter=load, generate=generate)


FAULTS: dict[str, Callable[[Any, Adapter], Any]] = {
    "lost_update": lost_update,
    "old_adapter": old_adapter,
    "no_adapter": no_adapter,
    "swapped_matrix": swapped_matrix,
    "unused_adapter": unused_adapter,
    "noise_left": noise_left,
    "noise_missing": noise_missing,
    "other_noise": other_noise,
    "stale_prefixes": stale_prefixes,
}


class Sabotage(Callback):
    """Replaces a run's engine by a faulty one when rollout ``at`` begins or, with ``in_validation``, when a validation,
    test or prediction begins."""

    def __init__(self, fault: str, at: int = 0, in_validation: bool = False) -> None:
        self.fault, self.at, self.in_validation = fault, at, in_validation

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if not self.in_validation and pl_module.rollout_index == self.at:
            self._break(pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.in_validation:
            self._break(pl_module)

    on_test_start = on_predict_start = on_validation_start

    def _break(self, pl_module: Any) -> None:
        pl_module.loop.engine = FAULTS[self.fault](pl_module.loop.engine, pl_module.policy.adapter_state())
