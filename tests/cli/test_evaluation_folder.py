"""An evaluation never mixes its results with others: it writes to a new folder, or to one with the results of an
evaluation that had the same settings."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_pl.cli.evaluation_folder import different_settings, evaluation_folder

CONFIG = {
    "seed_everything": 0,
    "run_dir": "runs/a",
    "ckpt_path": "runs/a/checkpoints/last.ckpt",
    "trainer": {"devices": 1},
    "model": {"base": "b", "base_format": None, "quantize": None, "val_sampling": None, "sampling": {"max_tokens": 8}},
    "data": {"source": {"class_path": "Table", "init_args": {"path": "1"}}, "val_limit": None, "val_batch_size": 4},
}


def with_value(value: object, *keys: str) -> dict[str, Any]:
    changed = copy.deepcopy(CONFIG)
    *sections, last = keys
    section: Any = changed
    for key in sections:
        section = section[key]
    section[last] = value
    return changed


def evaluate(wanted: Path, config: dict[str, Any]) -> str:
    """Let the product choose the folder of an evaluation with settings ``config``, and write them to config.yaml there.
    Returns the folder's name."""
    folder = evaluation_folder(wanted, config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder.name


@pytest.mark.parametrize(
    ("keys", "value", "name"),
    [
        (("data", "source", "init_args", "path"), "2", "data.source"),
        (("data", "val_limit"), 5, "data.val_limit"),
        (("data", "question_template"), "{question}?", "data.question_template"),
        (("model", "val_sampling"), {"num_completions": 4}, "model.val_sampling"),
        (("model", "sampling", "max_tokens"), 9, "model.sampling.max_tokens"),
        (("model", "base"), "c", "model.base"),
        (("model", "quantize"), "nvfp4", "model.quantize"),
        (("model", "dtype"), "float32", "model.dtype"),
        (("model", "rewards"), [{"name": "other"}], "model.rewards"),
        (("model", "lora"), {"start": "sft"}, "model.lora.start"),
        (("trainer", "limit_test_batches"), 1, "trainer.limit_test_batches"),
        (("ckpt_path",), "elsewhere/last.ckpt", "ckpt_path"),
        (("seed_everything",), 1, "seed_everything"),
    ],
)
def test_other_results_get_another_folder_and_a_line_says_why(tmp_path, caplog, keys, value, name):
    wanted, other = tmp_path / "test" / "table-last", with_value(value, *keys)
    assert evaluate(wanted, CONFIG) == "table-last"
    assert not caplog.text
    with caplog.at_level(logging.INFO):
        assert evaluate(wanted, other) == "table-last-2"
    [said] = caplog.messages
    assert f"{wanted}-2" in said
    assert name in said
    assert evaluate(wanted, CONFIG) == "table-last"
    assert evaluate(wanted, other) == "table-last-2"
    assert evaluate(wanted, with_value(3, "data", "held_out")) == "table-last-3"


def test_what_changes_no_result_and_the_current_folder_change_no_folder(tmp_path):
    evaluate(tmp_path / "table", CONFIG)
    assert evaluate(tmp_path / "table", with_value(2, "data", "val_batch_size")) == "table"
    assert evaluate(tmp_path / "table", with_value(2, "trainer", "devices")) == "table"
    moved = CONFIG | {"run_dir": "/data/a", "ckpt_path": "/data/a/checkpoints/last.ckpt"}
    assert different_settings(CONFIG, moved) == []


@pytest.mark.parametrize("text", [b"data: [", b"", b"- 1", b"data: 1", b"\xff"])
def test_a_config_that_cannot_be_read_is_another_evaluation(tmp_path, text):
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "config.yaml").write_bytes(text)
    assert evaluate(tmp_path / "table", CONFIG) == "table-2"


def test_a_config_in_a_folder_of_the_logger_counts(tmp_path):
    evaluate(tmp_path / "table" / "version_0", CONFIG)
    assert evaluation_folder(tmp_path / "table", CONFIG).name == "table"
    assert evaluation_folder(tmp_path / "table", with_value("c", "model", "base")).name == "table-2"
