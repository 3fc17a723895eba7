"""Check a training configuration without training: build its objects, read the data, score known answers, plan
memory."""

import functools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch.callbacks import LambdaCallback

from qerl_pl.cli.checks import check_run_is_new
from qerl_pl.cli.errors import of_error
from qerl_pl.cli.training import main as training
from qerl_pl.cli.without_base import part_without_base, training_problems
from qerl_pl.common.files import in_bytes
from qerl_pl.common.program import restored_arguments
from qerl_pl.common.run_folder import check_places, is_running
from qerl_pl.common.types import Completion, Problem, Prompt
from qerl_pl.memory.fitting import fitted, usable
from qerl_pl.memory.parts import adapter_values
from qerl_pl.memory.shape import ModelShape
from qerl_pl.rewards.base import WeightedReward, check_answers, score_rewards
from qerl_pl.settings.model import ModuleSettings
from qerl_pl.tools.plan import card_bytes, planned_run, read_settings, shape_of, without_native_kernels

GIB = 2**30
SCORED = 8
"""Number of training problems for which the rewards are tried on completions that consist of the known answer."""
LOGS = 10**9
"""Approximate upper limit on the size of a run's logs, in bytes."""
CHECKPOINTS = 4
"""Most checkpoint files that a run has on the disk at a time: last, previous, best, and the one being written."""


class NotChecked(Exception):
    """Raised by a check that cannot be made because an earlier check, whose result it needs, failed."""


class _Started(Exception):
    """Raised to end a run as soon as its rollout engine has started."""


def configuration_checks(arguments: list[str], *, warm: bool = False) -> list[tuple[str, Callable[[], str]]]:
    """List the checks that ``doctor`` makes of a configuration, which is given by the arguments of ``fit``. Each check
    has a name and a function that returns the result as text, or raises an error.

    The first check builds callbacks, loggers, rewards, engine and data source, and reads the base's files. If it fails,
    for example because the hub cannot be reached, the next checks build what they need themselves, and checks that need
    the base raise ``NotChecked``. With ``warm``, the last check starts the engine, which compiles its kernels.
    """
    objects: list[Any] = []  # the LightningCLI object, if it could be built

    def build() -> str:
        printed = StringIO()
        with restored_arguments(), redirect_stderr(printed):
            try:
                objects.append(training(["fit", *arguments], run_now=False))
                teacher = objects[0].model.checked_teacher()
            except (ValueError, OSError) as error:
                raise ValueError(of_error(error, sys.argv[1:])) from error
            except SystemExit:  # the parser has printed its error message
                raise ValueError(printed.getvalue().rpartition("error: ")[2].strip()) from None
        model = objects[0].model
        rewards = ", ".join(term.name for term in model.rewards) or "none"
        of_teacher = f"; teacher {teacher}" if teacher else ""
        return f"base {model.settings.folder}{of_teacher}; {type(model.engine).__name__}; rewards {rewards}"

    @functools.cache
    def settings() -> dict[str, Any]:
        try:
            with redirect_stderr(StringIO()):
                return read_settings(arguments)
        except (ValueError, OSError, SystemExit):
            raise NotChecked("not checked, because the settings could not be read") from None

    @functools.cache
    def alone(part: str) -> Any:
        try:
            return part_without_base(settings(), part)
        except ValueError:
            raise NotChecked("not checked, because the configuration could not be built") from None

    @functools.cache
    def problems() -> Sequence[Problem]:
        return training_problems(alone("source"))

    def rewards() -> str:
        if objects:
            return _scored(objects[0].model.rewards, objects[0].datamodule.some_train_prompts())
        prompts = [Prompt((0,), row.answer, text=row.question, row=row.row) for row in problems()[:SCORED]]
        return _scored(alone("rewards"), prompts)

    def start() -> str:
        if not objects:
            raise NotChecked("not checked, because the configuration could not be built")
        return _start_engine(arguments)

    checks = [
        ("configuration", build),
        (
            "length of the run",
            lambda: _length(settings(), objects[0].model.settings if objects else alone("settings")),
        ),
        ("data and template", lambda: _data(objects[0].datamodule) if objects else _rows(problems())),
        ("rewards", rewards),
        ("memory of the run", lambda: _memory(settings())),
        ("disk of the run", lambda: _disk(settings())),
        ("folder of the run", lambda: _folder(settings())),
    ]
    return [*checks, ("start of the engine", start)] if warm else checks


def _length(config: dict[str, Any], settings: ModuleSettings) -> str:
    max_steps = config["trainer"]["max_steps"]
    settings.check_length(max_steps=max_steps, batch_size=config["data"]["batch_size"])
    rollouts = max_steps // settings.steps_per_rollout
    for callback in config["trainer"]["callbacks"] or ():
        stages = (callback.get("init_args") or {}).get("num_stages", 0)
        if stages > rollouts:
            raise ValueError(f"{rollouts} rollouts for {stages} noise stages; lower num_stages or raise max_steps")
    return f"{rollouts} rollouts, {max_steps} optimizer steps"


def _rows(problems: Sequence[Problem]) -> str:
    first = problems[0].question.replace("\n", "\\n")
    return (
        f"{len(problems)} training problems; the first ends with ...{first[-60:]}; their lengths and the template need "
        "the base's tokenizer"
    )


def _data(datamodule: Any) -> str:
    datamodule.setup("fit")
    datamodule.train_dataloader()
    prompts = datamodule.some_train_prompts(256)
    longest = max(len(prompt.tokens) for prompt in prompts)
    first = prompts[0].text.replace("\n", "\\n")
    return f"longest of {len(prompts)} prompts {longest} tokens; the first ends with ...{first[-60:]}"


def _scored(rewards: Sequence[WeightedReward], prompts: Sequence[Prompt]) -> str:
    """Score two made-up completions of each prompt, one that is only the known answer and one without an answer.
    Returns, as text, the mean of each reward over the prompts, for either kind."""
    if not prompts:
        raise NotChecked("not checked, because the data could not be read")
    check_answers(rewards, prompts)
    prompts = prompts[:SCORED]
    known = [f"<think>known</think><answer>{prompt.answer}</answer>" for prompt in prompts]
    tables = [
        score_rewards(rewards, prompts, [Completion((0, 0), (0.0, 0.0), True, text) for text in texts])
        for texts in (known, ["I do not know."] * len(prompts))
    ]
    means = [
        ", ".join(f"{name} {scores.nanmean().item():.2f}" for name, scores in table.components.items())
        for table in tables
    ]
    text = f"mean score of completions that hold only the known answer, in <answer>: {means[0]}; of ones without any"
    if torch.equal(tables[0].total, tables[1].total):
        return f"{text}: the same, so a group of such completions would have no signal; is this answer in their form?"
    return f"{text}: {means[1]}"


def _shape(model: dict[str, Any]) -> ModelShape:
    try:
        return shape_of(model)
    except ValueError:  # the first check has said why the base cannot be read
        raise NotChecked("not checked, because the base's dimensions are not known") from None


def _memory(config: dict[str, Any]) -> str:
    model = config["model"]
    shape, run = _shape(model), planned_run(config)
    if not torch.cuda.is_available():
        size, free = shape.base_bytes, psutil.virtual_memory().available
        if 2 * size > free:
            raise ValueError(
                f"no GPU; trainer and engine each hold the base of {in_bytes(size)}, {in_bytes(free)} are free"
            )
        return f"no GPU: trains on the CPU, base of {in_bytes(size)}, {in_bytes(free)} free"
    card = card_bytes(model["gpu_memory"])
    peak = fitted(shape, run, card).peak
    if peak > usable(card):
        raise ValueError(f"the peak is {peak / GIB:.1f} GiB of {usable(card) / GIB:.1f}; `plan` says what to change")
    within = f"peak of {peak / GIB:.1f} GiB as planned, {usable(card) / GIB:.1f} GiB may be used"
    return "; ".join(filter(None, [within, without_native_kernels(shape)]))


def _disk(config: dict[str, Any]) -> str:
    model, run = config["model"], planned_run(config)
    folder = Path(config["run_dir"]).absolute()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.is_dir())).free
    if free < LOGS:
        raise ValueError(f"{in_bytes(free)} are free for {folder}; logs take about {in_bytes(LOGS)}")
    values = adapter_values(_shape(model), run)
    adapters = 2 if model["lora"].get("start") else 1  # checkpoints also hold the adapter that the run started from
    needed = CHECKPOINTS * values * (4 * adapters + run.state_bytes)
    if free < needed + LOGS:
        raise ValueError(
            f"{in_bytes(free)} are free for {folder}; checkpoints take {in_bytes(needed)}, logs about {in_bytes(LOGS)}"
        )
    return f"{in_bytes(free)} free for {config['run_dir']}, checkpoints take {in_bytes(needed)}"


def _folder(config: dict[str, Any]) -> str:
    run_dir, ckpt_path = config["run_dir"], config["ckpt_path"]
    check_run_is_new(run_dir, ckpt_path)
    check_places(Path(run_dir))
    if is_running(Path(run_dir)):
        raise ValueError(f"another process trains in {run_dir}; choose another folder with --run_dir")
    return f"{run_dir} {'holds no run' if ckpt_path is None else f'goes on from {ckpt_path}'}"


def _start_engine(arguments: list[str]) -> str:
    """Start the rollout engine once, in a temporary folder; returns a sentence with the seconds that this took."""
    seconds = 0.0

    def start(trainer: Any, module: Any) -> None:
        nonlocal seconds
        begin = time.perf_counter()
        module.start_engine()
        seconds = time.perf_counter() - begin
        raise _Started

    with tempfile.TemporaryDirectory() as folder, restored_arguments():
        alone = ["--run_dir", str(Path(folder, "run")), "--trainer.devices", "1", "--trainer.num_nodes", "1"]
        cli: Any = training(["fit", *arguments, *alone], run_now=False)
        cli.trainer.callbacks.append(LambdaCallback(on_fit_start=start))
        with suppress(_Started):
            cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    parts: dict[str, float] = getattr(cli.model.engine, "start_s", {})
    listed = ", ".join(f"{name} {part:.1f}" for name, part in parts.items())
    return f"{seconds:.1f} s{f' ({listed}); later starts find its compiled kernels' if listed else ''}"
