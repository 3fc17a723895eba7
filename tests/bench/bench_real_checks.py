"""What every check reads in healthy runs of pretrained models: python -m tests.bench.bench_real_checks

Each model trains on GSM8K through the program, with every check in every rollout, or as ``--every`` says. One JSON
line per model, format and seed has the alarm (there should be none) and, over the rollouts, the values that the
checks compare with their limits: the strength of the probe adapter, the difference of engine and trainer under it,
what it changes and what rounding errors change; the same of scores; the ledger's parts; the evidence; the gradient's
norm over its running median; planned and measured memory, and what of the latter torch's allocator does not know; the
share of the KV cache that is filled; how the time of a training pass depends on its tokens. ``--curves FILE`` keeps all
values of all rollouts too.

    python -m tests.bench.bench_real_checks --models models/qwen2.5-coder-0.5b --problems gsm8k_train.jsonl > lines
    python -m tests.bench.limits lines

A process trains the runs one after another; ``--formats`` and ``--seeds`` divide them among processes. The second
command makes a table of every constant beside what it reads on each model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml

from callbacks.gradient_guard import GradientGuard
from callbacks.rollout_evidence import FLOORS
from qerl_pl.policy.policy import DTYPES
from qerl_pl.results.curves import Curve, read_curves
from tests.bench.harness import DTYPE, emit
from tests.bench.noted import Readings, canary_share, jumps, longest_run, pass_overhead
from tests.correctness.faults import ENGINES, aqn, heard_in, sources
from tests.integration.conftest import ROOT

EVERY = {  # arguments with the rollouts from one check to the next
    "callbacks.canary.SyncCanary": ("sample_every", "score_every"),
    "callbacks.ledger.MismatchLedger": ("every",),
}
GAPS = tuple(kind + rows for kind in FLOORS for rows in ("", "_of_all"))
EVIDENCE = (*GAPS, "far_share", "far_share_of_all", "copies", "order", "branches", "other_sampling")


def settings(args: argparse.Namespace, model: Path, fmt: str, seed: int, folder: Path) -> dict[str, Any]:
    """Make the settings that differ from the task's."""
    callbacks = yaml.safe_load((ROOT / "configs" / "base.yaml").read_text())["trainer"]["callbacks"]
    for callback in callbacks:
        schedule = dict.fromkeys(EVERY.get(callback["class_path"], ()), args.every)
        callback.setdefault("init_args", {}).update(schedule)
    callbacks += [aqn(10)] if args.noise else []
    callbacks += [{"class_path": "tests.bench.noted.Readings"}]
    engine = {"max_num_seqs": args.prompts * args.completions} if args.engine == "vllm" else {}
    return {
        "run_dir": str(folder / "run"),
        "seed_everything": seed,
        "trainer": {"callbacks": callbacks, "max_steps": args.rollouts, "limit_val_batches": args.val_batches},
        "model": {
            "base": str(model.resolve()),
            "quantize": None if fmt == "bf16" else fmt,
            "dtype": args.dtype,
            "engine": {"class_path": ENGINES[args.engine], "init_args": engine},
            "sampling": {"num_completions": args.completions, "max_tokens": args.tokens, "temperature": 1.0},
        },
        "data": {
            "batch_size": args.prompts,
            "source": {"init_args": sources(args.problems)},
            "held_out": 64,
            "val_batch_size": 32,
        },
    }


def readings(curves: Mapping[str, Curve], dtype: torch.dtype) -> dict[str, Any]:
    """Summarise what the checks read: [median, largest] over rollouts, in nats if nothing else is said."""

    def of(tag: str) -> list[float]:
        return curves[tag].values if tag in curves else []

    def summary(values: list[float]) -> list[float]:
        return [statistics.median(values), max(values)] if values else []

    names = ("probe_share", "probe_excess", "probe_gap", "probe_change", "probe_rounding")
    names += ("score_excess", "score_gap", "score_rounding")
    norms = [norm for norm in of("train/grad_norm") if norm > 0]
    window = GradientGuard().window
    usual = [statistics.median(norms[max(0, index - window) : index]) for index in range(1, len(norms))]
    causes = ("kernel", "noise", "decode", "staleness")
    return {
        "rollouts": len(of("train/reward")),
        "probe_strength": sorted(set(of("canary/probe_strength"))),
        **{name: summary(of(f"canary/{name}")) for name in names},
        "probe_change_least": min(of("canary/probe_change"), default=None),
        "ledger": {cause: summary(of(f"ledger/{cause}/mean_abs")) for cause in causes},
        "gap": summary(of("gap/mean_abs")),
        "gap_max": summary(of("gap/max")),
        "gap_outside_share": summary(of("gap/outside_share")),
        "evidence": {name: summary(of(f"evidence/{name}")) for name in EVIDENCE},
        "jumps": {name: jumps(curves, name, dtype) for name in GAPS},
        "silent_rollouts": longest_run([share == 0 for share in of("rollout/groups_with_signal")]),
        "rounding_over_change": summary(
            [
                rounding / change
                for rounding, change in zip(of("canary/probe_rounding"), of("canary/probe_change"), strict=True)
            ]
        ),
        "canary_share": summary([*canary_share(curves, "probe", dtype), *canary_share(curves, "score", dtype)]),
        "unscored_share": summary(of("rollout/unscored_share")),
        "outside_weights_share": summary(of("correction/outside_share")),
        "check_share": summary(
            [check / step for check, step in zip(of("time/check_s"), of("time/step_s"), strict=True)][1:]
        ),
        "pass": pass_overhead(Readings.noted),
        "noted": {
            name: summary(values)
            for name, values in Readings.noted.items()
            if name not in ("pass_tokens", "passes", "train_s")
        },
        "grad_norm": summary(norms),
        "grad_norm_over_median": summary(
            [norm / median for norm, median in list(zip(norms[1:], usual, strict=True))[GradientGuard().min_steps :]]
        ),
        "memory_gib": {
            phase: {"planned": summary(of(f"memory/predicted_{phase}_gib")), "used": summary(of(f"memory/{phase}_gib"))}
            for phase in ("rollout", "train", "peak")
        },
        "kv_cache_bytes": Readings.kv_cache_bytes,
        "step_s": summary(of("time/step_s")),
        "check_s": summary(of("time/check_s")),
        "completion_tokens": summary(of("rollout/completion_tokens")),
        "reward": [sum(part) / len(part) for part in (of("train/reward")[:10], of("train/reward")[-10:]) if part],
    }


def without_memory(found: dict[str, Any], shared: bool) -> dict[str, Any]:
    """Leave out what a process reads wrongly if others use its GPU: memory, and the seconds of passes."""
    return {name: {} if shared and name in ("noted", "memory_gib", "pass") else value for name, value in found.items()}


def main(argv: list[str] | None = None) -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="folders or GGUF files of bases")
    parser.add_argument("--problems", type=Path, required=True, help="GSM8K's training problems, JSON lines")
    parser.add_argument("--formats", nargs="+", default=["bf16", "nvfp4"], help="bf16, or a value of model.quantize")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--task", choices=("gsm8k_verl", "gsm8k_boxed"), default="gsm8k_boxed")
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--every", type=int, default=1, help="rollouts from one check to the next (evidence: always)")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="longest completion")
    parser.add_argument("--val-batches", type=int, default=0, help="batches of 32 problems of each validation")
    parser.add_argument("--noise", action="store_true", help="adaptive quantization noise, with the paper's sigmas")
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--dtype", choices=DTYPES, default=str(DTYPE).removeprefix("torch."))
    parser.add_argument("--shared", action="store_true", help="others use the GPU: leave out readings of its memory")
    parser.add_argument("--curves", type=Path, help="file to append all values of all rollouts to")
    args = parser.parse_args(argv)
    sys.argv = sys.argv[:1]
    for model, fmt, seed in product(args.models, args.formats, args.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            changes = folder / "changes.yaml"
            changes.write_text(yaml.safe_dump(settings(args, model, fmt, seed, folder)))
            begin = time.perf_counter()
            task = ROOT / "configs" / "tasks" / f"{args.task}.yaml"
            alarm = heard_in(["fit", "-c", str(task), "-c", str(changes)], None)
            seconds = time.perf_counter() - begin
            if not list((folder / "run").glob("events.*")):
                raise SystemExit(f"the run of {model} did not start: {alarm['said']}")
            curves = read_curves(folder / "run")
        shape = {
            "prompts": args.prompts,
            "completions": args.completions,
            "max_tokens": args.tokens,
            "every": args.every,
        }
        about = {"format": fmt, "seed": seed, "noise": args.noise, "engine": args.engine, "alarm": alarm}
        emit(
            f"real_checks/{model.name.removesuffix('.gguf')}",
            shape,
            args.dtype,
            **about,
            run_s=seconds,
            **without_memory(readings(curves, DTYPES[args.dtype]), args.shared),
        )
        if args.curves:
            values = {tag: [curve.steps, curve.values] for tag, curve in curves.items()}
            with args.curves.open("a") as file:
                file.write(json.dumps({"model": name, **about, "curves": values}) + "\n")


if __name__ == "__main__":
    main()
