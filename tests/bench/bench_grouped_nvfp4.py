"""Time the NVFP4 experts of Qwen3-30B-A3B in decoding, without an engine: python -m tests.bench.bench_grouped_nvfp4

Gate and up, the activation, down and the sum over each token's experts are computed for several blocks one after
another in a CUDA graph, so that the weights come from memory and not from the L2 cache. Results named ``ours`` are of
``qerl_pl/hopper/grouped_nvfp4.py``, which reads the weights in the trainer's order, and ``marlin`` of vLLM's kernels,
which read an order of their own. The times are those of one block. ``roof_s`` is the time in which a copy moves as many
bytes, read and written bytes added up, as the weights of the experts that have rows take. ``--sweep 1`` also measures
other tiles. Without a GPU, a small mixture is computed in Triton's interpreter, and its times mean nothing.
"""

import os
import sys
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.bench.bench_rollout import bandwidth
from tests.bench.harness import CUDA, DEVICE, captured, check, emit, parser_with, relative_error, timed
from tests.random_models import MIXTURES

if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when the kernels are defined
from qerl_pl.hopper import grouped_nvfp4
from qerl_pl.hopper.grouped_nvfp4 import Tile, find_rows, multiply
from qerl_pl.quant.formats import PackedWeight

SIZE = "30B-A3B" if CUDA else "tiny-A"
HIDDEN, INNER, EXPERTS, CHOSEN = (
    MIXTURES[SIZE][name] for name in ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
)
DTYPE = torch.bfloat16 if CUDA else torch.float32  # the interpreter has no bf16
REPLAYS = 4


class Block:
    """Random weights of a block's experts, in the trainer's order and, on a GPU, in Marlin's."""

    def __init__(self) -> None:
        self.gate, self.up, self.down = draw_stack(INNER, HIDDEN), draw_stack(INNER, HIDDEN), draw_stack(HIDDEN, INNER)
        self.up.global_scale.copy_(self.gate.global_scale)  # vLLM has one factor for both
        self.marlin: dict[str, Any] = to_marlin(self) if CUDA else {}

    def bytes_read(self, batch: "Batch") -> float:
        """Return the size of the codes and block scales of the experts that have rows."""
        size = sum(stack.codes.nbytes + stack.block_scale.nbytes for stack in (self.gate, self.up, self.down))
        return size * batch.ids.unique().numel() / EXPERTS

    def ours(self, batch: "Batch", tile: Tile | None = None) -> Tensor:
        """Compute the experts by ``grouped_nvfp4``, [T, H]."""
        rows = find_rows(batch.ids, EXPERTS)
        y = multiply(batch.x, [self.gate, self.up], rows, tile=tile)
        z = multiply(activation(y), [self.down], rows, batch.shares, tile)
        return z.view(len(batch.x), CHOSEN, HIDDEN).sum(1)

    def theirs(self, batch: "Batch") -> Tensor:
        """Compute the experts by vLLM's Marlin kernels, [T, H]."""
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe

        return fused_marlin_moe(batch.x, topk_weights=batch.shares, topk_ids=batch.ids, **self.marlin)

    def exact(self, batch: "Batch", tokens: int) -> Tensor:
        """Compute the experts of the first tokens in fp32, from dequantised weights."""
        out = torch.zeros(tokens, HIDDEN, device=DEVICE)
        for token, choice in product(range(tokens), range(CHOSEN)):
            expert = int(batch.ids[token, choice])
            gate, up, down = (dense(stack, expert) for stack in (self.gate, self.up, self.down))
            x = batch.x[token].float()
            out[token] += batch.shares[token, choice] * (down @ (F.silu(gate @ x) * (up @ x)))
        return out


class Batch:
    """Random inputs, experts and weights of tokens."""

    def __init__(self, tokens: int) -> None:
        self.x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=DTYPE)
        self.ids = torch.rand(tokens, EXPERTS, device=DEVICE).topk(CHOSEN).indices.int()
        self.shares = torch.rand(tokens, CHOSEN, device=DEVICE).softmax(-1)


def draw_stack(outputs: int, inputs: int) -> PackedWeight:
    """Draw weights whose products with inputs of about 1 are about 1. Block scales are from 32 to 448, as those of
    pretrained weights are."""
    codes = torch.randint(256, (EXPERTS, outputs, inputs // 2), device=DEVICE, dtype=torch.uint8)
    scales = torch.randint(0x60, 0x7F, (EXPERTS, outputs, inputs // 16), device=DEVICE, dtype=torch.uint8)
    return PackedWeight(codes, scales, (1 + torch.rand(EXPERTS, device=DEVICE)) / (600 * inputs**0.5))


def dense(stack: PackedWeight, expert: int) -> Tensor:
    """Dequantise the matrix of an expert, [N, K] fp32."""
    from qerl_pl.quant.nvfp4 import dequantize

    return dequantize(PackedWeight(*(tensor[expert] for tensor in vars(stack).values())), torch.float32)


def to_marlin(block: Block) -> dict[str, Any]:
    """Rearrange a block's weights by vLLM's functions; returns arguments of ``fused_marlin_moe``."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4
    from vllm.scalar_type import scalar_types

    gate_up = [
        torch.cat([getattr(block.gate, kind), getattr(block.up, kind)], dim=1) for kind in ("codes", "block_scale")
    ]
    layer: Any = SimpleNamespace(
        num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size_per_partition=INNER, params_dtype=DTYPE
    )
    stacks = (*gate_up, block.gate.global_scale), vars(block.down).values()
    arguments = [
        tensor for codes, scales, factor in stacks for tensor in (codes, scales.view(torch.float8_e4m3fn), factor)
    ]
    found = marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin(layer, *arguments, is_act_and_mul=True)
    names = "w1", "w1_scale", "global_scale1", "w2", "w2_scale", "global_scale2"
    kind = {"bias1": None, "bias2": None, "quant_type_id": scalar_types.float4_e2m1f.id}
    return {**dict(zip(names, found, strict=True)), **kind}


def activation(y: Tensor) -> Tensor:
    """Compute silu(gate) * up, [S, I], from [S, 2I]; on a GPU by vLLM's kernel, which Marlin's experts use too."""
    if not CUDA:
        gate, up = y.chunk(2, dim=1)
        return F.silu(gate) * up
    out = y.new_empty(len(y), y.shape[1] // 2)
    torch.ops._C.silu_and_mul(out, y)
    return out


def tiles(tokens: int) -> dict[str, Tile]:
    """Name tiles to measure besides the one that ``choose_tile`` chooses."""
    rows = grouped_nvfp4.choose_tile(tokens * CHOSEN, EXPERTS).rows
    shapes = [(64, 128, 4, 128), (128, 128, 4, 128), (128, 128, 4, 168), (128, 128, 8, 128), (128, 256, 8, 128)]
    shapes += [(256, 128, 8, 128), (256, 128, 8, 255)]
    sizes = [(rows, *shape[:3], stages, shape[3]) for shape, stages in product(shapes, (3, 4))]
    return {"ours-" + "-".join(map(str, size)): Tile(*size) for size in sizes}


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    numbers = [1, 8, 32, 128, 256, 512] if CUDA else [1, 3]
    parser = parser_with(__doc__, "--output", tokens=numbers, layers=8 if CUDA else 1, repeats=7, sweep=0)
    args = parser.parse_args(argv)
    if CUDA:
        try:
            import vllm._custom_ops  # noqa: F401  # registers the activation and Marlin's kernels
        except ImportError:
            print("grouped-nvfp4: nothing is measured without vLLM", file=sys.stderr)
            return
    torch.manual_seed(0)
    blocks, bytes_per_s = [Block() for _ in range(args.layers)], bandwidth()
    for tokens in args.tokens:
        batch = Batch(tokens)
        variants: dict[str, Any] = {"ours": Block.ours, **({"marlin": Block.theirs} if CUDA else {})}
        if args.sweep:
            variants |= {name: partial(Block.ours, tile=tile) for name, tile in tiles(tokens).items()}
        few = min(tokens, 4)
        exact = blocks[0].exact(batch, few)
        check((name, relative_error(run(blocks[0], batch)[:few], exact), 2**-6) for name, run in variants.items())

        def run_all(run: Any, batch: Batch) -> None:
            for block in blocks:
                run(block, batch)

        runs = {name: captured(partial(run_all, run, batch)) for name, run in variants.items()}
        roof = blocks[0].bytes_read(batch) / bytes_per_s
        for name, seconds in timed(runs, repeats=args.repeats, inner=REPLAYS).items():
            shape = {"model": SIZE, "tokens": tokens, "layers": args.layers}
            each = [second / args.layers for second in seconds]
            emit(f"grouped-nvfp4/{name}", shape, DTYPE, each, output=args.output, roof_s=roof)


if __name__ == "__main__":
    main()
