"""The head of docs/performance.md: what a 4-bit base is worth, of the newest lines that compare it with bf16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.bench.report_rollouts import RANK, Line, of_kind, policy, table, whole_steps


def speeds_table(lines: Iterable[Line]) -> str:
    """How many times as fast an NVFP4 base is as bf16, adapters on both, a row a model; only runs of one commit."""
    lines = list(lines)
    rollouts: dict[tuple[Any, ...], dict[str, float]] = {}
    for line in of_kind(lines, "rollout/generate"):
        shape = line["shape"]
        if (shape["rank"], shape["engine"], shape["kv"], shape["adapter"]) == (RANK, "ours", "auto", "ours"):
            key = line["commit"], shape["model"], shape["sequences"]
            rollouts.setdefault(key, {})[shape["base"]] = line["tokens_per_s"]
    steps: dict[tuple[Any, ...], dict[str, float]] = {}
    for line in whole_steps(lines):
        if line["name"] == "grpo/step":
            steps.setdefault((line["commit"], line["shape"]["model"]), {})[line["shape"]["base"]] = line["spread_s"][0]
    ratios = {key[1:]: found["nvfp4"] / found["bf16"] for key, found in rollouts.items() if len(found) == 2}
    ratios |= {
        (model, "step"): found["bf16"] / found["nvfp4"] for (_, model), found in steps.items() if len(found) == 2
    }
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
