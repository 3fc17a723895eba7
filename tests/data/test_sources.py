"""Sources of problems: generated arithmetic, tables, GSM8K."""

import json
import os
import re
from pathlib import Path

import pytest

from datamodules.arithmetic import Arithmetic
from datamodules.gsm8k import GSM8K
from datamodules.table import Table

DATA = Path(os.environ.get("QERL_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"real data sets are not in {DATA}; set QERL_DATA")


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def row(**columns: object) -> str:
    return json.dumps(columns, ensure_ascii=False)


def test_arithmetic_shares_no_problem_between_its_sides_whatever_the_seeds():
    train = {problem.question for problem in Arithmetic(seed=0).train()}
    validation = {problem.question for seed in range(5) for problem in Arithmetic(seed=seed).validation()}
    assert len(train) == 8192
    assert not train & validation


def test_arithmetic_repeats_itself_for_a_seed_and_has_an_end():
    assert Arithmetic(seed=1, num_train=50).train() == Arithmetic(seed=1, num_train=50).train()
    assert Arithmetic(seed=1, num_train=50).train() != Arithmetic(seed=2, num_train=50).train()
    with pytest.raises(ValueError, match=r"1000000 different validation problems were asked for; 3[0-9]{3} exist"):
        Arithmetic(num_validation=10**6).validation()


@needs_data
def test_gsm8k_has_its_published_size_and_numeric_answers():
    source = GSM8K(str(DATA / "gsm8k_train.jsonl"), str(DATA / "gsm8k_test.jsonl"))
    train, validation = source.train(), source.validation()
    assert (len(train), len(validation)) == (7473, 1319)
    assert all(re.fullmatch(r"-?\d+(\.\d+)?", problem.answer) for problem in train + validation)
    assert train[0][:2] == (train[0].question, "72")
    assert train[0].question.startswith("Natalia sold clips to 48 of her friends")


def test_gsm8k_takes_the_last_marked_answer_without_commas(tmp_path):
    path = write(tmp_path / "t.jsonl", row(question="q", answer="#### 5 is not it\n#### 1,234 "))
    assert [problem[:2] for problem in GSM8K(path, path).train()] == [("q", "1234")]


def test_a_gsm8k_solution_without_an_answer_is_named(tmp_path):
    path = write(tmp_path / "t.jsonl", row(question="q", answer="#### 1"), row(question="q", answer="forty"))
    with pytest.raises(ValueError, match=r"t\.jsonl:2: the solution has no final answer"):
        GSM8K(path, path).train()


def test_a_table_reads_the_named_columns_and_keeps_digits_as_written(tmp_path):
    path = write(
        tmp_path / "t.jsonl",
        row(ask="a {b} \u2028 c", gold="x"),
        "",
        '{"ask": "d", "gold": 27.10}',
        row(ask="e", gold=7),
    )
    found = Table(path, path, question="ask", answer="gold").train()
    assert [problem[:2] for problem in found] == [("a {b} \u2028 c", "x"), ("d", "27.10"), ("e", "7")]
    assert found[1].row == {"ask": "d", "gold": 27.1}, "a number is a number to a reward"


def test_blank_lines_are_counted(tmp_path, capsys, caplog):
    path = write(tmp_path / "t.jsonl", "", row(question="q", answer="a"), "   ")
    with caplog.at_level("INFO"):
        Table(path, path).train()
    assert "skipped 2 blank lines" in caplog.text + capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (row(question="q"), "no column 'answer'; the row has 'question'. The settings .* can name other columns"),
        (row(question="q", answer=None), "column 'answer' is null; expected text or a number"),
        ('{"question": "q", "answer": NaN}', "column 'answer' is NaN; expected text or a number"),
        ('{"question": "q", "answer": -Infinity}', "column 'answer' is -inf; expected text or a finite number"),
        ('{"question": null, "answer": "a"}', "column 'question' is null; expected text or a number"),
        ('{"question": "q", "answer": "a", "answer": "b"}', "the key 'answer' is given twice"),
        ('{"question": "q", "answer": "a", "x": [{"y": 1, "y": 2}]}', "the key 'y' is given twice"),
        ('{"question": "q", "answer": ' + "1" * 4301 + "}", "a number has too many digits"),
        ('{"question": "q", "answer": "a", "x": ' + "[" * 70 + "]" * 70 + "}", "brackets are nested too deeply"),
        ('{"question": "q", "answer": "a", "x": ' + "[" * 100_000, "brackets are nested too deeply"),
        (row(question="q", answer=True), "column 'answer' is True; expected text or a number"),
        (row(question="q", answer=["a", "b"]), "column 'answer' is .'a', 'b'.; expected text or a number"),
        (row(question="q", answer=[]), r"column 'answer' is \[\]; expected text or a number"),
        (row(question=" ", answer="a"), "column 'question' is empty"),
        ('["q", "a"]', "is not a JSON object"),
        ('{"question": "q", ', "not JSON: .*; expected a JSON object per line"),
        ('{"question": "a", "answer": "\\ud800"}', "column 'answer' is no valid Unicode text"),
        ('{"question": "\\ud800", "answer": "1"}', "column 'question' is no valid Unicode text"),
        ('{"question": ' + '{"a":' * 200_000, "(brackets are nested too deeply|not JSON)"),
        (row(question="x" * 2_000_000, answer="1"), "column 'question' has 2000000 char"),
        ("[", r"not JSON: Expecting value at column [12] of '\['; expected a JSON object per line"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_file_and_line(tmp_path, line, message):
    path = write(tmp_path / "t.jsonl", row(question="q", answer="a"), "", line)
    with pytest.raises(ValueError, match=rf"t\.jsonl:3: .*{message}"):
        Table(path, path).train()


def test_a_file_that_is_missing_or_not_utf8_is_named(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"question": "\u00e9", "answer": "a"}'.encode("latin-1"))
    (tmp_path / "list.json").write_text('\n[{"question": "q", "answer": "a"}]')
    for path, message in (
        (tmp_path / "nowhere.jsonl", r"data\.source: train_path: there is no file /.*nowhere\.jsonl$"),
        (tmp_path / "nowhere.parquet", r"data\.source: train_path: there is no file /.*nowhere\.parquet$"),
        (tmp_path / "latin.jsonl", r"latin\.jsonl:1 is not UTF-8"),
        (tmp_path / "list.json", r"list\.json:2: the file begins with a list; .*`jq -c '\.\[\]' .*list\.json >"),
        ("./no/such/folder", r"cannot load \./no/such/folder: .*; a local \.jsonl or \.parquet file does"),
    ):
        with pytest.raises(ValueError, match=message):
            Table(str(path), validation_share=0.5).train()


def test_a_validation_share_splits_by_question_whatever_the_order(tmp_path):
    rows = [row(question=f"q{number % 900}", answer="a") for number in range(1000)]
    source = Table(write(tmp_path / "a.jsonl", *rows), validation_share=0.2)
    backwards = Table(write(tmp_path / "b.jsonl", *reversed(rows)), validation_share=0.2)
    train, validation = source.train(), source.validation()
    assert len(train) + len(validation) == 1000
    assert 140 < len(validation) < 260
    assert not {problem.question for problem in train} & {problem.question for problem in validation}
    assert {problem.question for problem in backwards.validation()} == {problem.question for problem in validation}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of"),
        ({"validation_path": "v.jsonl", "validation_share": 0.1}, "exactly one of"),
        *[({"validation_share": share}, "validation_share") for share in (0.0, 1.0, -0.1)],
    ],
)
def test_a_table_needs_one_way_to_validate(settings, message):
    with pytest.raises(ValueError, match=message):
        Table("t.jsonl", **settings)
