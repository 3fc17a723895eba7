"""Load and call surrogate losses and advantage rules that users write, which the settings name by import path
(``my_module.my_loss``). Shapes: B rows, S token positions, P prompts, G completions per prompt."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from qerl_pl.objective.advantages import AdvantageFunction
from qerl_pl.objective.losses import PolicyLoss, prepared, with_sums


@dataclass(frozen=True)
class UserFunction:
    """A function of the user that a setting names by its import path."""

    key: str
    path: str
    function: Callable[..., Any]
    takes: frozenset[str]
    """Names of those offered arguments that are parameters of the user's function."""

    @classmethod
    def load(cls, key: str, path: str, offered: Mapping[str, Any]) -> UserFunction:
        """Import the user's function that the setting ``key`` names by its import ``path``, call it once on small
        example arguments, and return it as a ``UserFunction``.

        ``offered`` has the example arguments by name. The function must have a parameter with the first of these names,
        may have parameters with the other names, and may not require any other argument. A function with ``**kwargs``
        gets all of them.

        Raises:
            ValueError: the function cannot be imported or has unsuitable parameters, or its call fails or returns
                something other than a finite tensor of the first argument's shape.
        """
        module, _, name = path.rpartition(".")
        try:
            function = getattr(import_module(module), name)
            parameters = inspect.signature(function).parameters.values()
        except Exception as error:  # the user's module may raise any error
            raise ValueError(
                f"{key} is {path!r}, which is no function that can be imported ({error!r}); expected an import path "
                "such as my_module.my_function"
            ) from error
        required = [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        takes = offered.keys() & {parameter.name for parameter in parameters}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            takes = offered.keys()
        if next(iter(offered)) not in takes or not offered.keys() >= set(required):
            raise ValueError(
                f"{key} is {path}, whose parameters are ({', '.join(parameter.name for parameter in parameters)}); "
                f"expected {next(iter(offered))} and, as far as it needs them, {', '.join(list(offered)[1:])}"
            )
        loaded = cls(key, path, function, frozenset(takes))
        loaded.call(offered)
        return loaded

    def call(self, offered: Mapping[str, Any]) -> Tensor:
        """Call the user's function with those arguments of ``offered`` that it has parameters for, and return its value
        in the dtype of the first argument that ``offered`` has, set to 0 where the mask ``scored``, if offered, is
        False. Raises ValueError if the function fails, or its value is not a finite floating-point tensor of the shape
        of that first argument.
        """
        first = next(iter(offered.values()))
        given = ((name, offered[name]) for name in self.takes)
        copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given}
        try:
            value = self.function(**copies)  # which it may change in place
        except torch.OutOfMemoryError:  # the caller repeats the pass with fewer tokens
            raise
        except Exception as error:  # the user's function may raise any error
            raise ValueError(f"{self.key} {self.path} failed: {error!r}") from error
        if not isinstance(value, Tensor) or value.shape != first.shape or not value.is_floating_point():
            kind = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            shape = list(first.shape)
            raise ValueError(f"{self.key} {self.path} returned {kind}; expected floating-point numbers {shape}")
        value = value.to(first.dtype)  # in which a number of fp64 may be infinite
        value = torch.where(offered["scored"], value, 0.0) if "scored" in offered else value
        if not value.isfinite().all():
            raise ValueError(f"{self.key} {self.path} returned a nan or infinite number; expected finite numbers")
        return value


def user_surrogate(path: str, **bounds: float) -> Callable[..., PolicyLoss]:
    """Import a user's surrogate loss by its path, call it once on a small example, and return a policy loss that
    multiplies the values of this function by importance weights and averages them. The policy loss has the arguments of
    ``losses.sequence_policy_loss``.

    The user's function returns the loss of each token, [B, S]. It may have any of these parameters: ``logprobs`` and
    ``old_logprobs`` [B, S] in nats, 0 outside of ``mask``; ``advantages`` [B, 1]; ``mask`` [B, S] bool, True for the
    tokens in the loss; and those ``bounds`` (``clip_low``, ``clip_high``, ``max_ratio``) that the user has set.

    Raises ValueError as ``UserFunction.load`` does, or if the function has no parameter for a bound that is set, or its
    value does not depend on ``logprobs``.
    """
    old = torch.tensor([[-1.0, -2.0, -0.5], [-0.1, -3.0, 0.0]])
    small = {
        "logprobs": (old + torch.tensor([0.2, -0.1, 0.0])).requires_grad_(),
        "old_logprobs": old,
        "advantages": torch.tensor([[1.0], [-1.0]]),
        "mask": old < 0,
    }
    loaded = UserFunction.load("model.objective.surrogate", path, small | bounds)
    if unused := bounds.keys() - loaded.takes:
        raise ValueError(
            f"model.objective.{min(unused)} is {bounds[min(unused)]}, which the surrogate {path} does not take: it "
            "has no effect; leave it out"
        )
    if not loaded.call(small | bounds).requires_grad:
        raise ValueError(f"model.objective.surrogate {path} returned numbers that do not depend on logprobs")
    return partial(_surrogate_loss, loaded)


def _surrogate_loss(
    function: UserFunction,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    whole: Tensor,
    importance: Tensor | None = None,
    **bounds: float,
) -> PolicyLoss:
    """Compute the policy loss with the user's ``function``; the other arguments are those of
    ``losses.sequence_policy_loss``."""
    log_ratio, factor = prepared(logprobs, old_logprobs, torch.ones_like(advantages), mask, weights, importance)
    offered = {
        "logprobs": torch.where(whole, logprobs, 0.0),
        "old_logprobs": torch.where(whole, old_logprobs, 0.0),
        "advantages": advantages.unsqueeze(1),
        "mask": whole,
    }
    values = torch.where(mask, function.call(offered | bounds), 0.0)
    nowhere = torch.zeros_like(mask)
    return with_sums((values * factor).sum(), log_ratio.exp(), nowhere, nowhere, log_ratio, mask)


def user_advantages(path: str) -> AdvantageFunction:
    """Import a user's rule for advantages by its path, call it once on a small example, and return a rule for
    ``group_advantages``.

    The user's function gets ``rewards`` [P, G] fp32, 0 where ``scored`` [P, G] bool is False, and returns advantages
    [P, G]. The advantages of a group should depend on this group's rewards alone: dynamic sampling replaces other
    groups later, and each rank calls the function with only its own groups of the rollout.
    """
    rewards = torch.tensor([[1.0, 0.0, 0.5], [1.0, 1.0, 0.0]])
    small = {"rewards": rewards, "scored": torch.tensor([[True, True, True], [True, True, False]])}
    return partial(_advantages, UserFunction.load("model.objective.baseline", path, small))


def _advantages(function: UserFunction, rewards: Tensor, scored: Tensor) -> Tensor:
    """Return the user's advantages [P, G], 0 where ``scored`` is False."""
    return function.call({"rewards": torch.where(scored, rewards, 0.0), "scored": scored})
