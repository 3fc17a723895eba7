"""Log what speculative decoding gains, and turn it off where it does not pay."""

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from qerl_pl import native
from qerl_pl.common import ranks
from qerl_pl.module import QeRLModule
from qerl_pl.rollout.loop import Rollout
from qerl_pl.rollout.vllm import VLLMEngine


class DraftGuard(Callback):
    """Logs the drafted and accepted tokens of speculative decoding for each rollout (``speculation/*``), and decides,
    separately for each range of numbers of concurrent sequences, whether decoding steps of the next rollout, and of
    evaluations before it, have drafts. Drafts are turned off where too few were accepted in recent rollouts to save
    time.

    Drafts are counted over all ranks, without those of evaluations and of samples that only check the engine. The
    counts are in the checkpoint, so a resumed run decides as an uninterrupted one would
    (``qerl_pl/hopper/draft_guard.py`` has the rule). If the engine does not speculate, the callback does nothing.
    """

    def __init__(self) -> None:
        self._history: list[list[int]] = []
        self._counts: list[list[int]] = []  # of this rollout, over all ranks
        self._engine: VLLMEngine | None = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"history": self._history} if self._history else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._history = state_dict["history"]

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        engine = pl_module.engine
        if isinstance(engine, VLLMEngine) and engine.speculates:
            self._engine, engine.draft_history = engine, self._history
            # before the observers that sample for a check
            pl_module.loop.observers.insert(0, self._after_rollout)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: QeRLModule, *_: Any) -> None:
        if self._engine:
            self._engine.draft_counts.clear()

    def _after_rollout(self, rollout: Rollout) -> None:
        assert self._engine is not None
        guard = native.for_vllm().guard
        here = guard.by_class(self._engine.draft_counts)
        self._counts = torch.tensor(ranks.gather_values(here)).sum(dim=0).tolist()
        self._history = self._engine.draft_history = guard.remembered(self._history, self._counts)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        if not self._engine:
            return
        drafted, verified, emitted = map(sum, zip(*self._counts, strict=True))
        values: dict[str, float] = {"drafted": drafted, "accepted": emitted - verified}
        for most, (drafts, number, tokens) in zip(native.for_vllm().guard.CLASSES, self._counts, strict=True):
            if number:
                values |= {f"drafted_{most}": drafts, f"accepted_{most}": tokens - number}
                values[f"tokens_{most}"] = tokens / number
        pl_module.log_dict({f"speculation/{name}": float(value) for name, value in values.items()})
