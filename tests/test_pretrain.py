"""A policy made from scratch: tokenizer, batches, training that goes on after a kill, and what is measured."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_pl.__main__ import main as command
from qerl_pl.base.digest import base_digest
from qerl_pl.kernels import nvfp4_batch, nvfp4_decode
from qerl_pl.policy.elementwise import use_elementwise
from qerl_pl.pretraining import fit
from qerl_pl.pretraining.batches import Batches, Rows, encode, prompts_of, rows_of
from qerl_pl.pretraining.loss import mean_loss, prepare, token_losses
from qerl_pl.pretraining.measure import Measured, Sampling, count_right, over, with_room
from qerl_pl.pretraining.policy import END, FILES, make_tokenizer
from qerl_pl.tasks.word_problems import MAX_OPERATIONS, draw_problems, leave_out_lines
from tests.program import Program
from tests.reference.elementwise import REFERENCE

CPU = torch.device("cpu")
SMALL = fit.Settings(size="toy", steps=6, batch_size=6, operations=(2, 3), warmup_steps=2, micro_batch_tokens=400)


@pytest.fixture(scope="module")
def policy():
    model, tokenizer = fit.new_policy(SMALL)
    prepare(model, CPU)
    return model, tokenizer


def written(tokenizer, rows: Rows) -> list[tuple[str, str]]:
    """The prompts and the solutions of a micro-batch."""
    found = []
    for start, end in pairwise(rows.starts.tolist()):
        assert rows.positions[start:end].tolist() == list(range(end - start))
        own = (start <= rows.before) & (rows.before < end)
        before, wanted = rows.before[own], rows.wanted[own]
        assert before.tolist() == list(range(before[0], end)), "each token of the solution, the last one included"
        assert np.array_equal(rows.tokens[before[1:]], wanted[:-1])
        found.append((tokenizer.decode(rows.tokens[start : before[0] + 1]), tokenizer.decode(wanted)))
    return found


def batches_of(tokenizer, **changes: Any) -> Batches:
    values: dict[str, Any] = {
        "seed": 0,
        "num_steps": 40,
        "batch_size": 6,
        "operations": (2, 3),
        "rare": 0.0,
        "left_out": 0.0,
        "micro_batch_tokens": 400,
    }
    return Batches(tokenizer, **(values | changes))


def test_the_tokenizer_keeps_any_text_and_makes_few_tokens_of_the_problems(policy, tmp_path):
    _, tokenizer = policy
    assert len(tokenizer) <= SMALL.vocab_size
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    problem = draw_problems(1, seed=1, split="reach", operations=(14, 14))[0]
    for text in (problem.question, problem.solution, "h\u00e9 \u65e5\u672c \U0001f642 \t\r\n x", "<thin", ""):
        assert loaded(text).input_ids == tokenizer(text).input_ids
        assert loaded.decode(loaded(text).input_ids) == text
    assert loaded.decode(loaded(problem.solution + END).input_ids, skip_special_tokens=True) == problem.solution
    words = problem.question.replace("'s", " 's").replace(".", " .").replace("?", " ?").split()
    digits = sum(len(word) for word in words if word.isdigit())
    assert len(tokenizer(problem.question).input_ids) <= len(words) + 2 * digits


def test_learnt_merges_are_a_function_of_the_texts():
    texts = [problem.question for problem in draw_problems(200, seed=0, split="train")]
    one, other = (make_tokenizer(texts, vocab_size=400) for _ in range(2))
    assert one.get_vocab() == other.get_vocab()
    assert one(texts[0]).input_ids == other(texts[0]).input_ids


@pytest.mark.parametrize("size", ["10m", "30m"])
def test_sizes_are_as_they_are_called_and_their_linears_fit_the_kernels(size):
    shape = fit.SHAPES[size]
    hidden, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    values = hidden // heads * shape["num_key_value_heads"]
    per_block = 2 * hidden * hidden + 2 * hidden * values + 3 * hidden * inner
    total = shape["num_hidden_layers"] * per_block + 2 * 768 * hidden
    assert total / 1e6 == pytest.approx(float(size.removesuffix("m")), rel=0.05)
    linears = [(hidden + 2 * values, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    for outputs, inputs in linears:
        assert nvfp4_decode.choose_schedule(8, outputs, inputs) is not None
        assert nvfp4_batch.choose_schedule(256, outputs, inputs, fuses_lora=False) is not None


def test_a_batch_is_a_function_of_seed_and_index_and_holds_every_solution_once(policy):
    _, tokenizer = policy
    random.seed(0)
    some = batches_of(tokenizer)[3]
    again = batches_of(tokenizer)[3]
    assert all(
        np.array_equal(a, b) for one, two in zip(some, again, strict=True) for a, b in zip(one, two, strict=True)
    )
    pairs = [pair for rows in some for pair in written(tokenizer, rows)]
    assert len(pairs) == len(set(pairs)) == 6
    assert not set(pairs) & {pair for rows in batches_of(tokenizer)[4] for pair in written(tokenizer, rows)}
    assert len(some) > 1
    assert all(len(rows.tokens) <= 400 for rows in some)
    for prompt, solution in pairs:
        assert prompt.startswith("<|im_start|>user\n")
        assert prompt.endswith("?<|im_end|>\n<|im_start|>assistant\n")
        assert solution.startswith("<think>")
        assert solution.endswith(f"</answer>{END}")


def test_words_are_tokenised_as_in_whole_texts(policy):
    _, tokenizer = policy
    problems = draw_problems(200, seed=3, split="train")
    texts = [text for problem in problems for text in (problem.question, problem.solution + END)]
    texts += ["", "a", " a", "h\u00e9 \u65e5\u672c, \U0001f642! e \u0301x\r\n 12's", "<|im_start|>user\nTo 5<think>7 "]
    assert encode(tokenizer, texts) == tokenizer(texts, add_special_tokens=False).input_ids


def test_rare_problems_are_longer_than_the_others(policy):
    _, tokenizer = policy

    def longest(rare: float) -> set[int]:
        rows = [rows for index in range(8) for rows in batches_of(tokenizer, rare=rare, micro_batch_tokens=4000)[index]]
        return {solution.count("\n") + 1 for each in rows for _, solution in written(tokenizer, each)}

    assert longest(0.0) == {2, 3}
    assert max(longest(0.5)) > 10
    assert max(longest(0.5)) <= MAX_OPERATIONS


def test_lines_are_left_out_of_solutions_but_never_the_last_one(policy):
    _, tokenizer = policy
    problem = draw_problems(1, seed=5, split="train", operations=(14, 14))[0]
    lines = problem.solution.removeprefix("<think>").split("\n")
    assert leave_out_lines(random.Random(0), problem, 0.0) == problem
    assert leave_out_lines(random.Random(0), problem, 1.0) == problem._replace(solution="<think>" + lines[-1])
    left = leave_out_lines(random.Random(0), problem, 0.5).solution.removeprefix("<think>").split("\n")
    assert left[-1] == lines[-1]
    assert left == [line for line in lines if line in left], "the others keep their order"
    assert 1 < len(left) < len(lines)

    def num_lines(share: float) -> int:
        rows = [rows for index in range(20) for rows in batches_of(tokenizer, left_out=share)[index]]
        return sum(solution.count("\n") for each in rows for _, solution in written(tokenizer, each))

    assert num_lines(0.4) == pytest.approx(0.6 * num_lines(0.0), rel=0.15)


def gradients(model, rows: list[Rows], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss over the solutions' tokens, and its gradient."""
    model.zero_grad()
    loss = sum(token_losses(model, some, CPU, **options).sum() for some in rows) / sum(
        len(some.wanted) for some in rows
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return loss.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])


def test_the_loss_and_its_gradient_are_those_of_single_rows_however_they_are_packed(policy):
    model, tokenizer = policy
    problems = draw_problems(5, seed=0, split="train", operations=(2, 6))
    losses = []  # one row at a time, every position written out
    for prompt, problem in zip(prompts_of(tokenizer, problems), problems, strict=True):
        tail = tokenizer(problem.solution + END).input_ids
        logits = model(torch.tensor([prompt + tail])).logits[0].float()
        losses += [F.cross_entropy(logits[len(prompt) + i - 1], torch.tensor(token)) for i, token in enumerate(tail)]
    expected = torch.stack(losses).mean()
    model.zero_grad()
    expected.backward()
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    packed = {tokens: rows_of(tokenizer, problems, micro_batch_tokens=tokens) for tokens in (100, 500, 100_000)}
    assert [len(rows) for rows in packed.values()] == sorted({len(rows) for rows in packed.values()}, reverse=True)
    for rows in packed.values():
        found, of_packed = gradients(model, rows)
        torch.testing.assert_close(found, expected.detach())
        torch.testing.assert_close(of_packed, gradient, atol=1e-6, rtol=1e-4)


def test_fused_elementwise_operations_and_bf16_compute_the_same_loss(policy):
    _, tokenizer = policy
    model, _ = fit.new_policy(SMALL)
    prepare(model, CPU)
    rows = rows_of(tokenizer, draw_problems(5, seed=0, split="train"), micro_batch_tokens=2000)
    expected, gradient = gradients(model, rows)
    rounded, of_rounded = gradients(model, rows, dtype=torch.bfloat16)
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    torch.testing.assert_close(rounded, expected, atol=0.01, rtol=0)
    assert 0 < (of_rounded - gradient).norm() / gradient.norm() < 0.03
    use_elementwise(model, REFERENCE)
    found, of_fused = gradients(model, rows)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(of_fused, gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.gpu
def test_on_a_gpu_the_losses_of_training_are_those_of_a_cpu_to_the_rounding_of_bf16():
    settings = replace(SMALL, steps=12, batch_size=32, micro_batch_tokens=100_000)
    losses = {}
    for device in (CPU, torch.device("cuda")):
        model, tokenizer = fit.new_policy(settings)
        torch.nn.Module.to(model, device)
        prepare(model, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        batches = fit.batches_of(tokenizer, settings)
        losses[device.type] = [fit.train_step(model, optimizer, batches[step], device).item() for step in range(12)]
        assert all(weight.dtype == torch.float32 for weight in model.parameters())
    assert losses["cpu"][-1] < losses["cpu"][0] - 0.5
    assert losses["cuda"] == pytest.approx(losses["cpu"], abs=0.03)


@pytest.mark.gpu
def test_a_step_on_a_gpu_does_not_wait_for_it():
    device = torch.device("cuda")
    model, tokenizer = fit.new_policy(SMALL)
    torch.nn.Module.to(model, device)
    prepare(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    batches = fit.batches_of(tokenizer, SMALL)
    fit.train_step(model, optimizer, batches[0], device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fit.train_step(model, optimizer, batches[1], device)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_learning_rate_rises_then_falls_to_nothing():
    settings = fit.Settings(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [fit.learning_rate(settings, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(0.91)
    assert rates[-1] == pytest.approx(0.01)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def trained(settings: fit.Settings, state: Path, *, workers: int = 0) -> torch.Tensor:
    model, tokenizer = fit.new_policy(settings)
    fit.train(model, tokenizer, settings, state=state, device=CPU, num_workers=workers)
    return torch.cat([weight.flatten() for weight in model.parameters()])


@pytest.mark.slow
def test_weights_are_a_function_of_the_settings_whoever_draws_the_problems(tmp_path):
    before = torch.random.get_rng_state()
    torch.manual_seed(1)
    here = trained(SMALL, tmp_path / "one.pt")
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    assert torch.equal(here, trained(SMALL, tmp_path / "two.pt", workers=2))
    assert torch.equal(torch.random.get_rng_state(), state), "the global stream is left alone"
    torch.random.set_rng_state(before)
    with pytest.raises(ValueError, match="interrupted training with other settings"):
        trained(replace(SMALL, seed=1), tmp_path / "one.pt")


FLAGS = """
--size toy --steps 12 --batch-size 4 --operations 2 3 --micro-batch-tokens 400 --measure-problems 1 --reach-problems 2
--samples 2 --batch-rows 64 --device cpu --workers 0
"""


def pretrain(output: Path, *more: str) -> list[str]:
    return ["pretrain", "--output", str(output), *FLAGS.split(), *more]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("made") / "policy"
    assert command(pretrain(output)) == 0
    return output


@pytest.mark.slow
def test_killed_while_it_trains_and_started_again_it_makes_the_same_policy(made, tmp_path):
    output, state = tmp_path / "policy", tmp_path / ".policy.state" / "state.pt"
    process = Program(pretrain(output, "--save-seconds", "0"), script="qerl_pl")
    while not state.exists() and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -9, "it was still at work"
    assert 1 <= torch.load(state, weights_only=True)["step"] < 12
    assert not output.exists()
    assert command(pretrain(output)) == 0
    for name in (*FILES, "reach.jsonl", "task.yaml"):
        assert (output / name).read_bytes() == (made / name).read_bytes(), name
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.mark.slow
def test_stopped_again_and_again_it_makes_the_same_policy(tmp_path, capsys):
    """With no time at all, each start does one step, or one batch of samples, and keeps it."""
    output, state = tmp_path / "policy", tmp_path / ".policy.state" / "state.pt"
    few = ("--batch-rows", "8", "--steps", "4")
    starts = 0
    while (status := command(pretrain(output, *few, "--minutes", "0"))) == 3:
        starts += 1
        assert torch.load(state, weights_only=True)["step"] == min(starts, 4)
    assert status == 0
    assert starts == 3 + 3, "26 samples are 4 batches, and the last batch and the last step need no further start"
    text = capsys.readouterr().out
    assert "stopped after step 3 of 4; the same command goes on" in text
    assert "stopped after 8 of 26 samples (sampling)" in text
    straight = tmp_path / "straight"
    assert command(pretrain(straight, *few)) == 0
    for name in (*FILES, "reach.jsonl", "task.yaml"):
        assert (output / name).read_bytes() == (straight / name).read_bytes(), name
    whole = tmp_path / "whole"
    assert command(pretrain(whole, "--steps", "4")) == 0
    assert (output / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    one, other = (json.loads((folder / "pretrain.json").read_text()) for folder in (output, straight))
    assert one | {"seconds": 0} == other | {"seconds": 0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy", "straight", "whole"]


@pytest.mark.slow
def test_ctrl_c_saves_the_step_and_the_same_command_goes_on(made, tmp_path):
    output, state = tmp_path / "policy", tmp_path / ".policy.state" / "state.pt"
    long = ("--steps", "100000")
    process = Program(pretrain(output, *long, "--save-steps", "3"), script="qerl_pl")
    while not state.exists() and process.poll() is None:
        time.sleep(0.002)
    process.interrupt()
    text, _ = process.communicate()
    assert process.returncode == 3
    step = torch.load(state, weights_only=True)["step"]
    assert f"stopped after step {step} of 100000; the same command goes on" in text


def test_the_folder_is_an_ordinary_checkpoint_with_a_record_a_task_and_a_reach_set(made, capsys):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    assert model.dtype == torch.float32, "bf16 on a GPU alone"
    assert model.config.eos_token_id == tokenizer.eos_token_id == model.generation_config.eos_token_id
    record = json.loads((made / "pretrain.json").read_text())
    assert [each["num_operations"] for each in record["measured"]] == list(range(2, 15))
    assert record["has_room"] is False
    assert record["reach"] == len((made / "reach.jsonl").read_text().splitlines()) == 2
    task = yaml.safe_load((made / "task.yaml").read_text())
    assert task["data"]["source"]["init_args"]["operations"] == [3, 6]
    before = {path.name: path.stat().st_mtime_ns for path in made.iterdir()}
    assert command(pretrain(made)) == 0
    output = capsys.readouterr().out
    assert "nothing to do" in output
    assert "3 to 6 operations: pass@1 0.0%, pass@2 0.0%: OUTSIDE of pass@1 of 5% to 20% and pass@2 above 50%" in output
    assert "no range of operations has room: train the policy further with --start and --left-out" in output
    assert {path.name: path.stat().st_mtime_ns for path in made.iterdir()} == before
    assert command(pretrain(made, "--seed", "1")) == 1
    assert "is not an empty folder" in capsys.readouterr().err


def test_training_may_start_from_another_policy(made, tmp_path, capsys):
    output = tmp_path / "policy"
    assert command(pretrain(output, "--start", str(made), "--learning-rate", "1e-9", "--left-out", "0.4")) == 0
    advice = "no range of operations has room: remove the folder and change --steps or --left-out"
    assert advice in capsys.readouterr().out
    start, end = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (made, output))
    for name, weight in start.items():
        torch.testing.assert_close(end[name], weight, rtol=0, atol=1e-7)
    assert any(not torch.equal(end[name], weight) for name, weight in start.items())
    assert (output / "tokenizer.json").read_bytes() == (made / "tokenizer.json").read_bytes()
    settings = json.loads((output / "pretrain.json").read_text())["settings"]
    assert (settings["start"], settings["left_out"]) == (base_digest(made), 0.4)


def test_a_start_that_is_no_policy_of_this_size_is_refused(made, tmp_path, capsys):
    assert command(pretrain(tmp_path / "policy", "--start", str(tmp_path))) == 1
    assert "which is no policy of `pretrain`: it has no pretrain.json" in capsys.readouterr().err
    assert command(pretrain(tmp_path / "policy", "--start", str(made), "--size", "10m")) == 1
    assert "a policy of size toy, but --size is 10m: choose the same size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--operations", "1", "3"], "expected the fewest and the most, from 2 to 14"),
        (["--steps", "0"], "steps is 0; expected more than 0"),
        (["--rare", "1.5"], "rare is 1.5; expected a probability"),
        (["--left-out", "1"], "left_out is 1.0; expected a probability"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_any_work(tmp_path, capsys, flags, message):
    assert command(pretrain(tmp_path / "policy", *flags)) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "option", ["--measure-problems", "--reach-problems", "--samples", "--batch-rows", "--save-steps"]
)
def test_numbers_below_1_are_refused_by_the_parser(tmp_path, capsys, option):
    with pytest.raises(SystemExit):
        command(pretrain(tmp_path / "policy", option, "0"))
    assert f"argument {option}: it is 0; expected 1 or more" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_samples_of_a_policy_that_knows_a_problem_by_heart_are_right_and_of_another_wrong(policy):
    _, tokenizer = policy
    model, _ = fit.new_policy(SMALL)
    prepare(model, CPU)
    problems = draw_problems(3, seed=0, split="train", operations=(2, 2))
    rows = rows_of(tokenizer, problems[:1], micro_batch_tokens=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 200)  # the loss would still jump at a constant rate
        fit.train_step(model, optimizer, rows, CPU)
    model.eval()
    others = rows_of(tokenizer, problems[1:], micro_batch_tokens=1000)
    assert mean_loss(model, rows, CPU) < 0.01 < mean_loss(model, others, CPU)
    counts = [
        count_right(
            model, tokenizer, problems, Sampling(seed=0, num_samples=4, batch_rows=size), description=""
        ).tolist()
        for size in (12, 12, 5)
    ]
    assert counts[0] == counts[1], "equal seeds give equal counts"
    assert counts[0][0] >= 3
    assert counts[2][0] >= 3
    assert counts[0][1:] == [0, 0]


def test_the_range_with_room_is_the_widest_then_the_one_nearest_to_the_middle():
    easy, good, better, hard = (
        Measured(n, *values)
        for n, values in zip(range(2, 6), ((0.9, 1.0), (0.18, 0.9), (0.12, 0.7), (0.01, 0.1)), strict=True)
    )
    assert over([easy, good], (2, 3)).pass_at_1 == pytest.approx(0.54)
    assert not over([easy, good], (2, 3)).has_room
    found = with_room([easy, good, better, hard])
    assert found is not None
    assert found.operations == (3, 5), "pass@1 0.10, pass@n 0.57"
    narrow = with_room([easy, good, better, hard], most=1)
    assert narrow is not None
    assert narrow.operations == (4, 4)
    assert with_room([easy, hard]) is None
