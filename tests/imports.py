"""What processes of tests are forked with: the imports of a run, vLLM's included."""

from __future__ import annotations

import warnings

import train  # noqa: F401
from qerl_pl.rollout.vllm.setup import prepare_environment

prepare_environment()
with warnings.catch_warnings(action="ignore"):
    from vllm import LLM  # noqa: F401
