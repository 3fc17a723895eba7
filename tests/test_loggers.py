"""Completions are written to every logger that accepts texts."""

import sys
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qerl_pl.common.loggers import log_completions

ROW = {
    "question": "1+2?",
    "prompt": "<|im_start|>user\n1+2?<|im_end|>",
    "completion": "<script>x</script>\n# 3\n\n4",
    "answer": "3",
    "reward": 0.5,
    "rewards": {"accuracy": 0.0, "format": 1.0, "odd": None},
    "reasons": {"accuracy": "says 4", "format": "", "odd": ""},
    "num_tokens": 7,
    "finished": False,
}


def test_tensorboard_has_texts_with_reasons(tmp_path, monkeypatch):
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)  # to import them would now raise: no logger of theirs is in use
    loggers = [TensorBoardLogger(tmp_path, name="", version=""), CSVLogger(tmp_path, name="", version="")]
    log_completions(loggers, "completions/train", [ROW, ROW], step=3)
    loggers[0].finalize("success")
    events = EventAccumulator(str(tmp_path)).Reload()
    [text] = events.Tensors("completions/train/text_summary")
    assert text.step == 3
    said = text.tensor_proto.string_val[0].decode()
    assert "reward 0.5: accuracy 0 (says 4), format 1, odd not scored; answer 3; 7 tokens, cut off" in said
    assert "im_start" not in said
    assert "    # 3\n    \n    4" in said, "shown as code"
    assert "\n<script>" not in said


def test_wandb_has_a_table(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=str(tmp_path), offline=True, project="test")
    log_completions([logger], "completions/train", [ROW], step=3)
    summary = dict(logger.experiment.summary)
    assert summary["trainer/global_step"] == 3
    assert summary["completions/train"]["nrows"] == 1
    assert summary["completions/train"]["ncols"] == 7
    logger.experiment.finish()


def test_mlflow_has_a_file_per_rollout(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    pytest.importorskip("mlflow")
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path}")
    log_completions([logger], "completions/train", [ROW], step=3)
    [result] = Path(tmp_path).rglob("000003.md")
    assert "says 4" in result.read_text()
