"""Where a step's time and memory go."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, Trainer

from qerl_pl.module import QeRLModule


class Throughput(Callback):
    """Logs seconds a phase, tokens a second, and the peak memory of the GPU (or of the process without one)."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: QeRLModule, batch: Any, batch_idx: int) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        seconds: dict[str, float] = outputs["seconds"]
        for phase, value in seconds.items():
            pl_module.log(f"time/{phase}_s", value)
        pl_module.log("time/step_s", sum(seconds.values()), prog_bar=True)
        experience = outputs["rollout"].experience
        sampled = sum(len(completion.tokens) for completion in outputs["rollout"].evaluation.completions)
        pl_module.log("throughput/rollout_tokens_per_s", sampled / max(seconds["rollout"], 1e-9), prog_bar=True)
        trained = int(experience.lengths.sum())
        pl_module.log("throughput/train_tokens_per_s", trained / max(seconds["train"], 1e-9))
        if pl_module.device.type == "cuda":
            pl_module.log("memory/gpu_peak_bytes", float(torch.cuda.max_memory_allocated(pl_module.device)))
        else:
            pl_module.log("memory/process_bytes", float(psutil.Process().memory_info().rss))
