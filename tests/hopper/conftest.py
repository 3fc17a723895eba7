"""Fixtures for the tests of the Hopper kernels, taken from the tests of other kernels and of engines."""

from tests.kernels.conftest import kernels  # noqa: F401
from tests.rollout.conftest import _kernels_are_interpreted, checkpoints, unpadded  # noqa: F401
