"""Reinforcement learning of language models on a frozen NVFP4 base with LoRA (QeRL, arXiv 2510.11696)."""

import logging
import os

# On a CPU, threads that wait for each other spin by default (GNU OpenMP), and a run that shares its cores with another
# process was more than ten times slower than with sleeping threads. torch reads the variable when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# bitsandbytes warns at import that a hub has a faster CPU kernel. This package uses bitsandbytes only on a GPU.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

__version__ = "0.1.0"
