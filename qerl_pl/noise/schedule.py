"""Schedule of adaptive quantization noise (AQN): the standard deviation sigma as a function of the rollout's index."""

import math
from typing import Literal

from qerl_pl.common.checks import LARGEST

Decay = Literal["exponential", "linear", "cosine", "logarithmic", "constant"]


def check_schedule(*, num_stages: int, sigma_start: float, sigma_end: float) -> None:
    """Raise ValueError if there are fewer than 3 stages of noise, or unless 0 < sigma_end <= sigma_start < infinity."""
    if num_stages < 3:
        raise ValueError(f"num_stages is {num_stages}; expected at least 3: one without noise and two to decay over")
    if not sigma_start <= LARGEST:
        raise ValueError(f"sigma_start is {sigma_start}; expected a finite noise level")
    if not sigma_end > 0:
        raise ValueError(
            f"sigma_end is {sigma_end}; expected more than 0 (leave the callback out to train without noise)"
        )
    if sigma_end > sigma_start:
        raise ValueError(f"sigma_end {sigma_end} is above sigma_start {sigma_start}; the noise decays, so swap them")


def stage_of(index: int, *, num_rollouts: int, num_stages: int) -> int:
    """Return the index, from 0, of the noise stage that a rollout belongs to: a run is split into ``num_stages`` stages
    of equally many rollouts; rollouts after the end of the run belong to the last stage."""
    if index < 0:
        raise ValueError(f"rollout index is {index}; expected 0 or more")
    if num_rollouts < 1:
        raise ValueError(f"num_rollouts is {num_rollouts}; expected at least 1, the rollouts of the whole run")
    return min(index * num_stages // num_rollouts, num_stages - 1)


def stage_sigma(
    index: int,
    *,
    num_rollouts: int,
    num_stages: int = 10,
    sigma_start: float = 1e-2,
    sigma_end: float = 5e-4,
    decay: Decay = "exponential",
) -> float:
    """Return the standard deviation sigma of the noise on norm weights in the rollout ``index`` (arXiv 2510.11696, eq.
    8 and algorithm 1).

    A run has K = ``num_stages`` stages of equal length, from 0 to K - 1. Stage 0 has no noise, stage 1 has sigma_start,
    and the last stage has sigma_end. With the exponent that the paper gives for stage k, (k-1)/(K-1), sigma_end would
    not be reached. The exponent here is (k-1)/(K-2), as in the paper's published code. The decay "exponential" did best
    in the paper; with "constant", all stages after stage 0 have sigma_start.
    """
    check_schedule(num_stages=num_stages, sigma_start=sigma_start, sigma_end=sigma_end)
    stage = stage_of(index, num_rollouts=num_rollouts, num_stages=num_stages)
    if stage == 0:
        return 0.0
    if decay == "constant" or stage == 1:
        return sigma_start
    if stage == num_stages - 1:
        return sigma_end
    done = (stage - 1) / (num_stages - 2)  # how far sigma has fallen: 0 in stage 1, 1 in the last stage
    if decay == "exponential":
        return sigma_start * (sigma_end / sigma_start) ** done
    remaining = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "logarithmic": 1 - math.log1p(done * (math.e - 1)),  # sigma falls fast at first, then slowly
    }[decay]
    return sigma_end + (sigma_start - sigma_end) * remaining
