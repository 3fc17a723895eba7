"""Log the GPU memory that the memory plan predicted, and the GPU memory that the run used."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from qerl_pl.common import ranks
from qerl_pl.memory.device import others_bytes, used_bytes
from qerl_pl.module import QeRLModule
from qerl_pl.rollout.loop import Rollout

GIB = 2**30


class MemoryReport(Callback):
    """Logs the GPU memory that the run uses, ``memory/{rollout,train,peak}_gib``, and the memory that was predicted
    when the run chose its batch sizes, ``memory/predicted_{rollout,train,peak}_gib``.

    The measured value is what the driver reports as used on the device, minus what other processes used when the run
    began. It is read when a rollout is complete, with the engine awake (``rollout``), and after the updates
    (``train``); ``peak`` is the larger of the two. torch does not give memory back to the driver after a forward or
    backward pass, so both readings include the peaks of earlier passes. With several ranks, the rank that uses most is
    logged. Without a GPU there is no prediction, and nothing is logged.
    """

    def __init__(self) -> None:
        self._others = self._rollout = 0

    @override
    def setup(self, trainer: Trainer, pl_module: QeRLModule, stage: str) -> None:
        device = trainer.strategy.root_device
        if stage == "fit" and device.type == "cuda":
            self._others = others_bytes(device)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        if pl_module.memory_plan is not None:
            pl_module.loop.observers.append(partial(self._after_rollout, pl_module.device))

    def _after_rollout(self, device: torch.device, rollout: Rollout) -> None:
        self._rollout = used_bytes(device) - self._others

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        plan = pl_module.memory_plan
        if plan is None:
            return
        readings = ranks.gather_values((self._rollout, used_bytes(pl_module.device) - self._others))
        rollout, train = (max(sizes) for sizes in zip(*readings, strict=True))
        measured = {"rollout": rollout, "train": train, "peak": max(rollout, train)}
        predicted = {"rollout": plan.total("rollout"), "train": plan.train, "peak": plan.peak}
        for kind, sizes in (("", measured), ("predicted_", predicted)):
            pl_module.log_dict({f"memory/{kind}{phase}_gib": size / GIB for phase, size in sizes.items()})
