"""Rollout engine that samples with vLLM (``qerl_pl.rollout.base`` has the protocol)."""

from qerl_pl.rollout.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
