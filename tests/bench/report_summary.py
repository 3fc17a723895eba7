"""The head of docs/performance.md: what a 4-bit base is worth, of the newest lines that compare it with bf16.

Where there are lines with our decoding kernel, which engines choose by themselves, those with Humming's are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.bench.report_rollouts import (
    RANK,
    Line,
    decoding,
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
    found: dict[tuple[str, str], dict[Any, float]] = {}  # model and kernel -> sequences or "step" -> ratio
    for key in engines:
        wanted = (key.base, key.kv, key.rank, key.kernels) == ("nvfp4", "auto", RANK, "ours")
        if wanted and (ratio := times_bf16(engines, key)):
            found.setdefault((key.model, key.decoding), {})[key.sequences] = ratio
    for line, ratio in zip(runs, step_speeds(runs), strict=True):
        if line["shape"].get("base") == "nvfp4" and ratio:
            found.setdefault((line["shape"]["model"], decoding(line)), {})["step"] = ratio
    models = dict.fromkeys(model for model, _ in found)
    shown = [(model, "ours" if (model, "ours") in found else "humming") for model in models]
    counts = sorted({count for key in shown for count in found[key] if count != "step"})
    rows = [
        [*key, *(f"{found[key][count]:.2f}" if count in found[key] else "" for count in [*counts, "step"])]
        for key in shown
    ]
    return table(["model", "decoding kernel", *(f"rollouts, {count}" for count in counts), "whole step"], rows)


def memory_table(lines: Iterable[Line]) -> str:
    """What whole steps took of the GPU beside the plan, a row a model, policy and card: the newest run of each."""
    newest = {}
    for line in sorted(of_kind(lines, "grpo/step"), key=lambda line: decoding(line) == "ours"):
        if "peak_gib" in line["logged"]:
            setting = tuple(line["shape"][name] for name in ("model", "base", "aqn", "completion", "cap"))
            newest[setting] = line
    rows = []
    for (model, _, _, length, cap), line in newest.items():
        peak, planned = line["logged"]["peak_gib"], line["logged"]["predicted_peak_gib"]
        card = f"{cap:g}" if cap else "whole"
        apart = f"{100 * abs(planned / peak - 1):.1f} %"
        rows.append([model, policy(line), length, card, f"{peak:.1f}", f"{planned:.1f}", apart])
    return table(["model", "policy", "completion", "card, GiB", "took, GiB", "planned", "apart"], rows)
