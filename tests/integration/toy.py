"""Rewards, a logger and callbacks of the runs in these tests."""

import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger

from callbacks.last_checkpoint import LastCheckpoint
from qerl_pl.common.types import Completion, Prompt
from tests.callbacks.faults import Instead
from tests.rollout.expert_faults import FAULTS, expert_adapters


def low_tokens(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
    """Reward each completion by the share of its tokens that are below 128, the lower half of the vocabulary. Even a
    random policy samples some, so it can learn from this reward."""
    return [sum(token < 128 for token in completion.tokens) / len(completion.tokens) for completion in completions]


def even_tokens(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
    """Reward each completion by the share of its tokens that are even numbers: about a half for an untrained policy."""
    return [sum(token % 2 == 0 for token in completion.tokens) / len(completion.tokens) for completion in completions]


def half_of_a_batch(prompts: list[Any], completions: list[Any]) -> list[float]:
    """Reward completions of the first half of a batch by their place, up to 0.4, and all others equally."""
    half = len(prompts) // 2
    return [0.1 * (index % 4 + 1) if index < half else 0.5 for index in range(len(prompts))]


def majority(prompts: list[Any], completions: list[Any]) -> list[float]:
    """Reward the most frequent completion of each prompt, which is a vote without known answers."""
    rows = [(prompt.tokens, completion.tokens) for prompt, completion in zip(prompts, completions, strict=True)]
    votes = Counter(rows)
    most = {prompt: max(votes[row] for row in rows if row[0] == prompt) for prompt, _ in rows}
    return [float(votes[row] == most[row[0]]) for row in rows]


def undecided(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
    """Score every second row by 1, and leave the other rows unscored."""
    return [1.0 if row % 2 else None for row in range(len(prompts))]


class ShiftedRoutes(Callback):
    """Fault of the engine from rollout ``at`` on: the experts that it returns for each token are those of the token
    before."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.rollout_index == self.at:
            engine = pl_module.loop.engine
            pl_module.loop.engine = Instead(engine, generate=lambda *args: _shifted(engine.generate(*args)))


def _shifted(groups: list[list[Completion]]) -> list[list[Completion]]:
    def shifted(row: Completion) -> Completion:
        return row if row.routes is None else replace(row, routes=row.routes.roll(1, dims=0))

    return [list(map(shifted, group)) for group in groups]


class FaultyExperts(Callback):
    """From rollout ``at`` on, puts one of the faults of tests/rollout/expert_faults.py into vLLM's adapters of experts
    whenever an adapter was loaded."""

    def __init__(self, at: int, fault: str) -> None:
        self.at, self.fault = at, fault

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.rollout_index == self.at:
            engine = pl_module.loop.engine

            def load(adapter: Any) -> None:
                engine.load_adapter(adapter)
                FAULTS[self.fault](expert_adapters(engine))

            pl_module.loop.engine = Instead(engine, load_adapter=load)


class NamedLogger(DummyLogger):
    """Logger that, as the one of Weights & Biases, chooses name and version of its folder itself."""

    def __init__(self, save_dir: str = ".") -> None:
        super().__init__()
        self._save_dir = save_dir

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def name(self) -> str:
        return "project"

    @property
    def version(self) -> str:
        return "abc123"


class Killed(Callback):
    """Kills the process of a run, to test that it can be resumed: after ``at`` optimizer steps, at the point of
    training that ``phase`` names.

    Values of ``phase``: "rollout" (the engine has the policy and is asked for completions), "scored" (completions have
    rewards, and the update has not begun), "update" (before an optimizer step), "saving" (the checkpoint is written to
    a temporary file that is not yet renamed), "validation" (in the second batch of a validation).
    """

    def __init__(self, phase: str, at: int) -> None:
        self.phase = phase
        self.at = at

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.loop.observers.append(lambda rollout: self._at("scored", trainer))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (self.phase, self.at) == ("rollout", trainer.global_step):
            pl_module.engine.generate = lambda *_, **__: self._at("rollout", trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._at("update", trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.phase == "saving":
            os.fsync = lambda _: self._at("saving", trainer)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._at("validation", trainer)

    def _at(self, phase: str, trainer: Any) -> None:
        if (phase, trainer.global_step) == (self.phase, self.at):
            os.kill(os.getpid(), signal.SIGKILL)


class CtrlC(Callback):
    """Presses Ctrl-C, or sends another signal, when a rollout begins."""

    def __init__(self, at: int, times: int = 1, number: int = int(signal.SIGINT)) -> None:
        self.at = at
        self.times = times
        self.number = number

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.rollout_index == self.at:
            for _ in range(self.times):
                signal.raise_signal(self.number)


class OutOfMemory(Callback):
    """Fails after rollout ``at`` is sampled as PyTorch, or vLLM when it wakes up (``vllm``), does without free
    memory."""

    def __init__(self, at: int, vllm: bool = False) -> None:
        self.at = at
        self.vllm = vllm

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        def fail(rollout: Any) -> None:
            if pl_module.rollout_index == self.at and self.vllm:
                raise RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163")
            if pl_module.rollout_index == self.at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nGPU 0 has 139.80 GiB.")

        pl_module.loop.observers.append(fail)


class CtrlCAtTheStart(Callback):
    """Sends SIGINT, as Ctrl-C does, when training begins and before the engine has started."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        signal.raise_signal(signal.SIGINT)


class SigtermEarly(Callback):
    """Sends SIGTERM when Lightning calls the callback hook ``hook``. This callback is put first, so the signal comes
    before the other callbacks' hooks."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda *_: signal.raise_signal(signal.SIGTERM))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.callbacks = [self, *(callback for callback in trainer.callbacks if callback is not self)]


class SpoilGradient(Callback):
    """Multiplies the gradient of one LoRA matrix B by ``factor``, from rollout ``at`` on."""

    def __init__(self, at: int, factor: float) -> None:
        self.at = at
        self.factor = factor

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.rollout_index == self.at:
            matrix = next(p for name, p in pl_module.policy.named_parameters() if "lora_B" in name)
            matrix.register_hook(lambda gradient: gradient * self.factor)


class InBackground(Callback):
    """Makes the run write all checkpoints in the background while training goes on; otherwise it does so only with
    large checkpoints."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        last_checkpoint(trainer).background_bytes = 0


class StoppedByValidation(Callback):
    """Ends the run by the validation after step ``at``; the interval of checkpoints is set such that no checkpoint is
    due at this step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        last_checkpoint(trainer).every_n_rollouts = self.at + 1

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == self.at:
            trainer.should_stop = True


def last_checkpoint(trainer: Any) -> LastCheckpoint:
    """Find the trainer's ``LastCheckpoint`` callback."""
    [last] = [callback for callback in trainer.callbacks if isinstance(callback, LastCheckpoint)]
    return last


class Fails(Callback):
    """Raises on one rank when a rollout begins."""

    def __init__(self, rank: int, at: int) -> None:
        self.rank = rank
        self.at = at

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_rank, pl_module.rollout_index) == (self.rank, self.at):
            raise RuntimeError(f"rank {self.rank} fails at {self.at}")
