"""Rollout engine by vLLM, behind the protocol of ``qerl_pl.rollout.base``; no other package imports vLLM."""

from qerl_pl.rollout.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
