"""Fixtures for the tests of the Hopper kernels; they are defined in tests/kernels and tests/rollout."""

from tests.kernels.conftest import kernels  # noqa: F401
from tests.rollout.conftest import _kernels_are_interpreted, checkpoints, unpadded  # noqa: F401
