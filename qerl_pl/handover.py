"""Pass policy and started engine of a finished run on to the next run of the same process."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from qerl_pl.evaluation.fingerprint import Indescribable
from qerl_pl.module import QeRLModule


class Handover:
    """Runs of one process that follow each other, such as a training and the evaluations of its policy.

    A run uses the policy and the engine of the run before it if it would load the same base and start the same engine,
    and reads its adapter from a checkpoint: the policy that it takes over may have been trained.
    """

    def __init__(self) -> None:
        self._last: QeRLModule | None = None

    def begin(self, module: QeRLModule, *, reads_checkpoint: bool) -> None:
        """Give a new run's module what it can use of the run before; to be called before the run's ``setup``.

        Args:
            module: the new run's module.
            reads_checkpoint: whether the run reads its adapter from a checkpoint.
        """
        last, self._last = self._last, module
        module.closes_engine = False
        if last is None:
            return
        if reads_checkpoint and same_engine(last, module):
            module.policy, module.engine = last.policy, last.engine
            # a new plan would count the memory of the running engine as that of another process
            module.memory_plan, module.micro_batch_tokens = last.memory_plan, last.micro_batch_tokens
            rank_zero_info("this run uses the rollout engine of the run before it")
        else:
            release(last)

    def end(self) -> None:
        """Close the engine of the last run."""
        if self._last is not None:
            release(self._last)
        self._last = None


def same_engine(one: QeRLModule, other: QeRLModule) -> bool:
    """Return True if two modules would load the same policy, apart from its adapter's values, and start equal engines.

    False if that cannot be known, because the engine or a reward is of a class whose settings cannot be read.
    """
    if isinstance(one.built, Indescribable) or not hasattr(one, "policy"):
        return False
    sides = [
        (module.built, module.settings.folder, module.settings.of_policy, module.settings.max_model_len)
        for module in (one, other)
    ]
    return sides[0] == sides[1]


def release(module: QeRLModule) -> None:
    """Close a module's engine and drop its policy, so that the next one finds free memory."""
    module.engine.close()
    if hasattr(module, "policy"):
        del module.policy
