"""Tests that docs/performance.md and the README's table are what the script writes from the recorded lines."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.bench.bench_grpo import memory_reason
from tests.bench.report import PAGE, README, TABLES, Line, headline_table, page, results, with_speeds

PLAN = "ValueError: 13.1 GiB while training, more than 12.5 of the GPU's 13.0 GiB; with kv_cache_dtype: fp8 it fits"
ALLOCATOR = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."
WARNED = "RuntimeWarning: out of memory with 16384 tokens in a pass: going on with 8192 (micro_batch_tokens)"


def rollout(base: str, rate: float, commit: str, **shape: Any) -> Line:
    """Line of 8 sequences of 7B with an adapter."""
    usual = {"sequences": 8, "model": "7B", "base": base, "rank": 32, "adapter": "ours", "kv": "auto"}
    seconds = {"median_s": 1.0, "tokens_per_s": rate, "decoded_per_s": rate, "roof_per_s": 2 * rate}
    return {"name": "rollout/generate", "shape": usual | shape, "device": "NVIDIA H200", "commit": commit, **seconds}


def step(base: str, seconds: float, commit: str, *, finished: bool = True, **shape: Any) -> Line:
    """Make the line of a whole step of a 7B model that took as many GiB as seconds."""
    usual = {"model": "7B", "base": base, "aqn": False, "prompts": 1, "completion": 64, "steps": 3, "cap": None}
    times = {"median_s": seconds, "spread_s": [seconds, seconds], "phases_s": {}, "gap": 0.1}
    logged = {"peak_gib": seconds, "predicted_peak_gib": seconds}
    about = {"name": "grpo/step", "shape": usual | shape, "commit": commit}
    return {**about, "logged": logged, "finished": finished, **times}


OLD = [
    rollout("bf16", 100, "a"),
    rollout("nvfp4", 120, "a", decoding="native"),
    step("bf16", 20, "a"),
    step("nvfp4", 16, "a", decoding_kernel="native"),
]
NEW = [
    rollout("bf16", 100, "b", decoding="humming"),
    rollout("nvfp4", 150, "b", decoding="native"),
    rollout("nvfp4", 130, "b", decoding="humming"),
    rollout("nvfp4", 170, "c", decoding="native"),
    step("bf16", 20, "b", decoding_kernel="humming"),
    step("nvfp4", 10, "b", decoding_kernel="native"),
    step("nvfp4", 12, "b", decoding_kernel="humming"),
]


def made(name: str, lines: list[Line]) -> str:
    return TABLES[name].markdown(TABLES[name].select(lines))


def test_the_page_is_what_the_script_makes_of_the_results():
    text = PAGE.read_text()
    assert text == page(results())
    assert len(text.splitlines()) < 200
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))


def test_the_readmes_table_has_what_the_results_say():
    readme = README.read_text()
    assert with_speeds(readme, results()) == readme
    other = with_speeds(readme, [*OLD, step("nvfp4", 9, "a", cap=24), step("nvfp4", 9, "a", cap=16, finished=False)])
    assert "| 7B | 1.20 |  |  |  | 1.25 | 24 |" in other
    assert with_speeds(other, results()) == readme


def test_the_readmes_first_facts_are_in_its_table():
    readme = README.read_text()
    cells = {
        row[0]: row[1:] for line in headline_table(results()).splitlines() if (row := line.strip("| ").split(" | "))
    }
    decoding, steps = re.findall(
        r"is (\d\.\d) times as fast .* whole training steps are (\d\.\d) times", " ".join(readme.split())
    )[0]
    assert (decoding, steps) == (f"{float(cells['7B'][0]):.1f}", f"{float(cells['7B'][4]):.1f}")
    assert f"{cells['32B'][-1]} GiB" in " ".join(readme.split())


@pytest.mark.parametrize("lines", [OLD + NEW, NEW], ids=["with old lines", "new lines alone"])
def test_speed_ups_compare_the_native_kernel_with_bf16_of_one_commit(lines):
    assert "| 7B | 1.50 |  |  |  | 2.00 |" in headline_table(lines)
    assert "| 7B | nvfp4 (native) | 64 | 10 (10 to 10) | 2.00 |" in made("steps", lines)
    assert "| 7B | H200 | speed-up | 1.50 |" in made("rollouts", lines)
    assert "Humming" not in made("steps", lines)


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        (["Traceback (most recent call last):", PLAN, ""], PLAN),
        ([PLAN, "[rank0]: Traceback (most recent call last):", ALLOCATOR, "going away"], ALLOCATOR),
        (["torch.OutOfMemoryError: CUDA out of memory.", "RuntimeError: the engine", ""], None),
        ([WARNED, "Traceback (most recent call last):", "KeyError: 'loss'"], None),
        ([WARNED], None),
        ([], None),
    ],
)
def test_a_card_was_too_small_where_the_last_error_is_of_memory(errors, reason):
    assert memory_reason(errors) == reason
