"""Train a policy on generated word problems and measure it; ``options.PRETRAIN`` describes the command."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import yaml

from qerl_pl.base.digest import base_digest
from qerl_pl.pretraining.fit import Saves, Settings, Stopped, new_policy, train
from qerl_pl.pretraining.measure import (
    MIN_PASS_AT_N,
    PASS_AT_1,
    Measured,
    Range,
    Sampling,
    completion_limit,
    measure,
    out_of_reach,
    over,
    with_room,
)
from qerl_pl.pretraining.policy import FILES, check_place, read_policy, write_policy
from qerl_pl.pretraining.sizes import LEARNING_RATES
from qerl_pl.tasks.word_problems import MAX_OPERATIONS, WordProblem, check_operations
from qerl_pl.tools.options import pretrain_options
from qerl_pl.tools.problems import record as line_of

RECORD = "pretrain.json"
STOPPED = 3  # exit status
REACH = 3  # problems of the reach set have up to so many operations more than those of RL


def main(argv: Sequence[str]) -> int:
    """Parse the command line, train the policy, and print its pass rates; returns the exit status."""
    options = pretrain_options().parse_args(argv)
    try:
        settings = _settings(options)
        check_operations(options.rl_operations)
        if is_made(options.output, settings):
            print(f"{options.output} already holds this policy: nothing to do")
            print(json.loads((options.output / RECORD).read_text(encoding="utf-8"))["verdict"])
            return 0
        check_place(options.output)
        with _stop_after(options.minutes) as stop:
            print(make(options, settings, stop))
    except Stopped as stopped:
        print(f"{stopped}; the same command goes on")
        return STOPPED
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        seed=options.seed,
        size=options.size,
        steps=options.steps,
        batch_size=options.batch_size,
        operations=tuple(options.operations),
        rare=options.rare,
        left_out=options.left_out,
        learning_rate=options.learning_rate or LEARNING_RATES[options.size],
        start=None if options.start is None else base_digest(check_start(options.start, options.size)),
        warmup_steps=min(100, max(1, options.steps // 10)),
        micro_batch_tokens=options.micro_batch_tokens,
    )


def check_start(folder: Path, size: str) -> Path:
    """Check that a folder holds a finished policy of a size; returns the folder.

    Raises:
        ValueError: it does not.
    """
    if not (folder / RECORD).is_file():
        raise ValueError(f"--start is {folder}, which is no policy of `pretrain`: it has no {RECORD}")
    found = json.loads((folder / RECORD).read_text(encoding="utf-8"))["settings"]["size"]
    if found != size:
        raise ValueError(f"--start is {folder}, a policy of size {found}, but --size is {size}: choose the same size")
    return folder


@contextmanager
def _stop_after(minutes: float | None) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether to stop: after so many minutes, or at SIGINT or SIGTERM; a second signal acts
    as if there was no such function."""
    deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, previous[number])

    previous = {int(number): signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received) or time.monotonic() >= deadline
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def make(options: argparse.Namespace, settings: Settings, stop: Callable[[], bool]) -> str:
    """Train, measure and write the folder; returns the verdict.

    Args:
        options: the command line's.
        settings: of the training.
        stop: if it returns True, what is done is saved and the command stops.

    Raises:
        Stopped: ``stop`` returned True.
    """
    started = time.perf_counter()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # problems are drawn in processes of their own
    cores = len(os.sched_getaffinity(0))
    workers = options.workers if options.workers is not None else min(12, cores - 1) if cores > 2 else 0
    state = options.output.with_name(f".{options.output.name}.state") / "state.pt"
    model, tokenizer = new_policy(settings) if options.start is None else read_policy(options.start)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{settings.size}: {num_parameters:,} parameters, {len(tokenizer)} tokens, on {device}", flush=True)
    torch.nn.Module.to(model, device)  # transformers' own has no types
    training_seconds = train(
        model,
        tokenizer,
        settings,
        state=state,
        device=device,
        num_workers=workers,
        saves=Saves(options.save_seconds, options.save_steps),
        stop=stop,
    )
    if device.type == "cuda":
        torch.nn.Module.to(model, torch.bfloat16)
    sampling = Sampling(
        seed=settings.seed,
        num_samples=options.samples,
        batch_rows=options.batch_rows,
        kept=state.parent / "samples",
        stop=stop,
    )
    measured = measure(model, tokenizer, sampling, num_problems=options.measure_problems)
    wanted, found = over(measured, tuple(options.rl_operations)), with_room(measured)
    chosen = wanted if wanted.has_room or found is None else found
    most = chosen.operations[1]
    reach_operations = (min(most + 1, MAX_OPERATIONS), min(most + REACH, MAX_OPERATIONS))
    reach = out_of_reach(model, tokenizer, sampling, operations=reach_operations, num_problems=options.reach_problems)
    text = verdict(measured, wanted, chosen, options.samples, left_out=settings.left_out)
    text += f"\nreach set: {len(reach)} of {options.reach_problems} problems of {reach_operations[0]} to "
    text += f"{reach_operations[1]} operations were solved 0 of {options.samples} times"
    record = {
        "settings": settings.as_json(),
        "parameters": num_parameters,
        "samples": options.samples,
        "measured": [each._asdict() for each in measured],
        "rl_operations": list(chosen.operations),
        "has_room": chosen.has_room,
        "reach": len(reach),
        "seconds": {"training": training_seconds, "last_start": time.perf_counter() - started},
        "verdict": text,
    }
    files = {
        RECORD: json.dumps(record, indent=2) + "\n",
        "task.yaml": task(chosen, reach_operations),
        "reach.jsonl": _lines(reach),
    }
    write_policy(options.output, model, tokenizer, files)
    shutil.rmtree(state.parent)
    return f"{text}\n{options.output}: {training_seconds:.0f} s of training"


def is_made(output: Path, settings: Settings) -> bool:
    """Whether a folder holds a finished policy of these settings."""
    record = output / RECORD
    if not record.is_file() or not all((output / name).is_file() for name in FILES):
        return False
    return json.loads(record.read_text(encoding="utf-8"))["settings"] == settings.as_json()


def verdict(measured: Sequence[Measured], wanted: Range, chosen: Range, num_samples: int, *, left_out: float) -> str:
    """Format the pass rates as a table, say whether reinforcement learning has room to improve the policy, and if not,
    what to change: a policy that leaves out lines needs more or fewer of them, another one has yet to learn to."""
    lines = [f"operations  pass@1  pass@{num_samples}"]
    lines += [f"{each.num_operations:10}  {each.pass_at_1:6.1%}  {each.pass_at_n:6.1%}" for each in measured]
    room = f"pass@1 of {PASS_AT_1[0]:.0%} to {PASS_AT_1[1]:.0%} and pass@{num_samples} above {MIN_PASS_AT_N:.0%}"
    for each in (wanted,) if chosen.operations == wanted.operations else (wanted, chosen):
        low, high = each.operations
        lines.append(
            f"{low} to {high} operations: pass@1 {each.pass_at_1:.1%}, pass@{num_samples} {each.pass_at_n:.1%}: "
            f"{'inside' if each.has_room else 'OUTSIDE'} of {room}"
        )
    if not chosen.has_room:
        change = "remove the folder and change --steps or --left-out"
        further = "train the policy further with --start and --left-out, or change --steps or --operations"
        lines.append(f"no range of operations has room: {change if left_out > 0 else further}")
    return "\n".join(lines)


def task(chosen: Range, reach_operations: tuple[int, int]) -> str:
    """Return the YAML text of a configuration with the problems on which RL can improve the policy, because it solves
    them sometimes (``PASS_AT_1``, ``MIN_PASS_AT_N``). A run gets it with ``-c`` after configs/word_problems.yaml."""
    problems = {"operations": list(chosen.operations), "reach_operations": list(reach_operations)}
    config = {
        "model": {
            "sampling": {"max_tokens": completion_limit(chosen.operations[1])},
            "val_sampling": {"max_tokens": completion_limit(reach_operations[1])},  # validation may use the reach set
        },
        "data": {"source": {"class_path": "datamodules.word_problems.WordProblems", "init_args": problems}},
    }
    head = f"# pass@1 {chosen.pass_at_1:.3f}, pass@n {chosen.pass_at_n:.3f} when the policy was made (pretrain.json).\n"
    return head + yaml.safe_dump(config, sort_keys=False)


def _lines(problems: Sequence[WordProblem]) -> str:
    return "".join(json.dumps(line_of(problem)) + "\n" for problem in problems)
