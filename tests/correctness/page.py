"""Write docs/correctness.md from docs/results: python -m tests.correctness.page

The page's text is correctness.md in this folder. Its numbers and tables come from the JSON lines of
``tests.correctness.gaps``, ``tests.correctness.faults`` and ``tests.bench.bench_canary``.
"""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from callbacks.rollout_evidence import RolloutEvidence
from qerl_pl.policy.other_policy import MOST_CERTAIN, TOLERATED
from qerl_pl.rollout.gaps import JUMPS
from tests.bench.report import RESULTS, ROOT, Line, table
from tests.correctness.gaps import CAUSES, STAGES

TEXT = Path(__file__).parent / "correctness.md"
PAGE = ROOT / "docs" / "correctness.md"
ENGINES = ("transformers", "vllm")
COLUMNS = (*ENGINES, "pretrained")
CHECKS = {  # what an error says -> which check it comes from; the first that is said counts
    "look as if they were sampled": "other policy",
    "differ from the trainer's": "gap",
    "have a probability in the trainer": "gap",
    "more than chance explains": "numbers",
    "depends on their place": "order",
    "begin like others": "choice",
    "finished; ": "ends",
    "no draws from the distribution": "other sampling",
    "random numbers of their requests": "other draws",
    "repeat others of the same prompt": "copies",
    "does not hold the current policy": "canary, checksums",
    "does not compute with the current policy": "canary, samples",
    "is nan or infinite": "engine's output",
    "the token that ends it included": "engine's output",
}


def document() -> str:
    """Make docs/correctness.md."""
    gaps, canary, faults, real = (_read(name) for name in ("correctness", "canary", "faults", "real_checks"))
    parts = about_gaps(gaps) | about_faults(faults, _read("real_faults")) | about_jumps(real)
    parts |= about_other_policies(_read("other_policies"), real)
    return TEXT.read_text().format(**parts, canary=canary_tables(canary))


def about_gaps(results: Sequence[Line]) -> dict[str, Any]:
    """Make the table of the gap between trainer and vLLM and of its parts by cause, a row per run, and the numbers for
    the page's text below this table."""
    stages = [(result, name, result[name]) for result in results for name in STAGES if name in result]
    fp32 = [(result, name, summary) for result, name, summary in stages if result["dtype"] == "float32"]
    quiet = [summary for result, name, summary in fp32 if name == "quiet" and result["shape"]["temperature"] == 1]
    header = ["run", "sigma", "gap, mean", "gap, largest", *CAUSES, "outside [0.9, 1.1]"]
    rows = [_gap_row(result["name"], summary) for result, _, summary in stages]

    def largest(name: str, summaries: Sequence[dict[str, Any]]) -> str:
        return _number(max(summary[name] for summary in summaries if name in summary))

    return {
        **{name: results[0][name] for name in ("device", "torch")},
        "commits": _commits(results),
        **{name: results[0]["shape"][name] for name in ("rollouts", "rows")},
        "gaps": table(header, rows),
        "worst_quiet": _number(max(summary["gap"]["worst_mean_abs"] for summary in quiet)),
        "balance": largest("balance_error", [summary for *_, summary in stages]),
        "beyond": largest("gap_beyond_noise", [summary for _, name, summary in fp32 if name == "noisy"]),
        "tensors": results[0]["canary_tensors"],
        "canary_fp32": largest("canary_score_gap_max", [each for each in results if each["dtype"] == "float32"]),
        "canary_bf16": largest("canary_score_gap_max", [each for each in results if each["dtype"] == "bfloat16"]),
    }


def canary_tables(results: Sequence[Line]) -> str:
    """Make a table for each run of ``bench_canary``: what the callback SyncCanary compares, in healthy and in broken
    engines."""
    runs: dict[tuple[str, str], list[Line]] = {}
    for result in results:
        runs.setdefault((result["device"], result["commit"]), []).append(result)
    parts = []
    for lines in runs.values():
        header = ["engine", *(f"{what}, nats" for what in lines[0]["nats"])]
        rows = []
        for line in lines:
            nats = (f"{median:.3f} ({least:.3f} to {most:.3f})" for least, median, most in line["nats"].values())
            rows.append([line["name"].removeprefix("canary/").replace("_", " "), *nats])
        about = (
            "{layers} blocks of {size}, an {format} base in {dtype}, {adapters} adapters, "
            "on {device} at commit {commit}:"
        ).format(**lines[0], **lines[0]["shape"])
        parts.append(f"{about}\n\n{table(header, rows)}\n")
    return "\n".join(parts)


def about_faults(lines: Sequence[Line], real: Sequence[Line]) -> dict[str, Any]:
    """Make the values that are filled into docs/correctness.md about faults of engines: which of them stopped a run or
    caused a warning, whether runs without a fault stopped or warned, and how long the checks take. ``lines`` are of
    runs of the quickstart, ``real`` of runs of a pretrained model."""
    faults = [line for line in lines if not line["name"].startswith("healthy")]
    healthy = [line for line in lines if line["name"].startswith("healthy")]
    by_engine = {(line["name"], line["shape"]["engine"]): line for line in faults}
    columns = by_engine | {(line["name"], "pretrained"): line for line in real}
    rows = [
        [name, *(_outcome(columns[name, engine]) if (name, engine) in columns else "-" for engine in COLUMNS)]
        for name in dict.fromkeys(line["name"] for line in [*faults, *real])
    ]
    seen = (_seen(engine, [line for line in faults if line["shape"]["engine"] == engine]) for engine in ENGINES)
    within_two = sum(line["outcome"] == "stopped" and line["rollout"] <= line["appears"] + 1 for line in real)
    return {
        "seen": " and ".join(seen),
        "pretrained": f"{within_two} of {len(real)}",
        "pretrained_device": real[0]["device"],
        "pretrained_commits": _commits(real),
        "faults": table(["fault", *COLUMNS], rows),
        "rollouts_without": sum(line["rollouts"] for line in healthy),
        "vllm": sum(line["rollouts"] for line in healthy if line["shape"]["engine"] == "vllm"),
        "alarms": sum(line["outcome"] != "silent" for line in healthy) or "none",
        "costs": table(["run", "step, s", "evidence", "canary"], [_cost(line) for line in healthy]),
        "faults_commits": _commits(lines),
        **{f"faults_{name}": faults[0][name] for name in ("device", "torch")},
    }


def about_jumps(lines: Sequence[Line]) -> dict[str, Any]:
    """Make the values that are filled into docs/correctness.md about sudden increases of the difference between trainer
    and sampler in runs of pretrained policies without a fault: for each measure of a rollout's difference, the largest
    ratio to the median of recent rollouts, and the ratio above which a run stops."""
    of_stops = {kind: (RolloutEvidence().limits.max_jump or math.inf) * JUMPS[kind] for kind in JUMPS}

    def largest(kind: str) -> str:
        return f"{max(line['jumps'][kind + rows][0] for line in lines for rows in ('', '_of_all')):.2f}"

    parts = [f"{largest(kind)} times for `{kind}` (a run stops above {most:g})" for kind, most in of_stops.items()]
    audited = [line for line in lines if "margin" in line]
    assert all(max(line["evidence"]["other_draws"]) <= 0 for line in audited)
    return {
        "real_rollouts": sum(line["rollouts"] for line in lines),
        "real_runs": len(lines),
        "real_devices": " and ".join(dict.fromkeys(line["device"] for line in lines)),
        "real_commits": _commits(lines),
        "real_jumps": ", ".join(parts),
        "audited_rollouts": sum(line["rollouts"] for line in audited),
        "largest_margin": f"{max(line['margin']['max'][1] for line in audited):.2f}",
    }


def about_other_policies(lines: Sequence[Line], real: Sequence[Line]) -> dict[str, Any]:
    """Make the values that are filled into docs/correctness.md about the test of whether an engine sampled with another
    policy. They are a table with a row per run of ``lines``, which has the fraction of each other policy's effect on
    log-probabilities that the engine's errors contain, and the number of rollouts after which the test stopped the only
    run that it stopped among ``real``, runs without a fault."""
    header = ["run", "rollouts", "part: without the adapter", "part: of the rollout before", "log of the bound, least"]
    rows = []
    for line in lines:
        rollouts = line["rollouts"]
        parts = ([one[name] for one in rollouts] for name in ("without_adapter", "of_before"))
        shown = [f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})" for values in parts]
        least = min(one["log_false_alarm"] for one in rollouts)
        name = f"{line['name'].removeprefix('other_policies/')}, {line['fault'] or 'no fault'}"
        rows.append([name, str(len(rollouts)), *shown, f"{least:.1f}"])
    [alarm] = (line for line in real if "look as if they were sampled" in line["alarm"]["said"])
    return {
        "tolerated": f"{TOLERATED:g}",
        "most_certain": f"{MOST_CERTAIN:g}",
        "others": table(header, rows),
        "false_alarm_after": alarm["rollouts"],
        "audit_commit": alarm["commit"],
        "others_device": lines[0]["device"],
        "others_commit": lines[0]["commit"],
    }


def _read(name: str) -> list[Line]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def _commits(lines: Sequence[Line]) -> str:
    """Name the commits at which the lines were measured, as in "commit a" or "commits a, b and c"."""
    *others, last = dict.fromkeys(line["commit"] for line in lines)
    return f"commits {', '.join(others)} and {last}" if others else f"commit {last}"


def _gap_row(run: str, summary: dict[str, Any]) -> list[str]:
    low, high = summary["sigma"]
    return [
        run,
        "0" if high == 0 else f"{high:.1e} to {low:.1e}",
        _number(summary["gap"]["mean_abs"]),
        _number(summary["gap"]["max"]),
        *(_number(summary[cause]["mean_abs"]) if cause in summary else "-" for cause in CAUSES),
        f"{summary['gap']['outside_share']:.2%}",
    ]


def _outcome(line: Line) -> str:
    if line["outcome"] == "silent":
        return "silent"
    check = next(name for words, name in CHECKS.items() if words in line["said"])
    late = line["rollout"] - line["appears"]
    when = f" {late} rollout{'s' if late > 1 else ''} later" if late > 0 else ""
    return f"{line['outcome']}{when} ({check})"


def _seen(engine: str, lines: Sequence[Line]) -> str:
    at_once = sum(line["outcome"] != "silent" and line["rollout"] <= line["appears"] for line in lines)
    return f"{at_once} of {len(lines)} with {engine}"


def _cost(line: Line) -> list[str]:
    step, checks = line["step_s"], line["check_s"]
    name = f"{line['name'].removeprefix('healthy, ')}, {line['shape']['engine']}"
    return [name, f"{step:.2f}", *(f"{checks[check] / step:.1%}" for check in ("RolloutEvidence", "SyncCanary"))]


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


if __name__ == "__main__":
    PAGE.write_text(document())
