"""Calibration files are read and turned into rows of tokens."""

import json

import pytest
import torch

from qerl_pl.quant.calibration import read_calibration, row_text


def test_pieces_follow_one_another_with_the_end_token_between_rows(make_checkpoint, tmp_path):
    model, file = make_checkpoint(), tmp_path / "rows.jsonl"
    rows = [{"text": "abc", "other": "zzz"}, {"question": "de", "answer": "f"}, {"text": "ghijk"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    calibration = read_calibration(str(file), model, samples=2, length=5)
    assert calibration.source == str(file)
    assert calibration.tokens.dtype == torch.int64
    assert calibration.tokens.tolist() == [[0, 1, 2, 37, 3], [4, 5, 37, 6, 7]]  # 37 ends a text
    (tmp_path / "text.txt").write_text("abcdef")
    assert read_calibration(str(tmp_path / "text.txt"), model, samples=1, length=6).tokens.tolist() == [[*range(6)]]


def test_strings_are_found_however_deep_and_in_order():
    row = {"system": "s", "turns": [{"from": "user", "value": "v"}, ["w", 3, None]], "score": 0.5}
    assert row_text(row) == "s\nuser\nv\nw"


@pytest.mark.parametrize(
    ("content", "samples", "message"),
    [
        ('{"text": "abc"}\n', 1, r"holds 4 tokens; 1 samples of 8 need 8"),
        ('{"text": "abcdefghijk"}\n{oops\n', 3, r"rows\.jsonl:2: not JSON"),
        ("", 0, "samples is 0"),
        (None, 1, r"rows\.jsonl does not exist"),
    ],
)
def test_text_that_does_not_suffice_is_refused(make_checkpoint, tmp_path, content, samples, message):
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_calibration(str(file), make_checkpoint(), samples=samples, length=8)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer_config"):
        read_calibration(str(tmp_path / "a.txt"), tmp_path, samples=1, length=1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.parquet", b"PAR1", r"rows\.parquet' is no \.txt or \.jsonl file and no data set of the hub"),
        ("", b"", "calibration source '' is no"),
        ("text.txt", b"caf\xe9", r"calibration file .*text\.txt is not UTF-8 text"),
    ],
)
def test_a_source_that_is_no_text_is_named(make_checkpoint, tmp_path, name, content, message):
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_calibration(str(tmp_path / name) if name else "", make_checkpoint(), samples=1, length=1)
