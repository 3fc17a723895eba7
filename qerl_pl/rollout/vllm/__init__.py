"""Everything of vLLM, behind the protocol of ``qerl_pl.rollout.base``: only this package imports it."""

from qerl_pl.rollout.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
