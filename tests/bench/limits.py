"""Every constant beside what it reads on real models, as a Markdown table: python -m tests.bench.limits FILE...

The files hold lines of ``bench_real_checks`` (one column per model, dtype and format, with the worst of several seeds)
and, if there are any, of ``bench_constants`` and of ``bench_model --rungs``. Values come from the code. ``MARGIN`` is
how many times the worst reading may grow until the limit is reached; for constants that are estimates of what is read,
the table has the reading divided by the estimate.

``NOT_READ`` has the other constants of these packages, with the reason why no run reads them; a test compares both with
the code, so that a new constant has to be in one of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from callbacks import rollout_evidence as evidence
from callbacks.canary import TOLERANCE
from callbacks.gradient_guard import GradientGuard
from qerl_pl.memory import fitting, parts
from qerl_pl.objective import losses
from qerl_pl.policy.jumps import FAR
from qerl_pl.policy.policy import DTYPES
from qerl_pl.rollout import probe
from qerl_pl.rollout.comparison import MARGIN
from qerl_pl.settings.model import ModuleSettings
from qerl_pl.tools.page import verdicts
from tests.bench.harness import GIB, parser_with
from tests.bench.report import Line, table

Reading = Callable[[Line], float | None]
GUARD = evidence.RolloutEvidence()
SURE = -math.log(GUARD.false_alarm)  # nats
SCANNED = ("callbacks", "qerl_pl/policy", "qerl_pl/rollout", "qerl_pl/memory", "qerl_pl/objective", "qerl_pl/training")
ALL_GAPS = tuple(kind + rows for kind in evidence.FLOORS for rows in ("", "_of_all"))


class Constant(NamedTuple):
    """A number of the code, and how a line of ``bench_real_checks`` reads it.

    Readings of right engines and healthy runs stay "at most" at a limit; a limit that is a "part" decides only together
    with another one. A value that is "near" is an estimate of the reading.
    """

    where: str
    name: str
    value: float | Mapping[torch.dtype, float]
    unit: str
    set_on: str
    reading: Reading
    kind: Literal["at most", "part", "near"] = "at most"

    def of(self, line: Line) -> float:
        """Return the value for the dtype of a line."""
        return self.value if isinstance(self.value, float | int) else self.value[DTYPES[line["dtype"]]]


def largest(*path: str, place: int = 1) -> Reading:
    """Read the largest value of a summary [median, largest] at a path of keys."""

    def read(line: Line) -> float | None:
        value: Any = line
        for key in path:
            value = (value or {}).get(key)
        return value[place] if value else None

    return read


def usual(*path: str) -> Reading:
    """Read the median of a summary."""
    return largest(*path, place=0)


def most(*readings: Reading) -> Reading:
    """Read the largest of several readings, without those that a line lacks."""
    return lambda line: max((value for read in readings if (value := read(line)) is not None), default=None)


def times_gap(kind: str) -> Reading:
    """Read the usual gap of a kind as a multiple of the usual gap."""

    def read(line: Line) -> float | None:
        value, gap = usual("evidence", kind)(line), usual("evidence", "gap")(line)
        return None if value is None or not gap else value / gap

    return read


def jumps(place: int, *names: str) -> Reading:
    """Read the largest ratio (place 0), number of sigmas (1) or share of both limits (2) of gaps."""
    return most(*(largest("jumps", name, place=place) for name in names))


def over_own_limit(line: Line) -> float | None:
    """Return the largest jump, in units of what ``max_jump`` is multiplied by for its kind."""
    ratios = {name: largest("jumps", name, place=0)(line) for name in ALL_GAPS}
    scaled = [ratio / evidence.JUMPS[name.removesuffix("_of_all")] for name, ratio in ratios.items() if ratio]
    return max(scaled, default=None)


def checks_share(line: Line) -> float | None:
    """Return the share of a step that checks take on the schedule of configs/base.yaml."""
    return None if line["shape"]["every"] < 8 else usual("check_share")(line)


def weakest(line: Line) -> float | None:
    """Return 1 / the smallest strength of a probe adapter."""
    return max((1 / strength for strength in line["probe_strength"] if strength), default=None)


def far_share(line: Line) -> float | None:
    """Return the largest share of tokens that are far apart, of the chosen or of all rows."""
    return most(largest("evidence", "far_share"), largest("evidence", "far_share_of_all"))(line)


def overhead(line: Line) -> float | None:
    """Return the tokens whose time a pass takes besides that of its own tokens."""
    return line.get("pass", {}).get("overhead_tokens")


TOY, RANDOM, REAL = "the quickstart's policy", "random weights", "0.1B to 1.5B, pretrained"
SMALL, H200, TEXT = "0.1B and 0.5B, pretrained", "7B with random weights, H200", ", on the text it is found with"
SMALLER = "of the limit, the smaller one of both"
ROWS: dict[str, list[tuple[Any, ...]]] = {
    "callbacks/canary.py": [
        ("TOLERANCE", TOLERANCE, "nats", RANDOM, most(largest("probe_gap"), largest("score_gap")), "part"),
        ("TOLERANCE and MARGIN", 1.0, SMALLER, "as these", largest("canary_share")),
    ],
    "qerl_pl/rollout/comparison.py": [
        ("MARGIN", MARGIN, "x rounding errors", REAL, most(largest("probe_excess"), largest("score_excess")), "part")
    ],
    "qerl_pl/policy/shaken.py, error of eps / 4": [
        ("1 (a right engine's excess)", 1.0, "x rounding errors", "theory", usual("probe_excess"), "near")
    ],
    "qerl_pl/rollout/probe.py": [
        ("MOST_CHANGE", probe.MOST_CHANGE, "nats", "1.5B, pretrained" + TEXT, largest("probe_change")),
        ("USABLE", probe.USABLE, "rounding / change", SMALL + TEXT, largest("rounding_over_change")),
        ("STRENGTHS, largest", max(probe.STRENGTHS), "", SMALL, lambda line: max(line["probe_strength"], default=None)),
        ("1 / STRENGTHS, smallest", 1 / min(probe.STRENGTHS), "1 / strength", SMALL, weakest),
    ],
    "callbacks/rollout_evidence.py": [
        ("MAX_GAP", evidence.MAX_GAP, "nats", f"{TOY} and 7B with {RANDOM}", largest("evidence", "gap")),
        ("GAP_FLOOR", evidence.GAP_FLOOR, "nats", TOY, usual("evidence", "gap"), "near"),
        ("FLOORS, high_gap", evidence.FLOORS["high_gap"], "high_gap / gap", TOY, times_gap("high_gap"), "near"),
        ("FLOORS, logit_gap", evidence.FLOORS["logit_gap"], "logit_gap / gap", TOY, times_gap("logit_gap"), "near"),
        ("max_jump", GUARD.max_jump or math.inf, "x median", REAL, over_own_limit, "part"),
        ("warn_jump", GUARD.warn_jump, "x median", REAL, jumps(0, "gap", "gap_of_all"), "part"),
        ("SURE_SIGMAS", evidence.SURE_SIGMAS, "sigmas", REAL, jumps(1, *ALL_GAPS), "part"),
        ("max_jump and SURE_SIGMAS", 1.0, SMALLER, "as these", jumps(2, *ALL_GAPS)),
        ("MAX_FAR_SHARE", evidence.MAX_FAR_SHARE, f"of tokens, x {FAR:g}", "Chebyshev's inequality", far_share),
        *(
            (f"false_alarm, {name}", SURE, "nats", "theory", largest("evidence", name))
            for name in ("copies", "order", "branches", "other_sampling")
        ),
        ("false_alarm, changes", SURE, "nats", "theory, for normal means", largest("noted", "change_evidence")),
        ("silent_rollouts", GUARD.silent_rollouts, "rollouts", TOY, lambda line: line.get("silent_rollouts")),
    ],
    "callbacks/gradient_guard.py": [
        ("max_ratio", GradientGuard().max_ratio, "x median norm", TOY, largest("grad_norm_over_median"))
    ],
    "qerl_pl/tools/page/verdicts.py": [
        ("OUTSIDE", verdicts.OUTSIDE, "of tokens", TOY, largest("gap_outside_share")),
    ],
    "qerl_pl/objective/losses.py, correction.py": [
        ("MAX_LOG_RATIO", losses.MAX_LOG_RATIO, "nats", "theory: exp is finite", largest("gap_max"))
    ],
    "qerl_pl/settings/model.py": [
        ("max_unscored_share", ModuleSettings.max_unscored_share, "of rows", "chosen", largest("unscored_share"))
    ],
    "configs/base.yaml, schedules of the checks": [
        ("a tenth of a step", 0.1, "of a step", "7B, H200; read with --every 8", checks_share)
    ],
    "qerl_pl/memory/fitting.py": [
        ("HEADROOM", fitting.HEADROOM, "of the GPU above the plan", H200, largest("noted", "over_plan_share")),
        ("OVERHEAD", float(fitting.OVERHEAD), "tokens", H200, overhead, "near"),
        ("the planned KV cache", 1.0, "filled with all sequences", "formula", largest("noted", "kv_cache_share")),
    ],
    "qerl_pl/memory/parts.py": [
        ("FRAGMENTATION", parts.FRAGMENTATION, "of a pass's tensors", H200, largest("noted", "unused_share"), "near"),
        ("CONTEXT", parts.CONTEXT / GIB, "GiB", H200, largest("noted", "context_gib"), "near"),
        # with all that libraries take after the start
        (
            "GRAPHS_PER_LAYER",
            parts.GRAPHS_PER_LAYER / 2**20,
            "MiB",
            H200,
            largest("noted", "graphs_per_layer_mib"),
            "near",
        ),
    ],
}
CONSTANTS = tuple(Constant(where, *row) for where, rows in ROWS.items() for row in rows)

REASONS = {
    "SEED": "a seed",
    "GIB": "a unit",
    "ODDS POWERS NUCLEI TOPS END_ODDS RANDOM SHARES COPY_RATES REDRAW_RATES SLOPES STEEPNESS": (
        "an alternative of a test, whose false alarms do not depend on it; tests.correctness.faults reads power"
    ),
    "LEAST_LEFT": "bounds a ratio; the test is right with any value",
    "CERTAIN": "leaves tokens out that tell nothing; the test is right with any value",
    "FAR": "read with MAX_FAR_SHARE",
    "FIRST": "a multiple of max_jump, while the usual is an estimate",
    "ROUNDING": "of fp32 means; far above it and far below every change that matters",
    "LEAST_OTHERS": "bounds a difference of logits; the floor of these is read with FLOORS",
    "MOST": "a multiple of MARGIN",
    "GROUP_TOKENS CHUNK CHUNK_BYTES HEAD_ROWS AT_ONCE SCORED_TOKENS_PER_CALL STEP": (
        "a size of pieces: results do not depend on it"
    ),
    "VARLEN_HEAD_DIM KV_BLOCK SCORED_TOGETHER CPU_BLOCK BITS ADAPTER_ID COOLEST HOTTEST LARGEST_GPU": (
        "a property of a library, of hardware or of a file format"
    ),
    "LOWEST_TEMPERATURE": "a property of a library",
    "SHAKES NUM_PROMPTS TOKENS SEEDS ONE_TOKEN": (
        "a number of samples: costs time, and makes readings of other constants less random"
    ),
    "WORTH": "decides between two ways with equal results; bench_batch measures both",
    "WAIT": "seconds that a loopback interface may take",
    "CPU_CACHE_LIMIT": "only on a CPU, where a full cache makes vLLM slower",
    "UNUSED_SHARE": "the share of a GPU that vLLM is asked to use, which it does not",
    "USUAL_MICRO_BATCH": "read with OVERHEAD: larger passes would save OVERHEAD / USUAL_MICRO_BATCH, 4 %",
    "SCAN_BYTES": "only models with delta nets; bench_model compares planned and measured bytes",
    "DEFAULT_BATCHED_TOKENS": "a default of vLLM's scheduler; bench_rollout measures it",
    "GRAPH_SEQUENCES": "decides between two ways with equal results; bench_decode measures both",
    "CHECKED_TOKENS": "read with HEADROOM: the checks run while the engine is awake",
    "WHOLE SELECTIVE FUSED_WHOLE FUSED_SELECTIVE OFFLOAD": "read by bench_model --rungs, see below",
}
NOT_READ = {name: reason for names, reason in REASONS.items() for name in names.split()}


def limits_table(lines: Iterable[Line]) -> str:
    """Make the table of ``CONSTANTS`` from lines of ``bench_real_checks``."""
    columns: dict[str, list[Line]] = {}
    for line in lines:
        noise = ", AQN" if line["noise"] else ""
        model = line["name"].split("/", 1)[1]
        columns.setdefault(f"{model}, {line['format']}, {line['dtype']}{noise}", []).append(line)
    rows = []
    for constant in CONSTANTS:
        pairs = [
            [(constant.of(line), value) for line in group if (value := constant.reading(line)) is not None]
            for group in columns.values()
        ]
        readings = ["-" if not group else f"{max(value for _, value in group):.2g}" for group in pairs]
        limits = dict.fromkeys(f"{constant.of(line):.3g}" for group in columns.values() for line in group)
        about = [constant.name, constant.where, constant.set_on, " or ".join(limits), constant.unit]
        rows.append([*about, *readings, margin(constant, [pair for group in pairs for pair in group])])
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


def measured_again(lines: Sequence[Line]) -> str:
    """Make the table of constants of costs: of kernels from ``bench_constants``, of recomputation from
    ``bench_model --rungs``."""
    values = [
        (line["name"].removeprefix("constants/"), line["today"], line["measured"])
        for line in lines
        if line["name"].startswith("constants/")
    ]
    rungs = [line for line in lines if line["name"].startswith("rungs/")]
    seconds = {(line["name"].removeprefix("rungs/"), line["shape"]["model"]): line["median_s"] for line in rungs}
    for (rung, model), taken in seconds.items():
        kind, _, level = rung.partition("-")
        before, name = {
            "blocks": ("none", "FUSED_WHOLE" if kind == "fused" else "WHOLE"),
            "selective": ("none", "FUSED_SELECTIVE" if kind == "fused" else "SELECTIVE"),
            "offload": ("blocks", "OFFLOAD"),
        }.get(level, ("", ""))
        if (f"{kind}-{before}", model) in seconds:
            reading = taken / seconds[f"{kind}-{before}", model] - 1
            values.append((f"{name}, {model}", getattr(fitting, name), reading))
    rows = [[name, f"{value:.3g}", f"{reading:.3g}", f"{reading / value:.2f} of it"] for name, value, reading in values]
    return table(["constant of costs", "value", "measured", "MARGIN"], rows) if rows else ""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = parser_with(__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="JSON lines of the benchmarks")
    texts = [text for path in parser.parse_args(argv).files for text in path.read_text().splitlines() if text]
    lines = [line for line in map(json.loads, texts) if "name" in line]
    checks = [line for line in lines if line["name"].startswith("real_checks/")]
    if not checks:
        raise SystemExit("the files hold no lines of bench_real_checks")
    print(limits_table(checks))
    if costs := measured_again(lines):
        print(f"\n{costs}")
    print("\nalarms:", "; ".join(alarms(checks)) or "none")


if __name__ == "__main__":
    main()
