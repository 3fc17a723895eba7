"""Checks: of settings for nan and infinity, which rollouts get the checks that take long, and the exception by which a
check ends a run.

Comparisons with nan are always False, so a range check may accept nan. Settings are computed with as 32-bit floats, so
a number that is too large for these counts as infinite.
"""

from __future__ import annotations

import math

LARGEST = 2.0**127 * (2 - 2.0**-23)
"""Largest 32-bit float."""
EARLY = 4
"""Rollouts at the start of a run that all get the checks that take long, because most faults are there from the
start."""
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
    """Refuse nan, infinity and numbers that are infinite as 32-bit floats.

    Args:
        section: section of the YAML file, e.g. "model.objective".
        settings: values by name; None is a setting that was not given, and is accepted.

    Raises:
        ValueError: a value is nan, infinite or too large.
    """
    for name, value in settings.items():
        if value is not None and not abs(value) <= LARGEST:
            raise ValueError(f"{section}.{name} is {value}; expected a finite number (of 32 bits)")


def require_no_nan(section: str, **settings: float | None) -> None:
    """Refuse nan in settings that are bounds, for which infinity is allowed and means no bound.

    Args:
        section: as in ``require_finite``.
        settings: as in ``require_finite``.

    Raises:
        ValueError: a value is nan.
    """
    for name, value in settings.items():
        if value is not None and math.isnan(value):
            raise ValueError(f"{section}.{name} is nan; expected a number, or .inf for no bound")
