"""Record what every check measures in healthy runs of pretrained models: python -m tests.bench.bench_real_checks

Each model trains on GSM8K through the program, with every check in every rollout, or as often as ``--every`` says. One
JSON line per model, format and seed has the message of the check that stopped the run (there should be none) and, over
the rollouts, the values that the checks compare with their limits: those of the callbacks SyncCanary (the strength of
its probe adapter, how far engine and trainer differ with this adapter, and how much the adapter and rounding errors
change the log-probabilities), MismatchLedger (the difference between engine and trainer by its causes) and
RolloutEvidence; the norm of the gradient divided by its running median; and planned and measured memory. ``--curves
FILE`` also keeps all values of all rollouts.

    python -m tests.bench.bench_real_checks --models models/qwen2.5-coder-0.5b --problems gsm8k_train.jsonl > lines

A process trains the runs one after another; ``--formats`` and ``--seeds`` divide them among processes.
"""

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
from qerl_pl.policy.policy import DTYPES
from qerl_pl.results.curves import Curve, read_curves
from qerl_pl.rollout.gaps import FLOORS
from tests.bench.harness import DTYPE, ROOT, emit, parser_with
from tests.bench.noted import jumps
from tests.correctness.faults import ENGINES, GPU_MEMORY, aqn, every_check, heard_in, sources

EVERY = {  # arguments that set how many rollouts lie between checks
    "callbacks.canary.SyncCanary": ("sample_every", "score_every"),
    "callbacks.ledger.MismatchLedger": ("every",),
}
GAPS = tuple(kind + rows for kind in FLOORS for rows in ("", "_of_all"))
CANARY = ("probe_share", "probe_excess", "probe_gap", "probe_change", "probe_rounding")
CANARY += ("score_excess", "score_gap", "score_rounding")
CAUSES = ("kernel", "noise", "decode", "staleness")
EVIDENCE = (*GAPS, "far_share", "far_share_of_all", "copies", "order", "branches", "other_sampling")
EVIDENCE += ("other_draws", "other_policy")


def settings(args: argparse.Namespace, model: Path, fmt: str, seed: int, folder: Path) -> dict[str, Any]:
    """Make the settings that differ from the task's."""
    callbacks = every_check()
    for callback in callbacks:
        schedule = dict.fromkeys(EVERY.get(callback["class_path"], ()), args.every)
        callback.setdefault("init_args", {}).update(schedule)
    callbacks += [aqn(10)] if args.noise else []
    engine = {"max_num_seqs": args.prompts * args.completions} if args.engine == "vllm" else {}
    return {
        "run_dir": str(folder / "run"),
        "seed_everything": seed,
        "trainer": {"callbacks": callbacks, "max_steps": args.rollouts, "limit_val_batches": args.val_batches},
        "model": {
            "base": str(model.resolve()),
            "gpu_memory": args.gpu_memory,
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


def readings(curves: Mapping[str, Curve], dtype: torch.dtype, *, shared: bool) -> dict[str, Any]:
    """Summarise what the checks measured as [median, largest] over the rollouts, in nats unless the name has another
    unit.

    With ``shared``, other processes use the same GPU. Memory is then left out, because measurements include theirs.
    """

    def of(tag: str) -> list[float]:
        return curves[tag].values if tag in curves else []

    def summary(values: list[float]) -> list[float]:
        return [statistics.median(values), max(values)] if values else []

    def shares(top: str, bottom: str) -> list[float]:
        return [one / other for one, other in zip(of(top), of(bottom), strict=True)]

    norms = [norm for norm in of("train/grad_norm") if norm > 0]
    guard = GradientGuard()
    usual = [statistics.median(norms[max(0, index - guard.window) : index]) for index in range(1, len(norms))]
    over_usual = [norm / median for norm, median in zip(norms[1:], usual, strict=True)][guard.min_steps :]
    memory = {
        phase: {"planned": summary(of(f"memory/predicted_{phase}_gib")), "used": summary(of(f"memory/{phase}_gib"))}
        for phase in ("rollout", "train", "peak")
    }
    return {
        "rollouts": len(of("train/reward")),
        "probe_strength": sorted(set(of("canary/probe_strength"))),
        **{name: summary(of(f"canary/{name}")) for name in CANARY},
        "probe_change_least": min(of("canary/probe_change"), default=None),
        "ledger": {cause: summary(of(f"ledger/{cause}/mean_abs")) for cause in CAUSES},
        "gap": summary(of("gap/mean_abs")),
        "gap_max": summary(of("gap/max")),
        "gap_outside_share": summary(of("gap/outside_share")),
        "evidence": {name: summary(of(f"evidence/{name}")) for name in EVIDENCE},
        "margin": {name: summary(of(f"margin/{name}")) for name in ("mean_abs", "p99", "max")},
        "jumps": {name: jumps(curves, name, dtype) for name in GAPS},
        "rounding_over_change": summary(shares("canary/probe_rounding", "canary/probe_change")),
        "unscored_share": summary(of("rollout/unscored_share")),
        "outside_weights_share": summary(of("correction/outside_share")),
        "check_share": summary(shares("time/check_s", "time/step_s")[1:]),
        "grad_norm": summary(norms),
        "grad_norm_over_median": summary(over_usual),
        "memory_gib": {} if shared else memory,
        "step_s": summary(of("time/step_s")),
        "check_s": summary(of("time/check_s")),
        "completion_tokens": summary(of("rollout/completion_tokens")),
        "reward": [sum(part) / len(part) for part in (of("train/reward")[:10], of("train/reward")[-10:]) if part],
    }


def main(argv: list[str] | None = None) -> None:
    """Train and print."""
    parser = parser_with(__doc__, seeds=[0], rollouts=200, prompts=16, completions=8)
    add = parser.add_argument
    add("--models", type=Path, nargs="+", required=True, help="folders or GGUF files of bases")
    add("--problems", type=Path, required=True, help="GSM8K's training problems, JSON lines")
    add("--formats", nargs="+", default=["bf16", "nvfp4"], help="bf16, or a value of model.quantize")
    add("--task", choices=("gsm8k_verl", "gsm8k_boxed"), default="gsm8k_boxed")
    add("--every", type=int, default=1, help="rollouts from one check to the next (evidence: always)")
    add("--tokens", type=int, default=256, help="longest completion")
    add("--val-batches", type=int, default=0, help="batches of 32 problems of each validation")
    add("--noise", action="store_true", help="adaptive quantization noise, with the paper's sigmas")
    add("--engine", choices=ENGINES, default="vllm")
    add("--dtype", choices=DTYPES, default=str(DTYPE).removeprefix("torch."))
    add("--gpu-memory", type=float, metavar="GIB", help=GPU_MEMORY + "; leaves out readings of memory")
    add("--curves", type=Path, help="file to append all values of all rollouts to")
    args = parser.parse_args(argv)
    sys.argv = sys.argv[:1]
    for model, fmt, seed in product(args.models, args.formats, args.seeds):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            changes = folder / "changes.yaml"
            changes.write_text(yaml.safe_dump(settings(args, model, fmt, seed, folder)))
            begin = time.perf_counter()
            task = ROOT / "configs" / "tasks" / f"{args.task}.yaml"
            alarm = heard_in(["fit", "-c", str(task), "-c", str(changes)], None)
            seconds = time.perf_counter() - begin
            if not list((folder / "run").glob("events.*")):
                raise SystemExit(f"the run of {model} did not start: {alarm['said']}")
            curves = read_curves(folder / "run")
        shape = {"prompts": args.prompts, "completions": args.completions, "max_tokens": args.tokens}
        about = {"format": fmt, "seed": seed, "noise": args.noise, "engine": args.engine, "alarm": alarm}
        read = readings(curves, DTYPES[args.dtype], shared=args.gpu_memory is not None)
        name = f"real_checks/{model.name.removesuffix('.gguf')}"
        emit(name, {**shape, "every": args.every}, args.dtype, **about, run_s=seconds, **read)
        if args.curves:
            values = {tag: [curve.steps, curve.values] for tag, curve in curves.items()}
            with args.curves.open("a") as file:
                file.write(json.dumps({"model": name, **about, "curves": values}) + "\n")


if __name__ == "__main__":
    main()
