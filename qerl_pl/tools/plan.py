"""Predict the GPU memory of a run by purpose (weights, KV cache, activations, ...) before it is started."""

import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from qerl_pl import native
from qerl_pl.cli.training import main as training
from qerl_pl.cli.without_base import part_without_base
from qerl_pl.common.checks import require_at_least
from qerl_pl.common.files import write_whole
from qerl_pl.common.phases import phase
from qerl_pl.common.program import restored_arguments
from qerl_pl.memory.advice import Change, advice, advice_text
from qerl_pl.memory.device import check_gpu_memory
from qerl_pl.memory.fitting import (
    Option,
    cache_bytes,
    checkpointing_options,
    fitted,
    longest_completion,
    smallest_gpu,
    usable,
)
from qerl_pl.memory.plan import Plan
from qerl_pl.memory.settings import RunMemory
from qerl_pl.memory.shape import ModelShape, planned_shape
from qerl_pl.model.family import INSTEAD, MERGED, PROJECTIONS
from qerl_pl.model.quantization import quantization_of
from qerl_pl.policy.policy import DTYPES
from qerl_pl.quant.families import check_positions
from qerl_pl.settings.model import ModuleSettings
from qerl_pl.settings.run_memory import run_memory
from qerl_pl.settings.teacher import DENSE, as_teacher, not_dense
from qerl_pl.settings.trainer import check_devices
from qerl_pl.tools.options import plan_options

GIB = 2**30
BAR = 60
USUAL_GPUS = (24, 48, 80, 141)  # GiB


def main(argv: list[str]) -> int:
    """Parse the command line, predict the memory and print the result; returns 1 if the run does not fit on the GPU, 0
    if it fits, and 0 with ``--longest``, which only prints how long completions may be."""
    options, of_fit = plan_options().parse_known_args(argv)
    config = read_settings([argument for path in options.config for argument in ("-c", str(path))] + of_fit)
    run = on_hopper(planned_run(config), config["model"]) if options.hopper else planned_run(config)
    shape = shape_of(config["model"])
    run.recompute(shape.num_layers)  # raises if more blocks are to be recomputed than the model has
    if options.longest is not None:
        print_longest(shape, run, [card_bytes(gib) for gib in options.longest or USUAL_GPUS])
        return 0
    check_positions(shape.positions, shape.short_positions, longest=run.max_model_len)
    gpu_bytes = card_bytes(config["model"]["gpu_memory"] if options.gpu_memory is None else options.gpu_memory)
    with phase("planning"):
        plan = fitted(shape, run, gpu_bytes)
        changes = advice(shape, run, gpu_bytes)
        smallest = smallest_gpu(shape, run)
    print_plan(plan, gpu_bytes)
    print_choices(plan, shape)
    print_options(checkpointing_options(shape, replace(run, engine=plan.run.engine), gpu_bytes), plan, gpu_bytes)
    fits = plan.peak <= usable(gpu_bytes)
    limit = f"{usable(gpu_bytes) / GIB:.1f} GiB, what may be used of {gpu_bytes / GIB:.1f}"
    if fits:
        print(f"fits: the peak is {plan.peak / GIB:.1f} GiB of {limit}")
    else:
        print(f"does not fit: the peak is {plan.peak / GIB:.1f} GiB, more than {limit}")
        print(advice_text(changes, gpu_bytes))
    print(f"the smallest GPU for these settings has {smallest} GiB")
    if fits and plan.peak > fitted(shape, run, smallest * GIB).peak:
        print(
            "the run takes more on this one because spare memory was given to larger micro-batches, to activations "
            "that are then not recomputed, and to the KV cache, which makes it faster"
        )
    if options.json:
        write_whole(options.json, json.dumps(as_json(plan, changes, gpu_bytes, smallest), indent=2) + "\n")
    return 0 if fits else 1


def read_settings(arguments: list[str]) -> dict[str, Any]:
    """Parse the arguments of ``fit``, and return the whole configuration with defaults, without building any object."""
    printed = StringIO()
    try:
        with redirect_stdout(printed), restored_arguments():
            training(["fit", *arguments, "--print_config"])
    except SystemExit as stop:
        if stop.code:
            raise  # the parser has printed what is wrong
    return yaml.safe_load(printed.getvalue())


def shape_of(model: Mapping[str, Any]) -> ModelShape:
    """Return the dimensions of the base that the section ``model`` of a configuration names. Raises ValueError if its
    config.json is not found, or a run cannot use the base."""
    quantization = quantization_of(model["quantize"])
    return planned_shape(model["base"], model["base_format"], quantization, DTYPES[model["dtype"]])


def card_bytes(gib: float | None) -> int:
    """Return the memory, in bytes, of the GPU for which memory is planned: ``gib`` GiB, or the size of this machine's
    GPU if ``gib`` is None. Raises ValueError if the size is out of range, or this machine has no GPU."""
    if gib is not None:
        check_gpu_memory(gib, "the GPU's memory (--gpu-memory, model.gpu_memory)")
        return int(gib * GIB)
    if not torch.cuda.is_available():
        raise ValueError("this machine has no GPU to plan for: give its memory in GiB, e.g. --gpu-memory 80")
    return torch.cuda.get_device_properties(0).total_memory


def planned_run(config: Mapping[str, Any]) -> RunMemory:
    """Return the settings of a configuration that decide how much memory a run needs on each GPU. Raises ValueError if
    a setting is missing or out of range, or the rollout engine cannot be built with its settings."""
    model, data, trainer = config["model"], config["data"], config["trainer"]
    for name in ("base", "engine"):
        if not model[name]:
            raise ValueError(f"model.{name} is not given; give a task and a model, e.g. -c gsm8k -c qwen2.5-7b")
    require_at_least(1, section="data.", batch_size=data["batch_size"], max_prompt_tokens=data["max_prompt_tokens"])
    check_devices(trainer)
    settings, engine = part_without_base(config, "settings"), part_without_base(config, "engine")
    known = (*PROJECTIONS, *MERGED, *INSTEAD)  # which of them the base has is known only when it is loaded
    if unknown := sorted(set(settings.lora.targets) - set(known)):
        raise ValueError(f"model.lora.targets has {unknown}; expected some of {', '.join(known)}")
    return run_memory(
        settings,
        engine,
        num_prompts=data["batch_size"],
        num_ranks=(trainer["devices"] if isinstance(trainer["devices"], int) else 1) * trainer["num_nodes"],
        teacher=_teacher_shape(settings),
    )


def _teacher_shape(settings: ModuleSettings) -> ModelShape | None:
    teacher, dtype = settings.teacher, settings.compute_dtype
    if teacher is None:
        return None
    if teacher.base == DENSE:
        shape = planned_shape(settings.base, None, None, dtype)
        if shape.largest_packed:
            raise not_dense(settings.base)
        return shape
    with as_teacher(teacher.base):
        shape = planned_shape(teacher.base, teacher.base_format, quantization_of(teacher.quantize), dtype)
        check_positions(shape.positions, shape.short_positions, longest=settings.longest_row)
    return shape


def on_hopper(run: RunMemory, model: Mapping[str, Any]) -> RunMemory:
    """Return the settings that determine a run's memory as they would be on an H100 or H200 with the packages of the
    extra [gpu], whatever this machine has. The command ``plan`` needs them to predict memory without such a GPU.

    Unless the configuration turns them off, training then uses fused element-wise kernels, and vLLM uses this project's
    decoding kernels, which read the trainer's copy of the base. Speculative decoding is on if it is set to "auto".
    ``model`` is the section of the run's configuration.
    """
    engine, settings = run.engine, model["engine"].get("init_args") or {}
    if engine is not None:
        is_native = settings.get("decoding_kernel", "auto") != "humming" and native.is_installed()
        speculates = engine.speculates or (settings.get("speculation") == "auto" and native.is_installed())
        engine = replace(engine, one_copy=is_native, dequantises=is_native, speculates=speculates)
    return replace(run, fused=model["fused_elementwise"] is not False, engine=engine)


def print_plan(plan: Plan, gpu_bytes: int) -> None:
    """Print a table of the predicted GiB by purpose and moment of a training step, and one bar per moment."""
    table = Table("GiB", *plan.moments)
    for name, sizes in plan.parts.items():
        table.add_row(name, *(f"{sizes[moment] / GIB:.2f}" if sizes.get(moment) else "" for moment in plan.moments))
    table.add_section()
    table.add_row("total", *(f"{plan.total(moment) / GIB:.2f}" for moment in plan.moments))
    Console().print(table)
    scale = max(gpu_bytes, plan.peak) / BAR
    card = round(gpu_bytes / scale)
    for moment, meaning in plan.moments.items():
        bar = ("#" * round(plan.total(moment) / scale)).ljust(card, ".")
        print(f"{moment:8} {bar[:card]}|{bar[card:]} {meaning}")


def print_choices(plan: Plan, shape: ModelShape) -> None:
    """Print what the prediction chose: micro-batch size, KV-cache size and level of gradient checkpointing."""
    run, engine = plan.run, plan.run.engine
    print(f"model.micro_batch_tokens: {plan.micro_batch_tokens}")
    if engine is not None:
        room = plan.kv_cache_bytes / cache_bytes(shape, run, engine, num_sequences=1)
        at_once = min(engine.max_num_seqs, run.rows)
        print(f"model.engine.init_args.kv_cache_bytes: {plan.kv_cache_bytes}")
        print(f"  room for {room:.0f} of the longest sequences; {at_once} are sampled at a time")
        if plan.keeps_cache:
            print("  it stays allocated while the trainer works, because there is memory to spare")
    kernels = "norms, rotary embeddings and SwiGLU by liger-kernel" if run.fused else "by transformers' own modules"
    print(f"element-wise work: {kernels}")
    if slower := without_native_kernels(shape):
        print(slower)
    print(f"model.gradient_checkpointing: {plan.why.removeprefix('gradient_checkpointing is ') or 'as given'}")


def without_native_kernels(shape: ModelShape) -> str:
    """Return a sentence that names the 4-bit linear layers of a model that this project's kernels for Hopper GPUs do
    not support, and says what this costs; the empty string if there are none."""
    if not (native.is_installed() and shape.unfit):
        return ""
    copied = (shape.engine_packed_bytes - shape.fitting_bytes) / GIB
    return (
        f"no native kernels, which need N and K that are multiples of 64, for {', '.join(shape.unfit)}: on Hopper, "
        f"vLLM's own, slower kernels compute these layers from a second copy of {copied:.2f} GiB"
    )


def print_options(offered: list[Option], plan: Plan, gpu_bytes: int) -> None:
    """Print a table of the possible values of gradient_checkpointing: for each value, the micro-batch size, and the
    predicted memory and time per token, which is relative to the fastest value. The chosen value has the micro-batch
    size and the memory of the plan, which may be larger where there is memory to spare. Nothing is printed if the
    user's settings leave only one value of gradient_checkpointing."""
    if len(offered) == 1:
        return
    table = Table("checkpointing", "tokens per pass", "GiB", "fits", "time per token")
    best = min(option.time for option in offered)
    for option in offered:
        fits = "yes" if option.train <= usable(gpu_bytes) else "no"
        time = f"{option.time / best:.2f}"
        is_chosen = option.setting == plan.run.gradient_checkpointing
        tokens, train = (plan.micro_batch_tokens, plan.train) if is_chosen else (option.tokens, option.train)
        table.add_row(str(option.setting), str(tokens), f"{train / GIB:.2f}", fits, time)
    Console().print(table)


def print_longest(shape: ModelShape, run: RunMemory, gpus: Sequence[int]) -> None:
    """Print a table of the longest completions, in tokens, that a run can train on, for GPUs with the given memory in
    bytes."""
    table = Table("GPU, GiB", "tokens per completion", "checkpointing", "tokens per pass", "sequences in the KV cache")
    for gpu_bytes in gpus:
        tokens = longest_completion(shape, run, gpu_bytes)
        row = [f"{gpu_bytes / GIB:g}", str(tokens or "does not fit")]
        if tokens:
            plan = fitted(shape, run.with_completions(tokens), gpu_bytes)
            engine, how = plan.run.engine, plan.run.gradient_checkpointing
            at_once = plan.kv_cache_bytes / cache_bytes(shape, plan.run, engine, num_sequences=1) if engine else None
            row += [str(how), str(plan.micro_batch_tokens), f"{at_once:.0f} of {run.rows}" if at_once else ""]
        table.add_row(*row)
    Console().print(table)
    if limit := shape.short_positions or shape.positions:
        print(f"the model takes {limit} tokens; a run with longer prompts and completions is refused")


def as_json(plan: Plan, changes: list[Change], gpu_bytes: int, smallest_gib: int) -> dict[str, Any]:
    """Convert a plan to values that JSON can represent. Memory is in bytes, except that of the smallest sufficient GPU,
    in GiB."""
    return {
        "gpu_bytes": gpu_bytes,
        "usable_bytes": usable(gpu_bytes),
        "fits": plan.peak <= usable(gpu_bytes),
        "smallest_gpu_gib": smallest_gib,
        "peak_bytes": plan.peak,
        "phases": {"start": plan.total("start"), "rollout": plan.total("rollout"), "train": plan.train},
        "moments": {moment: plan.total(moment) for moment in plan.moments},
        "parts": plan.parts,
        "changes": [asdict(change) for change in changes],
        "run": asdict(plan.run),
        "why": plan.why,
    }
