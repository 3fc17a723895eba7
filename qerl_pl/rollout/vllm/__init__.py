"""Rollout engine that samples with vLLM and implements the protocol of ``qerl_pl.rollout.base``; no other package
imports vLLM."""

from qerl_pl.rollout.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
