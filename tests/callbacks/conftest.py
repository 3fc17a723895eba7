"""Whole runs on a policy with random weights, as in tests/integration."""

from tests.integration.conftest import bases, run

__all__ = ["bases", "run"]
