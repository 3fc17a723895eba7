"""Import everything that a run needs, vLLM included, once for all processes that the tests fork."""

import atexit
import gc
import warnings
from importlib import import_module

import torch

import train  # noqa: F401
from qerl_pl.rollout.vllm.setup import prepare_environment

prepare_environment()
with warnings.catch_warnings(action="ignore"):
    from vllm import LLM  # noqa: F401

    if not torch.cuda.is_available():
        for name in ("qerl_pl.rollout.vllm.cpu", "vllm.models.deepseek_v4", "vllm.v1.worker.cpu_worker"):
            import_module(name)  # what an engine imports when it starts


def freeze_heap() -> None:
    """Exclude all objects that exist now, mostly modules, from garbage collection for good, which saves seconds per
    engine.

    vLLM collects garbage eight times per engine, and each time looking at all imported modules would take half a
    second. vLLM also freezes and unfreezes the heap, which would undo this, so afterwards gc.freeze and gc.unfreeze do
    nothing.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # as the interpreter ends, Triton reports what is left of it as leaked
    gc.freeze = gc.unfreeze = lambda: None


freeze_heap()
