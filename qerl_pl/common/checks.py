"""Checks of settings for nan and infinity; which rollouts get long checks; the exception by which one ends a run."""

from __future__ import annotations

import math

LARGEST = 2.0**127 * (2 - 2.0**-23)
"""Largest 32-bit float. Settings are computed with as such, so larger ones count as infinite."""
EARLY = 4
"""Rollouts at the start of a run that all get the long checks, because most faults are there from the start."""
EXIT_STATUS = 4
"""Exit status of a run that a check ended."""


class CheckFailed(RuntimeError):
    """A check found that the run must not go on, for example because the engine's completions are no samples from the
    policy.

    The program prints the message without a traceback and exits with ``EXIT_STATUS``. Checkpoints and logs are those of
    the last finished step.
    """


def is_due(index: int, every: int) -> bool:
    """Return whether the rollout of this index (0 is the first of a run) is one of the first ``EARLY`` ones, or one of
    every ``every`` after them."""
    return index < EARLY or index % every == 0


def require_finite(section: str, **settings: float | None) -> None:
    """Refuse nan, which a comparison with a limit may accept, and what is infinite as a 32-bit float, with the section
    of the YAML file in the message; None is accepted."""
    for name, value in settings.items():
        if value is not None and not abs(value) <= LARGEST:
            raise ValueError(f"{section}.{name} is {value}; expected a finite number (of 32 bits)")


def require_no_nan(section: str, **settings: float | None) -> None:
    """Refuse nan as ``require_finite``, in bounds, for which infinity means no bound."""
    for name, value in settings.items():
        if value is not None and math.isnan(value):
            raise ValueError(f"{section}.{name} is nan; expected a number, or .inf for no bound")
