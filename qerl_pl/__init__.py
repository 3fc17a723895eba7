"""Reinforcement learning of language models on a frozen NVFP4 base with LoRA (QeRL, arXiv 2510.11696)."""

import logging
import os

# GNU OpenMP's threads spin by default while they wait for each other. A run on a CPU that it shared with other
# processes was more than ten times slower with such threads than with threads that spin only briefly and then sleep. If
# a run has the cores to itself, sleeping threads cost it nothing. The variables are read when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# bitsandbytes warns at import that a hub has a faster CPU kernel. This package uses bitsandbytes only on a GPU.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

__version__ = "0.1.0"
