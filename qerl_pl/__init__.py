"""Reinforcement learning of language models on a frozen NVFP4 base with a LoRA adapter (QeRL, arXiv 2510.11696)."""

import logging
import os

# GNU OpenMP's threads spin by default while they wait for each other. When other processes used the same CPU, a run
# with spinning threads was more than ten times slower than a run with threads that spin briefly and then sleep. On
# cores that no other process uses, both are equally fast. The variables are read when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# bitsandbytes warns at import that a faster CPU kernel can be downloaded from the Hugging Face hub. This package uses
# bitsandbytes only on a GPU.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

__version__ = "0.1.0"
