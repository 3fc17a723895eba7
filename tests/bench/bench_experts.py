"""Time the LoRA adapters of a mixture's experts in decoding, without an engine: python -m tests.bench.bench_experts

The adapters of gate, up and down of several blocks are added one after another in a CUDA graph, so that they come from
memory and not from the L2 cache. Results named ``ours`` are of this project's kernel, which the engine uses, and
``vllm`` of vLLM's kernels. The time is that of one block. Base weights are not multiplied. Nothing is measured without
a GPU and vLLM.
"""

import importlib.util
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.bench.harness import captured, check, emit, parser_with, relative_error, timed
from tests.random_models import MIXTURES

SIZE = "30B-A3B"
HIDDEN, INNER, EXPERTS, CHOSEN = (
    MIXTURES[SIZE][name] for name in ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
)
REPLAYS = 8


class Batch:
    """Random rows of tokens that all have the adapter, and what the adapters are added to."""

    def __init__(self, tokens: int) -> None:
        self.x, self.product = random(tokens, HIDDEN), random(tokens * CHOSEN, INNER)
        self.ids = torch.rand(tokens, EXPERTS, device="cuda").topk(CHOSEN).indices.int()
        self.weights = torch.rand(tokens, CHOSEN, device="cuda")
        self.y, self.z = random(tokens, CHOSEN, 2 * INNER) * 0, random(tokens, CHOSEN, HIDDEN) * 0


class Block:
    """Slots with a random adapter of a block's experts."""

    def __init__(self, rank: int) -> None:
        a, b = [random(1, EXPERTS, rank, HIDDEN) for _ in "gu"], [random(1, EXPERTS, INNER, rank) for _ in "gu"]
        self.gate_up, self.down = (a, b), ([random(1, EXPERTS, rank, INNER)], [random(1, EXPERTS, HIDDEN, rank)])
        self.enabled = torch.tensor([1, 0], dtype=torch.int32, device="cuda")
        shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
        self.bases = [torch.empty(shape, device="meta") for shape in shapes]

    def add(self, kind: Any, kernels: Any, batch: Batch) -> None:
        """Add the adapters of gate and up to ``batch.y``, and those of down to ``batch.z``. ``kind`` is the class, this
        project's or vLLM's, whose methods do it."""
        tokens, ids, weights = len(batch.x), batch.ids, batch.weights
        sizes, flags = (*self.bases, tokens, CHOSEN, 1, self.enabled), (EXPERTS, CHOSEN, 2, False, False)
        rows = kind.add_lora_w13(kernels, batch.y, batch.x, *self.gate_up, ids, weights, None, *sizes, *flags)
        rest = tokens, *self.bases, CHOSEN, 1, self.enabled, CHOSEN, False, 0, False
        kind.add_lora_w2(kernels, batch.z, batch.product, *self.down, weights, *rows, *rest)


def random(*shape: int) -> Tensor:
    """Draw a matrix whose product with another such matrix has elements of about 1."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.25


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = parser_with(__doc__, tokens=[1, 8, 32, 64, 128, 256, 512], rank=8, layers=12, repeats=7)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None:
        print("experts: nothing is measured without a CUDA GPU and vLLM", file=sys.stderr)
        return
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    from qerl_pl.rollout.vllm.cuda import OneAdapterKernels, adapter_kernels

    kinds: dict[str, Any] = {"ours": OneAdapterKernels, "vllm": PunicaWrapperGPU}
    config = LoRAConfig(max_loras=1, target_modules=["experts"])
    kernels: Any = adapter_kernels(max(args.tokens), 8, torch.device("cuda"), lora_config=config)
    blocks = [Block(args.rank) for _ in range(args.layers)]
    for tokens in args.tokens:
        kernels.update_metadata(LoRAMapping((7,) * tokens, (7,) * tokens), [7], 2, 100)
        batch, found = Batch(tokens), {}
        for name, kind in kinds.items():
            batch.y.zero_()
            batch.z.zero_()
            blocks[0].add(kind, kernels, batch)
            found[name] = batch.y.clone(), batch.z.clone()
        pairs = zip(("gate and up", "down"), *found.values(), strict=True)
        check((name, relative_error(ours, theirs), 2**-6) for name, ours, theirs in pairs)

        def add_all(kind: Any, batch: Batch) -> None:
            for block in blocks:
                block.add(kind, kernels, batch)

        runs = {name: captured(partial(add_all, kind, batch)) for name, kind in kinds.items()}
        for name, seconds in timed(runs, repeats=args.repeats, inner=REPLAYS).items():
            shape = {"model": SIZE, "tokens": tokens, "rank": args.rank, "layers": args.layers}
            emit(f"experts-adapters/{name}", shape, "bfloat16", [second / args.layers for second in seconds])


if __name__ == "__main__":
    main()
