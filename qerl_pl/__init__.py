"""Reinforcement learning of language models on a frozen NVFP4 base with LoRA (QeRL, arXiv 2510.11696)."""

import logging

# bitsandbytes warns at import that a hub has a faster CPU kernel. This package uses bitsandbytes only on a GPU.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

__version__ = "0.1.0"
