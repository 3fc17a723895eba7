"""Reinforcement learning of language models on a frozen NVFP4 base with LoRA (QeRL, arXiv 2510.11696)."""

__version__ = "0.1.0"
