"""Engines that do not hold the policy that they are given, or do not compute with it."""

from __future__ import annotations

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
    """An object of which some methods are other functions."""

    def __init__(self, real: Any, **others: Callable[..., Any]) -> None:
        self._real = real
        self._others = others

    def __getattr__(self, name: str) -> Any:
        return self._others[name] if name in self._others else getattr(self._real, name)


def loading(engine: Any, change: Callable[[Adapter], Adapter]) -> Any:
    """What arrives of an adapter is changed."""
    return Instead(engine, load_adapter=lambda adapter: engine.load_adapter(change(adapter)))


def old_adapter(engine: Any, adapter: Adapter) -> Any:
    """Adapters no longer arrive."""
    old = {name: tensor.clone() for name, tensor in adapter.items()}
    return loading(engine, lambda _: old)


def lost_update(engine: Any, adapter: Adapter) -> Any:
    """The next adapter does not arrive, those after it do."""
    arrived: list[Adapter] = []

    def load(new: Adapter) -> None:
        if arrived:
            engine.load_adapter(new)
        arrived.append(new)

    return Instead(engine, load_adapter=load)


def no_adapter(engine: Any, adapter: Adapter) -> Any:
    """What arrives are zeros."""
    zeros = {name: torch.zeros_like(tensor) if ".lora_" in name else tensor for name, tensor in adapter.items()}
    return loading(engine, lambda _: zeros)


def swapped_matrix(engine: Any, adapter: Adapter) -> Any:
    """One matrix is that of another layer."""
    wrong = "base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"
    return loading(engine, lambda new: {**new, wrong: new[wrong.replace("layers.1", "layers.0")]})


def unused_adapter(engine: Any, adapter: Adapter) -> Any:
    """The adapter is there, and samples come from the base."""
    return Instead(engine, generate=lambda *new: engine.generate(*new, adapter=False))


def noise_left(engine: Any, adapter: Adapter) -> Any:
    """Noise of an earlier rollout never comes off."""

    def set_norm_noise(noise: NormNoise) -> int:
        return engine.set_norm_noise(replace(noise, sigma=noise.sigma or 0.1)) * (noise.sigma > 0)

    return Instead(engine, set_norm_noise=set_norm_noise)


def noise_missing(engine: Any, adapter: Adapter) -> Any:
    """Noise is said to be on, and is not."""

    def set_norm_noise(noise: NormNoise) -> int:
        norms = engine.set_norm_noise(noise)
        engine.set_norm_noise(NormNoise())
        return norms

    return Instead(engine, set_norm_noise=set_norm_noise)


def other_noise(engine: Any, adapter: Adapter) -> Any:
    """Noise of another seed."""
    return Instead(engine, set_norm_noise=lambda noise: engine.set_norm_noise(replace(noise, seed=noise.seed + 1)))


def stale_prefixes(engine: Any, adapter: Adapter) -> Any:
    """What was computed for the beginning of a prompt once is used for it ever after.

    Without a cache, all that follows the beginning comes from the adapter that was loaded when it was new.
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
    """Puts the fault into a run's engine when a rollout begins, or the first validation."""

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
