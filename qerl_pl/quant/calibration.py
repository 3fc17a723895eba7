"""Read calibration data for the quantiser, preferably text that resembles prompts and completions of later training."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer

from qerl_pl.common.json_lines import read_json_lines
from qerl_pl.common.packages import not_installed


class Calibration(NamedTuple):
    """Calibration sequences and the name of their source."""

    tokens: Tensor
    """[S, L] int64, S sequences of L tokens without padding."""
    source: str


def read_calibration(source: str, model: Path, *, samples: int = 256, length: int = 2048) -> Calibration:
    """Tokenise a data source by the tokenizer of the folder ``model`` and return its first ``samples`` sequences of
    ``length`` tokens. ``source`` is a .txt file (one text), a .jsonl file or a data set of the Hugging Face hub (split
    "train"), whose rows' texts (``row_text``) are joined, with an end-of-text token after each. Raises ValueError if
    the source cannot be read or has too few tokens."""
    if samples < 1 or length < 1:
        raise ValueError(f"samples is {samples} and length is {length}; expected at least 1 for each")
    if not (model / "tokenizer_config.json").is_file():  # transformers would make up an empty tokenizer
        raise ValueError(f"{model} has no tokenizer_config.json; the calibration text needs the model's tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens, end = [], [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in _texts(source):
        tokens += tokenizer(text, add_special_tokens=False)["input_ids"] + end
        if len(tokens) >= samples * length:
            break
    if len(tokens) < samples * length:
        raise ValueError(
            f"calibration source {source} holds {len(tokens)} tokens; {samples} samples of {length} need "
            f"{samples * length}: lower --samples or --length, or give more text"
        )
    return Calibration(torch.tensor(tokens[: samples * length]).view(samples, length), source)


def row_text(row: object) -> str:
    """Return the column "text" of a row or, without it, all strings in the row, nested ones included, one per line."""
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return row["text"]
    return "\n".join(_strings(row))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _texts(source: str) -> Iterator[str]:
    path = Path(source)
    if path.suffix not in (".txt", ".jsonl"):
        if not source or path.is_file():
            raise ValueError(f"calibration source {source!r} is no .txt or .jsonl file and no data set of the hub")
        yield from _hub_texts(source)
    elif not path.is_file():
        raise ValueError(f"calibration file {path} does not exist")
    elif path.suffix == ".txt":
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"calibration file {path} is not UTF-8 text: {error}") from error
    else:
        yield from (row_text(row) for _, row in read_json_lines(path, say=print))


def _hub_texts(name: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetNotFoundError
    except ModuleNotFoundError as error:
        raise ValueError(
            f"calibration source {name!r} is no file, and for the hub {not_installed('datasets')}"
        ) from error
    try:
        rows = load_dataset(name, split="train", streaming=True)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise ValueError(f"calibration source {name!r} is no .txt or .jsonl file and no data set of the hub") from error
    yield from map(row_text, rows)
