"""Keep the checkpoint with the best validation score."""

from pathlib import Path
from typing import Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

BEST = "best"


class BestCheckpoint(ModelCheckpoint):
    """Keeps ``best.ckpt``, the checkpoint with the best validation score so far, also across interruptions of the run.

    A resumed run reads the best score from ``best.ckpt`` and not from ``last.ckpt``: ``last.ckpt`` is written before
    the validation that follows its RL iteration, so it may lack the newest best score, and Lightning ignores the score
    in ``last.ckpt`` if the run's folder has moved. If ``best.ckpt`` is of a later iteration than the one from which
    training resumes, its score is ignored, because the iterations in between are repeated.

    Args:
        monitor: name of the logged value to compare.
        mode: "max" if higher values are better, "min" if lower ones are.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.best_checkpoint.BestCheckpoint
              init_args: {monitor: val/accuracy}
    """

    def __init__(self, monitor: str = "val/reward", mode: Literal["min", "max"] = "max") -> None:
        super().__init__(monitor=monitor, mode=mode, save_top_k=1, filename=BEST, enable_version_counter=False)
        # Lightning saves once per step and counts step 0 as saved; -1 lets it save after the validation at step 0
        self._last_global_step_saved = -1

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.monitor == "val/reward" and not getattr(pl_module, "is_rewarded", True):
            self.save_top_k = 0  # nothing is logged under this name

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        assert self.dirpath is not None, "resolved in setup"
        best = Path(self.dirpath) / f"{BEST}{self.FILE_EXTENSION}"
        if trainer.ckpt_path is None or not best.exists():
            return
        try:
            kept = trainer.strategy.checkpoint_io.load_checkpoint(best)
        except ValueError as error:  # training does not depend on this file
            rank_zero_warn(f"{str(error).partition(';')[0]}; the next validation writes a new one")
            return
        score = kept["callbacks"].get(self.state_key, {}).get("best_model_score")
        if score is not None and kept["global_step"] <= trainer.global_step:
            self.best_model_path = self.kth_best_model_path = str(best)
            self.best_model_score = self.kth_value = score
            self.best_k_models = {str(best): score}
