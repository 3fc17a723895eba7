"""Save and restore the global random states when a run is resumed."""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from qerl_pl.common import ranks


class RNGState(Callback):
    """Saves the global random states of Python, NumPy and torch with each checkpoint, and restores them when a run
    resumes.

    Lightning's checkpoints hold no random state, and resuming seeds the generators again, so a resumed run would repeat
    the random numbers of its first steps. The trainer uses generators of its own, except for LoRA dropout, which draws
    from the global ones; rewards and other code may do so, too. Each rank has its own states. If the checkpoint holds
    none for a rank, because the run had fewer ranks, the rank keeps the states that it started with.
    """

    def __init__(self) -> None:
        self._restored: list[dict[str, Any]] = []

    @override
    def state_dict(self) -> dict[str, Any]:
        # tensors and builtins, which torch.load(weights_only=True) can read
        name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 (the global stream)
        states = {
            "python": random.getstate(),
            "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        }
        return {"ranks": ranks.gather_values(states)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict["ranks"]  # restored when training starts: the set-up draws numbers, too

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        known, self._restored = self._restored, []
        if trainer.global_rank >= len(known):
            return
        state = known[trainer.global_rank]
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
        torch.set_rng_state(state["torch"].cpu())
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())
