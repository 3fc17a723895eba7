"""The section of docs/correctness.md about faults of rollouts, from the lines of ``bench_faults``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.bench.report import table

ENGINES = ("transformers", "vllm")
CHECKS = {  # what an error says -> which check it comes from
    "differ from the trainer's": "gap",
    "no draws from the distribution": "other sampling",
    "repeat others of the same prompt": "copies",
    "does not hold the current policy": "canary, checksums",
    "does not compute with the current policy": "canary, samples",
    "is nan or infinite": "engine's output",
}


def faults_section(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: what happened to every fault and to healthy rollouts, and what the checks cost."""
    faults = [line for line in lines if not line["name"].startswith("healthy")]
    healthy = [line for line in lines if line["name"].startswith("healthy")]
    found = {(line["name"], line["shape"]["engine"]): line for line in faults}
    rows = [
        [name, *(_outcome(found[name, engine]) if (name, engine) in found else "-" for engine in ENGINES)]
        for name in dict.fromkeys(line["name"] for line in faults)
    ]
    counts = " and ".join(_count([line for line in faults if line["shape"]["engine"] == engine]) for engine in ENGINES)
    rollouts = {
        engine: sum(line["rollouts"] for line in healthy if line["shape"]["engine"] == engine) for engine in ENGINES
    }
    return TEXT.format(
        counts=counts,
        table=table(["fault", *ENGINES], rows),
        rollouts=sum(rollouts.values()),
        vllm=rollouts["vllm"],
        alarms=sum(line["outcome"] != "silent" for line in healthy) or "none",
        costs=table(["run", "step, s", "evidence", "canary"], [_cost(line) for line in healthy]),
        commits=" and ".join(dict.fromkeys(line["commit"] for line in lines)),
        **{name: faults[0][name] for name in ("device", "torch")},
    )


def _outcome(line: dict[str, Any]) -> str:
    if line["outcome"] == "silent":
        return "silent"
    check = next(name for words, name in CHECKS.items() if words in line["said"])
    late = line["rollout"] - line["appears"]
    when = f" {late} rollout{'s' if late > 1 else ''} later" if late > 0 else ""
    return f"{line['outcome']}{when} ({check})"


def _is_seen(line: dict[str, Any]) -> bool:
    return line["outcome"] != "silent" and line["rollout"] <= line["appears"]


def _count(lines: Sequence[dict[str, Any]]) -> str:
    return f"{sum(map(_is_seen, lines))} of {len(lines)} with {lines[0]['shape']['engine']}" if lines else ""


def _cost(line: dict[str, Any]) -> list[str]:
    step, checks = line["step_s"], line["check_s"]
    name = f"{line['name'].removeprefix('healthy, ')}, {line['shape']['engine']}"
    return [name, f"{step:.2f}", *(f"{checks[check] / step:.1%}" for check in ("RolloutEvidence", "SyncCanary"))]


TEXT = """\
## The evidence

Some rows of every rollout go through the trainer's model before anything is learned from them
(`callbacks/rollout_evidence.py`). The run stops where trainer and sampler differ by too much, or by many times their
usual difference. It also stops where the tokens are no draws from the distribution whose log-probabilities the engine
reports: each token has a likelihood ratio of another temperature or a nucleus to that distribution, which is 1 in the
mean for draws, so its product over tokens exceeds 1 / a with probability a at most, whatever the model and however far
trainer and sampler are apart. Completions that repeat others are tested in the same way. The bound is 1e-6 for each
rollout and test, and the ratios go on from rollout to rollout.

`tests/bench/bench_faults.py` puts each of these faults into the engine of a quickstart run of its own (256 completions
per rollout) at the beginning of rollout 2. In the first rollout that the fault changes, before anything is learned from
it, the run stops or warns for {counts}.
Measured on {device} with torch {torch} at commit {commits}.

{table}

This policy is nearly certain of every token. At temperature 0.5, or with top_p 0.8, it samples nearly what it samples
at 1, and a completion that is copied over its group is one that most of the group would have been anyway: one rollout
does not hold enough evidence for any test at that bound. Where it adds up, the run stops later. Stale prefixes of vLLM
have blocks of 32 tokens: with the CPU's default of 128 no sequence of this run fills one.

Of {rollouts} rollouts without a fault, {vllm} of them with vLLM, {alarms} stopped or warned. What a step takes in these
runs, and the shares of it that the checks take (medians). Most of the evidence's share is the forward pass of 8192
tokens, two thirds of such a rollout and a small part of a large one:

{costs}
"""
