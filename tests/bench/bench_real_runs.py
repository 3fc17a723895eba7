"""Train pretrained models on GSM8K in several arms and seeds: python -m tests.bench.bench_real_runs

    python -m tests.bench.bench_real_runs --models qwen2.5-coder-0.5b.gguf qwen2.5-coder-1.5b.gguf \
        --problems gsm8k_train.jsonl --task gsm8k_verl --seeds 0 1 2 --jobs 5 --minutes 8 \
        --folder /tmp/real --output docs/results/real_runs.jsonl

Every run uses the task's file unchanged, with all checks. An arm, a file of configs/arms or another YAML file, is a
variant to compare. It sets the base's format and the noise on the norms, and the learning rate only if the task does
not set one. The runs are a study of `python -m qerl_pl study`, ``--jobs`` at a time on each GPU; the same command
continues a study that was interrupted. All test problems are answered greedily before training, every 20 rollouts (as
the task says), and afterwards.

For each finished run whose lines the file ``--output`` does not have yet, JSON lines are appended to this file.
``real_runs/MODEL`` has curves by rollout, validations (the first and the last one with the verdict on each problem),
the message of a check that stopped the run (null: none did), warnings, seconds and memory. ``real_completions/MODEL``,
only for runs of the first seed, has completions of the same test problems before and after training. ``--partial`` also
writes the lines of runs that have not finished. ``--read`` trains nothing and only writes lines, e.g. after a machine
was lost. Of several lines with equal fields ``name`` and ``shape`` (settings of the run) the last one counts.
"""

import argparse
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import yaml

from qerl_pl.__main__ import main as command
from qerl_pl.base.folder import base_folder
from qerl_pl.base.gguf import RECORD
from qerl_pl.results.curves import Curve, read_curves
from qerl_pl.study import state
from qerl_pl.study.runner import SHARE_OF_GPU
from qerl_pl.study.study_file import FIT, Run, Study, read_study
from tests.bench.harness import CUDA, DTYPE, GIB, PHASES, ROOT, curve, emit, kept, parser_with
from tests.bench.noted import HOST, START, VALIDATION
from tests.correctness.faults import WARNINGS, sources

ARMS = ("bf16", "nvfp4", "nvfp4_aqn")
REWARDS = ("strict", "lenient")  # of both tasks; the first one trains
OUTPUT = "```output"  # opens what a program prints; nothing runs the programs in completions, so the model made it up
CURVES = {  # curve of a result line -> the logged scalar that it is read from
    "strict": "train/strict",
    "lenient": "train/lenient",
    "entropy": "policy/entropy",
    "gap": "gap/mean_abs",
    "teacher_kl": "teacher/kl",
    "grad_norm": "train/grad_norm",
    **{f"{name}": f"rollout/{name}" for name in ("surprisal", "completion_tokens", "truncated_share")},
    "groups_with_signal": "rollout/groups_with_signal",
    "rollout_tokens_per_s": "throughput/rollout_tokens_per_s",
    "host_bytes": HOST,
    "gpu_gib": "memory/peak_gib",
    **{f"{phase}_s": f"time/{phase}_s" for phase in ("step", "teacher", *PHASES)},
}


def left_open(arm: Mapping[str, Any], task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an arm without those that the task's file sets, so that the task's values hold."""
    rest = {
        key: left_open(value, task.get(key) or {}) if isinstance(value, dict) else value
        for key, value in arm.items()
        if isinstance(value, dict) or key not in task
    }
    return {key: value for key, value in rest.items() if value != {}}


def study_of(args: argparse.Namespace) -> dict[str, Any]:
    """Make the study's file."""
    task = ROOT / "configs" / "tasks" / f"{args.task}.yaml"
    of_task = yaml.safe_load(task.read_text())
    files = [Path(arm) if arm.endswith(".yaml") else ROOT / "configs" / "arms" / f"{arm}.yaml" for arm in args.arms]
    arms = {file.stem: yaml.safe_load(file.read_text()) for file in files}
    steps = {} if args.rollouts is None else {"max_steps": args.rollouts}
    share = args.share or (SHARE_OF_GPU / args.jobs if args.jobs > 1 else None)
    memory = torch.cuda.get_device_properties(0).total_memory / GIB if CUDA else 0.0
    return {
        "output": str(args.folder / args.task),
        "config": [str(task), *map(str, args.config)],
        "settings": {
            "trainer": {"callbacks+": [{"class_path": "tests.bench.noted.RunClock"}], **steps},
            "model": {"dtype": str(DTYPE).removeprefix("torch.")},
            "data": {"source": {"init_args": sources(args.problems)}},
        },
        "gpu_memory": round(share * memory, 2) if CUDA and share else None,
        "jobs": args.jobs,
        "attempts": 1,
        "grid": {"model.base": [str(model.resolve()) for model in args.models]},
        "arms": {arm: left_open(settings, of_task) for arm, settings in arms.items()},
        "seeds": args.seeds,
        "analysis": {"comparisons": []},
    }


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Read a file of completions."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def validation(file: Path, *, verdicts: bool) -> dict[str, Any]:
    """Summarise a file of greedy completions of test problems. ``invented_share`` is the share of completions with the
    output of a program, which the model must have made up, and ``lenient_invented`` and ``lenient_other`` are the
    lenient accuracies with and without one (null if there are none). With ``verdicts`` the summary also has, for each
    reward, a text with one character per problem: "1" for a right and "0" for a wrong answer."""
    rows = rows_of(file)
    lenient: dict[bool, list[bool]] = {True: [], False: []}
    for row in rows:
        lenient[OUTPUT in row["completion"]].append(row["rewards"]["lenient"] == 1)
    right = {name: "".join("1" if row["rewards"][name] == 1 else "0" for row in rows) for name in REWARDS}
    return {
        "rollouts": int(file.stem.rpartition("-")[2]),
        "problems": len(rows),
        **{name: text.count("1") / len(rows) for name, text in right.items()},
        "completion_tokens": sum(row["num_tokens"] for row in rows) / len(rows),
        "truncated_share": sum(not row["finished"] for row in rows) / len(rows),
        "invented_share": len(lenient[True]) / len(rows),
        "lenient_invented": fmean(lenient[True]) if lenient[True] else None,
        "lenient_other": fmean(lenient[False]) if lenient[False] else None,
        **({"verdicts": right} if verdicts else {}),
    }


def compared_completions(before: Path, after: Path, number: int) -> list[dict[str, Any]]:
    """Choose completions of ``number`` evenly spaced problems before and after training."""
    first, last = rows_of(before), rows_of(after)
    number = min(number, len(first))
    chosen = [index * len(first) // number for index in range(number)]
    names = ("completion", "rewards", "num_tokens", "finished")

    def row(index: int) -> dict[str, Any]:
        both = {"before": first[index], "after": last[index]}
        about = {"problem": index, **{name: first[index][name] for name in ("question", "answer")}}
        return about | {when: {name: row_of[name] for name in names} for when, row_of in both.items()}

    return list(map(row, chosen))


def alarm_of(log: str) -> str | None:
    """Return the message of the first check that stopped the run, or None. A run that was started again afterwards
    counts as stopped, too."""
    return next((line for line in log.splitlines() if line.startswith("stopped: ")), None)


def seconds_logged(curves: Mapping[str, Curve]) -> float:
    """Return how many seconds a run that was cut off (its machine was lost) took, from what it logged: the time from
    its first to its last logged value, plus the seconds from the start of its process to the start of training, if
    these were logged."""
    times = [time for values in curves.values() for time in values.times]
    return max(times) - min(times) + sum(curve(curves, START)[:1])


def bits_per_weight(model: Path) -> float:
    """Return the bits per weight of the file that a model was read from: the mean over all weights if this was a
    quantised (GGUF) file, of which the model's 16-bit weights are a dequantised copy; otherwise 16."""
    record = Path(base_folder(str(model), None)) / RECORD
    return json.loads(record.read_text())["bits_per_weight"] if record.is_file() else 16.0


def report(study: Study, run: Run, args: argparse.Namespace) -> None:
    """Append the lines of a run."""
    settings, curves = yaml.safe_load((run.folder / "config.yaml").read_text()), read_curves(run.folder)
    model, base = settings["model"], Path(run.point["model.base"])
    name = base.name.removesuffix(".gguf")
    shape = {
        "task": args.task,
        "arm": run.arm,
        "seed": run.seed,
        "rollouts": settings["trainer"]["max_steps"],
        "prompts": settings["data"]["batch_size"],
        "completions": model["sampling"]["num_completions"],
        "max_tokens": model["sampling"]["max_tokens"],
        "config": [path.stem for path in args.config],
    }
    if (before := last_line(args.output, f"real_runs/{name}", shape)) and before["finished"]:
        return
    log = state.log_of(run.folder, FIT).read_text(encoding="utf-8", errors="replace")
    done, spent, _ = state.state_of(run.folder)
    files = sorted((run.folder / "completions").glob("validate-*.jsonl"))
    steps_done = len(curve(curves, "time/step_s"))
    emit(
        f"real_runs/{name}",
        shape,
        model["dtype"],
        output=args.output,
        finished=FIT in done,
        bits_per_weight=bits_per_weight(base),
        lr=model["optimizer"]["init_args"]["lr"],
        steps=steps_done,
        curves={key: values for key, tag in CURVES.items() if (values := curve(curves, tag))},
        validations=[validation(file, verdicts=file in (files[0], files[-1])) for file in files],
        alarm=alarm_of(log) or state.state_of(run.folder).failure,
        warnings=[line.strip() for line in log.splitlines() if re.search(WARNINGS, line)],
        run_s=done.get(FIT) or spent.get(FIT) or seconds_logged(curves),
        start_s=curve(curves, START),
        validation_s=curve(curves, VALIDATION),
        median_step_s=median(curves["time/step_s"].values) if steps_done else None,
        memory_gib={
            name: max(values, default=None) and max(values) / unit
            for name, values, unit in (
                ("planned", curve(curves, "memory/predicted_peak_gib"), 1),
                ("driver", curve(curves, "memory/peak_gib"), 1),  # includes the growth of other runs on the same GPU
                ("torch", curve(curves, "memory/gpu_peak_bytes"), GIB),
            )
        },
        gpu_memory=study.gpu_memory,
        jobs=args.jobs,
    )
    if args.completions and len(files) > 1 and run.seed == args.seeds[0]:
        rows = compared_completions(files[0], files[-1], args.completions)
        done_then = [int(file.stem.rpartition("-")[2]) for file in (files[0], files[-1])]
        emit(
            f"real_completions/{name}", shape, model["dtype"], output=args.output, rollouts=done_then, completions=rows
        )


def last_line(output: Path | None, name: str, shape: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the last line of a file whose fields ``name`` and ``shape`` have these values; None if there is none."""
    return next((line for line in reversed(kept(output)) if (line["name"], line["shape"]) == (name, shape)), None)


def main(argv: list[str] | None = None) -> int:
    """Train, and append lines; returns the study's exit status (3: the time is up)."""
    parser = parser_with(__doc__, "--output")
    add = parser.add_argument
    add("--models", type=Path, nargs="+", required=True, help="GGUF files or folders of bases")
    add("--problems", type=Path, required=True, help="gsm8k_train.jsonl, next to gsm8k_test.jsonl")
    add("--task", choices=("gsm8k_verl", "gsm8k_boxed"), default="gsm8k_verl")
    add("--arms", nargs="+", default=ARMS, help="names of configs/arms, or YAML files (default: %(default)s)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--rollouts", type=int, help="of each run (default: the task's)")
    add("--config", type=Path, nargs="+", default=[], help="further -c files, read after the task's")
    add("--jobs", type=int, default=1, help="runs at a time on each GPU")
    add("--share", type=float, help="of a GPU's memory for each run (default: 0.92 / jobs)")
    add("--minutes", type=float, help="after which runs stop at a checkpoint")
    add("--folder", type=Path, required=True, help="for the runs; it also lets them go on")
    add("--completions", type=int, default=20, help="problems of a line of completions; 0: no line")
    add("--partial", action="store_true", help="also report runs that have not finished")
    add("--read", action="store_true", help="train nothing, report the runs in the folder")
    args = parser.parse_args(argv)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / f"{args.task}.yaml"
    file.write_text(yaml.safe_dump(study_of(args), sort_keys=False))
    limit = [] if args.minutes is None else ["--minutes", str(args.minutes)]
    status = 0 if args.read else command(["study", str(file), *limit])
    study = read_study(file)
    for run in study.runs():
        finished = FIT in state.state_of(run.folder).done or state.state_of(run.folder).failure is not None
        started = (run.folder / "config.yaml").exists() and list(run.folder.glob("events.out.tfevents.*"))
        if started and (finished or args.partial):
            report(study, run, args)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
