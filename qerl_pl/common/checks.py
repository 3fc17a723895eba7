"""Functions that check the range of settings, the function that decides in which rollouts the rollout engine is checked
thoroughly, and the exception by which a check ends a run."""

import math

LARGEST = 2.0**127 * (2 - 2.0**-23)
"""Largest 32-bit float. Settings are used in fp32 arithmetic, in which a larger number is infinite."""
EARLY = 4
"""Number of rollouts at the start of a run that all get the time-consuming checks, because most faults show there."""
EXIT_STATUS = 4
"""Exit status of a run that a check ended."""


def shortened(text: str, most: int = 80) -> str:
    """Cut a text for a message to ``most`` characters, followed by three dots if it is longer."""
    return text if len(text) <= most else f"{text[:most]}..."


class CheckFailed(RuntimeError):
    """Error of a check which finds that the run must not go on. The program prints the message without a traceback and
    exits with ``EXIT_STATUS``; checkpoints and logs are those of the last training step that was finished."""


def is_due(index: int, every: int) -> bool:
    """Return whether callbacks make their time-consuming checks of the rollout engine in rollout (or batch of an
    evaluation) ``index``, from 0: in the first ``EARLY`` ones and in multiples of ``every``."""
    return index < EARLY or index % every == 0


def require_at_least(least: float, *, section: str = "", hint: str = "", **settings: float | None) -> None:
    """Raise ValueError if one of ``settings``, given by name, is nan or below ``least``; None is accepted. The message
    names the setting with ``section``, its section of the YAML file, before it, and ends with ``hint``."""
    for name, value in settings.items():
        if value is not None and not value >= least:
            raise ValueError(f"{section}{name} is {value}; expected at least {least}{hint}")


def require_finite(section: str, **settings: float | None) -> None:
    """Raise ValueError if one of ``settings`` is nan, which a comparison with a limit may accept, or infinite as a
    32-bit float; None is accepted. ``section`` is the section of the YAML file, for the message."""
    for name, value in settings.items():
        if value is not None and not abs(value) <= LARGEST:
            raise ValueError(f"{section}.{name} is {value}; expected a finite number (of 32 bits)")


def require_no_nan(section: str, **settings: float | None) -> None:
    """Raise ValueError if one of ``settings``, which are bounds, is nan; infinity is accepted and means no bound."""
    for name, value in settings.items():
        if value is not None and math.isnan(value):
            raise ValueError(f"{section}.{name} is nan; expected a number, or .inf for no bound")
