"""Measure how far log-probabilities of trainer and vLLM differ (the gap), and why: python -m tests.correctness.gaps

Does short runs of configs/quickstart.yaml with vLLM in several settings. The callback MismatchLedger divides the gap of
every row into parts by cause. Prints one JSON line per setting, for docs/results/correctness.jsonl. A setting whose gap
exceeds its limit gets no line; the program ends there with exit status 1.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml

from qerl_pl.results.curves import Curve, read_curves
from tests.bench.harness import base_callbacks, check, emit

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
NUM_ROLLOUTS = 20
NUM_ROWS = 256  # all of a rollout
STAGES = {"quiet": False, "noisy": True}
CAUSES = ("kernel", "decode", "noise", "staleness")


class Setting(NamedTuple):
    """Changes of one run to the quickstart's settings."""

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


def main(argv: list[str] | None = None) -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("models/tiny-0-nvfp4"), help="the quickstart's policy")
    parser.add_argument("--rollouts", type=int, default=NUM_ROLLOUTS)
    args = parser.parse_args(argv)
    for setting in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            curves = run(setting, args.base, Path(folder), num_rollouts=args.rollouts)
        result = summarize(curves)
        check(bounds(setting, result))
        shape = {"rollouts": args.rollouts, "rows": NUM_ROWS, "temperature": setting.temperature}
        emit(setting.name, shape, setting.dtype, updates_per_rollout=setting.updates_per_rollout, **result)


def run(setting: Setting, base: Path, folder: Path, *, num_rollouts: int) -> dict[str, Curve]:
    """Do one run in a process of its own; returns its curves."""
    callbacks = base_callbacks()
    for callback in callbacks:
        if callback["class_path"] == "callbacks.ledger.MismatchLedger":
            callback["init_args"] = {"num_rows": NUM_ROWS, "max_tokens": 1_000_000, "every": 1}
    if setting.has_noise:
        callbacks += yaml.safe_load(QUICKSTART.read_text())["trainer"]["callbacks+"]
    changes = {
        "run_dir": str(folder / "run"),
        "trainer": {"callbacks": callbacks, "max_steps": num_rollouts * setting.updates_per_rollout},
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
    """Summarise the gap and its parts by cause, separately over the rollouts without noise on the norms ("quiet") and
    over those with noise ("noisy")."""
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
    """Compute, over the rollouts whose numbers are in ``steps``, mean and maximum of the gap between the engine's and
    the trainer's log-probabilities of sampled tokens, in nats, and of the part of it that each cause, such as rounding
    or noise, contributes."""

    def values(tag: str) -> list[float]:
        return [curves[tag].values[step] for step in steps]

    parts = {cause: f"ledger/{cause}" for cause in CAUSES if f"ledger/{cause}/k1" in curves} | {"gap": "gap"}
    summary: dict[str, Any] = {
        part: {
            "mean_abs": fmean(values(f"{tag}/mean_abs")),
            "worst_mean_abs": max(values(f"{tag}/mean_abs")),
            "max": max(values(f"{tag}/max")),
            "outside_share": fmean(values(f"{tag}/outside_share")),
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
    """List the limits of a setting: (what, value, bound) in nats."""
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


if __name__ == "__main__":
    main()
