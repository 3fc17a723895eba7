"""Write docs/performance.md and the README's table of speeds from docs/results: python -m tests.bench.report

The page answers one question per section. Its text is pages/performance.md; which lines answer a question, and with
which columns, stands in ``TABLES``. Every number comes from the JSON lines that the benchmarks print. Of several lines
with one setting the last one counts.
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
TEXT = Path(__file__).parent / "pages" / "performance.md"
RESULTS, PAGE, README = ROOT / "docs" / "results", ROOT / "docs" / "performance.md", ROOT / "README.md"
GIB = 2**30
HEADLINE = (8, 32, 128, 256)
KERNEL_LINES = (("rule", "ours"), ("decode", "batch"))  # Humming's schedules, native kernels
LAYER_NAMES = {
    "none": "no adapter",
    "together": "fused",
    "unfetched": "fused, not fetched",
    "apart": "separate",
}
PARTS = {"head/rollout": "step, head", "aqn-norm/rollout": "step, norms", "aqn-norm/norms": "norms alone"}


class Table(NamedTuple):
    """Table that answers one question."""

    select: Callable[[list[Line]], list[Line]]
    """Choose the lines of the table out of all lines."""
    markdown: Callable[[list[Line]], str]
    """Make the table from these lines."""


def results() -> list[Line]:
    """Read the lines of all benchmarks; lines of other pages have no name."""
    texts = [text for path in sorted(RESULTS.glob("*.jsonl")) for text in path.read_text().splitlines() if text]
    return [line for line in map(json.loads, texts) if "name" in line]


def page(lines: list[Line]) -> str:
    """Make docs/performance.md; a question without lines has no section."""
    lead, *sections = TEXT.read_text().split("\n## ")
    parsed = [section.strip().split("\n\n") for section in sections]  # title, text, name of the table
    answers = [(title, text, TABLES[name.split()[2]]) for title, text, name in parsed]
    found = [(title, text, table, table.select(lines)) for title, text, table in answers]
    usual = Counter(_machine(line) for *_, selected in found for line in selected).most_common(1)[0][0]
    written = [lead.strip().format(usual=usual)]
    for title, text, table, selected in found:
        if selected:
            about = textwrap.fill(f"{text} {_origin(selected, usual)}", 120, break_on_hyphens=False)
            written.append(f"## {title}\n{about}\n\n{table.markdown(selected)}")
    return "\n\n".join(written) + "\n"


def with_speeds(readme: str, lines: list[Line]) -> str:
    """Replace the table of speeds in the README's text."""
    head, tail = "<!-- speeds -->\n", "\n<!-- end -->"
    before, after = readme.split(head)
    return before + head + headline_table(lines) + tail + after.split(tail, 1)[1]


def headline_table(lines: list[Line]) -> str:
    """Speed-up of NVFP4 over bf16 per model, and the smallest GPU memory with which a run finished."""
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
            *(_speed_up(speeds.get((model, count))) for count in HEADLINE),
            _digits(steps.get(model), 2),
            f"{smallest[model]:g}" if model in smallest else "",
        ]
        for model in dict.fromkeys(model for model, _ in speeds)
    ]
    columns = (f"{count} sequences" for count in HEADLINE)
    return table(["model", *columns, "whole step of 8", "smallest GPU, GiB"], rows)


def at_one_commit(lines: list[Line], first: str, second: str) -> dict[tuple[str, int], tuple[Line, Line]]:
    """Find the last two engines of two kinds that one commit measured, by model and number of sequences.

    All pairs of a model are of one GPU, on which it was measured last.

    Args:
        lines: of ``bench_rollout``; engines with other than the usual settings are left out.
        first, second: "nvfp4" or "bf16", or the same with " alone": without an adapter.
    """
    found: dict[tuple[str, int, str, str], dict[str, Line]] = {}
    for line in _of_kind("rollout/generate", lines):
        shape = line["shape"]
        usual = (shape["kv"], shape["rank"]) == ("auto", RANK)
        if usual and _kernel(line) != "humming":
            kind = shape["base"] + (" alone" if shape["adapter"] == "none" else "")
            found.setdefault((shape["model"], shape["sequences"], _gpu(line), line["commit"]), {})[kind] = line
    both = {key: (kinds[first], kinds[second]) for key, kinds in found.items() if {first, second} <= {*kinds}}
    gpus = {model: gpu for model, _, gpu, _ in both}
    pairs = {(model, count): pair for (model, count, gpu, _), pair in both.items() if gpu == gpus[model]}
    return {key: pairs[key] for key in sorted(pairs, key=lambda key: (*_by_size(key[0]), key[1]))}


def rollouts(lines: list[Line]) -> list[Line]:
    """NVFP4 and bf16 engines with an adapter at one commit, and NVFP4 engines with and without it at one commit."""
    pairs = [*at_one_commit(lines, "bf16", "nvfp4").values(), *at_one_commit(lines, "nvfp4", "nvfp4 alone").values()]
    return [line for pair in pairs for line in pair]


def rollouts_table(lines: list[Line]) -> str:
    """Tokens per second, one column per number of sequences."""
    speeds, adapters = at_one_commit(lines, "bf16", "nvfp4"), at_one_commit(lines, "nvfp4", "nvfp4 alone")
    counts = sorted({count for _, count in speeds})
    rows = []
    for model in dict.fromkeys(model for model, _ in speeds):
        pairs = [speeds.get((model, count)) for count in counts]
        alone = [adapters.get((model, count)) for count in counts]
        label = [model, *_gpus(pairs)]
        for place, base in enumerate(("bf16", "nvfp4")):
            rates = [_digits(pair and pair[place]["tokens_per_s"], 0) for pair in pairs]
            rows.append([*label, f"{base}, tokens/s", *rates])
        rows.append([*label, "speed-up", *map(_speed_up, pairs)])
        shares = [_digits(pair and pair[1]["decoded_per_s"] / pair[1]["roof_per_s"], 2) for pair in pairs]
        rows.append([*label, "nvfp4, share of the roof", *shares])
        if any(alone):
            rows.append([model, *_gpus(alone), "nvfp4, added by LoRA", *map(_added, alone)])
    return table(["model", "GPU", "", *counts], rows)


def whole_steps(lines: list[Line]) -> list[Line]:
    """Choose the last run of each model and policy on a whole GPU, sorted by size, without long runs and single
    steps."""
    runs = [
        line
        for line in _of_kind("grpo/", lines)
        if "median_s" in line and not line["shape"].get("cap") and not line.get("quarters")
        if line.get("steps_done") != 1
        if _kernel(line) != "humming"
    ]
    return sorted(_last(runs, lambda line: (line["name"], line["shape"]["model"], _base(line))), key=_model_size)


def times_bf16(line: Line, runs: Iterable[Line]) -> float | None:
    """Fastest step of bf16 in the same setting and at the same commit, over this run's; None where there is none."""
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
    """Choose the last run of each recipe's shape, model and policy, those of one shape together."""
    names = "mean", "group", "updates", "model"

    def setting(line: Line) -> tuple[Any, ...]:
        return *(line["shape"][name] for name in names), _policy(line)

    return sorted(_last(_of_kind("recipe/", lines), setting), key=lambda line: setting(line)[: len(names)])


def recipes_table(lines: list[Line]) -> str:
    """Seconds of a recipe's steps by phase."""
    columns: dict[str, Column] = {
        "completions": lambda line: f"{line['shape']['prompts']} x {line['shape']['group']}",
        "mean": _shape("mean"),
        "updates": _shape("updates"),
        "policy": _policy,
        "step, s": _median(1),
        "speed-up": lambda line: _digits(times_bf16(line, lines), 2),
        **{phase: _phase(phase) for phase in ("rollout", "check", "logprob", "train", "between")},
    }
    return rows_table(columns, lines)


def steps_table(lines: list[Line]) -> str:
    """Seconds of whole steps by phase."""
    columns: dict[str, Column] = {
        "model": _shape("model"),
        "policy": _policy,
        "completion": _shape("completion"),
        "step, s": _median(1),
        "speed-up": lambda line: _digits(times_bf16(line, lines), 2) if line["name"] == "grpo/step" else "",
        **{phase: _phase(phase) for phase in PHASES},
        "gap, nats": _number("gap", 3),
    }
    return rows_table(columns, lines)


def cards(lines: list[Line]) -> list[Line]:
    """Choose the last run of each model, policy and memory limit that has a plan, without long runs, and those that
    were refused."""

    def setting(line: Line) -> tuple[object, ...]:
        return _policy(line), *(line["shape"][name] for name in ("model", "completion", "cap"))

    refused = _of_kind("grpo/too-small", lines)
    ran = [
        line
        for line in _of_kind("grpo/step", lines)
        if "predicted_peak_gib" in line["logged"] and not line.get("quarters")
    ]
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
    """Format a Markdown table."""
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


def _latest(kinds: Sequence[str], lines: Iterable[Line]) -> list[Line]:
    chosen = [line for kind in kinds for line in _of_kind(kind, lines)]
    return _last(chosen, lambda line: (line["name"], json.dumps(line["shape"])))


def _machine(line: Line) -> str:
    return f"{line['device']}, torch {line['torch']}, Triton {line['triton']}"


def _gpu(line: Line) -> str:
    """Name the GPU in a word, e.g. H100."""
    return line["device"].removeprefix("NVIDIA ").split()[0]


def _gpus(pairs: Iterable[tuple[Line, Line] | None]) -> list[str]:
    """Name the GPU of pairs from ``at_one_commit``; a list of one name."""
    return list(dict.fromkeys(_gpu(pair[0]) for pair in pairs if pair))


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


def _speed_up(pair: tuple[Line, Line] | None) -> str:
    return f"{pair[1]['tokens_per_s'] / pair[0]['tokens_per_s']:.2f}" if pair else ""


def _added(pair: tuple[Line, Line] | None) -> str:
    """Share of the time of an engine without an adapter that the adapter adds."""
    return f"{100 * (pair[0]['median_s'] / pair[1]['median_s'] - 1):.0f} %" if pair else ""


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
    """Make a column with the median and the range."""

    def show(line: Line) -> str:
        low, high = (f"{scale * end:.4g}" for end in line["spread_s"])
        return f"{scale * line['median_s']:.4g} ({low} to {high})"

    return show


def _number(name: str, digits: int, scale: float = 1) -> Column:
    return lambda line: _digits(None if line.get(name) is None else scale * line[name], digits)


def _of_base(base: str, name: str) -> Column:
    return lambda line: _digits(line[base][name], 0)


def _quarters(name: str, digits: int, scale: float = 1) -> Column:
    return lambda line: " ".join(_digits(scale * each, digits) for each in line["quarters"][name])


def _rows(select: Callable[[list[Line]], list[Line]], columns: Mapping[str, Column]) -> Table:
    return Table(select, partial(rows_table, columns))


def _pivot(kinds: Sequence[str], row: Column, column: Column, value: Column, label: str) -> Table:
    return Table(partial(_latest, kinds), partial(pivot, row, column, value, label=label))


TABLES = {
    "rollouts": Table(rollouts, rollouts_table),
    "steps": Table(whole_steps, steps_table),
    "recipes": Table(recipes, recipes_table),
    "memory": _rows(
        cards,
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
    "families": _rows(
        partial(_latest, ["families/"]),
        {
            "family": _shape("family"),
            **{f"rollout tokens/s, {base}": _of_base(base, "rollout_tokens_per_s") for base in ("nvfp4", "bf16")},
            **{f"training tokens/s, {base}": _of_base(base, "training_tokens_per_s") for base in ("nvfp4", "bf16")},
        },
    ),
    "long_run": _rows(
        lambda lines: [line for line in _of_kind("grpo/step", lines) if line.get("quarters")][-1:],
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
    "ranks": Table(partial(_latest, ["ddp/step"]), ranks_table),
    "pass": _rows(
        partial(_latest, ["step/"]),
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
    "recompute": _pivot(
        ["rungs/"],
        lambda line: f"{_shape('model')(line)} {_variant(line).split('-')[0]}",
        lambda line: _variant(line).split("-")[1],
        lambda line: f"{line['tokens_per_s']:.0f} / {(line['resident_bytes'] + line['peak_bytes']) * 1e-9:.0f}",
        "recomputed",
    ),
    "cards": _rows(
        partial(_latest, ["cards/"]),
        {
            "model": _shape("model"),
            "GPU": _gpu,
            "GPU memory, GiB": _shape("card_gib"),
            "recomputed": _variant,
            "tokens per pass": lambda line: line["micro_batch_tokens"],
            "tokens/s": _number("tokens_per_s", 0),
            "peak, GB": _number("peak_bytes", 1, 1e-9),
            "planned, GB": _number("predicted_bytes", 1, 1e-9),
        },
    ),
    "exact": _pivot(
        ["head/rollout", "aqn-norm/"],
        lambda line: f"{PARTS[line['name']]}, {line['shape']['variant']}",
        _shape("sequences"),
        _number("median_s", 0, 1e6),
        "sequences",
    ),
    "kernels": Table(partial(_latest, ["schedules/"]), kernels_table),
    "adapter": _pivot(
        [f"layer-ours/{variant}" for variant in ("none", "together", "unfetched", "apart")],
        lambda line: f"{line['shape']['model']}, {LAYER_NAMES[_variant(line)]}",
        _shape("tokens"),
        _number("median_s", 1, 1e6),
        "tokens",
    ),
    "start": _rows(
        partial(_latest, ["start/"]),
        {
            "start": _variant,
            "seconds": _number("median_s", 1),
            **{phase: _phase(phase) for phase in ("imports", "vLLM", "adapter kernels")},
        },
    ),
}


if __name__ == "__main__":
    sys.exit(main())
