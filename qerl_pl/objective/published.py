"""The published objectives (presets) by name, and defaults of an objective's settings that follow from other
settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

Preset = Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"]

DEFINING = ("surrogate", "aggregation", "baseline")
"""Settings that define a published objective; all others may be changed without contradicting its name."""

PUBLISHED: dict[Preset, dict[str, Any]] = {
    # arXiv 2503.14476: only DAPO's loss. Its dynamic sampling, overlong filtering and length reward have settings of
    # their own.
    "dapo": {"surrogate": "clipped", "aggregation": "token", "baseline": "normalized", "clip_high": 0.28},
    # arXiv 2402.03300, without its KL (there kl_coefficient is 0.04)
    "grpo": {"surrogate": "clipped", "aggregation": "sequence", "baseline": "normalized", "clip_high": 0.2},
    # arXiv 2503.20783
    "dr_grpo": {"surrogate": "clipped", "aggregation": "constant", "baseline": "centered", "clip_high": 0.2},
    # arXiv 2507.18071
    "gspo": {"surrogate": "sequence", "aggregation": "sequence", "baseline": "normalized"},
    # arXiv 2506.13585
    "cispo": {"surrogate": "cispo", "aggregation": "token", "baseline": "normalized"},
}

CLIP_BOUNDS = {"clipped": (0.2, 0.28), "sequence": (3e-4, 4e-4), "cispo": (math.inf, 4.0)}
"""Distances of the ratio's lower and upper bound from 1, by surrogate: DAPO's, GSPO's, and our choice for CISPO."""


def completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the settings of an objective that are null and follow from others.

    A preset gives its own values. Without one the surrogate is "clipped". The "sequence" surrogate is averaged over
    sequences, the others over tokens. The "constant" aggregation goes with "centered" rewards, as in Dr. GRPO, which
    weighs every token and every prompt equally. The KL's estimator follows from ``kl_in``. Sampler and trainer always
    differ a little, so importance weights correct it unless the ratio is taken against the sampler: one weight per
    token, or with the "sequence" surrogate one per row, of the form of GSPO's ratio.

    Args:
        given: every setting of ``qerl_pl.objective.Objective`` by name.

    Raises:
        ValueError: a setting contradicts the preset.
    """
    settings = dict(given)
    preset: Preset | None = settings["preset"]
    if preset is not None:
        for name, value in PUBLISHED[preset].items():
            if settings[name] is None:
                settings[name] = value
            elif name in DEFINING and settings[name] != value:
                raise ValueError(
                    f"model.objective.{name} is {settings[name]!r} and preset is {preset!r}, which has {value!r}: "
                    f"leave {name} out (or null), or the preset, whose other values may be given one by one"
                )
    usual = {
        "surrogate": lambda: "clipped",
        "aggregation": lambda: "sequence" if settings["surrogate"] == "sequence" else "token",
        "baseline": lambda: "centered" if settings["aggregation"] == "constant" else "normalized",
        "clip_low": lambda: CLIP_BOUNDS[settings["surrogate"]][0],
        "clip_high": lambda: CLIP_BOUNDS[settings["surrogate"]][1],
        "kl": lambda: "k3" if settings["kl_in"] == "loss" else "k1",
        "correction": lambda: "none" if settings["ratio_against"] == "sampler" else "truncate",
        "correction_level": lambda: "geometric" if settings["surrogate"] == "sequence" else "token",
    }
    for name, value in usual.items():  # in this order, because some follow from earlier ones
        if settings[name] is None:
            settings[name] = value()
    return settings


DERIVED = ("surrogate", "aggregation", "baseline", "clip_low", "clip_high", "kl", "correction", "correction_level")
"""Settings that ``completed`` fills in."""
