"""docs/performance.md from the result lines, and the README's table of speeds: python -m tests.bench.report

Reads docs/results/*.jsonl, as the benchmarks print them. Every number of the page comes from there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from string import Template

from tests.bench.report_rollouts import (
    Line,
    adapters_table,
    base_of,
    blocks_table,
    cards_table,
    decoding_note,
    draw_rollouts,
    draw_steps,
    host_table,
    layers_table,
    long_run_phases_table,
    long_runs_table,
    methods_table,
    of_kind,
    profiles,
    ranks_table,
    rollouts_table,
    schedules_table,
    shown,
    steps_table,
    table,
)
from tests.bench.report_summary import adapter_table, headline_table, memory_table, speeds_table

ROOT = Path(__file__).parents[2]
RESULTS, PAGE, README = ROOT / "docs" / "results", ROOT / "docs" / "performance.md", ROOT / "README.md"

TEXT = Template("""\
# Performance

Made by `python -m tests.bench.report` from the lines in `docs/results`, which `make bench` prints. No benchmark prints
a line while its check against a reference is red. Weights and tokens are random; adapters have rank 32 on all linears.
Measured on:

$origins

## In short

How many times as fast a 4-bit base is as bf16 on the same code, adapters on both: rollouts by the number of sequences,
and whole GRPO steps of 8 rows of up to 2048 tokens. What is empty has not been measured in one run. Decoding kernels
are compared below.

$speeds

How much longer rollouts take with the adapter than without, on the same engine with an NVFP4 base, by the number of
sequences:

$added

Memory of whole steps, which `python -m qerl_pl plan` tells beforehand. What they took is the most that another process
saw of them, looking every 5 ms; what a run logs of itself (`memory/peak_gib`) is up to half a GiB above, as it counts
its CUDA context as a whole GiB from the start:

$memory

## Dequantising

The seven linears of one block of Qwen2.5-7B to bf16. Bytes are read and written, each once; GB/s are over the time of
the kernels, and the last column compares medians, the launches included.

$dequantize

One weight at a time:

$one

`copy` reads as much as it writes and `fill` only writes. Four fifths of what a dequantiser moves is written.

## Linears of one 7B block with LoRA, forward and backward

`nvfp4` and `bf16` are this repository's layer; `+lora` is PEFT's formula with a bf16 adapter, around the named base.
Where the median is far above the time of the kernels, the host's launches are the limit. In `caller`, backward runs in
the thread that asked for it, not in one of autograd's; training does so.

$linears

## One block

Forward and backward of one 7B block from its embedded tokens on, no checkpointing. `bf16+peft` is PEFT's layer with a
bf16 adapter, `bf16+peft-fp32` with the fp32 adapter that PEFT makes by default; the attention is the same in all.

$block

## A step

The policy's forward and backward over packed rows, gradient checkpointing on, log-probabilities and entropies included.
`offload` keeps the checkpoints in host memory. Peak is on top of what is resident, base and adapter.

$step

## Packing

The same rows packed, and padded to the longest for transformers' own attention: hidden states, forward and backward.

$padding

## Resident base

Bits a weight of a linear, scales included; the rest is bf16 embeddings, head, norms and biases. Other is what torch's
allocator adds when it rounds sizes up.

$resident

## Log-probabilities and entropies

Forward and backward over the vocabulary; `ratio` is time over the naive way's.

$logprobs

## The offline quantiser

Round to nearest; the whole command, its imports included.

$quantize

The error of its methods on calibration data, of the linears' outputs and relative to them: the tiny policy, and a
random block with outlier channels.

$methods

## Rollouts

Tokens a second of whole calls, prompts included, with log-probabilities and a seed for each completion: the best of the
repeats. The engine is the same with the adapter and without; `added` compares the medians. The roof is what the
memory's bandwidth allows in decoding, which is compared with it without the prompts: a step reads every weight and
every cached key and value once, and nothing else takes time. Engines of one model and commit ran on one GPU, one after
the other.

$rollouts

![Tokens a second of each sequence by their number, dotted without the adapter](rollout.png)

How long an engine takes to start (`bench_start`): `first` with all caches empty, `again` the same one, and `other` with
other lengths and numbers of sequences, for which vLLM compiles a graph but finds the kernels. Of the seconds, `imports`
are those of vLLM's modules, `vLLM` those of its own start, and `adapter` those of the adapter's slots and kernels.

$starts

What vLLM's scheduler and its output processor take of a step, and what they take with
`qerl_pl/rollout/vllm/scheduler.py`, on a machine without a GPU. With vLLM's, a step of 128 and more sequences of a 7B
model takes the host about as long as the GPU, so a faster base gains little there.

$host

What a decoding step spends its time on, by kernels and by functions of the host:

$profiles

What an adapter adds to each fused linear of a decoding step, in microseconds; all linears of the model in one CUDA
graph, on a bf16 base. `ours` is what the engine uses, `late` starts no kernel early, `matmul` is two cuBLAS products
for each matrix.

$adapters

The same with the blocks of 64 tokens that `expand` had before, and with those of 16 that it has now:

$blocks

Kernels for the fused linears of a block, each alone, in microseconds (`bench_schedules`): Humming's by its own rule and
with the blocks of `qerl_pl/rollout/vllm/humming.py` where these differ, `nvfp4_decode` for few tokens and `nvfp4_batch`
for more (`qerl_pl/kernels`), with which an engine decodes where it can, but for what they leave to Humming. Gate and up
of 14B were measured before they went to `nvfp4_decode` with 64 tokens, and before `nvfp4_batch` had blocks of unequal
width (08e3224), which leave less of the GPU idle for gate and up of 14B with more than 128 tokens and of 32B with more
than 64; down of 14B has gone to Humming with 256 where it has no adapter.
$decoding

$schedules

Layers of NVFP4 linears with their adapters one after another in a CUDA graph, without attention (`bench_layer`), by the
kernels of this repository. `none` has no adapter. `together` is what an engine does: x A^T starts the base's kernel at
once, which adds the product with B to its own sums (`kernels/lora_hopper.py`; with more than 64 tokens, of gate and up
alone up to commit 65f810d, and since 443f568 of all linears of which the base leaves room and time for x A^T). `apart`
adds the adapter afterwards with the kernels for any base, as an engine does else, and `matmul` with cuBLAS.

$layers_ours

The same with bases by Humming, before: `ours` are the kernels for any base, `late` starts no kernel before the last one
has ended, `beside` computes x A^T on a second stream, `before` computes it before the base, `matmul` leaves adapters to
cuBLAS; the others have other blocks than the rule's.

$layers

What launching every kernel of a layer early did, norms and the gate too (commit 7e474b8, taken back): linears alone
gain (`none-early`), and adapters lose more (`all-early` against `ours`), probably because their programs wait on
multiprocessors that the base still needs. Humming adds partial sums up in any order: none of these repeats the bits of
its last run. Since 443f568 adapters are in the kernels of the base, and norms, gates and rotations start early again
beside these, by Inductor's own option.

$early

## Whole steps

One prompt of 256 tokens, 8 completions of 2048, gradient checkpointing, through train.py with all its callbacks: the
medians of the steps after the first; speeds compare the fastest of them. `check` is what the canary and the ledger
take: the ledger looks at every fourth rollout from commit fc6d425 on, which the medians then hardly see. `between` is
what lies between the phases: logs, data, the copy of a checkpoint. Rows without it leave it out of the step, though
checkpoints (1 GB at 7B) were written there. Memory is all that the run takes of the GPU, and what the plan said before
it was started.

$steps

![Seconds of a step by phase, and memory predicted and measured](step.png)

## Small cards

Another process holds the rest of the GPU's memory.

$cards

## Long runs

Each column has the four quarters of a run, its first step left out. In the run of commit 443f568 the last quarter has
the process's end too, when Lightning copied the base to the host (it stays where it is since then); and another
benchmark measured on the host's other GPU meanwhile. That of 08e3224, alone on its host, was ended by its limit in
seconds.

$long_runs

The median seconds of their phases. `train`, and most of `rollout`, are the GPU's; `check` and `between` are the host's
work as well, and vary most with it. In the first half of the run of 80ef12e the host was slower at everything: steps of
completions this short wait for it between kernels. `between` has the replacement of the checkpoint before the last one,
of 1 GB, which is no longer waited for after 08e3224.

$long_run_phases

## Several GPUs

One global batch, 8 completions a prompt; the runs start together and take turns. `wait` is what the fastest rank
waits for the others. Curves are not the same to the last bit: bf16 sums depend on the batch, and Humming's on chance.

$ranks

## Rules that these numbers made

- Linears dequantise into scratch memory and multiply with cuBLAS at every token count. At $large tokens the kernels of
  the block's linears take $large_share of those on a dense base; at $small tokens $small_share. A fused product could
  win the difference at the small end, which a trainer that packs its micro-batches does not visit.
- The adapter is one node with its linear: its kernels take $node_share of the time of separate nodes at $large tokens.
- Blocks are recomputed up to their last product, not including it.
""")


def results() -> list[Line]:
    """Of all benchmarks."""
    texts = [text for path in sorted(RESULTS.glob("*.jsonl")) for text in path.read_text().splitlines() if text]
    return [line for line in map(json.loads, texts) if "name" in line]  # other pages have results there too


def with_speeds(readme: str, lines: list[Line]) -> str:
    """The README with its table of speeds made anew."""
    head, tail = "<!-- speeds -->\n", "\n<!-- end -->"
    before, after = readme.split(head)
    return before + head + headline_table(lines) + tail + after.split(tail, 1)[1]


def main() -> int:
    """Write the page and the README's table; 1 where there are no results."""
    lines = results()
    if not lines:
        print(f"no results in {RESULTS}", file=sys.stderr)
        return 1
    linears = {(line["name"], line["shape"]["tokens"]): line["device_s"] for line in of_kind(lines, "linears/")}
    small, large = (choose(tokens for _, tokens in linears) for choose in (min, max))
    PAGE.write_text(
        TEXT.substitute(
            speeds=speeds_table(lines),
            memory=memory_table(lines),
            added=adapter_table(lines),
            origins="\n".join(sorted({f"- {_origin(line)}" for line in lines if line["device"] != "cpu"})),
            dequantize=_table(
                [line for line in of_kind(lines, "dequantize/") if line["name"] != "dequantize/one"],
                {
                    "GB/s": lambda line: f"{line['gb_per_s']:.0f}",
                    "kernels, us": lambda line: f"{1e6 * line['device_s']:.0f}",
                    **_median(1e6, "us"),
                    "times nvfp4": lambda line: f"{line['ratio']:.2f}",
                },
            ),
            one=_table(
                [line for line in lines if line["name"] == "dequantize/one"],
                {
                    "out x in": lambda line: f"{line['shape']['out']} x {line['shape']['in']}",
                    "GB/s": lambda line: f"{line['gb_per_s']:.0f}",
                    "kernel, us": lambda line: f"{1e6 * line['device_s']:.1f}",
                    **_median(1e6, "us"),
                },
            ),
            linears=_table(
                of_kind(lines, "linears/"),
                {
                    "tokens": lambda line: line["shape"]["tokens"],
                    "backward in": lambda line: "autograd's" if line["shape"]["own_thread"] else "caller",
                    "kernels, ms": lambda line: f"{1e3 * line['device_s']:.2f}",
                    **_median(1e3, "ms"),
                    "times bf16": lambda line: f"{line['ratio']:.2f}",
                },
            ),
            block=_table(of_kind(lines, "block/"), {**_median(1e3, "ms"), "speed": _ratio}),
            step=_table(
                of_kind(lines, "step/"),
                {
                    "model": _model,
                    "tokens": lambda line: line["shape"]["tokens"],
                    **_median(1, "s"),
                    "tokens/s": lambda line: f"{line['tokens_per_s']:.0f}",
                    "speed": _ratio,
                    "resident, GB": lambda line: f"{line['resident_bytes'] / 1e9:.2f}",
                    "peak, GB": lambda line: f"{line['peak_bytes'] / 1e9:.2f}",
                },
            ),
            padding=_table(
                of_kind(lines, "padding/"),
                {
                    "tokens": lambda line: line["shape"]["tokens"],
                    "padded": lambda line: line["shape"]["padded"],
                    **_median(1, "s"),
                    "tokens/s": lambda line: f"{line['tokens_per_s']:.0f}",
                },
            ),
            resident=_table(
                of_kind(lines, "resident/"),
                {
                    "model": _model,
                    "bytes": lambda line: f"{line['resident_bytes']:,}",
                    "packed": lambda line: f"{line['packed_bytes']:,}",
                    "bits a weight": lambda line: f"{8 * line['packed_bytes'] / line['num_packed_weights']:.3f}",
                    "embeddings and head": lambda line: f"{line['embedding_bytes']:,}",
                    "norms and biases": lambda line: f"{line['norm_and_bias_bytes']:,}",
                    "other": lambda line: f"{_unaccounted(line):,}",
                },
            ),
            logprobs=_table(
                of_kind(lines, "logprobs/"),
                {
                    "tokens": lambda line: line["shape"]["tokens"],
                    "vocabulary": lambda line: line["shape"]["vocabulary"],
                    **_median(1e3, "ms"),
                    "ratio": lambda line: f"{line['ratio']:.2f}",
                    "peak, MiB": lambda line: f"{line['peak_bytes'] / 2**20:.0f}",
                },
            ),
            quantize=_table(
                of_kind(lines, "quantize/"),
                {
                    "model": _model,
                    "seconds": lambda line: f"{line['median_s']:.1f}",
                    "GPU, GB": lambda line: f"{line['device_bytes'] / 1e9:.2f}",
                    "host, GB": lambda line: f"{line['host_bytes'] / 1e9:.2f}",
                    "host mapped, GB": lambda line: f"{line['host_mapped_bytes'] / 1e9:.2f}",
                    "read, GB": lambda line: f"{line['read_bytes'] / 1e9:.1f}",
                    "written, GB": lambda line: f"{line['written_bytes'] / 1e9:.1f}",
                },
            ),
            methods=methods_table(lines),
            rollouts=rollouts_table(lines),
            adapters=adapters_table(lines),
            schedules=schedules_table(lines),
            decoding=decoding_note(lines),
            layers=layers_table(lines, "layer"),
            layers_ours=layers_table(lines, "layer-ours"),
            early=layers_table(lines, "layer-early"),
            blocks=blocks_table(lines),
            starts=_table(
                of_kind(lines, "start/"),
                {
                    "model": _model,
                    "base": base_of,
                    "sequences": lambda line: line["shape"]["sequences"],
                    "tokens": lambda line: line["shape"]["tokens"],
                    "seconds": lambda line: f"{line['median_s']:.1f}",
                    "imports": partial(_phase, "imports"),
                    "vLLM": partial(_phase, "vLLM"),
                    "adapter": partial(_phase, "adapter"),
                },
            ),
            host=host_table(lines),
            profiles=profiles(lines),
            steps=steps_table(lines),
            cards=cards_table(lines),
            long_runs=long_runs_table(lines),
            long_run_phases=long_run_phases_table(lines),
            ranks=ranks_table(lines),
            small=small,
            large=large,
            small_share=f"{linears['linears/nvfp4', small] / linears['linears/bf16', small]:.2f}",
            large_share=f"{linears['linears/nvfp4', large] / linears['linears/bf16', large]:.2f}",
            node_share=f"{linears['linears/bf16', large] / linears['linears/bf16+lora', large]:.2f}",
        )
    )
    README.write_text(with_speeds(README.read_text(), lines))
    draw_rollouts(lines, PAGE.with_name("rollout.png"))
    draw_steps(lines, PAGE.with_name("step.png"))
    return 0


def _table(lines: list[Line], columns: dict[str, Callable[[Line], object]]) -> str:
    rows = [(line["name"].split("/", 1)[1], *(column(line) for column in columns.values())) for line in lines]
    return table(["", *columns], rows)


def _median(scale: float, unit: str) -> dict[str, Callable[[Line], object]]:
    def show(line: Line) -> str:
        low, high = line["spread_s"]
        return f"{scale * line['median_s']:.4g} ({scale * low:.4g} to {scale * high:.4g})"

    return {f"median, {unit} (range)": show}


def _ratio(line: Line) -> str:
    return "" if line["ratio"] is None else f"{line['ratio']:.3f}"


def _model(line: Line) -> str:
    return line["shape"]["model"]


def _phase(name: str, line: Line) -> str:
    return shown(line.get("phases_s", {}).get(name), 1)


def _unaccounted(line: Line) -> int:
    return line["resident_bytes"] - sum(line[f"{part}_bytes"] for part in ("packed", "embedding", "norm_and_bias"))


def _origin(line: Line) -> str:
    return f"{line['device']}, torch {line['torch']}, Triton {line['triton']}, commit {line['commit']}"


if __name__ == "__main__":
    sys.exit(main())
