"""Tests of reading problems (questions and their answers) from tables, which are files with a row per problem: numbers
in columns of any type, nulls, layouts of published data sets, and what happens to rows that cannot be used."""

import datetime
import json
import os
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from pyarrow import parquet

from datamodules import math_sets
from datamodules.arrow import table_rows
from datamodules.benchmarks import Benchmark
from datamodules.gsm8k import GSM8K
from datamodules.rows import read_rows
from datamodules.sources import PromptSource
from datamodules.table import Table
from qerl_pl.common.json_lines import stored_text

DATA = Path(os.environ.get("QERL_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"real data sets are not in {DATA}; set QERL_DATA")


def table(path: Path, **settings: Any) -> Table:
    return Table(str(path), str(path), **settings)


def lines(path: Path, *rows: Mapping[str, object] | str) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in rows))
    return path


def answers_of(path: Path, answers: pyarrow.Array, **settings: Any) -> list[str]:
    questions = [f"q{number}" for number in range(len(answers))]
    parquet.write_table(pyarrow.table({"question": questions, "answer": answers}), path)
    return [problem.answer for problem in table(path, **settings).train()]


@pytest.mark.parametrize(
    ("values", "kind", "texts"),
    [
        ([0.1, 1.1, -2.7, 3.0], pyarrow.float32(), ["0.1", "1.1", "-2.7", "3.0"]),
        ([0.1, 1.1], pyarrow.float64(), ["0.1", "1.1"]),
        ([Decimal("27.10"), Decimal("0.00")], pyarrow.decimal128(6, 2), ["27.10", "0.00"]),
        ([Decimal("0.0000000001")], pyarrow.decimal256(20, 10), ["0.0000000001"]),
        ([-128, 127], pyarrow.int8(), ["-128", "127"]),
        ([2**64 - 1], pyarrow.uint64(), ["18446744073709551615"]),
        (["a", "1.50"], pyarrow.large_string(), ["a", "1.50"]),
        ([[0.1], [1.1]], pyarrow.list_(pyarrow.float32()), ["0.1", "1.1"]),
    ],
)
def test_an_answer_is_the_text_of_its_number_in_every_type(tmp_path, values, kind, texts):
    assert answers_of(tmp_path / "t.parquet", pyarrow.array(values, kind)) == texts


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_float_of_32_bits_keeps_the_digits_of_its_own_precision(value):
    [row] = table_rows(pyarrow.table({"x": pyarrow.array([value], pyarrow.float32())}))
    assert numpy.float32(str(row["x"])) == numpy.float32(value)
    assert float(str(numpy.float32(value))) == row["x"]


def test_short_floats_inside_other_types_keep_their_digits():
    short = pyarrow.float32()
    half = pyarrow.array(numpy.array([0.1, 65504], numpy.float16))
    columns = {
        "half": half,
        "category": pyarrow.array([0.1, None], short).dictionary_encode(),
        "struct": pyarrow.array(
            [{"a": 0.1, "b": [0.2]}, None], pyarrow.struct({"a": short, "b": pyarrow.list_(short)})
        ),
        "map": pyarrow.array([[("k", 0.1)], None], pyarrow.map_(pyarrow.string(), short)),
        "fixed": pyarrow.array([[0.1, 0.2], None], pyarrow.list_(short, 2)),
    }
    first, second = table_rows(pyarrow.table(columns))
    assert first == {
        "half": 0.1,
        "category": 0.1,
        "struct": {"a": 0.1, "b": [0.2]},
        "map": [("k", 0.1)],
        "fixed": [0.1, 0.2],
    }
    assert second == {"half": 65500.0, "category": None, "struct": None, "map": None, "fixed": None}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (pyarrow.array([True]), "is True; expected text or a number"),
        (pyarrow.array([datetime.datetime(2026, 1, 2)]), "is datetime.datetime.*; expected text or a number"),
        (pyarrow.array([b"4"]), "is b'4'; expected text or a number"),
        (pyarrow.array([float("nan")]), "is NaN; expected text or a number"),
        (pyarrow.array([None], pyarrow.string()), "is null; expected text or a number"),
    ],
)
def test_an_answer_that_is_no_number_and_no_text_is_refused(tmp_path, values, said):
    with pytest.raises(ValueError, match=rf"t\.parquet, row 0: column 'answer' {said}"):
        answers_of(tmp_path / "t.parquet", values)


def test_times_that_python_cannot_represent_do_not_end_the_run(tmp_path):
    times = pyarrow.array([1, 10**18 + 1], pyarrow.timestamp("ns"))
    far = pyarrow.array([4 * 10**6, 0], pyarrow.date32())
    path = tmp_path / "t.parquet"
    columns = {"question": ["a", "b"], "answer": ["1", "2"], "time": times, "day": far}
    parquet.write_table(pyarrow.table(columns), path)
    assert [problem.answer for problem in table(path).train()] == ["1", "2"]


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: path.write_bytes(b"PAR1 and no more"), "cannot be read as Parquet"),
        (
            lambda path: parquet.write_table(pyarrow.table({"question": pyarrow.array([], "string")}), path),
            "has no rows",
        ),
        (
            lambda path: parquet.write_table(pyarrow.table([["a"], ["b"]], names=["q", "q"]), path),
            "several columns 'q'",
        ),
    ],
)
def test_a_parquet_file_that_cannot_be_read_is_named(tmp_path, write: Callable[[Path], object], said):
    write(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=said):
        table(tmp_path / "t.parquet").train()


def test_a_data_set_gives_what_its_files_give(tmp_path):
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "folder" / "train.parquet"
    path.parent.mkdir()
    columns = {"question": ["a", "b"], "answer": pyarrow.array([0.1, 2.5], pyarrow.float32())}
    parquet.write_table(pyarrow.table(columns), path)
    found = Table(str(path.parent), str(path)).train()
    assert found == table(path).train()
    assert [problem.answer for problem in found] == ["0.1", "2.5"]

    from datamodules.arrow import dataset_rows

    labels = datasets.Features({"kind": datasets.ClassLabel(names=["no", "yes"])})
    rows = dataset_rows(datasets.Dataset.from_dict({"kind": [1, 0, None]}, features=labels))
    assert [row["kind"] for row in rows] == ["yes", "no", None]

    kind = datasets.ClassLabel(names=["no", "yes"])
    nested = datasets.Features({"row": {"kinds": datasets.List(kind)}, "pair": datasets.List({"kind": kind})})
    values = {"row": [{"kinds": [1, 0]}, {"kinds": None}], "pair": [[{"kind": 1}], [None]]}
    rows = list(dataset_rows(datasets.Dataset.from_dict(values, features=nested)))
    assert [row["row"] for row in rows] == [{"kinds": ["yes", "no"]}, {"kinds": None}]
    assert rows[0]["pair"] == [{"kind": "yes"}]


def test_a_folder_with_a_script_and_no_data_is_refused_in_one_line(tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.py").write_text("raise SystemExit('run')\n")
    with pytest.raises(ValueError, match=r"cannot load .*mine: .*script.*; a local \.jsonl or \.parquet file") as error:
        table(folder).train()
    assert "\n" not in str(error.value)


ROWS = [
    {"question": "a", "answer": "1", "rate": 0.5, "source": "x", "good": True, "level": 4, "system": "Be brief."},
    {"question": "b", "answer": "2", "rate": None, "source": None, "good": None, "level": None, "system": None},
    {"question": "c", "answer": "3", "rate": 0.95, "source": "y", "good": False, "level": "5", "system": " "},
    {"question": "d", "answer": "4"},
]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"between": {"rate": [0.1, 0.9]}}, "a"),
        ({"between": {"rate": [0.5, 0.95]}}, "ac"),
        ({"only": {"source": ["x", "y"]}}, "ac"),
        ({"only": {"good": [True]}}, "a"),
        ({"only": {"good": ["true", "false"]}}, "ac"),
        ({"only": {"level": [4, 5]}}, "ac"),
        ({"only": {"level": ["4"]}}, "a"),
        ({"only": {"level": [5.0]}}, "c"),
        ({"only": {"level": [4, 5]}, "between": {"rate": [0, 0.6], "level": [0, 9]}}, "a"),
    ],
)
def test_a_null_is_outside_of_every_filter_and_counted(tmp_path, caplog, settings, kept):
    path = lines(tmp_path / "t.jsonl", *ROWS)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--source", type=PromptSource)
    init = {"train_path": str(path), "validation_path": str(path), **settings}
    config = {"source": {"class_path": "datamodules.table.Table", "init_args": init}}
    source = parser.instantiate(parser.parse_object(config))["source"]
    with caplog.at_level("INFO"):
        assert "".join(problem.question for problem in source.train()) == kept
    assert f"only and between keep {len(kept)} of 4 rows" in caplog.text
    assert "2 rows have null in" in caplog.text
    assert len(source.validation()) == 4


def test_filters_read_numbers_of_any_type(tmp_path):
    rates = {
        "short": pyarrow.array([0.1, 0.2, None], pyarrow.float32()),
        "exact": pyarrow.array([Decimal("0.10"), Decimal("0.20"), None]),
        "text": ["0.1", "0.2", None],
        "nan": [0.1, 0.2, float("nan")],
    }
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"question": ["a", "b", "c"], "answer": ["1", "2", "3"], **rates}), path)
    for column in rates:
        for settings in ({"between": {column: [0, 0.1]}}, {"only": {column: [0.1]}}):
            assert [problem.question for problem in table(path, **settings).train()] == ["a"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"between": {"x": [0.9, 0.1]}}, "expected the lower number first"),
        ({"between": {"x": [float("nan"), 1]}}, "expected the lower number first"),
        ({"only": {"x": []}}, "expected at least one value"),
        ({"only": {"x": [None]}}, "rows with null are always left out"),
        ({"question": []}, "expected a column, a list of columns, or null"),
        ({"bad_rows": "skip"}, "expected 'refuse' or 'drop'"),
    ],
)
def test_filters_that_keep_nothing_are_refused_before_reading(settings, said):
    with pytest.raises(ValueError, match=said):
        table(Path("nowhere.jsonl"), **settings)


@pytest.mark.parametrize(
    ("setting", "message"),
    [({name: {"lvl": [0, 1]}}, "no column 'lvl'; the row has 'question'") for name in ("only", "between")]
    + [
        ({"system": "lvl"}, "no column 'lvl'"),
        ({"between": {"source": [0, 1]}}, ":1: column 'source' is 'x'; expected a"),
    ],
)
def test_a_column_that_no_row_has_or_that_has_no_numbers_is_refused(tmp_path, setting, message):
    with pytest.raises(ValueError, match=message):
        table(lines(tmp_path / "t.jsonl", *ROWS), **setting).train()


def test_a_null_system_prompt_is_none(tmp_path):
    found = table(lines(tmp_path / "t.jsonl", *ROWS), system="system").train()
    assert [bool(problem.messages) for problem in found] == [True, False, False, False]


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"}]


@pytest.mark.parametrize("truth", [["6", "six"], {"target": ["6"]}])
def test_an_answer_that_is_no_text_can_be_left_to_the_reward(tmp_path, truth):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "1+2+3=?", "answer": truth}))
    with pytest.raises(ValueError, match=r"expected text or a number, or the setting answer: null .* prompt\.row"):
        table(path).train()
    [problem] = table(path, answer=None).train()
    assert problem.row["answer"] == truth


def test_the_layout_of_verl_is_read_by_a_dotted_name(tmp_path):
    row = {
        "data_source": "math_dapo",
        "prompt": CHAT[1:],
        "reward_model": {"ground_truth": "34", "style": "rule"},
        "extra_info": {"index": 3, "split": "train"},
    }
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([row, {**row, "extra_info": None}]), path)
    [problem] = table(path, answer="reward_model.ground_truth", only={"extra_info.split": ["train"]}).train()
    assert (problem.question, problem.answer, problem.messages) == ("1+1=?", "34", tuple(CHAT[1:]))
    with pytest.raises(
        ValueError, match=r"no column 'reward_model\.truth'; the row has .*'reward_model\.ground_truth'"
    ):
        table(path, answer="reward_model.truth").train()
    dotted = lines(tmp_path / "dotted.jsonl", {"question": "q", "a.b": "7", "a": {"b": "8"}})
    assert table(dotted, answer="a.b").train()[0].answer == "7", "a column with this very name comes first"


@pytest.mark.parametrize(
    "stored",
    [
        CHAT,
        json.dumps(CHAT),
        [{"role": "developer", "content": "Be brief."}, CHAT[1]],
        [CHAT[0], {"role": "user", "content": [{"type": "text", "text": "1+1=?", "image": None}]}],
        [CHAT[0], {"role": "system", "content": None}, {"role": "developer", "content": " "}, CHAT[1]],
        json.dumps(
            [{"name": None, **CHAT[0]}, {"content": [{"text": "1+1=?", "type": "text"}], "role": "user"}], indent=1
        ),
    ],
)
def test_a_chat_is_the_same_in_every_form(tmp_path, stored):
    for column in ("question", "prompt"):
        [problem] = table(lines(tmp_path / "t.jsonl", {column: stored, "answer": ["2"]})).train()
        assert (problem.question, problem.answer, problem.messages) == ("1+1=?", "2", tuple(CHAT))
    for one in (CHAT[1], json.dumps(CHAT[1]), [{"role": "system", "content": None}, CHAT[1]]):
        [problem] = table(lines(tmp_path / "t.jsonl", {"prompt": one, "answer": "2"})).train()
        assert problem.messages == (CHAT[1],)


@pytest.mark.parametrize(
    "question", ['[{"a": 1}] has how many entries?', "[1, 2]", '{"role": "user"}', "[{role: x}]", '[{"role": 1}]']
)
def test_other_text_with_brackets_is_a_question(tmp_path, question):
    [problem] = table(lines(tmp_path / "t.jsonl", {"question": question, "answer": "2"})).train()
    assert (problem.question, problem.messages) == (question, ())


@pytest.mark.parametrize(
    "stored",
    [
        [{"from": "human", "value": "1+1=?"}],
        json.dumps([{"from": "human", "value": "1+1=?"}, {"from": "gpt", "value": "2"}]),
        "[{'from': 'human', 'value': '1+1=?'}]",
        "{'role': 'user', 'content': '1+1=?'}",
        [{"role": "system", "content": None}],
    ],
)
def test_a_chat_of_another_form_is_no_question(tmp_path, stored):
    with pytest.raises(ValueError, match=r"t\.jsonl:1: column 'prompt'"):
        table(lines(tmp_path / "t.jsonl", {"prompt": stored, "answer": "2"})).train()


def test_a_dotted_name_reads_fields_in_json_text_with_their_digits(tmp_path):
    path = lines(tmp_path / "t.jsonl", '{"question": "q", "info": "{\\"truth\\": {\\"value\\": 2.50}}"}')
    assert table(path, answer="info.truth.value").train()[0].answer == "2.50"
    for text in ("{", "[1]", "{}", "truth"):
        path = lines(tmp_path / "t.jsonl", {"question": "q", "info": text})
        with pytest.raises(ValueError, match=r"no column 'info\.truth'"):
            table(path, answer="info.truth").train()


def test_json_lines_are_read_under_all_their_endings(tmp_path):
    for ending in ("jsonl", "ndjson", "json", "JSON"):
        assert len(table(lines(tmp_path / f"t.{ending}", {"question": "q", "answer": 1})).train()) == 1
    (tmp_path / "t.json").write_text('[\n{"question": "q", "answer": 1}\n]')
    with pytest.raises(ValueError, match=r"t\.json:1: the file begins with a list; expected a JSON object per line"):
        table(tmp_path / "t.json").train()


def test_every_source_of_files_can_drop_bad_rows(tmp_path, caplog):
    good = dict.fromkeys(("problem", "question", "prompt"), "q")
    good |= {"solution": "\\boxed{1}", "clean_answer": "1", "answer": "#### 1"}
    bad = {**good, "answer": None, "solution": "", "clean_answer": " "}
    path = str(lines(tmp_path / "t.jsonl", good, '{"answer":', bad))
    for make in (
        lambda **settings: GSM8K(path, path, **settings),
        lambda **settings: Benchmark("math500", path, **settings),
        lambda **settings: Benchmark("amc23", path, **settings),
        lambda **settings: math_sets.math(None, path, path, **settings),
        lambda **settings: math_sets.big_math(path=path, **settings),
        lambda **settings: math_sets.dapo_math(path=path, **settings),
        lambda **settings: math_sets.miromind(path, **settings),
    ):
        caplog.clear()
        source = make(bad_rows="drop")
        with caplog.at_level("INFO"):
            assert source.validation() == [] or len(source.validation()) == 1
        assert f"dropped 2 of 3 rows of {path}" in caplog.text
        with pytest.raises(ValueError, match=r"t\.jsonl:2.*set bad_rows to drop"):
            make().validation()
        with pytest.raises(ValueError, match="bad_rows is 'skip'; expected 'refuse' or 'drop'"):
            make(bad_rows="skip")


def test_question_goes_before_prompt_and_columns_can_be_joined(tmp_path):
    path = lines(tmp_path / "t.jsonl", {"question": "q", "prompt": "p", "answer": 1})
    assert table(path).train()[0].question == "q"
    assert table(path, question=["prompt", "question"]).train()[0].question == "p\nq"


def test_a_null_question_is_none_and_the_prompt_is_asked(tmp_path):
    rows = {"question": ["q", None, None], "prompt": [None, "p", ""], "answer": ["1", "2", "3"]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "t.parquet")
    assert [problem.question for problem in table(tmp_path / "t.parquet", bad_rows="drop").train()] == ["q", "p"]


def test_several_files_patterns_capitals_and_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.jsonl", "b.JSONL", "c.Jsonl"):
        lines(tmp_path / name, {"question": name, "answer": "1"})
    parquet.write_table(pyarrow.table({"question": ["d"], "answer": ["1"]}), tmp_path / "d.PARQUET")

    def read(path: str | list[str]) -> list[str]:
        return [problem.question for problem in Table(path, path).train()]

    assert read("~/b.JSONL") == ["b.JSONL"]
    assert read("~/[abc].*") == ["a.jsonl", "b.JSONL", "c.Jsonl"]
    assert read([f"{tmp_path}/d.*", "~/a.jsonl"]) == ["d", "a.jsonl"]
    for path, said in (
        ("~/*.txt", "data.source: train_path: no file matches /"),
        ([], "the list of data files is empty"),
        (["~/a.jsonl", "~/a*"], r"a\.jsonl is named twice"),
        (["~/a.jsonl", "~/./a.jsonl"], r"a\.jsonl is named twice \(also as .*a\.jsonl\)"),
    ):
        with pytest.raises(ValueError, match=said):
            read(path)
    lines(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match=r"empty\.jsonl has no rows"):
        read("~/*l")


GOOD = {"question": "q", "answer": "a"}
BAD = [
    '{"question": "q", ',
    "[1]",
    '{"question": "q", "answer": "a", "answer": "b"}',
    '{"question": "q", "answer": ' + "9" * 5000 + "}",
    {"question": "q", "answer": None},
    {"question": "q", "answer": [1, 2]},
    {"question": [], "answer": "a"},
    {"question": "q"},
]


@pytest.mark.parametrize("bad", BAD)
def test_bad_rows_are_refused_or_dropped_and_counted(tmp_path, caplog, bad):
    path = lines(tmp_path / "t.jsonl", GOOD, bad, GOOD, bad)
    with pytest.raises(ValueError, match=r"t\.jsonl:2") as error:
        table(path).train()
    first = str(error.value).partition(". To leave such rows out")[0]
    with caplog.at_level("INFO"):
        assert len(table(path, bad_rows="drop").train()) == 2
    assert f"dropped 2 of 4 rows of {path} that cannot be used; the first: {first}" in caplog.text
    with pytest.raises(ValueError, match=r"bad_rows drops all 1 rows of .*; the first: .*t\.jsonl:1"):
        table(lines(tmp_path / "t.jsonl", bad), bad_rows="drop").train()


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6), st.integers())
def test_the_text_of_a_number_has_its_value_and_no_exponent(exact, whole):
    assert Decimal(stored_text(exact, "t")) == exact
    assert "E" not in stored_text(exact, "t")
    assert int(stored_text(whole, "t")) == whole


@needs_data
@pytest.mark.parametrize(
    ("name", "settings", "number", "first"),
    [
        ("gsm8k_train", {"marker": "hash"}, 7473, "72"),
        ("gsm8k_test", {"marker": "hash"}, 1319, "18"),
        ("svamp", {"question": ["Body", "Question"], "answer": "Answer"}, 1000, "145.0"),
        ("aime24", {"question": "problem"}, 30, "204"),
        ("amc23", {}, 40, "27.0"),
        ("gaokao2023en", {"bad_rows": "drop"}, 385 - 2, r"$\{x|-2\leq x < 1\}$"),
    ],
)
def test_public_files_load_with_two_settings_at_most(name, settings, number, first):
    problems = table(DATA / f"{name}.jsonl", **settings).train()
    assert len(problems) == number
    assert problems[0].answer == first


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "t.jsonl")
    with pytest.raises(ValueError, match="is not a regular file"):
        next(read_rows(str(tmp_path / "t.jsonl"), setting="train_path", split="train"))
