"""How far the trainer is from the policy that samples, and why: the numbers of docs/correctness.md.

    python -m tests.bench.correctness --base models/tiny-0-nvfp4 > docs/results/correctness.jsonl
    python -m tests.bench.correctness --write docs/correctness.md < docs/results/correctness.jsonl

Short runs of configs/quickstart.yaml with vLLM, in several settings, with every row in the ledger. One JSON line a
setting; none, and exit status 1, where a gap is larger than it may be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from qerl_pl.tools.curves import Curve, read_curves
from tests.bench.harness import check, emit
from tests.bench.report import table
from tests.bench.report_faults import faults_section

ROOT = Path(__file__).parent.parent.parent
CANARY = ROOT / "docs" / "results" / "canary.jsonl"
FAULTS = ROOT / "docs" / "results" / "faults.jsonl"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
NUM_ROLLOUTS = 20
NUM_ROWS = 256  # all of a rollout
STAGES = {"quiet": False, "noisy": True}
CAUSES = ("kernel", "decode", "noise", "staleness")


class Setting(NamedTuple):
    """One run."""

    name: str
    dtype: str = "float32"
    has_noise: bool = False
    temperature: float = 1.0
    updates_per_rollout: int = 1


SETTINGS = (
    Setting("fp32"),
    Setting("fp32, AQN", has_noise=True),
    Setting("fp32, AQN, temperature 0.7", has_noise=True, temperature=0.7),
    Setting("fp32, 4 updates a rollout", updates_per_rollout=4),
    Setting("bf16", dtype="bfloat16"),
    Setting("bf16, AQN", dtype="bfloat16", has_noise=True),
)


def main(argv: list[str] | None = None) -> int:
    """Measure, or write the document from what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("models/tiny-0-nvfp4"), help="the quickstart's policy")
    parser.add_argument("--rollouts", type=int, default=NUM_ROLLOUTS)
    parser.add_argument("--write", type=Path, help="write the document there from JSON lines on stdin")
    args = parser.parse_args(argv)
    if args.write:
        args.write.write_text(document([json.loads(line) for line in sys.stdin]))
        return 0
    for setting in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            curves = run(setting, args.base, Path(folder), num_rollouts=args.rollouts)
        found = summarize(curves)
        check(bounds(setting, found))
        shape = {"rollouts": args.rollouts, "rows": NUM_ROWS, "temperature": setting.temperature}
        emit(setting.name, shape, setting.dtype, updates_per_rollout=setting.updates_per_rollout, **found)
    return 0


def run(setting: Setting, base: Path, folder: Path, *, num_rollouts: int) -> dict[str, Curve]:
    """The curves of one run, in a process of its own."""
    callbacks = yaml.safe_load((ROOT / "configs" / "base.yaml").read_text())["trainer"]["callbacks"]
    for callback in callbacks:
        if callback["class_path"] == "callbacks.ledger.MismatchLedger":
            callback["init_args"] = {"num_rows": NUM_ROWS, "max_tokens": 1_000_000, "every": 1}
    if setting.has_noise:
        callbacks += yaml.safe_load(QUICKSTART.read_text())["trainer"]["callbacks+"]
    changes = {
        "run_dir": str(folder / "run"),
        "trainer": {
            "callbacks": callbacks,
            "max_steps": num_rollouts * setting.updates_per_rollout,
        },
        "model": {
            "base": str(base),
            "dtype": setting.dtype,
            "sampling": {"num_completions": 8, "max_tokens": 48, "temperature": setting.temperature},
            "updates_per_rollout": setting.updates_per_rollout,
        },
    }
    (folder / "changes.yaml").write_text(yaml.safe_dump(changes))
    command = [sys.executable, "train.py", "fit", "-c", str(QUICKSTART), "-c", str(folder / "changes.yaml")]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    return read_curves(folder / "run")


def summarize(curves: dict[str, Curve]) -> dict[str, Any]:
    """What the gap is made of, over the rollouts without noise ("quiet") and over those with it ("noisy")."""
    sigma = curves["aqn/sigma"].values if "aqn/sigma" in curves else [0.0] * len(curves["gap/k1"].values)
    steps = {name: [step for step, value in enumerate(sigma) if (value > 0) == noisy] for name, noisy in STAGES.items()}
    stages = {name: summarize_steps(curves, chosen) for name, chosen in steps.items() if chosen}
    for name, summary in stages.items():
        values = [sigma[step] for step in steps[name]]
        summary["sigma"] = [min(values), max(values)]
    return {
        "canary_tensors": int(curves["canary/tensors_checked"].values[-1]),
        "canary_score_gap_max": max(curves["canary/score_gap"].values),
        **stages,
    }


def summarize_steps(curves: dict[str, Curve], steps: Sequence[int]) -> dict[str, Any]:
    """Statistics of the gap and of each of its parts over some rollouts, in nats."""

    def values(tag: str) -> list[float]:
        return [curves[tag].values[step] for step in steps]

    parts = {cause: f"ledger/{cause}" for cause in CAUSES if f"ledger/{cause}/k1" in curves} | {"gap": "gap"}
    summary: dict[str, Any] = {
        part: {
            "mean_abs": _mean(values(f"{tag}/mean_abs")),
            "worst_mean_abs": max(values(f"{tag}/mean_abs")),
            "p99": _mean(values(f"{tag}/p99")),
            "max": max(values(f"{tag}/max")),
            "k3": _mean(values(f"{tag}/k3")),
            "outside_share": _mean(values(f"{tag}/outside_share")),
        }
        for part, tag in parts.items()
    }
    summary["rollouts"] = len(steps)
    if "decode" in parts:
        three = [values(f"ledger/{cause}/k1") for cause in ("kernel", "decode", "noise")]
        sums = zip(values("gap/k1"), *three, strict=True)
        summary["balance_error"] = max(abs(gap - kernel - decode - noise) for gap, kernel, decode, noise in sums)
        both = zip(values("gap/mean_abs"), values("ledger/noise/mean_abs"), strict=True)
        summary["gap_beyond_noise"] = max(abs(gap - noise) for gap, noise in both)
    return summary


def bounds(setting: Setting, found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """What may not be exceeded: (what, value, bound), nats."""
    limits = []
    fp32 = setting.dtype == "float32"
    for name, summary in ((name, found[name]) for name in STAGES if name in found):
        limits.append((f"{setting.name}: mean kernel part", summary["kernel"]["worst_mean_abs"], 1e-5 if fp32 else 0.1))
        if "balance_error" in summary:
            # The ledger's passes are smaller than the update's, which changes how bf16 products are rounded.
            limits.append((f"{setting.name}: sum of the parts", summary["balance_error"], 1e-6 if fp32 else 1e-4))
        if name == "quiet":
            limits.append((f"{setting.name}: noise part without noise", summary["noise"]["max"], 0.0))
            if setting.temperature == 1 and fp32:
                limits.append((f"{setting.name}: mean gap", summary["gap"]["worst_mean_abs"], 1e-5))
        elif "gap_beyond_noise" in summary and fp32:
            limits.append((f"{setting.name}: gap beyond the noise part", summary["gap_beyond_noise"], 1e-5))
    return limits


def document(results: Sequence[dict[str, Any]]) -> str:
    """docs/correctness.md."""
    rows = [(result, name, result[name]) for result in results for name in STAGES if name in result]
    lines = [HEAD.format(**results[0], rollouts=results[0]["shape"]["rollouts"], rows=results[0]["shape"]["rows"])]
    lines.append(
        "| run | sigma | gap, mean | gap, largest | kernel | decode | noise | staleness | outside [0.9, 1.1] |"
    )
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for result, _, summary in rows:
        low, high = summary["sigma"]
        cells = [
            result["name"],
            "0" if high == 0 else f"{high:.1e} to {low:.1e}",
            _number(summary["gap"]["mean_abs"]),
            _number(summary["gap"]["max"]),
            *(_number(summary[cause]["mean_abs"]) if cause in summary else "-" for cause in CAUSES),
            f"{summary['gap']['outside_share']:.2%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    fp32 = [(summary, result) for result, name, summary in rows if result["dtype"] == "float32" and name == "quiet"]
    at_1 = [summary for summary, result in fp32 if result["shape"]["temperature"] == 1]
    noisy = [summary for result, name, summary in rows if name == "noisy" and result["dtype"] == "float32"]
    lines.append(
        TAIL.format(
            worst_quiet=_number(max(summary["gap"]["worst_mean_abs"] for summary in at_1)),
            balance=_number(max(summary["balance_error"] for _, _, summary in rows if "balance_error" in summary)),
            beyond=_number(max(summary["gap_beyond_noise"] for summary in noisy if "gap_beyond_noise" in summary)),
            tensors=results[0]["canary_tensors"],
            canary_fp32=_number(max(r["canary_score_gap_max"] for r in results if r["dtype"] == "float32")),
            canary_bf16=_number(max(r["canary_score_gap_max"] for r in results if r["dtype"] == "bfloat16")),
        )
    )
    lines.append(canary_section([json.loads(line) for line in CANARY.read_text().splitlines()]))
    lines.append(faults_section([json.loads(line) for line in FAULTS.read_text().splitlines()]))
    return "\n".join(lines)


def canary_section(results: Sequence[dict[str, Any]]) -> str:
    """What the canary's comparisons give for healthy and for broken engines, a table a run of `bench_canary`."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        runs.setdefault((result["device"], result["commit"]), []).append(result)
    parts = [CANARY_HEAD]
    for first, *others in runs.values():
        rows = []
        for result in (first, *others):
            gaps = (f"{median:.3f} ({least:.3f} to {most:.3f})" for least, median, most in result["nats"].values())
            rows.append([result["name"].removeprefix("canary/").replace("_", " "), *gaps])
        header = ["engine", *(f"{what}, nats" for what in first["nats"])]
        parts.append(CANARY_RUN.format(**first, **first["shape"], table=table(header, rows)))
    return "\n".join(parts)


HEAD = """# Which policy do rollouts come from?

Written by `tests/bench/correctness.py`; change the script, not this file.

Trainer and rollout engine are two implementations of one policy. Four things keep watch over the difference, at every
step of every run (`configs/base.yaml`):

- `gap/*`: log(trainer / sampler) at every sampled token, at the sampling temperature, noise included.
- `ledger/*`: the same difference by cause, on some rows of every fourth rollout (`callbacks/ledger.py`).
- `canary/*`: proof that the engine holds the current policy; a run in which it does not stops (`callbacks/canary.py`).
- `evidence/*`: whether completions are independent draws from that policy (`callbacks/rollout_evidence.py`).

## The ledger

Runs of the quickstart's policy (NVFP4 base, LoRA) with vLLM: {rollouts} rollouts of {rows} completions, all of them in
the ledger. Measured on {device} with torch {torch} at commit {commit}. A number is the mean over rollouts of the mean
|difference| over tokens, in nats at temperature 1; "gap" is over the same tokens at the sampling temperature, "largest"
over all of them. The parts:

- **kernel**: trainer - engine with clean norms, scoring the same tokens. Other kernels, other rounding.
- **decode**: the engine scoring all at once - what it reported while sampling. Not defined where the sampling
  temperature is not 1, as engines score at 1.
- **noise**: engine with clean norms - engine with noise. Adaptive quantization noise, and nothing else.
- **staleness**: trainer after the updates of the rollout - trainer before them.
"""

TAIL = """
- Without noise, in fp32 at temperature 1, the mean gap of no rollout exceeds {worst_quiet} nats (allowed: 1e-5).
- Noise accounts for the rest: in fp32 the mean gap and the mean of the noise part differ by {beyond} nats at most.
- The parts add up: k1 of the gap is the sum of kernel, decode and noise to {balance} nats at most.

What is done about the difference is said in YAML (`model.objective`): `correction` (`truncate` or `mask`) puts
importance weights between trainer and sampler, noise included; with `correct_noise: false` only rollouts without noise
get them, so noise is kept on purpose; `ratio_against: sampler` puts the sampler into the clipped ratio, which is
Algorithm 1 of arXiv 2510.11696 to the letter. Rollouts are never sampled with top_p or top_k: the sampler's
log-probabilities would be those of another distribution.

## The canary

After every rollout, before anything is learned from it, and before every batch of an evaluation, {tensors} tensors of
this policy are read back from the engine (the adapter's slots, both norms of every block) and their checksums are
compared with those of the trainer's adapter and norms, the noise of the rollout included. Then tokens are sampled under
a probe adapter, which shows cached prefixes of an older policy and adapters that are not used, even while B is still
0; and every tenth rollout fixed tokens are scored with the adapter and without.

In these healthy runs engine and trainer differ on the fixed tokens by {canary_fp32} nats in fp32 and by {canary_bf16}
in bf16 at most (means over tokens); a run stops above 1e-4 and 0.3, and under the probe adapter above half of what it
changes. `tests/callbacks/test_canary.py` puts these faults into the engine of a run, transformers and vLLM, and sees it
stop at the rollout at which the fault appears: an old adapter, one update that is lost, no adapter, one wrong matrix,
an adapter that is held and not used, noise left behind, noise that is missing, noise of another seed, stale prefixes.
"""

CANARY_HEAD = """\
What its comparisons give (`tests/bench/bench_canary.py`), median and range over adapters. Checksums, which see most of
these faults, are left out. Of stale prefixes more is left the sooner a sample follows a cached block. Up to commit
65f810d there were 8 samples, each at least 9 tokens after one, and stale prefixes came close to half of the change in
bf16; now there are 16, and some follow at once.
"""

CANARY_RUN = """\
{layers} blocks of {size}, an {format} base in {dtype}, {adapters} adapters, on {device} at commit {commit}:

{table}
"""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


if __name__ == "__main__":
    sys.exit(main())
