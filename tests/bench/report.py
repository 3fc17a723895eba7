"""Write docs/performance.md and the README's table of speeds from docs/results: python -m tests.bench.report

The page answers one question per section. Its text is pages/performance.md, and ``TABLES`` says which JSON lines of
results answer a question, and with which columns. Every number comes from these lines, which the benchmarks have
printed. Of several lines with the same settings the last one counts.
"""

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.harness import GIB, PHASES, RANK, ROOT

Line = dict[str, Any]
Column = Callable[[Line], object]
Pair = tuple[Line, Line]

TEXT = Path(__file__).parent / "pages" / "performance.md"
RESULTS, PAGE, README = ROOT / "docs" / "results", ROOT / "docs" / "performance.md", ROOT / "README.md"
HEADLINE = (8, 32, 128, 256)  # sequences
KERNEL_LINES = (("rule", "ours"), ("decode", "batch"))  # Humming's schedules, native kernels
LAYER_NAMES = {"none": "no adapter", "together": "fused", "unfetched": "fused, not fetched", "apart": "separate"}


class Table(NamedTuple):
    """Table that answers one question."""

    select: Callable[[list[Line]], list[Line]]
    """Choose the lines of the table out of all lines."""
    markdown: Callable[[list[Line]], str]
    """Make the table from these lines."""


def results() -> list[Line]:
    """Read the JSON lines of all benchmarks. Lines without a name belong to other pages, and are left out."""
    texts = [text for path in sorted(RESULTS.glob("*.jsonl")) for text in path.read_text().splitlines() if text]
    return [line for line in map(json.loads, texts) if "name" in line]


def page(lines: list[Line]) -> str:
    """Make docs/performance.md; a question without lines has no section."""
    lead, *sections = TEXT.read_text().split("\n## ")
    parsed = [section.strip().split("\n\n") for section in sections]  # title, text, name of the table
    answers = [(title, text, TABLES[name.split()[2]]) for title, text, name in parsed]
    selections = [table.select(lines) for _, _, table in answers]
    usual = Counter(_machine(line) for selected in selections for line in selected).most_common(1)[0][0]
    written = [lead.strip().format(usual=usual)]
    for (title, text, table), selected in zip(answers, selections, strict=True):
        if selected:
            about = textwrap.fill(f"{text} {_origin(selected, usual)}", 120, break_on_hyphens=False)
            written.append(f"## {title}\n{about}\n\n{table.markdown(selected)}")
    return "\n\n".join(written) + "\n"


def with_speeds(readme: str, lines: list[Line]) -> str:
    """Replace the table of speeds in the README's text."""
    head, tail = "<!-- speeds -->\n", "\n<!-- end -->"
    before, after = readme.split(head)
    return before + head + headline_table(lines) + tail + after.split(tail, 1)[1]


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [header, ["---"] * len(header), *rows])


def row_per_line(columns: Mapping[str, Column], lines: Iterable[Line]) -> str:
    """Make a table with a row for each line."""
    return table(list(columns), [[column(line) for column in columns.values()] for line in lines])


def pivot(row: Column, column: Column, value: Column, lines: list[Line], *, label: str) -> str:
    """Make a table whose rows are the values of ``row`` of the lines, and whose columns are the values of ``column``; a
    cell has ``value`` of the line with this row and column. ``label`` is the heading of the first column."""
    cells: dict[object, dict[object, object]] = {}
    for line in lines:
        cells.setdefault(row(line), {})[column(line)] = value(line)
    columns = list(dict.fromkeys(column(line) for line in lines))
    columns.sort(key=lambda name: name if isinstance(name, int) else 0)
    return table([label, *columns], [[name, *(known.get(key, "") for key in columns)] for name, known in cells.items()])


def cell(*path: str, digits: int | None = None, scale: float = 1) -> Column:
    """Make a column that shows the value at ``path``, nested keys of a line: multiplied by ``scale`` and with
    ``digits`` decimal digits, or as it is without ``digits``. With ``digits``, the cell is empty if the line has no
    such value."""

    def show(line: Line) -> object:
        value: Any = line
        for key in path:
            value = value[key] if digits is None else (value or {}).get(key)
        return value if digits is None else rounded(value, digits, scale)

    return show


def rounded(value: float | None, digits: int, scale: float = 1) -> str:
    """Format a number; "" for None."""
    return "" if value is None else f"{scale * value:.{digits}f}"


def step_seconds(line: Line) -> str:
    """Format the median and the range of a line's seconds."""
    low, high = (f"{end:.4g}" for end in line["spread_s"])
    return f"{line['median_s']:.4g} ({low} to {high})"


def quarters(name: str, digits: int, scale: float = 1) -> Column:
    """Make a column with the values of the quarters of a long run."""
    return lambda line: " ".join(rounded(value, digits, scale) for value in line["quarters"][name])


def phases(*names: str) -> dict[str, Column]:
    """Make a column with the seconds of each phase."""
    return {name: cell("phases_s", name, digits=2) for name in names}


def headline_table(lines: list[Line]) -> str:
    """Make the README's table, with a row per model: how many times faster NVFP4 bases are than bf16 ones, in rollouts
    and in whole steps, and the smallest GPU memory with which a run finished."""
    speeds = at_one_commit(lines, "bf16", "nvfp4")
    runs = whole_steps(lines)
    steps = {line["shape"]["model"]: times_bf16(line, runs) for line in runs if _base(line) == "nvfp4"}
    smallest: dict[str, float] = {}
    for line in _of_kind("grpo/step", lines):
        model, cap = line["shape"]["model"], line["shape"]["cap"]
        if cap and line["finished"]:
            smallest[model] = min(cap, smallest.get(model, cap))
    rows = [
        [
            model,
            *(speed_up(*speeds[model, count]) if (model, count) in speeds else "" for count in HEADLINE),
            rounded(steps.get(model), 2),
            f"{smallest[model]:g}" if model in smallest else "",
        ]
        for model in dict.fromkeys(model for model, _ in speeds)
    ]
    columns = (f"{count} sequences" for count in HEADLINE)
    return table(["model", *columns, "whole step of 8", "smallest GPU, GiB"], rows)


def at_one_commit(lines: list[Line], first: str, second: str) -> dict[tuple[str, int], Pair]:
    """Pair the measurements of two kinds of engines that were made at the same commit. Returns the last such pair for
    each model and number of sequences.

    All pairs of a model are from one GPU, the one on which the model was measured last.

    Args:
        lines: lines of ``bench_rollout``; engines with unusual settings are left out.
        first, second: "nvfp4" or "bf16", with " alone" after it for an engine without an adapter.
    """
    engines: dict[tuple[str, int, str, str], dict[str, Line]] = {}
    for line in _of_kind("rollout/generate", lines):
        shape = line["shape"]
        if (shape["kv"], shape["rank"]) == ("auto", RANK) and _kernel(line) != "humming":
            kind = shape["base"] + (" alone" if shape["adapter"] == "none" else "")
            engines.setdefault((shape["model"], shape["sequences"], _gpu(line), line["commit"]), {})[kind] = line
    both = {key: (kinds[first], kinds[second]) for key, kinds in engines.items() if {first, second} <= {*kinds}}
    gpus = {model: gpu for model, _, gpu, _ in both}
    pairs = {(model, count): pair for (model, count, gpu, _), pair in both.items() if gpu == gpus[model]}
    return {key: pairs[key] for key in sorted(pairs, key=lambda key: (*by_size(key[0]), key[1]))}


def rollouts(lines: list[Line]) -> list[Line]:
    """Choose measurements of rollout engines for two comparisons, each between two engines that were measured at the
    same commit: engines with an adapter on a bf16 base and on an NVFP4 base, and engines on an NVFP4 base with and
    without an adapter."""
    pairs = [*at_one_commit(lines, "bf16", "nvfp4").values(), *at_one_commit(lines, "nvfp4", "nvfp4 alone").values()]
    return [line for pair in pairs for line in pair]


def speed_up(slow: Line, fast: Line) -> str:
    """Format the ratio of two rollouts' tokens per second."""
    return f"{fast['tokens_per_s'] / slow['tokens_per_s']:.2f}"


def rollouts_table(lines: list[Line]) -> str:
    """Tokens per second, one column per number of sequences."""
    speeds, adapters = at_one_commit(lines, "bf16", "nvfp4"), at_one_commit(lines, "nvfp4", "nvfp4 alone")
    kinds: dict[str, tuple[Mapping[tuple[str, int], Pair], Callable[[Line, Line], str]]] = {
        "bf16, tokens/s": (speeds, lambda bf16, _: rounded(bf16["tokens_per_s"], 0)),
        "nvfp4, tokens/s": (speeds, lambda _, nvfp4: rounded(nvfp4["tokens_per_s"], 0)),
        "speed-up": (speeds, speed_up),
        "nvfp4, share of the roof": (speeds, lambda _, fast: rounded(fast["decoded_per_s"] / fast["roof_per_s"], 2)),
        "nvfp4, added by LoRA": (
            adapters,
            lambda adapted, alone: f"{100 * (adapted['median_s'] / alone['median_s'] - 1):.0f} %",
        ),
    }
    counts = sorted({count for _, count in speeds})
    rows = []
    for model in dict.fromkeys(model for model, _ in speeds):
        for kind, (pairs, value) in kinds.items():
            known = {count: pairs[model, count] for count in counts if (model, count) in pairs}
            if known:
                gpu = _gpu(next(iter(known.values()))[0])
                rows.append([model, gpu, kind, *(value(*known[count]) if count in known else "" for count in counts)])
    return table(["model", "GPU", "", *counts], rows)


def whole_steps(lines: list[Line]) -> list[Line]:
    """Choose the last run of each model and format of the base that had all memory of its GPU, sorted by the model's
    size. Runs of a single step and of more than 40 steps are left out."""
    runs = [
        line
        for line in _of_kind("grpo/", lines)
        if "median_s" in line and not line["shape"].get("cap") and not line.get("quarters")
        if line.get("steps_done") != 1 and _kernel(line) != "humming"
    ]
    return sorted(_last(runs, lambda line: (line["name"], line["shape"]["model"], _base(line))), key=_model_size)


def times_bf16(line: Line, runs: Iterable[Line]) -> float | None:
    """Return how many times faster than on a bf16 base the fastest step of this run was. The bf16 run has to have the
    same settings and commit; None if there is no such run."""
    names = "model", "prompts", "completion", "group", "mean", "updates"

    def setting(run: Line) -> tuple[object, ...]:
        return run["commit"], *(run["shape"].get(name) for name in names)

    dense = {
        setting(run): run["spread_s"][0]
        for run in runs
        if run["name"] in ("grpo/step", "recipe/step") and _base(run) == "bf16" and not run["shape"].get("plain")
    }
    return dense[setting(line)] / line["spread_s"][0] if setting(line) in dense else None


def recipes(lines: list[Line]) -> list[Line]:
    """Choose runs of whole RL iterations with realistic lengths of completions (``recipe/``). Of several runs with the
    same mean length, group size, number of updates, model and kind of policy, only the last is chosen. In the result,
    runs that differ only in the kind of policy are next to each other."""
    names = "mean", "group", "updates", "model"

    def setting(line: Line) -> tuple[Any, ...]:
        return *(line["shape"][name] for name in names), _policy(line)

    return sorted(_last(_of_kind("recipe/", lines), setting), key=lambda line: setting(line)[: len(names)])


def cards(lines: list[Line]) -> list[Line]:
    """Choose runs of GRPO steps for the table of memory: for each model, length of completions, kind of policy and
    memory limit the last run that had a memory plan or, if there is none, the last that was refused for too little
    memory. Runs of more than 40 steps are left out."""

    def setting(line: Line) -> tuple[object, ...]:
        return _policy(line), *(line["shape"][name] for name in ("model", "completion", "cap"))

    ran = [
        line
        for line in _of_kind("grpo/step", lines)
        if "predicted_peak_gib" in line["logged"] and not line.get("quarters")
    ]
    chosen = _last(_of_kind("grpo/too-small", lines) + ran, setting)
    return sorted(chosen, key=lambda line: (*_model_size(line), line["shape"]["cap"] or float("inf")))


def taken_gib(run: Line) -> float | None:
    """Return the most GPU memory that a run held, in GiB: as another process measured it or, without such a
    measurement, as the run logged it; None if neither exists."""
    return run["peak_bytes"] / GIB if run.get("peak_bytes") else run.get("logged", {}).get("peak_gib")


def rollouts_with_drafts(lines: list[Line]) -> list[Line]:
    """Choose the rollouts of pretrained models with speculation, and add to each line, as "plain_s", the median seconds
    of the same rollouts without speculation on the same GPU at the same commit. A line without such a counterpart is
    left out."""
    latest = _latest(["drafts/"], lines)

    def setting(line: Line) -> str:
        return json.dumps([_gpu(line), line["commit"], line["name"], {**line["shape"], "speculation": None}])

    plain = {setting(line): line["median_s"] for line in latest if line["shape"]["speculation"] == "off"}
    drafted = [line for line in latest if line["shape"]["speculation"] == "on" and setting(line) in plain]
    return [{**line, "plain_s": plain[setting(line)]} for line in drafted]


def kernels_table(lines: list[Line]) -> str:
    """Make the table of the microseconds that a fused linear layer takes, with one row per layer and one column per
    number of tokens. A cell has the times of Humming's kernel and of this project's."""
    times: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for line in lines:
        model, linear, tokens = (line["shape"][name] for name in ("model", "linear", "tokens"))
        times.setdefault((model, linear), {}).setdefault(tokens, {})[_variant(line)] = 1e6 * line["median_s"]
    counts = sorted({count for by_count in times.values() for count in by_count})

    def fastest(known: Mapping[str, float]) -> str:
        kinds = (min((known[name] for name in names if name in known), default=None) for names in KERNEL_LINES)
        return " / ".join(rounded(time, 1) or "-" for time in kinds) if known else ""

    rows = [[*key, *(fastest(by_count.get(count, {})) for count in counts)] for key, by_count in times.items()]
    return table(["model", "linear", *(f"{count} tokens" for count in counts)], rows)


def main() -> int:
    """Write the page and the README's table. Returns the exit status: 1 if there are no results."""
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


def _latest(kinds: Sequence[str], lines: Iterable[Line]) -> list[Line]:
    chosen = [line for kind in kinds for line in _of_kind(kind, lines)]
    return _last(chosen, lambda line: (line["name"], json.dumps(line["shape"])))


def _machine(line: Line) -> str:
    return f"{line['device']}, torch {line['torch']}, Triton {line['triton']}"


def _gpu(line: Line) -> str:
    return line["device"].removeprefix("NVIDIA ").split()[0]  # e.g. H100


def _origin(lines: Iterable[Line], usual: str) -> str:
    """Say at which commits the lines were measured, and on which machine if it is not the usual one."""
    commits: dict[str, set[str]] = {usual: set()}
    for line in lines:
        commits.setdefault(_machine(line), set()).add(line["commit"])
    parts = [
        f"{'' if machine == usual else f'on {machine}, '}at commit{'s' * (len(at) > 1)} {', '.join(sorted(at))}"
        for machine, at in commits.items()
        if at
    ]
    return f"(Measured {'; '.join(parts)}.)"


def _kernel(line: Line) -> str:
    """Name the decoding kernel of an NVFP4 base; "" for others."""
    shape = line["shape"]
    return shape.get("decoding") or shape.get("decoding_kernel") or "" if _base(line) == "nvfp4" else ""


def _base(line: Line) -> str:
    return line["shape"].get("base", "")


def _policy(line: Line) -> str:
    if line["name"] in ("grpo/trl", "recipe/trl"):
        return f"TRL {line['versions']['trl']}, bf16"
    shape, kernel = line["shape"], _kernel(line)
    parts = [_base(line) + (f" ({kernel})" if kernel else ""), "AQN" if shape["aqn"] else ""]
    return ", ".join(filter(None, [*parts, "plain" if shape.get("plain") else ""]))


def by_size(model: str) -> tuple[bool, float]:
    """Return a key by which dense models come first, and then smaller ones: tiny, 0.5B, 7B, 14B, 30B-A3B."""
    billions = model.partition("B")[0]
    return "-" in model, float(billions) if billions[0].isdigit() else 0.0


def _model_size(line: Line) -> tuple[bool, float]:
    return by_size(line["shape"]["model"])


def _variant(line: Line) -> str:
    return line["name"].split("/", 1)[1]


def _rows(select: Callable[[list[Line]], list[Line]], columns: Callable[[list[Line]], dict[str, Column]]) -> Table:
    return Table(select, lambda lines: row_per_line(columns(lines), lines))


def _pivot(kinds: Sequence[str], row: Column, column: Column, value: Column, label: str) -> Table:
    return Table(partial(_latest, kinds), partial(pivot, row, column, value, label=label))


TABLES = {
    "rollouts": Table(rollouts, rollouts_table),
    "steps": _rows(
        whole_steps,
        lambda lines: {
            "model": cell("shape", "model"),
            "policy": _policy,
            "completion": cell("shape", "completion"),
            "step, s": step_seconds,
            "speed-up": lambda line: rounded(times_bf16(line, lines), 2) if line["name"] == "grpo/step" else "",
            **phases(*PHASES),
            "gap, nats": cell("gap", digits=3),
        },
    ),
    "recipes": _rows(
        recipes,
        lambda lines: {
            "completions": lambda line: f"{line['shape']['prompts']} x {line['shape']['group']}",
            "mean": cell("shape", "mean"),
            "updates": cell("shape", "updates"),
            "policy": _policy,
            "step, s": step_seconds,
            "speed-up": lambda line: rounded(times_bf16(line, lines), 2),
            **phases("rollout", "check", "logprob", "train", "between"),
        },
    ),
    "memory": _rows(
        cards,
        lambda _: {
            "model": cell("shape", "model"),
            "policy": _policy,
            "completion": cell("shape", "completion"),
            "GPU memory, GiB": lambda line: f"{line['shape']['cap']:g}" if line["shape"]["cap"] else "whole",
            "held, GiB": lambda line: rounded(taken_gib(line), 1) or "too small",
            "planned, GiB": cell("logged", "predicted_peak_gib", digits=1),
            "step, s": cell("median_s", digits=1),
        },
    ),
    "long_run": _rows(
        lambda lines: [line for line in _of_kind("grpo/step", lines) if line.get("quarters")][-1:],
        lambda _: {
            "model": cell("shape", "model"),
            "completion": cell("shape", "completion"),
            "steps": cell("steps_done"),
            "step, s": quarters("step_s", 2),
            "GPU, GiB": quarters("gpu_bytes", 2, 1 / GIB),
            "host, GiB": quarters("host_bytes", 2, 1 / GIB),
            "open files": quarters("files", 0),
        },
    ),
    "ranks": _rows(
        partial(_latest, ["ddp/step"]),
        lambda lines: {
            "model": cell("shape", "size"),
            "GPUs": cell("shape", "gpus"),
            "step, s": step_seconds,
            "speed-up": lambda line: rounded(
                next(one["median_s"] for one in lines if one["shape"]["gpus"] == 1) / line["median_s"], 2
            ),
            **phases("rollout", "check", "train", "wait"),
        },
    ),
    "pass": _rows(
        partial(_latest, ["step/"]),
        lambda _: {
            "policy": _variant,
            "model": cell("shape", "model"),
            "pass, s": step_seconds,
            "tokens/s": cell("tokens_per_s", digits=0),
            "speed": cell("ratio", digits=2),
            "resident, GB": cell("resident_bytes", digits=2, scale=1e-9),
            "peak, GB": cell("peak_bytes", digits=2, scale=1e-9),
        },
    ),
    "recompute": _pivot(
        ["rungs/"],
        lambda line: f"{line['shape']['model']} {_variant(line).split('-')[0]}",
        lambda line: _variant(line).split("-")[1],
        lambda line: f"{line['tokens_per_s']:.0f} / {(line['resident_bytes'] + line['peak_bytes']) * 1e-9:.0f}",
        "recomputed",
    ),
    "kernels": Table(partial(_latest, ["schedules/"]), kernels_table),
    "adapter": _pivot(
        [f"layer-ours/{variant}" for variant in LAYER_NAMES],
        lambda line: f"{line['shape']['model']}, {LAYER_NAMES[_variant(line)]}",
        cell("shape", "tokens"),
        cell("median_s", digits=1, scale=1e6),
        "tokens",
    ),
    "drafts": _rows(
        partial(_latest, ["speculation/cost"]),
        lambda _: {
            "model": cell("shape", "model"),
            "sequences": cell("shape", "sequences"),
            "drafts": cell("shape", "drafts"),
            "without, ms": cell("step_s", digits=2, scale=1e3),
            "with, ms": cell("verify_s", digits=2, scale=1e3),
            "cost": cell("cost", digits=2),
        },
    ),
    "rollouts_with_drafts": _rows(
        rollouts_with_drafts,
        lambda _: {
            "model": _variant,
            "base": _base,
            "completions": lambda line: f"{line['shape']['prompts']} x {line['shape']['completions']}",
            "temperature": cell("shape", "temperature"),
            "surprisal, nats": cell("surprisal", digits=2),
            "without, s": cell("plain_s", digits=2),
            "with, s": cell("median_s", digits=2),
            "speed-up": lambda line: rounded(line["plain_s"] / line["median_s"], 2),
        },
    ),
    "start": _rows(
        partial(_latest, ["start/"]),
        lambda _: {
            "start": _variant,
            "seconds": cell("median_s", digits=1),
            **phases("imports", "vLLM", "adapter kernels"),
        },
    ),
    "quantize": _rows(
        partial(_latest, ["quantize"]),
        lambda _: {
            "model": cell("shape", "model"),
            "method": cell("shape", "method"),
            "residual": cell("shape", "residual"),
            "calibration, sequences x tokens": lambda line: " x ".join(
                map(str, line["shape"].get("calibration_tokens", []))
            ),
            "seconds": cell("median_s", digits=0),
            "GB read and written": lambda line: " and ".join(f"{size / 1e9:.1f}" for size in line["bytes"]),
        },
    ),
}


if __name__ == "__main__":
    sys.exit(main())
