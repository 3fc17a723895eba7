"""Write docs/performance.md and the README's table of speeds from docs/results: python -m tests.bench.report

The page answers one question per section: which lines, which columns, and what they mean stand in ``QUESTIONS``. Every
number comes from the JSON lines that the benchmarks print. Of several lines with one setting the last one counts.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.harness import PHASES, RANK

Line = dict[str, Any]
Column = Callable[[Line], object]

ROOT = Path(__file__).parents[2]
RESULTS, PAGE, README = ROOT / "docs" / "results", ROOT / "docs" / "performance.md", ROOT / "README.md"
GIB = 2**30
HEADLINE = (8, 32, 128, 256)
KERNEL_NAMES = {"native": "native", "humming": "Humming"}
OLDER_NAMES = {"ours": "native"}  # of kernels, in lines of earlier commits
KERNEL_LINES = (("rule", "ours"), ("decode", "batch"))  # Humming's schedules, native kernels
LAYER_NAMES = {"none": "no adapter", "together": "fused", "apart": "separate", "matmul": "cuBLAS"}
LEAD = """\
# Performance

Written by `python -m tests.bench.report` from the lines in `docs/results`, which `make bench` prints; change the
script, not this page. A benchmark prints no line while its check against a reference fails. Models have the shapes of
Qwen2.5 and random weights; random prompts; LoRA adapters have rank 32 on all linear layers. Of several measurements
of one setting the last one counts. Each section ends with its commits, and names its machine unless that is an
$usual."""


class Question(NamedTuple):
    """One section of the page."""

    title: str
    text: str
    """What was measured, with which setting, what it means."""
    select: Callable[[list[Line]], list[Line]]
    """The lines that answer it, out of all."""
    table: Callable[[list[Line]], str]
    """Markdown, from the selected lines."""


def results() -> list[Line]:
    """Read the lines of all benchmarks; lines of other pages have no name."""
    texts = [text for path in sorted(RESULTS.glob("*.jsonl")) for text in path.read_text().splitlines() if text]
    return [line for line in map(json.loads, texts) if "name" in line]


def page(lines: list[Line]) -> str:
    """Make docs/performance.md; a question without lines has no section."""
    answers = [(question, found) for question in QUESTIONS if (found := question.select(lines))]
    usual = Counter(_machine(line) for _, found in answers for line in found).most_common(1)[0][0]
    sections = [LEAD.replace("$usual", usual)]
    for question, found in answers:
        text = textwrap.fill(f"{question.text} {_origin(found, usual)}", 120, break_on_hyphens=False)
        sections.append(f"## {question.title}\n\n{text}\n\n{question.table(found)}")
    return "\n\n".join(sections) + "\n"


def with_speeds(readme: str, lines: list[Line]) -> str:
    """Replace the table of speeds in the README's text."""
    head, tail = "<!-- speeds -->\n", "\n<!-- end -->"
    before, after = readme.split(head)
    return before + head + headline_table(lines) + tail + after.split(tail, 1)[1]


def headline_table(lines: list[Line]) -> str:
    """Speed-up of NVFP4 over bf16 per model, and the smallest GPU memory with which a run finished."""
    rates = {(line["shape"]["model"], line["shape"]["sequences"], _base(line)): line for line in rollouts(lines)}
    runs = whole_steps(lines)
    steps = {line["shape"]["model"]: times_bf16(line, runs) for line in runs if _base(line) == "nvfp4"}
    cards: dict[str, float] = {}
    for line in _of_kind("grpo/step", lines):
        shape = line["shape"]
        if shape["cap"] and line["finished"]:
            cards[shape["model"]] = min(shape["cap"], cards.get(shape["model"], shape["cap"]))
    rows = [
        [
            model,
            *(_speed_up(rates, model, count) for count in HEADLINE),
            _digits(steps.get(model), 2),
            f"{cards[model]:g}" if model in cards else "",
        ]
        for model in sorted({model for model, *_ in rates}, key=_by_size)
    ]
    columns = (f"{count} sequences" for count in HEADLINE)
    return table(["model", *columns, "whole step", "smallest GPU, GiB"], rows)


def rollouts(lines: list[Line]) -> list[Line]:
    """NVFP4 and bf16 engines with an adapter at one commit, and the NVFP4 engine without it where that was measured.

    Models that were measured with the native decoding kernel appear with it alone.
    """
    usual = [line for line in _of_kind("rollout/generate", lines) if _has_usual_settings(line["shape"])]
    native = {line["shape"]["model"] for line in usual if _kernel(line) == "native"}
    engines = {(*_engine(line), _adapted(line)): line for line in usual}
    found: dict[tuple[str, int, bool], list[Line]] = {}
    for (model, base, kernel, commit, count, adapted), line in engines.items():
        if base == "nvfp4" and (kernel == "native" or model not in native):
            other = engines.get((model, "bf16", "", commit, count, True) if adapted else (*_engine(line), True))
            if other:
                found[model, count, adapted] = [other, line]
    return [line for key in sorted(found, key=lambda key: (*_by_size(key[0]), *key[1:])) for line in found[key]]


def rollouts_table(lines: list[Line]) -> str:
    """Tokens per second, one column per number of sequences."""
    found: dict[tuple[str, int, str], Line] = {}
    added: dict[tuple[str, int], str] = {}
    for first, second in zip(lines[::2], lines[1::2], strict=True):  # as rollouts pairs them
        model, count = second["shape"]["model"], second["shape"]["sequences"]
        if _adapted(second):
            found[model, count, "bf16"], found[model, count, "nvfp4"] = first, second
        else:
            added[model, count] = f"{100 * (first['median_s'] / second['median_s'] - 1):.0f} %"
    counts = sorted({count for _, count, _ in found})
    rows = []
    for model in dict.fromkeys(model for model, *_ in found):
        for base in ("bf16", "nvfp4"):
            engines = [found.get((model, count, base)) for count in counts]
            rates = [_digits(line["tokens_per_s"] if line else None, 0) for line in engines]
            rows.append([model, f"{base}, tokens/s", *rates])
        rows.append([model, "speed-up", *(_speed_up(found, model, count) for count in counts)])
        roofs = [_share_of_roof(found.get((model, count, "nvfp4"))) for count in counts]
        rows.append([model, "nvfp4, share of the roof", *roofs])
        if any((model, count) in added for count in counts):
            rows.append([model, "nvfp4, added by LoRA", *(added.get((model, count), "") for count in counts)])
    return table(["model", "", *counts], rows)


def whole_steps(lines: list[Line]) -> list[Line]:
    """The last run of each model and policy on a whole GPU, by size; no long runs."""
    runs = [
        line
        for line in _of_kind("grpo/", lines)
        if "median_s" in line and not line["shape"].get("cap") and not line.get("quarters")
    ]
    native = {line["shape"]["model"] for line in runs if _kernel(line) == "native"}
    chosen = [line for line in runs if _kernel(line) != "humming" or line["shape"]["model"] not in native]
    return sorted(_last(chosen, lambda line: (line["name"], line["shape"]["model"], _base(line))), key=_model_size)


def times_bf16(line: Line, runs: Iterable[Line]) -> float | None:
    """Fastest step of bf16 in the same setting and at the same commit, over this run's; None where there is none."""

    def setting(run: Line) -> tuple[object, ...]:
        return run["commit"], *(run["shape"].get(name) for name in ("model", "prompts", "completion", "steps"))

    dense = {setting(run): run["spread_s"][0] for run in runs if (run["name"], _base(run)) == ("grpo/step", "bf16")}
    return dense[setting(line)] / line["spread_s"][0] if setting(line) in dense else None


def steps_table(lines: list[Line]) -> str:
    """Seconds of whole steps by phase."""
    columns: dict[str, Column] = {
        "model": _shape("model"),
        "policy": _policy,
        "step, s": _median(1),
        "speed-up": lambda line: _digits(times_bf16(line, lines), 2) if line["name"] == "grpo/step" else "",
        **{phase: _phase(phase) for phase in PHASES},
        "gap, nats": _number("gap", 3),
    }
    return rows_table(columns, lines)


def cards(lines: list[Line]) -> list[Line]:
    """The last run of each model, policy and memory limit for which there is a plan, and those that were refused."""

    def setting(line: Line) -> tuple[object, ...]:
        return _policy(line), *(line["shape"][name] for name in ("model", "completion", "cap"))

    refused = _of_kind("grpo/too-small", lines)
    ran = [line for line in _of_kind("grpo/step", lines) if "predicted_peak_gib" in line["logged"]]
    return sorted(
        _last(refused + ran, setting), key=lambda line: (*_model_size(line), line["shape"]["cap"] or float("inf"))
    )


def taken_gib(run: Line) -> float | None:
    """Most GPU memory that a run held, as another process saw it; by its own reading where none looked."""
    return run["peak_bytes"] / GIB if run.get("peak_bytes") else run.get("logged", {}).get("peak_gib")


def ranks_table(lines: list[Line]) -> str:
    """Seconds of steps by the number of GPUs."""
    alone = next(line["median_s"] for line in lines if line["shape"]["gpus"] == 1)
    columns: dict[str, Column] = {
        "model": _shape("size"),
        "GPUs": _shape("gpus"),
        "step, s": _median(1),
        "speed-up": lambda line: f"{alone / line['median_s']:.2f}",
        **{phase: _phase(phase) for phase in ("rollout", "check", "train", "wait")},
    }
    return rows_table(columns, lines)


def kernels_table(lines: list[Line]) -> str:
    """Microseconds of each fused linear, Humming's and the native kernel's; a column per number of tokens."""
    found: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for line in lines:
        model, linear, tokens = (line["shape"][name] for name in ("model", "linear", "tokens"))
        found.setdefault((model, linear), {}).setdefault(tokens, {})[_variant(line)] = 1e6 * line["median_s"]
    counts = sorted({count for times in found.values() for count in times})

    def cell(times: Mapping[str, float]) -> str:
        fastest = (min((times[name] for name in names if name in times), default=None) for names in KERNEL_LINES)
        return " / ".join(_digits(time, 1) or "-" for time in fastest) if times else ""

    rows = [[*key, *(cell(times.get(count, {})) for count in counts)] for key, times in found.items()]
    return table(["model", "linear", *(f"{count} tokens" for count in counts)], rows)


def pivot(row: Column, column: Column, value: Column, lines: list[Line], *, label: str) -> str:
    """Make a table with a row and a column for each value of two functions of a line."""
    found: dict[object, dict[object, object]] = {}
    for line in lines:
        found.setdefault(row(line), {})[column(line)] = value(line)
    columns = list(dict.fromkeys(column(line) for line in lines))
    columns.sort(key=lambda each: each if isinstance(each, int) else 0)
    rows = [[name, *(cells.get(each, "") for each in columns)] for name, cells in found.items()]
    return table([label, *columns], rows)


def rows_table(columns: Mapping[str, Column], lines: Iterable[Line]) -> str:
    """Make a table with a row for each line."""
    return table(list(columns), [[column(line) for column in columns.values()] for line in lines])


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Format Markdown."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [header, ["---"] * len(header), *rows])


def main() -> int:
    """Write the page and the README's table; return 1 where there are no results."""
    lines = results()
    if not lines:
        print(f"no results in {RESULTS}", file=sys.stderr)
        return 1
    PAGE.write_text(page(lines))
    README.write_text(with_speeds(README.read_text(), lines))
    return 0


def _of_kind(kind: str, lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if line["name"].startswith(kind)]


def _last(lines: Iterable[Line], key: Callable[[Line], Hashable]) -> list[Line]:
    return list({key(line): line for line in lines}.values())


def _machine(line: Line) -> str:
    return f"{line['device']}, torch {line['torch']}, Triton {line['triton']}"


def _origin(lines: Iterable[Line], usual: str) -> str:
    found: dict[str, set[str]] = {}
    for line in lines:
        found.setdefault(_machine(line), set()).add(line["commit"])
    named = (
        f"{'' if machine == usual else f'{machine}, '}{', '.join(sorted(commits))}"
        for machine, commits in found.items()
    )
    return f"({'; '.join(named)})"


def _kernel(line: Line) -> str:
    """Name the decoding kernel of an NVFP4 base; lines that name none were measured with Humming's."""
    shape = line["shape"]
    if shape.get("base", "nvfp4") != "nvfp4":
        return ""
    found = shape.get("decoding") or shape.get("decoding_kernel") or "humming"
    return OLDER_NAMES.get(found, found)


def _engine(line: Line) -> tuple[str, str, str, str, int]:
    shape = line["shape"]
    return shape["model"], shape["base"], _kernel(line), line["commit"], shape["sequences"]


def _has_usual_settings(shape: Mapping[str, Any]) -> bool:
    return (shape["kv"], shape["rank"]) == ("auto", RANK)


def _adapted(line: Line) -> bool:
    return line["shape"]["adapter"] != "none"


def _base(line: Line) -> str:
    return line["shape"].get("base", "")


def _policy(line: Line) -> str:
    if line["name"] == "grpo/trl":
        return f"TRL {line['versions']['trl']}, bf16"
    kernel = _kernel(line)
    return _base(line) + (f" ({KERNEL_NAMES[kernel]})" if kernel else "") + (", AQN" if line["shape"]["aqn"] else "")


def _speed_up(found: Mapping[tuple[str, int, str], Line], model: str, count: int) -> str:
    packed, dense = (found.get((model, count, base)) for base in ("nvfp4", "bf16"))
    return f"{packed['tokens_per_s'] / dense['tokens_per_s']:.2f}" if packed and dense else ""


def _share_of_roof(line: Line | None) -> str:
    return _digits(line["decoded_per_s"] / line["roof_per_s"], 2) if line else ""


def _by_size(model: str) -> tuple[int, str]:
    return len(model), model  # 7B comes before 14B


def _model_size(line: Line) -> tuple[int, str]:
    return _by_size(line["shape"]["model"])


def _digits(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _variant(line: Line) -> str:
    return line["name"].split("/", 1)[1]


def _shape(name: str) -> Column:
    return lambda line: line["shape"][name]


def _phase(name: str) -> Column:
    return lambda line: _digits(line["phases_s"].get(name), 2)


def _median(scale: float) -> Column:
    """Format the median and the range."""

    def show(line: Line) -> str:
        low, high = (f"{scale * end:.4g}" for end in line["spread_s"])
        return f"{scale * line['median_s']:.4g} ({low} to {high})"

    return show


def _number(name: str, digits: int, scale: float = 1) -> Column:
    return lambda line: _digits(None if line.get(name) is None else scale * line[name], digits)


def _quarters(name: str, digits: int, scale: float = 1) -> Column:
    return lambda line: " ".join(_digits(scale * each, digits) for each in line["quarters"][name])


PARTS = {"head/rollout": "step, head", "aqn-norm/rollout": "step, norms", "aqn-norm/norms": "norms alone"}
QUESTIONS = [
    Question(
        "How much faster does an NVFP4 base sample?",
        "Tokens per second of whole rollout calls by the number of sequences, prompts included, with LoRA and "
        "log-probabilities: best of the repeats. Speed-ups compare NVFP4 with bf16 at one commit. The roof is a "
        "decoding step that takes only the time to read every weight and every cached key and value once. NVFP4 gains "
        "where reading weights limits decoding, and nothing at 256 sequences. `added by LoRA` compares an engine with "
        "itself.",
        rollouts,
        rollouts_table,
    ),
    Question(
        "How long does a whole GRPO step take?",
        "One prompt of 256 tokens, 8 completions of 2048, gradient checkpointing, all callbacks, through train.py: "
        "median (range) of the steps after the first, and median seconds of the phases. `check` is canary and ledger, "
        "`between` logging, data and checkpoints; `gap` is the mean difference between the sampler's and the "
        "trainer's log-probabilities. Speed-ups compare fastest steps at one commit. TRL: its GRPOTrainer with vLLM "
        "in its process.",
        whole_steps,
        steps_table,
    ),
    Question(
        "How much GPU memory does a step need, and does the plan know?",
        "Groups of 8 completions, prompts of 256 tokens. Another process holds the rest of the GPU's memory. `held` "
        "is the most that the run held, as that process saw it or, where it did not look, as the run logged it; "
        "`planned` is what `python -m qerl_pl plan` says beforehand. `too small` was refused.",
        lambda lines: [line for line in cards(lines) if "Humming" not in _policy(line)],
        partial(
            rows_table,
            {
                "model": _shape("model"),
                "policy": _policy,
                "completion": _shape("completion"),
                "GPU memory, GiB": lambda line: f"{line['shape']['cap']:g}" if line["shape"]["cap"] else "whole",
                "held, GiB": lambda line: _digits(taken_gib(line), 1) or "too small",
                "planned, GiB": lambda line: _digits(line.get("logged", {}).get("predicted_peak_gib"), 1),
                "step, s": _number("median_s", 1),
            },
        ),
    ),
    Question(
        "Does a long run slow down or leak?",
        "Quarters of one run with an NVFP4 base: median step, most memory, most open files.",
        lambda lines: [line for line in _of_kind("grpo/step", lines) if line.get("quarters")][-1:],
        partial(
            rows_table,
            {
                "model": _shape("model"),
                "completion": _shape("completion"),
                "steps": lambda line: line["steps_done"],
                "step, s": _quarters("step_s", 2),
                "GPU, GiB": _quarters("gpu_bytes", 2, 1 / GIB),
                "host, GiB": _quarters("host_bytes", 2, 1 / GIB),
                "open files": _quarters("files", 0),
            },
        ),
    ),
    Question(
        "Do several GPUs divide the work?",
        "One global batch of 32 prompts x 8 completions of 256 tokens; `wait`: the fastest rank for the others.",
        partial(_of_kind, "ddp/step"),
        ranks_table,
    ),
    Question(
        "How fast is the training pass?",
        "Forward and backward over packed rows of up to 2048 tokens, gradient checkpointing, log-probabilities and "
        "entropies. `peft` is PEFT's LoRA layer with a bf16 adapter, `peft-fp32` with its default fp32 adapter; "
        "`offload` keeps checkpoints in host memory. Peak memory comes on top of what is resident.",
        lambda lines: [line for line in _of_kind("step/", lines) if line["shape"]["model"] != "3B"],
        partial(
            rows_table,
            {
                "policy": _variant,
                "model": _shape("model"),
                "pass, s": _median(1),
                "tokens/s": _number("tokens_per_s", 0),
                "speed": _number("ratio", 2),
                "resident, GB": _number("resident_bytes", 2, 1e-9),
                "peak, GB": _number("peak_bytes", 2, 1e-9),
            },
        ),
    ),
    Question(
        "What does recomputing less in backward gain?",
        "The same pass of 16384 tokens of the 7B NVFP4 policy: tokens per second / GB at its peak, base included, by "
        "`model.gradient_checkpointing`; a number is of blocks recomputed whole, the others selectively. `fused`: "
        "with liger-kernel's norms, rotary embeddings and SwiGLU, `model.fused_elementwise`.",
        partial(_of_kind, "rungs/"),
        partial(
            pivot,
            lambda line: _variant(line).split("-")[0],
            lambda line: _variant(line).split("-")[1],
            lambda line: f"{line['tokens_per_s']:.0f} / {(line['resident_bytes'] + line['peak_bytes']) * 1e-9:.0f}",
            label="recomputed",
        ),
    ),
    Question(
        "What do the linear layers of a block cost in training?",
        "GPU milliseconds of the seven linears of a 7B block, forward and backward, by the number of tokens, launch "
        "gaps left out. `nvfp4` and `bf16` are this repository's layer, base and adapter in one autograd node; "
        "`+lora` is PEFT's formula around the named base. NVFP4 linears dequantise to scratch memory and multiply "
        "with cuBLAS.",
        lambda lines: [line for line in _of_kind("linears/", lines) if not line["shape"].get("own_thread")],
        partial(pivot, _variant, _shape("tokens"), _number("device_s", 2, 1e3), label="tokens"),
    ),
    Question(
        "How fast is dequantising?",
        "The seven linears of a 7B block to bf16. Bytes are read and written, each once; GB/s is over the time of the "
        "kernels. `copy` and `fill` say what the memory allows: four fifths of the bytes are written.",
        lambda lines: [line for line in _of_kind("dequantize/", lines) if line["name"] != "dequantize/one"],
        partial(
            rows_table,
            {"format": _variant, "GB/s": _number("gb_per_s", 0), "kernels, us": _number("device_s", 0, 1e6)},
        ),
    ),
    Question(
        "What do log-probabilities and entropies cost?",
        "Forward and backward of the head. `naive` holds all logits, `recompute` makes them again for backward.",
        partial(_of_kind, "logprobs/"),
        partial(
            rows_table,
            {
                "variant": _variant,
                "tokens": _shape("tokens"),
                "vocabulary": _shape("vocabulary"),
                "time, ms": _median(1e3),
                "peak, MiB": _number("peak_bytes", 0, 2**-20),
            },
        ),
    ),
    Question(
        "What does the exact arithmetic of the sampler cost?",
        "Microseconds per decoding step of a 7B NVFP4 engine by the number of sequences. `exact`: logits in fp32, and "
        "noise on fp32 norm weights; `rounded`: both in bf16. `norms alone`: all of a step, in one CUDA graph.",
        lambda lines: _of_kind("head/rollout", lines) + _of_kind("aqn-norm/", lines),
        partial(
            pivot,
            lambda line: f"{PARTS[line['name']]}, {line['shape']['variant']}",
            _shape("sequences"),
            _number("median_s", 0, 1e6),
            label="sequences",
        ),
    ),
    Question(
        "How fast are the NVFP4 kernels of decoding?",
        "Microseconds of each fused linear alone: Humming's fastest schedule / the native kernel (`nvfp4_decode` for "
        "few tokens, `nvfp4_batch` for more); an engine chooses between them by a rule.",
        lambda lines: [line for line in _of_kind("schedules/", lines) if line["shape"]["model"] == "7B"],
        kernels_table,
    ),
    Question(
        "What does the adapter add to a decoding layer?",
        "Microseconds of the linears of one layer in a CUDA graph by the number of tokens. `fused`: the base GEMM "
        "adds the adapter, x A^T runs on SMs that it leaves idle. `separate` adds it with Triton kernels, `cuBLAS` by "
        "products.",
        lambda lines: [line for line in _of_kind("layer-ours/", lines) if line["shape"]["model"] == "7B"],
        partial(
            pivot,
            lambda line: f"{line['shape']['model']}, {LAYER_NAMES[_variant(line)]}",
            _shape("tokens"),
            _number("median_s", 1, 1e6),
            label="tokens",
        ),
    ),
    Question(
        "How long does an engine take to start?",
        "Seconds until a 7B NVFP4 engine is ready: `first` with all caches empty, `again` the same one.",
        partial(_of_kind, "start/"),
        partial(rows_table, {"start": _variant, "seconds": _number("median_s", 1)}),
    ),
]


if __name__ == "__main__":
    sys.exit(main())
