"""Reinforcement learning of language models on a frozen NVFP4 base with LoRA (QeRL, arXiv 2510.11696)."""

import logging
import os

# On a CPU, threads that wait for each other spin by default (GNU OpenMP), and a run that shares its cores with other
# processes was more than ten times slower than with threads that soon sleep. So short a spin costs a run nothing that
# has the cores alone. torch reads the variables when it is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# bitsandbytes warns at import that a hub has a faster CPU kernel. This package uses bitsandbytes only on a GPU.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

__version__ = "0.1.0"
