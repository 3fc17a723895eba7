"""Log where the time and the memory of a step go."""

import time
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from qerl_pl.common.metrics import largest, over_ranks, total
from qerl_pl.module import QeRLModule
from qerl_pl.rollout.loop import Rollout
from qerl_pl.rollout.vllm import memory


class Throughput(Callback):
    """Logs the seconds of each phase of a step (one RL iteration), tokens per second, and the peak memory of the GPU
    (without a GPU, the memory of the process).

    ``time/step_s`` is measured from the end of the previous step, without validation; for the first step, it is the sum
    of the measured phases. ``time/between_s`` is ``time/step_s`` minus the measured phases (rollout, update and
    others): the time for loading data, writing logs and copying a checkpoint.

    Seconds and memory are those of the rank with the highest value; tokens are summed over all ranks. The memory of a
    GPU is what torch has allocated there in this process, minus what a sleeping engine has given back to the GPU.
    """

    def __init__(self) -> None:
        self._last_end: float | None = None  # ``perf_counter`` at the end of the previous RL iteration
        self._validation_start = 0.0
        self._rollout_bytes = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._last_end = None
        if pl_module.device.type == "cuda":
            # Other callbacks have added their observers in on_fit_start, so this observer runs last, and the peak that
            # it reads includes their memory.
            pl_module.loop.observers.append(self._after_rollout)

    def _after_rollout(self, rollout: Rollout) -> None:
        self._rollout_bytes = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._validation_start = time.perf_counter()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        if self._last_end is not None:
            self._last_end += time.perf_counter() - self._validation_start

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: QeRLModule, *_: Any) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        seconds: dict[str, float] = outputs["seconds"]
        in_phases, now = sum(seconds.values()), time.perf_counter()
        step = in_phases if self._last_end is None else max(now - self._last_end, in_phases)
        self._last_end = now
        costs = {f"time/{phase}_s": value for phase, value in seconds.items()}
        costs |= {"time/between_s": step - in_phases, "time/step_s": step}
        if pl_module.device.type == "cuda":
            update = torch.cuda.max_memory_allocated(pl_module.device) - memory.given_back()
            costs["memory/gpu_peak_bytes"] = float(max(self._rollout_bytes, update))
        else:
            costs["memory/process_bytes"] = float(psutil.Process().memory_info().rss)
        rollout = outputs["rollout"]
        sampled = sum(len(completion.tokens) for completion in rollout.sampled.completions)
        tokens = {"rollout": sampled, "train": int(rollout.experience.lengths.sum())}
        most = {name: over_ranks(largest(), torch.tensor(value, dtype=torch.float64)) for name, value in costs.items()}
        pl_module.log_dict(most)
        for phase, number in tokens.items():
            everywhere = over_ranks(total(), torch.tensor(float(number)))
            pl_module.log(f"throughput/{phase}_tokens_per_s", everywhere / max(most[f"time/{phase}_s"], 1e-9))
