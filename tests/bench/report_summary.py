"""The head of docs/performance.md: what a 4-bit base is worth, of the newest lines that compare it with bf16."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.bench.report_rollouts import (
    RANK,
    Line,
    of_kind,
    policy,
    rollouts,
    step_speeds,
    table,
    times_bf16,
    whole_steps,
)


def speeds_table(lines: Sequence[Line]) -> str:
    """How many times as fast an NVFP4 base is as bf16, adapters on both, a row a model; only runs of one commit."""
    engines, runs = rollouts(lines), whole_steps(lines)
    ratios: dict[tuple[str, Any], float] = {
        (key.model, key.sequences): ratio
        for key in engines
        if (key.base, key.kv, key.rank, key.kernels) == ("nvfp4", "auto", RANK, "ours")
        and (ratio := times_bf16(engines, key))
    }
    for line, ratio in zip(runs, step_speeds(runs), strict=True):
        if line["shape"].get("base") == "nvfp4" and ratio:
            ratios[line["shape"]["model"], "step"] = ratio
    counts = sorted({count for _, count in ratios if count != "step"})
    rows = [
        [model, *(f"{ratios[model, count]:.2f}" if (model, count) in ratios else "" for count in [*counts, "step"])]
        for model in dict.fromkeys(model for model, _ in ratios)
    ]
    return table(["model", *(f"rollouts, {count}" for count in counts), "whole step"], rows)


def memory_table(lines: Iterable[Line]) -> str:
    """What whole steps took of the GPU beside the plan, a row a model, policy and card: the newest run of each."""
    newest = {}
    for line in of_kind(lines, "grpo/step"):
        if "peak_gib" in line["logged"]:
            shape = line["shape"]
            newest[shape["model"], policy(line), shape["completion"], shape["cap"]] = line["logged"]
    rows = [
        [
            model,
            name,
            length,
            f"{cap:g}" if cap else "whole",
            f"{found['peak_gib']:.1f}",
            f"{found['predicted_peak_gib']:.1f}",
            f"{100 * abs(found['predicted_peak_gib'] / found['peak_gib'] - 1):.1f} %",
        ]
        for (model, name, length, cap), found in newest.items()
    ]
    return table(["model", "policy", "completion", "card, GiB", "took, GiB", "planned", "apart"], rows)
