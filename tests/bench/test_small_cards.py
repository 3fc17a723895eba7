"""Which runs a card was too small for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.bench_grpo import memory_reason
from tests.bench.report_rollouts import Line, cards_table

PLAN = "ValueError: 13.1 GiB while training, more than 12.5 of the GPU's 13.0 GiB; with kv_cache_dtype: fp8 it fits"
ALLOCATOR = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."
WARNED = "RuntimeWarning: out of memory with 16384 tokens in a pass: going on with 8192 (micro_batch_tokens)"


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


def test_cards_stand_below_each_other_by_model_and_size():
    def line(name: str, model: str, cap: float, **more: Any) -> Line:
        shape = {"model": model, "base": "nvfp4", "aqn": True, "completion": 2048, "cap": cap}
        return {"name": name, "shape": shape, **more}

    ran = {"steps_done": 3, "median_s": 11.0, "logged": {"peak_gib": 13.5, "predicted_peak_gib": 13.4}}
    lines = [line("grpo/step", "14B", 24, **ran), line("grpo/too-small", "7B", 13), line("grpo/step", "7B", 14, **ran)]
    rows = [[cell.strip() for cell in row.split("|")[1:6]] for row in cards_table(lines).splitlines()[2:]]
    assert [[model, card, steps] for model, _, card, _, steps in rows] == [
        ["7B", "14", "3"],
        ["7B", "13", "too small"],
        ["14B", "24", "3"],
    ]
