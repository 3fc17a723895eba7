"""The exception by which a check ends a run."""

from __future__ import annotations

EXIT_STATUS = 4
"""Exit status of a run that a check ended."""


class CheckFailed(RuntimeError):
    """A check found that the run must not go on, for example because the engine's completions are no samples from the
    policy.

    The program prints the message without a traceback and exits with ``EXIT_STATUS``. Checkpoints and logs are those of
    the last finished step.
    """
