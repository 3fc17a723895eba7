"""Generated word problems: right answers, sets without a common structure, the same problems for the same seed."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.decontaminate import find_overlaps
from datamodules.prompts import PromptDataModule
from datamodules.table import Table
from datamodules.word_problems import WordProblems
from qerl_pl.__main__ import main as command
from qerl_pl.common.types import Completion, Problem
from qerl_pl.rewards.format import think_answer_format
from qerl_pl.rewards.math import NumericAnswer
from qerl_pl.tasks.quantities import Quantity, Split, draw_structure, split_of, structure_hash
from qerl_pl.tasks.word_problems import VERSION, WordProblem, draw_problem, draw_problems, draw_sets
from qerl_pl.tools import tiny

seeds = st.integers(0, 2**31)
operations = st.integers(2, 14)
splits = st.sampled_from(["train", "validation", "reach"])

OWNER = r"(\w+) has {}(\w+)"
THAN = r" than (\w+) has (\w+)"
PATTERNS = {
    "given": OWNER.format(r"(\d+) "),
    "more": OWNER.format(r"(\d+) more ") + THAN,
    "fewer": OWNER.format(r"(\d+) fewer ") + THAN,
    "times": OWNER.format(r"(\d+) times as many ") + r" as (\w+) has (\w+)",
    "part": OWNER.format(r"(half|a third|a quarter) as many ") + r" as (\w+) has (\w+)",
    "sum": r"(\w+) has (as) many (\w+) as (\w+) has (\w+) and (\w+) has (\w+) together",
    "minus": r"(\w+)'(s) (\w+) are as many as (\w+)'s (\w+) minus (\w+)'s (\w+)",
}
PARTS = {"half": 2, "a third": 3, "a quarter": 4}


def read(question: str) -> tuple[dict[tuple[str, str], tuple[str, list[str]]], tuple[str, str]]:
    """What the English text says: of each owner the kind and the rest of the statement; and what is asked for."""
    *statements, last = re.split(r"[.?] ?", question)[:-1]
    facts = {}
    for statement in statements:
        [(kind, found)] = [(kind, m) for kind, text in PATTERNS.items() if (m := re.fullmatch(text, statement))]
        name, number, item, *others = found.groups()
        assert (name, item) not in facts, "a quantity is defined once"
        facts[name, item] = kind, [number, *others]
    asked = re.fullmatch(r"How many (\w+) does (\w+) have", last)
    assert asked
    return facts, (asked[2], asked[1])


def solve(facts: dict[tuple[str, str], tuple[str, list[str]]], wanted: tuple[str, str]) -> tuple[float, set]:
    """The value of a quantity, and the quantities that were computed for it."""
    kind, (number, *others) = facts[wanted]
    below = [solve(facts, (others[at], others[at + 1])) for at in range(0, len(others), 2)]
    values = [value for value, _ in below]
    computed = set().union(*(more for _, more in below))
    if kind == "given":
        return int(number), set()
    value = {
        "more": lambda: values[0] + int(number),
        "fewer": lambda: values[0] - int(number),
        "times": lambda: values[0] * int(number),
        "part": lambda: values[0] / PARTS[number],
        "sum": lambda: sum(values),
        "minus": lambda: values[0] - values[1],
    }[kind]()
    return value, computed | {wanted}


@given(seeds, operations, splits)
def test_the_answer_is_what_the_english_text_says(seed, num_operations, split):
    problem = draw_problem(random.Random(seed), num_operations=num_operations, split=split)
    facts, asked = read(problem.question)
    value, computed = solve(facts, asked)
    assert value == problem.answer, "and it is an integer"
    assert len(computed) == problem.num_operations == num_operations
    assert split_of(problem.structure) == split


@given(seeds, operations)
def test_every_line_of_the_solution_is_right_needed_and_uses_what_is_known(seed, num_operations):
    problem = draw_problem(random.Random(seed), num_operations=num_operations, split="train")
    facts, asked = read(problem.question)
    _, needed = solve(facts, asked)
    work = re.fullmatch(r"<think>(.*)</think><answer>(\d+)</answer>", problem.solution, re.DOTALL)
    assert work
    known = {owner: int(rest[0]) for owner, (kind, rest) in facts.items() if kind == "given"}
    for line in work[1].split("\n"):
        found = re.fullmatch(r"(\w+)'s (\w+): (\d+) ([-+x/]) (\d+) = (\d+)", line)
        assert found
        left, right, result = int(found[3]), int(found[5]), int(found[6])
        assert {"+": left + right, "-": left - right, "x": left * right, "/": left / right}[found[4]] == result
        kind, (number, *others) = facts[found[1], found[2]]
        values = [known[others[at], others[at + 1]] for at in range(0, len(others), 2)]
        constants = [] if kind in ("sum", "minus") else [PARTS.get(number) or int(number)]
        assert [left, right] == values + constants
        known[found[1], found[2]] = result
        needed.remove((found[1], found[2]))
    assert not needed
    assert known[asked] == int(work[2]) == problem.answer


def as_graph(quantities: list[Quantity]) -> networkx.DiGraph:
    """With an edge's place among the operands where it matters; what is used twice is written out twice."""
    graph = networkx.DiGraph()

    def add(place: int) -> int:
        kind, operands, _ = quantities[place]
        node = len(graph)
        graph.add_node(node, kind=kind)
        for number, operand in enumerate(operands):
            graph.add_edge(node, add(operand), place=0 if kind == "sum" else number)
        return node

    add(len(quantities) - 1)
    return graph


@settings(max_examples=50)
@given(seeds, st.integers(2, 4))
def test_structures_have_one_hash_exactly_where_their_graphs_are_isomorphic(seed, num_operations):
    rng = random.Random(seed)
    one, other = draw_structure(rng, num_operations), draw_structure(rng, num_operations)
    same = networkx.is_isomorphic(
        as_graph(one),
        as_graph(other),
        node_match=lambda a, b: a["kind"] == b["kind"],
        edge_match=lambda a, b: a["place"] == b["place"],
    )
    assert same == (structure_hash(one) == structure_hash(other))


def test_a_hash_does_not_depend_on_numbers_or_the_order_of_a_sum_and_does_on_that_of_a_difference():
    a, b = Quantity("given", (), 3), Quantity("given", (), 4)
    up, down = Quantity("plus", (0,), 2), Quantity("minus", (1,), 2)
    graphs = {
        kind: [structure_hash([a, b, up, down, Quantity(kind, order)]) for order in ((2, 3), (3, 2))]
        for kind in ("sum", "difference")
    }
    assert len(set(graphs["sum"])) == 1
    assert len(set(graphs["difference"])) == 2
    assert structure_hash([a, up]) == structure_hash([b, Quantity("plus", (0,), 19)])


def masked(question: str) -> str:
    """The question with numbers out and names and things replaced by the order in which they appear."""
    seen: dict[str, str] = {}
    words = set(re.findall(r"\b[A-Z]\w+", question)) - {"How"}
    items = {item for _, item in read(question)[0]}
    text = re.sub(r"\d+", "#", question)
    return re.sub(r"\w+", lambda m: seen.setdefault(m[0], f"w{len(seen)}") if m[0] in words | items else m[0], text)


def test_sets_share_no_structure_not_even_of_another_seed_and_no_problem_with_other_names_and_numbers():
    sizes: dict[Split, int] = {"train": 600, "validation": 200, "reach": 200}
    ranges: dict[Split, tuple[int, int]] = dict.fromkeys(sizes, (2, 8))
    found = [draw_sets(seed=seed, sizes=sizes, operations=ranges) for seed in (0, 1)]
    for left in sizes:
        for right in set(sizes) - {left}:
            problems = [[p for sets in found for p in sets[split]] for split in (left, right)]
            for view in (lambda p: p.structure, lambda p: masked(p.question)):
                assert not {view(p) for p in problems[0]} & {view(p) for p in problems[1]}
    for sets in found:
        flat = {split: [Problem(p.question, "") for p in problems] for split, problems in sets.items()}
        assert not find_overlaps(flat["train"], flat["validation"] + flat["reach"], num_words=13)
        assert not find_overlaps(flat["reach"], flat["validation"], num_words=13)


def test_every_number_of_operations_comes_equally_often_and_no_problem_twice():
    problems = draw_problems(520, seed=3, split="train")
    assert Counter(p.num_operations for p in problems) == dict.fromkeys(range(2, 15), 40)
    assert len({p.question for p in problems}) == len({p.identity for p in problems}) == 520
    hard = draw_problems(200, seed=3, split="train", operations=(10, 12))
    assert len({p.structure for p in hard}) > 190, "hard problems hardly ever repeat a structure"


@pytest.mark.parametrize("split", ["train", "validation", "reach"])
def test_every_set_has_problems_of_every_difficulty(split):
    assert len({p.num_operations for p in draw_problems(13, seed=0, split=split)}) == 13


def digest(problems: list[WordProblem]) -> str:
    return hashlib.sha256(repr(problems).encode()).hexdigest()[:16]


def test_the_problems_of_a_seed_are_those_of_this_version():
    """A change that breaks this gives everybody other problems: raise VERSION with it."""
    random.seed(5)
    problems = draw_problems(130, seed=0, split="train")
    assert (VERSION, digest(problems)) == (1, "fe59ae85f1314418")
    assert digest(draw_problems(130, seed=1, split="train")) != digest(problems)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"operations": (1, 3)}, r"operations are \[1, 3\]; expected .* from 2 to 14"),
        ({"reach_operations": (9, 8)}, r"operations are \[9, 8\]"),
        ({"num_train": 0}, "num_train is 0; expected at least 1"),
        ({"validates": "test"}, "split is 'test'; expected one of train, validation, reach"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        WordProblems(**settings)


def test_the_data_module_serves_them_and_the_rewards_read_the_solutions(tmp_path):
    tiny.make_tiny(tmp_path / "policy", sft_steps=0)
    source = WordProblems(num_train=40, num_validation=8, operations=(2, 5))
    data = PromptDataModule(source, str(tmp_path / "policy"), batch_size=8, max_prompt_tokens=1024)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert (len(batch), data.num_shared, data.num_dropped) == (8, 0, {"train": 0, "validation": 0})
    assert {"id", "operations", "structure"} == set(batch[0].row)
    drawn = draw_sets(
        seed=0,
        sizes={"train": 40, "validation": 8, "reach": 8},
        operations={"train": (2, 5), "validation": (2, 5), "reach": (12, 14)},
    )
    by_question = {p.question: p for p in drawn["train"]}
    solved = [by_question[prompt.messages[-1]["content"]].solution for prompt in batch]
    right = [Completion((), (), True, text) for text in solved]
    assert NumericAnswer()(batch, right) == [1.0] * 8
    assert think_answer_format(batch, right) == [1.0] * 8
    wrong = [Completion((), (), True, re.sub(r"<answer>", "<answer>9", text)) for text in solved]
    assert NumericAnswer()(batch, wrong) == [0.0] * 8


def test_the_sets_are_written_as_files_that_a_table_reads(tmp_path, capsys):
    sizes = ["--train", "30", "--validation", "10", "--reach", "5", "--operations", "2", "6"]
    for folder in ("one", "two"):
        assert command(["problems", "--output", str(tmp_path / folder), *sizes]) == 0
    assert "train.jsonl: 30 problems" in capsys.readouterr().out
    for name in ("train.jsonl", "validation.jsonl", "reach.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "one" / "train.jsonl").read_text().splitlines()]
    assert {row["operations"] for row in rows} == set(range(2, 7))
    assert {row["version"] for row in rows} == {VERSION}
    table = Table(str(tmp_path / "one" / "train.jsonl"), str(tmp_path / "one" / "reach.jsonl"))
    assert [problem.answer for problem in table.train()] == [row["answer"] for row in rows]
    assert {problem.row["operations"] for problem in table.validation()} == {12, 13, 14}


def test_the_source_and_the_command_give_the_same_sets(tmp_path):
    sizes = ["--train", "30", "--validation", "6", "--reach", "6", "--operations", "8", "12"]
    assert command(["problems", "--output", str(tmp_path), *sizes]) == 0
    source = WordProblems(num_train=30, num_validation=6)
    reach = WordProblems(num_train=30, num_validation=6, validates="reach")
    for name, problems in (
        ("train", source.train()),
        ("validation", source.validation()),
        ("reach", reach.validation()),
    ):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert [row["question"] for row in rows] == [problem.question for problem in problems]


@pytest.mark.parametrize("option", ["--reach-operations", "--reach_operations"])
def test_the_reach_set_has_the_operations_that_are_asked_for_in_either_spelling(tmp_path, option):
    sizes = ["--train", "3", "--validation", "3", "--reach", "4", "--operations", "2", "6"]
    assert command(["problems", "--output", str(tmp_path), *sizes, option, "8", "8"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "reach.jsonl").read_text().splitlines()]
    assert {row["operations"] for row in rows} == {8}


@pytest.mark.parametrize(("flag", "values"), [("--train", ["0"]), ("--operations", ["3", "20"])])
def test_the_command_refuses_what_cannot_be(tmp_path, capsys, flag, values):
    assert command(["problems", "--output", str(tmp_path / "out"), flag, *values]) == 1
    assert "expected" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
