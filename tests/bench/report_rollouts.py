"""The parts of docs/performance.md that are about the quantiser's methods, rollouts and whole steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]

MISSING = "Not measured yet."
VARIANTS = ("ours", "ours-late", "vllm", "matmul")
KERNELS = {"rule": "Humming", "ours": "Humming, our blocks", "decode": "nvfp4_decode", "batch": "nvfp4_batch"}
PHASES = ("sync", "rollout", "reward", "check", "logprob", "train", "between")
GIB = 2**30
RANK = 32
COLORS = {"bf16": "tab:orange", "nvfp4 (humming)": "tab:blue", "nvfp4 (ours)": "tab:green"}


def methods_table(lines: Iterable[Line]) -> str:
    """Mean output error of each method, a row a model and format."""
    found = _variants(lines, "methods/", "mean", "model", "format")
    methods = list(dict.fromkeys(method for errors in found.values() for method in errors))
    rows = [[*key, *(f"{errors[method]:.4f}" for method in methods)] for key, errors in found.items()]
    return table(["model", "format", *methods], rows)


class Engine(NamedTuple):
    """What was measured at one number of sequences, with the adapter and perhaps without."""

    model: str
    base: str
    kv: str
    rank: int
    kernels: str
    decoding: str
    commit: str
    sequences: int


def rollouts(lines: Iterable[Line]) -> dict[Engine, dict[bool, Line]]:
    """Lines with the adapter and without it, of each engine and number of sequences."""
    found: dict[Engine, dict[bool, Line]] = {}
    for line in of_kind(lines, "rollout/generate"):
        shape = line["shape"]
        model, base, kv, rank = (shape[name] for name in ("model", "base", "kv", "rank"))
        key = Engine(model, base, kv, rank, shape["engine"], decoding(line), line["commit"], shape["sequences"])
        found.setdefault(key, {})[shape["adapter"] != "none"] = line
    return found


def times_bf16(found: Mapping[Engine, Mapping[bool, Line]], key: Engine) -> float | None:
    """How many times as fast an engine of a 4-bit base is as that of bf16 at the same commit; None without one."""
    dense = found.get(key._replace(base="bf16", decoding="")) if key.base != "bf16" else None
    return found[key][True]["tokens_per_s"] / dense[True]["tokens_per_s"] if dense else None


def rollouts_table(lines: Iterable[Line]) -> str:
    """Tokens a second with the adapter and without, a row an engine and number of sequences."""
    found = rollouts(lines)
    rows = []
    for key, pair in found.items():
        roof = pair[True]["roof_per_s"]
        rows.append(
            [
                *key,
                *(shown(pair[adapter]["tokens_per_s"] if adapter in pair else None, 0) for adapter in (True, False)),
                f"{100 * (pair[True]['median_s'] / pair[False]['median_s'] - 1):.0f} %" if False in pair else "",
                shown(times_bf16(found, key), 2),
                shown(pair[True]["decoded_per_s"] / roof, 2),
            ]
        )
    header = ["model", "base", "cache", "rank", "adapter kernels", "decoding kernel", "commit", "sequences"]
    header += ["with adapter", "without"]
    return table([*header, "added", "times bf16", "of the roof"], rows)


def profiles(lines: Iterable[Line]) -> str:
    """What a decoding step spends its time on, a paragraph a run."""
    return "\n\n".join(_profile(line) for line in of_kind(lines, "rollout/") if "us" in line) or MISSING


def _profile(line: Line) -> str:
    shape, step = line["shape"], line["step_us"]
    on = "host, under a profiler" if line["name"] == "rollout/host" else f"GPU, busy {100 * line['busy_share']:.0f} %"
    title = f"{shape['model']}, {base_of(line)}, {shape['sequences']} sequences, {on}; {step / 1e3:.2f} ms a step:"
    names = {re.sub(" at 0x[0-9a-f]+", "", name): us for name, us in line["us"].items()}
    rows = [[f"`{name}`", f"{us:.0f}", f"{100 * us / step:.0f} %"] for name, us in list(names.items())[:12]]
    return f"{title}\n\n{table(['what', 'us', 'share'], rows)}"


def adapters_table(lines: Iterable[Line]) -> str:
    """Microseconds that an adapter adds to a linear, a row a model and number of tokens."""
    found = _variants(lines, "rollout-lora/", "added_us", "model", "tokens")
    rows = [[*key, *(f"{added[name]:.1f}" for name in VARIANTS)] for key, added in found.items()]
    return table(["model", "tokens", "ours", "late", "vLLM's", "matmul"], rows)


def host_table(lines: Iterable[Line]) -> str:
    """Milliseconds a step of the host, a row a number of sequences and scheduler."""
    rows = []
    for line in of_kind(lines, "host/"):
        parts = (f"{1e3 * seconds:.2f}" for seconds in line["parts_s"].values())
        rows.append([line["shape"]["sequences"], line["shape"]["scheduler"], f"{1e3 * line['median_s']:.2f}", *parts])
    header = ["sequences", "scheduler", "ms a step", "schedule", "update", "outputs"]
    return table(header, sorted(rows, key=lambda row: row[0]))


def blocks_table(lines: Iterable[Line]) -> str:
    """Microseconds that an adapter adds to a linear with blocks of before and of now, a row a model and tokens."""
    found = _variants(lines, "lora-blocks/", "added_us", "model", "tokens")
    rows = [[*key, *(f"{added[when]:.1f}" for when in ("before", "now"))] for key, added in found.items()]
    return table(["model", "tokens", "before", "now"], rows)


def schedules_table(lines: Iterable[Line]) -> str:
    """Microseconds of NVFP4 linears by kernel, and of a block's four together; a column a number of tokens."""
    found = _variants(lines, "schedules/", "median_s", "model", "linear", "tokens")
    sizes = sorted({tokens for _, _, tokens in found})
    linears: dict[str, dict[str, None]] = {}
    for model, linear, _ in found:
        linears.setdefault(model, {})[linear] = None
    rows = []
    for model, names in linears.items():
        for linear, (who, kernel) in product(names, KERNELS.items()):
            times = [found.get((model, linear, size), {}).get(who) for size in sizes]
            if any(times):
                rows.append([model, linear, kernel, *(shown(time and 1e6 * time, 1) for time in times)])
        if len(names) == 4:
            blocks = [[found.get((model, linear, size), {}) for linear in names] for size in sizes]
            for label, kernels in {"best of Humming's": ["rule", "ours"], "best of all": list(KERNELS)}.items():
                rows.append([model, "all four", label, *(shown(_together_us(block, kernels), 1) for block in blocks)])
    return table(["model", "linear", "kernel", *(f"{size} tokens" for size in sizes)], rows)


def _together_us(block: Sequence[Mapping[str, float]], kernels: Iterable[str]) -> float | None:
    """Of linears, each by the fastest of these kernels; None where one was measured with none of them."""
    times = [measured for linear in block if (measured := [linear[who] for who in kernels if who in linear])]
    return 1e6 * sum(map(min, times)) if len(times) == len(block) else None


def layers_table(lines: Iterable[Line], kind: str) -> str:
    """Microseconds of a layer by who computes it, a column a model and number of tokens."""
    found = _variants(lines, f"{kind}/", "median_s", "model", "tokens")
    names = dict.fromkeys(name for times in found.values() for name in times)
    rows = [
        [name, *(shown(1e6 * times[name] if name in times else None, 1) for times in found.values())] for name in names
    ]
    return table(["us a layer", *(f"{model}, {tokens} tokens" for model, tokens in found)], rows)


def steps_table(lines: Iterable[Line]) -> str:
    """Seconds of whole steps by phase, and their memory; TRL's have no check and no plan."""
    runs, rows = whole_steps(lines), []
    for line, speed in zip(runs, step_speeds(runs), strict=True):
        memory = line["logged"]
        rows.append(
            [
                line["shape"]["model"],
                policy(line),
                line["commit"],
                f"{line['median_s']:.1f} ({line['spread_s'][0]:.1f} to {line['spread_s'][-1]:.1f})",
                shown(speed, 2),
                *(shown(line["phases_s"].get(phase), 2) for phase in PHASES),
                shown(taken_gib(line), 2),
                shown(memory.get("predicted_peak_gib"), 2),
                shown(line["gap"], 3),
            ]
        )
    header = [
        "model",
        "policy",
        "commit",
        "step, s (range)",
        "speed, bf16 is 1",
        *PHASES,
        "peak, GiB",
        "predicted",
        "gap, nats",
    ]
    return "\n\n".join([table(header, rows), *_notes(runs)])


def cards_table(lines: Iterable[Line]) -> str:
    """Runs on cards of which another process took a part; of those that were too small, the card."""
    rows: list[list[str]] = []
    for line in of_kind(lines, "grpo/"):
        shape = line["shape"]
        if not shape.get("cap"):
            continue
        row = [shape["model"], policy(line), f"{shape['cap']:g}", str(shape["completion"])]
        if line["name"] == "grpo/too-small":
            row += ["too small", "", "", ""]
        else:
            peaks = taken_gib(line), line["logged"]["predicted_peak_gib"]
            row += [str(line["steps_done"]), shown(line["median_s"], 1), *(shown(peak, 2) for peak in peaks)]
        rows.append(row)
    rows.sort(key=lambda row: (by_size(row[0]), -float(row[2])))
    return table(["model", "policy", "card, GiB", "completion", "steps", "step, s", "peak, GiB", "predicted"], rows)


def taken_gib(run: Line) -> float | None:
    """The most that a run had of the GPU, seen by the process beside it; by its own reading where none looked.

    The run's own reading is up to half a GiB above: it counts a whole GiB for its CUDA context from the start.
    """
    looked_at = run.get("peak_bytes")
    return looked_at / GIB if looked_at else run.get("logged", {}).get("peak_gib")


def long_runs_table(lines: Iterable[Line]) -> str:
    """Quarters of long runs: the median step, and the most memory and open files."""
    rows = []
    for line in _long_runs(lines):
        quarters = line["quarters"]
        steps = " ".join(f"{seconds:.2f}" for seconds in quarters["step_s"])
        parts = quarters["gpu_bytes"], quarters["host_bytes"]
        gpu, host = (" ".join(f"{size / GIB:.2f}" for size in sizes) for sizes in parts)
        files = " ".join(str(count) for count in quarters["files"])
        about = line["shape"]["model"], policy(line), line["commit"], line["shape"]["completion"]
        rows.append([*about, line["steps_done"], steps, gpu, host, files])
    names = "model", "policy", "commit", "completion", "steps", "step, s", "GPU, GiB", "host, GiB", "open files"
    return table(names, rows)


def long_run_phases_table(lines: Iterable[Line]) -> str:
    """Quarters of long runs: the median seconds of each phase."""
    rows = [
        [line["shape"]["model"], policy(line), line["commit"], phase, *(f"{second:.3f}" for second in seconds)]
        for line in _long_runs(lines)
        for phase, seconds in line["quarters"].get("phases_s", {}).items()
    ]
    return table(["model", "policy", "commit", "phase", "first", "second", "third", "last"], rows)


def _long_runs(lines: Iterable[Line]) -> list[Line]:
    return [line for line in of_kind(lines, "grpo/step") if line.get("quarters")]


def ranks_table(lines: Iterable[Line]) -> str:
    """Steps of one global batch on one GPU and on several, and how far apart they learn."""
    lines = list(lines)
    found: dict[tuple[Any, ...], dict[int, Line]] = {}
    for line in of_kind(lines, "ddp/step"):
        shape = line["shape"]
        batch = tuple(shape[name] for name in ("size", "prompts", "completion", "max_num_seqs"))
        found.setdefault((*batch, line["commit"], decoding(line)), {})[shape["gpus"]] = line
    rows = [
        [
            *key,
            gpus,
            f"{run['median_s']:.2f}",
            *(f"{run['phases_s'][phase]:.2f}" for phase in ("rollout", "check", "train", "wait")),
            shown(runs[1]["median_s"] / run["median_s"] if 1 in runs else None, 2),
            " ".join(f"{reward:.4f}" for reward in run["curves"]["train/reward"]),
        ]
        for key, runs in found.items()
        for gpus, run in sorted(runs.items())
    ]
    header = ["model", "prompts", "completion", "sequences at a time", "commit", "decoding kernel", "GPUs", "step, s"]
    notes = [
        f"Commit {line['commit']}: {100 * line['equal_completions']:.0f} % of the first rollout's completions are the "
        "same on one GPU and on several;\nthe curves are apart by at most "
        + ", ".join(f"{most:.2g} (`{curve}`)" for curve, most in line["largest_difference"].items())
        + "."
        for line in of_kind(lines, "ddp/speedup")
    ]
    header += ["rollout", "check", "train", "wait", "times one", "reward a step"]
    return "\n\n".join([table(header, rows), *notes])


def draw_rollouts(lines: Iterable[Line], path: Path) -> None:
    """Tokens a second of each sequence by their number, a panel a model; dotted without the adapter."""
    from matplotlib.figure import Figure

    panels: dict[str, dict[tuple[str, bool], dict[int, float]]] = {}
    for line in of_kind(lines, "rollout/generate"):
        shape = line["shape"]
        if shape["rank"] == RANK and shape["engine"] == "ours" and shape["kv"] == "auto":
            curves = panels.setdefault(shape["model"], {})
            rates = curves.setdefault((base_of(line), shape["adapter"] != "none"), {})
            rates[shape["sequences"]] = line["tokens_per_s"] / shape["sequences"]  # of several lines, the last
    figure = Figure(figsize=(4 * len(panels), 3.6), layout="constrained")
    for panel, (model, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for (base, adapter), rates in curves.items():
            style, label = ("o-", f"{base} + LoRA") if adapter else ("o:", None)
            panel.plot(*zip(*sorted(rates.items()), strict=True), style, color=COLORS[base], label=label, ms=3)
        panel.set(title=model, xscale="log", xlabel="sequences")
        panel.set_ylim(bottom=0)
        panel.set_xticks([1, 8, 32, 64, 128, 256], ["1", "8", "32", "64", "128", "256"])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend()
    figure.axes[0].set_ylabel("tokens a second and sequence")
    figure.savefig(path, dpi=120)


def draw_steps(lines: Iterable[Line], path: Path) -> None:
    """Stacked phases of runs on whole cards; beside them memory, small cards too. A bar a run."""
    from matplotlib.figure import Figure

    runs = whole_steps(lines)
    names = [_bar(run) for run in runs]
    figure = Figure(figsize=(14, 1.4 + 0.6 * len(runs)), layout="constrained")
    seconds, memory = figure.subplots(1, 2)
    left = [0.0] * len(runs)
    for phase in PHASES:
        values = [run["phases_s"].get(phase, 0) for run in runs]
        seconds.barh(names, values, left=left, label=phase)
        left = [start + value for start, value in zip(left, values, strict=True)]
    seconds.set_xlabel("seconds a step")
    figure.legend(*seconds.get_legend_handles_labels(), loc="outside upper left", ncols=len(PHASES), fontsize="small")
    held = [run for run in of_kind(lines, "grpo/") if taken_gib(run)]
    places = range(len(held))
    planned = [run["logged"].get("predicted_peak_gib", 0) for run in held]
    for name, sizes, shift in (("predicted", planned, 0.2), ("measured", [taken_gib(run) for run in held], -0.2)):
        memory.barh([place + shift for place in places], sizes, 0.4, label=name)
    memory.set_yticks(list(places), [_bar(run) for run in held])
    memory.set_xlabel("GiB of the GPU, at most")
    figure.legend(*memory.get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize="small")
    figure.savefig(path, dpi=120)


def _bar(run: Line) -> str:
    cap = run["shape"].get("cap")
    card = f"{cap:g} GiB card" if cap else run["commit"]
    return f"{run['shape']['model']} {policy(run)}, {card}"


def of_kind(lines: Iterable[Line], kind: str) -> list[Line]:
    """Those whose names begin so."""
    return [line for line in lines if line["name"].startswith(kind)]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    if not rows:
        return MISSING
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _variants(lines: Iterable[Line], kind: str, value: str, *fields: str) -> dict[tuple[Any, ...], dict[str, float]]:
    """What the lines of a kind have for each variant, which their name ends with, by these fields of the shape."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for line in of_kind(lines, kind):
        key = tuple(line["shape"][field] for field in fields)
        found.setdefault(key, {})[line["name"].split("/")[1]] = line[value]
    return found


def whole_steps(lines: Iterable[Line]) -> list[Line]:
    """Those of whole cards with a step beside the first (a run of TRL that is stopped has a line too); no long runs."""
    return [
        line
        for line in of_kind(lines, "grpo/")
        if "median_s" in line and not line["shape"].get("cap") and not line.get("quarters")
    ]


def step_speeds(runs: Iterable[Line]) -> list[float | None]:
    """How many times as fast each run's fastest step is as that of bf16 in the same setting and at the same commit."""

    def setting(line: Line) -> tuple[object, ...]:
        return line["commit"], *(line["shape"].get(name) for name in ("model", "prompts", "completion", "steps"))

    runs = list(runs)
    ours = [line for line in runs if line["name"] == "grpo/step"]
    dense = {setting(line): line["spread_s"][0] for line in ours if line["shape"]["base"] == "bf16"}
    return [dense[setting(line)] / line["spread_s"][0] if setting(line) in dense else None for line in runs]


def _notes(runs: Iterable[Line]) -> list[str]:
    """What TRL ran with, a paragraph a version; none where it did not run."""
    versions = {(run["versions"]["trl"], run["versions"]["vllm"]) for run in runs if run["name"] == "grpo/trl"}
    return [
        f"TRL is {trl}'s GRPOTrainer with vLLM {vllm} in its process and its own defaults (`bench_trl`). Its `sync`\n"
        "merges the adapter and loads all weights, its `train` is what the other phases leave of a step, and its vLLM\n"
        "takes a share of the GPU whether it needs it or not."
        for trl, vllm in sorted(versions)
    ]


def by_size(model: str) -> tuple[int, str]:
    """What to sort models by: 7B comes before 14B."""
    return len(model), model


def shown(value: float | None, digits: int) -> str:
    """So many digits of it, or nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def policy(line: Line) -> str:
    shape = line["shape"]
    if line["name"] == "grpo/trl":
        return "TRL, bf16 + LoRA" + (", sleep" if shape["sleep"] else "") + (", no vLLM" if shape["no_vllm"] else "")
    return f"{base_of(line)} + LoRA" + (" + AQN" if shape["aqn"] else "")


def base_of(line: Line) -> str:
    """Its format, and the decoding kernel in parentheses where it has one."""
    kernel = decoding(line)
    return line["shape"]["base"] + (f" ({kernel})" if kernel else "")


def decoding(line: Line) -> str:
    """Whose kernel an NVFP4 base had for few tokens; empty for another base. What does not say is from before ours."""
    shape = line["shape"]
    if shape.get("base", "nvfp4") != "nvfp4":
        return ""
    return shape.get("decoding") or shape.get("decoding_kernel") or "humming"


def decoding_note(lines: Iterable[Line]) -> str:
    """How many results of engines are by which kernel."""
    engines = ("rollout/generate", "grpo/step", "ddp/step")
    found = Counter(decoding(line) for line in lines if line["name"] in engines)
    ours, hummings = found["ours"], found["humming"]
    return (
        f"Engines with an NVFP4 base had it in {ours} of the results on this page (`ours`), and Humming's alone in\n"
        f"{hummings} (`humming`)."
    )
