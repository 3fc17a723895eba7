"""The quickstart's tiny model: the generated problems that it learns from, their solutions with mistakes, the
tokenizer, and the folder that is written."""

import json
import random
import re
import shutil
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from qerl_pl.__main__ import main as program
from qerl_pl.tasks.arithmetic import distinct_expressions, draw_expression, num_expressions, question, solution, value
from qerl_pl.tools import tiny

seeds = st.integers(0, 2**31)


def step_results(text: str) -> list[tuple[int, str, int, int]]:
    """Read (total before, sign, operand, total after) from every line of a solution."""
    found = re.findall(r"(\d+)([+-])(\d+)=(\d+)", text)
    return [(int(before), sign, int(operand), int(after)) for before, sign, operand, after in found]


@given(seeds)
def test_the_right_solution_adds_up_line_by_line_to_the_value(seed):
    expression = draw_expression(random.Random(seed), validation=False)
    steps = step_results(solution(expression))
    for before, sign, operand, after in steps:
        assert after == (before + operand if sign == "+" else before - operand)
    assert [steps[0][0], *(after for *_, after in steps)][1:-1] == [before for before, *_ in steps][1:]
    assert solution(expression).endswith(f"<answer>{value(expression)}</answer>")
    assert value(expression) == steps[-1][3]


def test_the_format_is_the_one_that_rewards_read():
    assert solution("7+5-3+8") == "<think>7+5=12\n12-3=9\n9+8=17</think><answer>17</answer>"
    assert solution("7+5-3+8", careless=lambda: True) == "<think>7+5=22\n22-3=29\n29+8=47</think><answer>47</answer>"
    assert question("7+5-3+8") == "7+5-3+8=?"


def test_errors_never_cancel_to_a_right_answer():
    for expression in distinct_expressions(300, seed=0, validation=True):
        for pattern in product((False, True), repeat=3):
            slips = iter(pattern)
            text = solution(expression, careless=lambda slips=slips: next(slips))
            assert (f"<answer>{value(expression)}</answer>" in text) == (text == solution(expression))


def test_a_tenth_of_the_expressions_validates_and_no_more_can_be_asked_for():
    num = num_expressions(validation=True)
    assert num / (num + num_expressions(validation=False)) == pytest.approx(0.1, abs=0.01)
    with pytest.raises(ValueError, match=f"{num + 1} different validation problems were asked for; {num} exist"):
        distinct_expressions(num + 1, seed=0, validation=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "policy"
    tiny.make_tiny(path, seed=5, sft_steps=0)
    return path


@pytest.mark.parametrize(
    "text", ["", "7+5=12\n", " \t\r\n  x", "h\u00e9 \u65e5\u672c \U0001f642", "<thin", "a</think ><answer>"]
)
def test_any_text_survives_the_saved_tokenizer(folder, text):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(text).input_ids
    assert tokenizer.decode(tokens) == text
    assert tokens == tiny.make_tokenizer()(text).input_ids


def test_reproduces_says_what_greedy_generation_writes():
    tokenizer = tiny.make_tokenizer()
    model = tiny.random_model(tokenizer, seed=0)
    expressions, learnt = ["1+2+3", "9-8+7"], [solution("1+2+3"), solution("9-8+7", careless=lambda: True)]
    tokens, mask = tiny.encode(tokenizer, expressions, learnt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(80):  # enough to know two rows by heart
        loss = F.cross_entropy(model(tokens).logits[:, :-1][mask[:, 1:]], tokens[:, 1:][mask[:, 1:]])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert tiny.reproduces(model, tokenizer, expressions, learnt).tolist() == [True, True]
    assert tiny.reproduces(model, tokenizer, expressions, learnt[::-1]).tolist() == [False, False]
    generator: Any = model  # the type of generate's self asks for attributes that no model declares
    for row, sampled, text in zip(tokens, mask, learnt, strict=True):
        prompt = row[None, : int(sampled.int().argmax())]
        written = generator.generate(prompt, max_new_tokens=60, do_sample=False)[0, prompt.shape[1] :]
        assert tokenizer.decode(written) == text + tiny.END


def test_weights_are_a_function_of_the_seed_and_the_global_stream_is_left_alone(tmp_path):
    before = torch.random.get_rng_state()
    tokenizer = tiny.make_tokenizer()
    made = []
    for noise, seed in ((1, 0), (2, 0), (3, 1)):
        torch.manual_seed(noise)
        random.seed(noise)
        model = tiny.random_model(tokenizer, seed=seed)
        tiny.fine_tune(model, tokenizer, seed=seed, steps=2)
        made.append(torch.cat([weight.flatten() for weight in model.parameters()]))
        assert torch.equal(torch.random.get_rng_state(), torch.manual_seed(noise).get_state())
    torch.random.set_rng_state(before)
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_the_policys_numbers_are_explained():
    said = tiny.measured_words({"accuracy": 0.252, "skill": 0.996})
    assert "solves 0.252 of the held-out problems; this would be 0.996 (its skill) without errors" in said


def test_a_folder_with_anything_else_in_it_is_refused_and_left_as_it_was(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep me")
    assert program(["tiny", "--output", str(tmp_path)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(ValueError, match="is not an empty folder"):
        tiny.make_tiny(tmp_path / "mine.txt", sft_steps=0)


def test_a_second_run_with_the_same_settings_does_nothing(folder, tmp_path, capsys):
    finished = shutil.copytree(folder, tmp_path / "policy")
    record = json.loads((finished / tiny.RECORD).read_text())
    record["settings"]["sft_steps"] = tiny.SFT_STEPS  # as if it had been trained
    (finished / tiny.RECORD).write_text(json.dumps(record))
    before = {path.name: path.stat().st_mtime_ns for path in finished.iterdir()}
    assert program(["tiny", "--output", str(finished), "--seed", "5"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in finished.iterdir()} == before
    (finished / "model.safetensors").unlink()
    assert program(["tiny", "--output", str(finished), "--seed", "5"]) == 2


def test_nothing_is_left_behind_where_the_policy_is_not_good_enough(tmp_path):
    with pytest.raises(ValueError, match=r"greedy held-out accuracy is 0.000; expected 0.2 to 0.5"):
        tiny.make_tiny(tmp_path / "policy", sft_steps=1)
    assert list(tmp_path.iterdir()) == []
