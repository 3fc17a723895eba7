"""Data sets of mathematical problems: the training sets and their filters, the benchmarks, and the removal of a
benchmark's problems from training sets."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentError, ArgumentParser

from datamodules import math_sets
from datamodules.benchmarks import Benchmark
from datamodules.decontaminate import Decontaminated, find_overlaps
from datamodules.gsm8k import GSM8K
from datamodules.sources import Pair, PromptSource
from datamodules.table import Table
from qerl_pl.common.types import Problem

DATA = Path(os.environ.get("QERL_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"real data sets are not in {DATA}; set QERL_DATA")


def write(path: Path, *rows: Mapping[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source(class_path: str, **init: object) -> PromptSource:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--source", type=PromptSource)
    return parser.instantiate(parser.parse_object({"source": {"class_path": class_path, "init_args": init}}))["source"]


def test_yaml_names_a_function_like_a_class(tmp_path):
    path = write(tmp_path / "t.jsonl", {"prompt": "q", "solution": "34"})
    found = source("datamodules.math_sets.dapo_math", path=path)
    assert [problem[:2] for problem in found.train() + found.validation()] == [("q", "34")]
    with pytest.raises(ArgumentError, match="4-5"):
        source("datamodules.math_sets.big_math", levels="1-2")


def test_big_math_keeps_problems_by_solve_rate_and_validates_on_all(tmp_path):
    rates = [number / 100 for number in range(101)]
    rows = [{"prompt": f"q{rate}", "solution": 1, "llama8b_solve_rate": rate} for rate in rates]
    whole = math_sets.big_math(path=write(tmp_path / "t.jsonl", *rows), validation_share=0.3)
    band = math_sets.big_math(path=write(tmp_path / "t.jsonl", *rows), validation_share=0.3, solve_rate=(0.1, 0.9))
    assert (math_sets.big_math().subset, math_sets.big_math(levels="4-5").subset) == ("level_3_4_5", "level_4_5")
    assert len(whole.train()) + len(whole.validation()) == 101
    assert band.validation() == whole.validation()
    assert band.train() == [problem for problem in whole.train() if 0.1 <= float(problem.question[1:]) <= 0.9]


def test_math_answers_come_out_of_the_box_and_levels_filter_training_alone(tmp_path):
    rows = [
        {"problem": f"q{level}", "level": f"Level {level}", "solution": rf"so $x = \boxed{{\frac{{{level}}}{{2}}}}$."}
        for level in range(1, 6)
    ]
    path = write(tmp_path / "t.jsonl", *rows)
    found = math_sets.math(levels=[4, 5], train_path=path, validation_path=path)
    assert [problem[:2] for problem in found.train()] == [("q4", r"\frac{4}{2}"), ("q5", r"\frac{5}{2}")]
    assert len(found.validation()) == 5
    path = write(tmp_path / "t.jsonl", {"problem": "q", "level": "Level 1", "solution": "so it is 4"})
    with pytest.raises(ValueError, match=r"t\.jsonl:1: no answer is marked \(boxed\) in column 'solution'"):
        math_sets.math(train_path=path, validation_path=path).train()


def test_miromind_takes_the_clean_answer(tmp_path):
    path = write(tmp_path / "t.jsonl", {"problem": "q", "clean_answer": "7", "answer": "seven"})
    found = math_sets.miromind(path)
    assert [problem[:2] for problem in found.train() + found.validation()] == [("q", "7")]


@needs_data
@pytest.mark.parametrize(("name", "size", "first"), [("aime24", 30, "204"), ("amc23", 40, "27")])
def test_benchmarks_have_their_published_size(name, size, first):
    problems = Benchmark(name, str(DATA / f"{name}.jsonl")).validation()
    assert (len(problems), problems[0].answer) == (size, first)


def test_nothing_trains_on_a_benchmark_but_it_validates_another_source(tmp_path):
    path = write(tmp_path / "t.jsonl", {"problem": "b", "answer": 3, "question": "t"})
    benchmark = Benchmark("math500", path)
    with pytest.raises(ValueError, match="math500 is a benchmark"):
        benchmark.train()
    pair = Pair(Table(path, validation_share=1e-9), benchmark)
    assert [problem[:2] for problem in pair.train() + pair.validation()] == [("t", "3"), ("b", "3")]


WORDS = [f"w{number}" for number in range(40)]


def shares_a_run(left: str, right: str, num_words: int) -> bool:
    """Compare all runs of words, which is the definition."""
    a, b = left.split(), right.split()
    if not a or not b:
        return False
    if len(a) < num_words or len(b) < num_words:
        return a == b
    return any(
        a[i : i + num_words] == b[j : j + num_words]
        for i in range(len(a) - num_words + 1)
        for j in range(len(b) - num_words + 1)
    )


texts = st.lists(st.lists(st.sampled_from(WORDS[:3]), max_size=7).map(" ".join), max_size=6)


@given(train=texts, evaluation=texts, num_words=st.integers(1, 5))
def test_an_overlap_is_a_run_of_words_that_both_have(train, evaluation, num_words):
    found = find_overlaps(
        [Problem(text, "1") for text in train], [Problem(text, "2") for text in evaluation], num_words=num_words
    )
    assert [overlap.train_index for overlap in found] == [
        index for index, text in enumerate(train) if any(shares_a_run(text, other, num_words) for other in evaluation)
    ]
    for overlap in found:
        assert overlap.words in overlap.train_question
        assert overlap.words in overlap.evaluation_question


def test_case_punctuation_and_space_hide_no_overlap():
    (overlap,) = find_overlaps(
        [Problem("How many  APPLES, are\nleft?", "1")], [Problem("... how many apples are left over", "2")], num_words=5
    )
    assert overlap.words == "how many apples are left"


def test_a_decontaminated_source_lacks_the_overlaps_and_reports_them(tmp_path, caplog):
    train = write(
        tmp_path / "t.jsonl",
        {"question": "a train leaves the station at noon", "answer": 1},
        {"question": "two trains meet", "answer": 2},
    )
    held_out = write(tmp_path / "b.jsonl", {"problem": "When a train leaves the station at noon, ...", "answer": 1})
    report = tmp_path / "report.jsonl"
    found = source(
        "datamodules.decontaminate.Decontaminated",
        source={"class_path": "datamodules.table.Table", "init_args": {"train_path": train, "validation_share": 1e-9}},
        against=[{"class_path": "datamodules.benchmarks.Benchmark", "init_args": {"name": "aime25", "path": held_out}}],
        num_words=5,
        report_path=str(report),
    )
    with caplog.at_level("INFO"):
        assert [problem[:2] for problem in found.train()] == [("two trains meet", "2")]
    assert "removed 1 of 2 training problems" in caplog.text
    (line,) = report.read_text().splitlines()
    assert json.loads(line)["words"] == "a train leaves the station"


def test_decontamination_needs_words_and_something_to_compare_with():
    with pytest.raises(ValueError, match="num_words is 0"):
        Decontaminated(Benchmark("aime24"), [Benchmark("aime24")], num_words=0)
    with pytest.raises(ValueError, match="against is empty"):
        Decontaminated(Benchmark("aime24"), [])


@needs_data
def test_gsm8k_train_and_test_share_no_question_but_some_wording():
    found = GSM8K(str(DATA / "gsm8k_train.jsonl"), str(DATA / "gsm8k_test.jsonl"))
    train, test = found.train(), found.validation()
    assert not {problem.question for problem in train} & {problem.question for problem in test}
    overlaps = find_overlaps(train, test, num_words=13)
    assert 0 < len(overlaps) < 0.01 * len(train)
