"""Random probe adapters, and the search for the strength at which they best reveal a faulty engine.

A probe adapter is loaded into a rollout engine to check it: it changes log-probabilities, so an engine that does not
use it is noticed. If it is too weak, the change is no larger than rounding errors. If it is too strong, the model
becomes chaotic, and rounding errors grow as large as the change. Which strengths lie between depends on the model; the
trainer finds them with its own model alone.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qerl_pl.common.seeding import derive_seed
from qerl_pl.policy.policy import Policy
from qerl_pl.policy.shaken import rounding_of
from qerl_pl.rollout.hf import TransformersEngine

STRENGTHS = tuple(2.0**-step for step in range(-2, 7))
"""Strengths of probe adapters that are tried, 4 to 1/64. With strength 1, the root mean square of the adapter's output
is about 0.6 of that of the linear layer's input."""
TOKENS = 64
"""Number of tokens of text on which each strength is tried."""
SEEDS = 2
"""Number of probe adapters that are tried with each strength."""
MOST_CHANGE = 3.0
"""Largest mean change of log-probabilities by a usable probe adapter, in nats. With a larger change, the text is nearly
impossible under the probe adapter, and the rounding errors of its log-probabilities have heavy tails: with a change of
20 nats, a correct engine of a pretrained model of 1.5B parameters differed from the trainer by 0.5 nats in most checks
and by 3.2 in one."""
GOOD = 1 / 16
"""Limit on the ratio of rounding errors to the change of log-probabilities by a probe adapter. A strength with a ratio
up to this limit, and up to twice the smallest ratio, is preferred to any stronger one."""
USABLE = 1 / 10
"""Largest ratio of rounding errors to the change of log-probabilities by a usable probe adapter. The change is then at
least 10 times the rounding errors, while an engine counts as correct if it differs by up to ``comparison.MARGIN`` times
the rounding errors. The limit is above ``GOOD`` because the smallest ratio of any strength depends on the text: with
Qwen2.5-Coder 0.5B in NVFP4 it sometimes exceeds ``GOOD``."""


def probe_adapter(policy: Policy, *, strength: float, seed: int) -> dict[str, Tensor]:
    """Draw a random LoRA adapter (probe adapter): A as at the start of training, from U(-K^-1/2, K^-1/2) for K inputs,
    and B from N(0, s^2), where s is proportional to ``strength``. Trained norms keep the policy's weights."""
    adapter = policy.adapter_state()
    device = next(iter(adapter.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    scale = strength / policy.lora_scaling / policy.peft_config.r**0.5

    def drawn(name: str, tensor: Tensor) -> Tensor:
        if ".lora_A" in name:
            return (2 * torch.rand(tensor.shape, generator=generator, device=device) - 1) / tensor.shape[1] ** 0.5
        if ".lora_B" in name:
            return scale * torch.randn(tensor.shape, generator=generator, device=device)
        return tensor

    return {name: drawn(name, tensor) for name, tensor in adapter.items()}


def find_strength(
    oracle: TransformersEngine, policy: Policy, tokens: Sequence[int], dtype: torch.dtype, *, seed: int
) -> float | None:
    """Find a scale ("strength") of random LoRA adapters (``probe_adapter``) at which they change log-probabilities far
    more than rounding errors of ``dtype`` do. Returns None if there is no such scale.

    Log-probabilities are those of the last ``TOKENS`` tokens of the text ``tokens``, which should resemble the text of
    the run. They are computed by ``oracle``, an engine that uses the trainer's model. It keeps the last probe adapter;
    the caller has to load its own adapter again. Strengths are tried from the strongest on, each with ``SEEDS``
    adapters; a strength is left out if one of its adapters causes a mean change above ``MOST_CHANGE`` nats. For each
    adapter, the ratio of rounding errors to the change that it causes is computed; the largest ratio of its adapters
    counts for a strength, and ``best_strength`` then chooses the weakest strength of those with a small ratio.
    """
    tokens = tokens[-TOKENS:]
    at, following = range(1, len(tokens)), tokens[1:]

    def score(copies: int) -> Tensor:
        return oracle.score_next(tokens, at, following, copies=copies)

    oracle.load_adapter(policy.adapter_state())
    [usual] = score(1)
    shares: dict[float, float] = {}
    for strength in STRENGTHS:
        shares_of_adapters, changes = [], []
        for index in range(SEEDS):
            seed_of_adapter = derive_seed(seed, f"probe {strength:.4g}", index)
            oracle.load_adapter(probe_adapter(policy, strength=strength, seed=seed_of_adapter))
            [probed] = score(1)
            changes.append((probed - usual).abs().mean().item())
            if not changes[-1] <= MOST_CHANGE:
                break
            rounding = rounding_of(probed, score, policy.causal_lm, dtype, seed=seed_of_adapter)
            shares_of_adapters.append(rounding.mean().item() / max(changes[-1], 1e-9))
        if not max(changes) <= MOST_CHANGE:
            continue
        shares[strength] = max(shares_of_adapters)
        if shares[strength] > 2 * min(shares.values()) <= 2 * USABLE:  # with weaker ones the share only grows
            break
    return best_strength(shares)


def best_strength(shares: Mapping[float, float]) -> float | None:
    """Choose the strength of probe adapters. ``shares`` has, for each strength, the ratio of rounding errors to the
    change of log-probabilities. Of the strengths whose ratio is at most ``GOOD`` and at most twice the smallest, the
    weakest is chosen, because it magnifies rounding errors less; if there are none, the one with the smallest ratio.
    The result is None if the smallest ratio is above ``USABLE``."""
    best = min(shares.values(), default=1.0)
    limit = max(best, min(2 * best, GOOD))
    return min(strength for strength, share in shares.items() if share <= limit) if best <= USABLE else None
