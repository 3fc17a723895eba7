"""What an adapter adds to the linears of a decoding step: python -m tests.bench.bench_rollout_lora [--tune]

The fused linears of all layers in one CUDA graph, each a bf16 base and the adapter's product; ``added_us`` is the
median's excess over the bases alone, a linear. ``ours-late`` starts each kernel when the last one has ended. ``--tune``
looks for better block sizes than the rule's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from triton import cdiv
from triton.runtime.errors import OutOfResources

from qerl_pl.kernels import lora
from tests.bench.harness import FUSED, RANK, captured, check, emit, linear_shapes, relative_error, timed

HAS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float16)  # Triton interprets no bf16
Add = Callable[[Tensor, Tensor, "Linear"], None]


class Linear(NamedTuple):
    """One fused linear and its adapter."""

    weight: Tensor
    a: list[Tensor]
    b: list[Tensor]

    def reference(self, x: Tensor) -> Tensor:
        """[T, N] fp64."""
        y = x.double() @ self.weight.double().t()
        return lora.add_lora_reference(y, x, self.a, self.b, torch.zeros(len(x), dtype=torch.int64))


def random_linear(size: str, name: str, rank: int) -> Linear:
    """Of one of ``SIZES``; the adapter's product is a fifth of the base's."""
    shapes = [linear_shapes(size)[part] for part in FUSED[name]]
    inputs = shapes[0][1]

    def draw(rows: int, cols: int, std: float) -> Tensor:
        return torch.empty(rows, cols, dtype=DTYPE, device=DEVICE).normal_(std=std)

    a = [draw(rank, inputs, inputs**-0.5) for _ in shapes]
    b = [draw(rows, rank, 0.2 * rank**-0.5) for rows, _ in shapes]
    return Linear(draw(sum(rows for rows, _ in shapes), inputs, inputs**-0.5), a, b)


def competitors(num_tokens: int) -> dict[str, Add]:
    """Who adds the adapter's product to y; what is not installed does not compete."""
    indices = torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE)

    def late(y: Tensor, x: Tensor, linear: Linear) -> None:
        lora.expand(y, lora.shrink(x, linear.a, early=False), linear.b, indices, early=False)

    found: dict[str, Add] = {
        "ours": lambda y, x, linear: lora.add_lora(y, x, linear.a, linear.b, indices),
        "ours-late": late,
        "matmul": lambda y, x, linear: lora.add_lora_by_matmul(y, x, linear.a, linear.b, indices),
    }
    if HAS_GPU and importlib.util.find_spec("vllm"):
        from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink

        meta = LoRAKernelMeta.make(1, num_tokens, DEVICE)
        meta.prepare_tensors(indices)
        batch = meta.meta_args(num_tokens, False)

        def vllm(y: Tensor, x: Tensor, linear: Linear) -> None:
            hidden = x.new_empty(len(linear.a), num_tokens, len(linear.a[0]), dtype=torch.float32)
            lora_shrink(x, [matrix[None] for matrix in linear.a], hidden, *batch, 1.0)
            lora_expand(hidden, [matrix[None] for matrix in linear.b], y, *batch, add_inputs=True)

        found["vllm"] = vllm
    return found


def plain(add: Add | None, linear: Linear, x: Tensor) -> Tensor:
    """The base, then the adapter."""
    y = F.linear(x, linear.weight)
    if add:
        add(y, x, linear)
    return y


def decode(run: Callable[[Linear, Tensor], Tensor], linears: Sequence[Linear], num_tokens: int) -> Callable[[], object]:
    """All linears in one CUDA graph; without a GPU, one after another."""
    inputs = {cols: activations(num_tokens, cols) for cols in {linear.weight.shape[1] for linear in linears}}

    def step() -> None:
        for linear in linears:
            run(linear, inputs[linear.weight.shape[1]])

    return captured(step)


def activations(num_tokens: int, cols: int) -> Tensor:
    return torch.randn(num_tokens, cols, device=DEVICE).to(DTYPE)


def compare(size: str, num_tokens: int, linears: Sequence[Linear], *, rank: int, repeats: int) -> None:
    """Check and time everybody."""
    runs = {name: partial(plain, add) for name, add in competitors(num_tokens).items()}
    for linear in linears[: len(FUSED)]:
        x = activations(num_tokens, linear.weight.shape[1])
        exact = linear.reference(x)
        check((name, relative_error(run(linear, x), exact), 2**-8) for name, run in runs.items())
    steps = {name: decode(run, linears, num_tokens) for name, run in {"base": partial(plain, None), **runs}.items()}
    times = timed(steps, repeats=repeats)
    base = statistics.median(times["base"])
    for name, seconds in times.items():
        added = (statistics.median(seconds) - base) / len(linears) * 1e6
        shape = {"model": size, "linears": len(linears), "tokens": num_tokens, "rank": rank}
        emit(f"rollout-lora/{name}", shape, str(DTYPE).removeprefix("torch."), seconds, added_us=added)


class Blocks(NamedTuple):
    """Of both kernels."""

    shrink: lora.ShrinkBlocks
    expand: lora.ExpandBlocks


CHOICES = {  # by how much there is to gain
    "expand": {"steps": (1, 2, 4, 8), "columns": (32, 64, 128, 256), "warps": (4, 8), "tokens": (16, 32, 64, 128)},
    "shrink": {"depth": (64, 128, 256), "warps": (4, 8), "tokens": (16, 32, 64, 128), "rank": (16, 32), "stages": (2,)},
}


def changes(K: int) -> Iterator[Callable[[Blocks], Blocks]]:
    """One at a time."""
    for splits in (1, 2, 4, 7, 14, 28, 37):
        yield lambda old, splits=splits: old._replace(
            shrink=old.shrink._replace(chunk=old.shrink.depth * cdiv(K, old.shrink.depth * splits))
        )
    for kernel, fields in CHOICES.items():
        for field, values in fields.items():
            for value in values:
                yield lambda old, kernel=kernel, field=field, value=value: old._replace(
                    **{kernel: getattr(old, kernel)._replace(**{field: value})}
                )


def tune(size: str, name: str, num_tokens: int, linears: Sequence[Linear], *, repeats: int, seconds: float) -> None:
    """Better blocks than the rule's, one change after another, each kept if it gains, until the time is over."""
    indices = torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE)
    K, rank = linears[0].weight.shape[1], len(linears[0].a[0])
    base = decode(partial(plain, None), linears, num_tokens)

    def added_us(blocks: Blocks) -> float:
        def add(y: Tensor, x: Tensor, linear: Linear) -> None:
            lora.expand(y, lora.shrink(x, linear.a, blocks.shrink), linear.b, indices, blocks.expand)

        try:
            times = timed({"base": base, "both": decode(partial(plain, add), linears, num_tokens)}, repeats=repeats)
        except OutOfResources:
            return float("inf")
        return (times["both"][repeats // 4] - times["base"][repeats // 4]) / len(linears) * 1e6

    end = time.perf_counter() + seconds
    rule = best = Blocks(
        lora.shrink_blocks(num_tokens, K, rank, len(linears[0].a)),
        lora.expand_blocks(num_tokens, [len(matrix) for matrix in linears[0].b]),
    )
    tried = {rule: added_us(rule)}
    for change in changes(K):
        candidate = change(best)
        if (
            candidate not in tried
            and candidate.shrink.chunk % candidate.shrink.depth == 0
            and time.perf_counter() < end
        ):
            tried[candidate] = added_us(candidate)
            if tried[candidate] < 0.98 * tried[best]:
                best = candidate
    shape = {"model": size, "linear": name, "tokens": num_tokens, "rank": rank}
    found = {kernel: blocks._asdict() for kernel, blocks in best._asdict().items()}
    times = {"added_us": tried[best], "rule_us": tried[rule]}
    emit("rollout-lora/tune", shape, str(DTYPE).removeprefix("torch."), **times, tried=len(tried), **found)


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", default=["7B", "32B"] if HAS_GPU else ["tiny"])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 32, 64, 256] if HAS_GPU else [2])
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--layers", type=int, default=28 if HAS_GPU else 1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--linears", nargs="*", choices=FUSED, default=list(FUSED), help="those to tune")
    parser.add_argument("--seconds", type=float, default=100.0, help="that tuning may take")
    args = parser.parse_args(argv)
    if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
        print("rollout_lora: nothing is measured without a CUDA GPU", file=sys.stderr)
        return
    share = args.seconds / (len(args.sizes) * len(args.tokens) * len(args.linears))
    for size in args.sizes:
        linears = [random_linear(size, name, args.rank) for _ in range(args.layers) for name in FUSED]
        for num_tokens in args.tokens:
            if not args.tune:
                compare(size, num_tokens, linears, rank=args.rank, repeats=args.repeats)
                continue
            for index, name in enumerate(FUSED):
                if name in args.linears:
                    chosen = linears[index :: len(FUSED)]
                    tune(size, name, num_tokens, chosen, repeats=args.repeats, seconds=share)


if __name__ == "__main__":
    main()
