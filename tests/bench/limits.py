"""Every constant beside what it reads on real models, as a Markdown table: python -m tests.bench.limits FILE...

The files hold lines of ``bench_real_checks`` (one column per model, dtype and format, with the worst of several seeds)
and, if there are any, of ``bench_constants`` and of ``bench_model --rungs``. Values come from the code. ``MARGIN`` is
how many times the worst reading may grow until the limit is reached; for constants that are estimates of what is read,
the table has the reading divided by the estimate.

``NOT_READ`` has the other constants of these packages, with the reason why no run reads them; a test compares both with
the code, so that a new constant has to be in one of them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from callbacks import canary, rollout_evidence
from callbacks.gradient_guard import GradientGuard
from qerl_pl.memory import fitting, parts
from qerl_pl.objective import losses
from qerl_pl.policy import jumps
from qerl_pl.policy.policy import DTYPES
from qerl_pl.rollout import comparison, probe
from qerl_pl.settings.model import ModuleSettings
from qerl_pl.tools.page import verdicts
from tests.bench.report import Line, table

EVIDENCE = rollout_evidence.RolloutEvidence()
GUARD = GradientGuard()
SURE = -math.log(EVIDENCE.false_alarm)  # nats
SCANNED = ("callbacks", "qerl_pl/policy", "qerl_pl/rollout", "qerl_pl/memory", "qerl_pl/objective", "qerl_pl/training")


class Constant(NamedTuple):
    """A number of the code, and how a line of ``bench_real_checks`` reads it."""

    name: str
    where: str
    value: float | Mapping[torch.dtype, float]
    unit: str
    set_on: str
    reading: Callable[[Line], float | None]
    kind: Literal["at most", "part", "near"] = "at most"
    """"at most": readings of right engines and healthy runs stay below it. "part": the same, but it decides only
    together with another one. "near": it is an estimate of the reading."""

    def of(self, line: Line) -> float:
        """Return the value for the dtype of a line."""
        return self.value if isinstance(self.value, float | int) else self.value[DTYPES[line["dtype"]]]


def largest(*path: str) -> Callable[[Line], float | None]:
    """Read the largest value of a summary [median, largest] at a path of keys."""
    return lambda line: _at(line, path, 1)


def usual(*path: str) -> Callable[[Line], float | None]:
    """Read the median of a summary [median, largest] at a path of keys."""
    return lambda line: _at(line, path, 0)


def most(*readings: Callable[[Line], float | None]) -> Callable[[Line], float | None]:
    """Read the largest of several readings, without those that a line lacks."""
    return lambda line: max((found for each in readings if (found := each(line)) is not None), default=None)


def quotient(top: Callable[[Line], float | None], bottom: Callable[[Line], float | None]) -> Callable[..., Any]:
    """Divide one reading by another."""

    def read(line: Line) -> float | None:
        first, second = top(line), bottom(line)
        return None if first is None or not second else first / second

    return read


def _at(line: Line, path: Sequence[str], place: int) -> float | None:
    found: Any = line
    for key in path:
        found = (found or {}).get(key)
    return found[place] if found else None


def _of_the_pass(line: Line) -> float | None:
    return line.get("pass", {}).get("overhead_tokens")


def _jumps(place: int, *names: str) -> Callable[[Line], float | None]:
    return most(*(lambda line, name=name: _at(line, ("jumps", name), place) for name in names))


def _over_own_limit(line: Line) -> float | None:
    """Return the largest jump, in units of what ``max_jump`` is multiplied by for its kind."""
    found = {name: _at(line, ("jumps", name), 0) for name in ALL_GAPS}
    jumps = rollout_evidence.JUMPS
    return max((each / jumps[name.removesuffix("_of_all")] for name, each in found.items() if each), default=None)


ALL_GAPS = tuple(kind + rows for kind in rollout_evidence.FLOORS for rows in ("", "_of_all"))
H200 = "7B with random weights, H200"
CONSTANTS = (
    Constant(
        "TOLERANCE",
        "callbacks/canary.py",
        canary.TOLERANCE,
        "nats",
        "random weights",
        most(largest("probe_gap"), largest("score_gap")),
        "part",
    ),
    Constant(
        "MARGIN",
        "qerl_pl/rollout/comparison.py",
        comparison.MARGIN,
        "x rounding errors",
        "0.1B to 1.5B, pretrained",
        most(largest("probe_excess"), largest("score_excess")),
        "part",
    ),
    Constant(
        "TOLERANCE and MARGIN",
        "callbacks/canary.py",
        1.0,
        "of the limit, the smaller one of both",
        "as these",
        largest("canary_share"),
    ),
    Constant(
        "1 (a right engine's excess)",
        "qerl_pl/policy/shaken.py, error of eps / 4",
        1.0,
        "x rounding errors",
        "theory",
        usual("probe_excess"),
        "near",
    ),
    Constant(
        "MOST_CHANGE",
        "qerl_pl/rollout/probe.py",
        probe.MOST_CHANGE,
        "nats",
        "1.5B, pretrained, on the text that the strength is found with",
        largest("probe_change"),
    ),
    Constant(
        "USABLE",
        "qerl_pl/rollout/probe.py",
        probe.USABLE,
        "rounding / change",
        "0.1B and 0.5B, pretrained, on the text that the strength is found with",
        largest("rounding_over_change"),
    ),
    Constant(
        "STRENGTHS, largest",
        "qerl_pl/rollout/probe.py",
        max(probe.STRENGTHS),
        "",
        "0.1B and 0.5B, pretrained",
        lambda line: max(line["probe_strength"], default=None),
    ),
    Constant(
        "1 / STRENGTHS, smallest",
        "qerl_pl/rollout/probe.py",
        1 / min(probe.STRENGTHS),
        "1 / strength",
        "0.1B and 0.5B, pretrained",
        lambda line: max((1 / each for each in line["probe_strength"] if each), default=None),
    ),
    Constant(
        "MAX_GAP",
        "callbacks/rollout_evidence.py",
        rollout_evidence.MAX_GAP,
        "nats",
        "the quickstart's policy and 7B with random weights",
        largest("evidence", "gap"),
    ),
    Constant(
        "GAP_FLOOR",
        "callbacks/rollout_evidence.py",
        rollout_evidence.GAP_FLOOR,
        "nats",
        "the quickstart's policy",
        usual("evidence", "gap"),
        "near",
    ),
    Constant(
        "FLOORS, high_gap",
        "callbacks/rollout_evidence.py",
        rollout_evidence.FLOORS["high_gap"],
        "high_gap / gap",
        "the quickstart's policy",
        quotient(usual("evidence", "high_gap"), usual("evidence", "gap")),
        "near",
    ),
    Constant(
        "FLOORS, logit_gap",
        "callbacks/rollout_evidence.py",
        rollout_evidence.FLOORS["logit_gap"],
        "logit_gap / gap",
        "the quickstart's policy",
        quotient(usual("evidence", "logit_gap"), usual("evidence", "gap")),
        "near",
    ),
    Constant(
        "max_jump",
        "callbacks/rollout_evidence.py",
        EVIDENCE.max_jump or math.inf,
        "x median",
        "0.1B to 1.5B, pretrained",
        _over_own_limit,
        "part",
    ),
    Constant(
        "warn_jump",
        "callbacks/rollout_evidence.py",
        EVIDENCE.warn_jump,
        "x median",
        "0.1B to 1.5B, pretrained",
        _jumps(0, "gap", "gap_of_all"),
        "part",
    ),
    Constant(
        "SURE_SIGMAS",
        "callbacks/rollout_evidence.py",
        rollout_evidence.SURE_SIGMAS,
        "sigmas",
        "0.1B to 1.5B, pretrained",
        _jumps(1, *ALL_GAPS),
        "part",
    ),
    Constant(
        "max_jump and SURE_SIGMAS",
        "callbacks/rollout_evidence.py",
        1.0,
        "of the limit, the smaller one of both",
        "as these",
        _jumps(2, *ALL_GAPS),
    ),
    Constant(
        "MAX_FAR_SHARE",
        "callbacks/rollout_evidence.py, FAR of qerl_pl/policy/jumps.py",
        rollout_evidence.MAX_FAR_SHARE,
        f"of tokens, a factor of {jumps.FAR:g} apart",
        "Chebyshev's inequality",
        most(largest("evidence", "far_share"), largest("evidence", "far_share_of_all")),
    ),
    *(
        Constant(
            f"false_alarm, {name}",
            "callbacks/rollout_evidence.py",
            SURE,
            "nats",
            "theory",
            largest("evidence", name),
        )
        for name in ("copies", "order", "branches", "other_sampling")
    ),
    Constant(
        "false_alarm, changes",
        "callbacks/rollout_evidence.py",
        SURE,
        "nats",
        "theory, for normal means",
        largest("noted", "change_evidence"),
    ),
    Constant(
        "silent_rollouts",
        "callbacks/rollout_evidence.py",
        EVIDENCE.silent_rollouts,
        "rollouts",
        "the quickstart's policy",
        lambda line: line.get("silent_rollouts"),
    ),
    Constant(
        "max_ratio",
        "callbacks/gradient_guard.py",
        GUARD.max_ratio,
        "x median norm",
        "the quickstart's policy",
        largest("grad_norm_over_median"),
    ),
    Constant(
        "OUTSIDE",
        "qerl_pl/tools/page/verdicts.py",
        verdicts.OUTSIDE,
        "of tokens",
        "the quickstart's policy",
        largest("gap_outside_share"),
    ),
    Constant(
        "MAX_LOG_RATIO",
        "qerl_pl/objective/losses.py, correction.py",
        losses.MAX_LOG_RATIO,
        "nats",
        "theory: exp is finite",
        largest("gap_max"),
    ),
    Constant(
        "max_unscored_share",
        "qerl_pl/settings/model.py",
        ModuleSettings.max_unscored_share,
        "of rows",
        "chosen",
        largest("unscored_share"),
    ),
    Constant(
        "a tenth of a step",
        "configs/base.yaml, schedules of the checks",
        0.1,
        "of a step",
        "7B, H200; read with --every 8",
        lambda line: None if line["shape"]["every"] < 8 else _at(line, ("check_share",), 0),
    ),
    Constant(
        "HEADROOM",
        "qerl_pl/memory/fitting.py",
        fitting.HEADROOM,
        "of the GPU above the plan",
        H200,
        largest("noted", "over_plan_share"),
    ),
    Constant(
        "FRAGMENTATION",
        "qerl_pl/memory/parts.py",
        parts.FRAGMENTATION,
        "of a pass's tensors",
        H200,
        largest("noted", "unused_share"),
        "near",
    ),
    Constant(
        "CONTEXT",
        "qerl_pl/memory/parts.py",
        parts.CONTEXT / 2**30,
        "GiB",
        H200,
        largest("noted", "context_gib"),
        "near",
    ),
    Constant(
        "GRAPHS_PER_LAYER",
        "qerl_pl/memory/parts.py",
        parts.GRAPHS_PER_LAYER / 2**20,
        "MiB, with all that libraries take after the start",
        H200,
        largest("noted", "graphs_per_layer_mib"),
        "near",
    ),
    Constant(
        "the planned KV cache",
        "qerl_pl/memory/fitting.py",
        1.0,
        "of its bytes are filled, if all sequences are alive at once",
        "formula",
        largest("noted", "kv_cache_share"),
    ),
    Constant(
        "OVERHEAD",
        "qerl_pl/memory/fitting.py",
        float(fitting.OVERHEAD),
        "tokens",
        H200,
        _of_the_pass,
        "near",
    ),
)

NO_EFFECT = "a size of pieces: results do not depend on it"
OF_ALTERNATIVES = (
    "an alternative of a test, whose false alarms do not depend on it; tests.correctness.faults reads power"
)
OF_LIBRARIES = "a property of a library, of hardware or of a file format"
NUMBER = "a number of samples: costs time, and makes readings of other constants less random"
NOT_READ = {
    "SEED": "a seed",
    "GIB": "a unit",
    "SMALLEST": "the left end of a histogram",
    "SMALLEST_GAP": "the left end of a histogram",
    **dict.fromkeys(("ODDS", "POWERS", "NUCLEI", "TOPS", "END_ODDS", "RANDOM", "SHARES"), OF_ALTERNATIVES),
    **dict.fromkeys(("COPY_RATES", "REDRAW_RATES", "SLOPES", "STEEPNESS"), OF_ALTERNATIVES),
    "LEAST_LEFT": "bounds a ratio; the test is right with any value",
    "CERTAIN": "leaves tokens out that tell nothing; the test is right with any value",
    "FAR": "read with MAX_FAR_SHARE",
    "FIRST": "a multiple of max_jump, while the usual is an estimate",
    "ROUNDING": "of fp32 means; far above it and far below every change that matters",
    "LEAST_OTHERS": "bounds a difference of logits; the floor of these is read with FLOORS",
    "MOST": "a multiple of MARGIN",
    **dict.fromkeys(("GROUP_TOKENS", "CHUNK", "CHUNK_BYTES", "HEAD_ROWS", "AT_ONCE"), NO_EFFECT),
    **dict.fromkeys(("SCORED_TOKENS_PER_CALL", "STEP"), NO_EFFECT),
    **dict.fromkeys(("VARLEN_HEAD_DIM", "KV_BLOCK", "SCORED_TOGETHER", "CPU_BLOCK", "BITS"), OF_LIBRARIES),
    **dict.fromkeys(("HOPPER", "STDERR", "ADAPTER_ID", "COOLEST", "HOTTEST", "LARGEST_GPU"), OF_LIBRARIES),
    "LOWEST_TEMPERATURE": OF_LIBRARIES,
    **dict.fromkeys(("SHAKES", "NUM_PROMPTS", "TOKENS", "SEEDS", "ONE_TOKEN"), NUMBER),
    "WORTH": "decides between two ways with equal results; bench_batch measures both",
    **dict.fromkeys(("WIDE", "FEW", "MANY", "LARGEST"), "tile sizes with equal results; bench_schedules measures them"),
    "WAIT": "seconds that a loopback interface may take",
    "CPU_CACHE_LIMIT": "only on a CPU, where a full cache makes vLLM slower",
    "UNUSED_SHARE": "the share of a GPU that vLLM is asked to use, which it does not",
    "USUAL_MICRO_BATCH": "read with OVERHEAD: larger passes would save OVERHEAD / USUAL_MICRO_BATCH, 4 %",
    "SCAN_BYTES": "only models with delta nets; bench_model compares planned and measured bytes",
    "DEFAULT_BATCHED_TOKENS": "a default of vLLM's scheduler; bench_rollout measures it",
    "GRAPH_SEQUENCES": "decides between two ways with equal results; bench_decode measures both",
    "CHECKED_TOKENS": "read with HEADROOM: the checks run while the engine is awake",
    **dict.fromkeys(
        ("WHOLE", "SELECTIVE", "FUSED_WHOLE", "FUSED_SELECTIVE", "OFFLOAD"), "read by bench_model --rungs, see below"
    ),
}


def limits_table(lines: Iterable[Line]) -> str:
    """Make the table of ``CONSTANTS`` from lines of ``bench_real_checks``."""
    columns: dict[str, list[Line]] = {}
    for line in lines:
        noise = ", AQN" if line["noise"] else ""
        columns.setdefault(f"{line['name'].split('/', 1)[1]}, {line['format']}, {line['dtype']}{noise}", []).append(
            line
        )
    rows = []
    for constant in CONSTANTS:
        found = [
            [(constant.of(line), value) for line in group if (value := constant.reading(line)) is not None]
            for group in columns.values()
        ]
        pairs = [pair for group in found for pair in group]
        readings = ["-" if not group else f"{max(value for _, value in group):.2g}" for group in found]
        limits = dict.fromkeys(f"{constant.of(line):.3g}" for group in columns.values() for line in group)
        about = [constant.name, constant.where, constant.set_on, " or ".join(limits), constant.unit]
        rows.append([*about, *readings, margin(constant, pairs)])
    return table(["constant", "where", "set on", "value", "unit", *columns, "MARGIN"], rows)


def margin(constant: Constant, pairs: Sequence[tuple[float, float]]) -> str:
    """Describe how far readings are from a constant, given pairs of its value and a reading: "x 2.5" until a limit is
    reached, or the range of reading / value where the constant is an estimate."""
    if not pairs:
        return "not read"
    if constant.kind == "near":
        shares = [reading / value for value, reading in pairs]
        return f"{min(shares):.2g} to {max(shares):.2g} of it"
    least = min(value / reading if reading > 0 else math.inf for value, reading in pairs)
    if math.isinf(least):
        return "no reading above 0"
    exceeded = "" if least >= 1 else " (EXCEEDED)" if constant.kind == "at most" else " alone"
    return f"x {least:.2g}{exceeded}"


def alarms(lines: Iterable[Line]) -> list[str]:
    """Say which runs stopped or warned."""
    return [
        f"{line['name']}, {line['format']}, seed {line['seed']}: {line['alarm']['outcome']} in rollout "
        f"{line['alarm']['rollout']}: {line['alarm']['said']}"
        for line in lines
        if line["alarm"]["outcome"] != "silent"
    ]


def recomputation(lines: Sequence[Line]) -> list[tuple[str, float, float]]:
    """Compare the constants of ``memory.fitting`` with lines of ``bench_model --rungs``: name and model, value,
    reading."""
    seconds = {(line["name"].removeprefix("rungs/"), line["shape"]["model"]): line["median_s"] for line in lines}
    found = []
    for (rung, model), taken in seconds.items():
        kind, _, level = rung.partition("-")
        fused = "FUSED_" if kind == "fused" else ""
        compared = {"blocks": ("none", f"{fused}WHOLE"), "selective": ("none", f"{fused}SELECTIVE")}
        compared["offload"] = ("blocks", "OFFLOAD")
        if level in compared and (f"{kind}-{compared[level][0]}", model) in seconds:
            before, name = compared[level]
            found.append((f"{name}, {model}", getattr(fitting, name), taken / seconds[f"{kind}-{before}", model] - 1))
    return found


def measured_again(lines: Sequence[Line]) -> str:
    """Make the table of constants of costs: of kernels from ``bench_constants``, of recomputation from
    ``bench_model``."""
    found = [
        (line["name"].removeprefix("constants/"), line["today"], line["measured"])
        for line in lines
        if line["name"].startswith("constants/")
    ]
    found += recomputation([line for line in lines if line["name"].startswith("rungs/")])
    rows = [[name, f"{value:.3g}", f"{reading:.3g}", f"{reading / value:.2f} of it"] for name, value, reading in found]
    return table(["constant of costs", "value", "measured", "MARGIN"], rows) if rows else ""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="JSON lines of the benchmarks")
    texts = [text for path in parser.parse_args(argv).files for text in path.read_text().splitlines() if text]
    lines = [line for line in map(json.loads, texts) if "name" in line]
    read = [line for line in lines if line["name"].startswith("real_checks/")]
    if not read:
        raise SystemExit("the files hold no lines of bench_real_checks")
    print(limits_table(read))
    if costs := measured_again(lines):
        print(f"\n{costs}")
    print("\nalarms:", "; ".join(alarms(read)) or "none")


if __name__ == "__main__":
    main()
