"""The head of docs/performance.md: what a 4-bit base is worth, of the newest lines that compare it with bf16.

Where there are lines with our decoding kernel, which engines choose by themselves, those with Humming's are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.bench.report_rollouts import (
    RANK,
    Engine,
    Line,
    by_size,
    decoding,
    of_kind,
    policy,
    rollouts,
    shown,
    step_speeds,
    table,
    taken_gib,
    times_bf16,
    whole_steps,
)

STEP, HEADLINE = "step", (8, 32, 256)


def speeds_table(lines: Sequence[Line]) -> str:
    """How many times as fast an NVFP4 base is as bf16, adapters on both, a row a model; only runs of one commit."""
    found = speeds(lines)
    counts = sorted({count for ratios in found.values() for count in ratios if count != STEP})
    rows = [[*key, *(shown(ratios.get(count), 2) for count in [*counts, STEP])] for key, ratios in found.items()]
    return table(["model", "decoding kernel", *(f"rollouts, {count}" for count in counts), "whole step"], rows)


def headline_table(lines: Sequence[Line]) -> str:
    """The same for those in a hurry, and the smallest card that a model was trained on."""
    cards: dict[str, float] = {}
    for line in of_kind(lines, "grpo/step"):
        shape = line["shape"]
        if shape["cap"] and line["finished"]:
            cards[shape["model"]] = min(shape["cap"], cards.get(shape["model"], shape["cap"]))
    rows = [
        [
            model,
            *(shown(ratios.get(what), 2) for what in (*HEADLINE, STEP)),
            f"{cards[model]:g}" if model in cards else "",
        ]
        for (model, _), ratios in speeds(lines).items()
    ]
    rollouts_of = (f"rollouts of {count}" for count in HEADLINE)
    return table(["policy", *rollouts_of, "whole step", "smallest card tried, GiB"], rows)


def speeds(lines: Sequence[Line]) -> dict[tuple[str, str], dict[Any, float]]:
    """Model and kernel -> number of sequences, or ``STEP`` -> how many times as fast as bf16."""
    engines, runs = rollouts(lines), whole_steps(lines)
    found: dict[tuple[str, str], dict[Any, float]] = {}
    for key in engines:
        if _is_usual(key) and (ratio := times_bf16(engines, key)):
            found.setdefault((key.model, key.decoding), {})[key.sequences] = ratio
    for line, ratio in zip(runs, step_speeds(runs), strict=True):
        if line["shape"].get("base") == "nvfp4" and ratio:
            found.setdefault((line["shape"]["model"], decoding(line)), {})[STEP] = ratio
    models = dict.fromkeys(model for model, _ in found)
    chosen = [(model, "ours" if (model, "ours") in found else "humming") for model in models]
    return {key: found[key] for key in sorted(chosen, key=lambda key: by_size(key[0]))}


def adapter_table(lines: Sequence[Line]) -> str:
    """How much longer rollouts of one engine take with the adapter, a row a model and kernel: the newest of each."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for key, pair in rollouts(lines).items():
        if _is_usual(key) and False in pair:
            share = pair[True]["median_s"] / pair[False]["median_s"] - 1
            found.setdefault((key.model, key.decoding), {})[key.sequences] = share
    counts = sorted({count for shares in found.values() for count in shares})
    rows = [
        [*key, *(f"{100 * shares[count]:.0f} %" if count in shares else "" for count in counts)]
        for key, shares in found.items()
    ]
    return table(["model", "decoding kernel", *map(str, counts)], rows)


def _is_usual(key: Engine) -> bool:
    return (key.base, key.kv, key.rank, key.kernels) == ("nvfp4", "auto", RANK, "ours")


def _by_size_and_card(line: Line) -> tuple[tuple[int, str], float]:
    return by_size(line["shape"]["model"]), line["shape"]["cap"] or float("inf")


def memory_table(lines: Iterable[Line]) -> str:
    """What whole steps took of the GPU beside the plan, a row a model, policy and card: the newest run of each."""
    newest = {}
    for line in sorted(of_kind(lines, "grpo/step"), key=lambda line: decoding(line) == "ours"):
        if "predicted_peak_gib" in line["logged"]:
            setting = tuple(line["shape"][name] for name in ("model", "base", "aqn", "completion", "cap"))
            newest[setting] = line
    rows = []
    for line in sorted(newest.values(), key=_by_size_and_card):
        model, length, cap = (line["shape"][name] for name in ("model", "completion", "cap"))
        peak, planned = taken_gib(line), line["logged"]["predicted_peak_gib"]
        assert peak, line
        card = f"{cap:g}" if cap else "whole"
        apart = f"{100 * abs(planned / peak - 1):.1f} %"
        rows.append([model, policy(line), length, card, f"{peak:.1f}", f"{planned:.1f}", apart])
    return table(["model", "policy", "completion", "card, GiB", "took, GiB", "planned", "apart"], rows)
