"""Output errors of the quantiser's methods: python -m tests.bench.bench_methods

Two models: the tiny policy on problems with their solutions, and one block of Qwen2.5-7B's shape whose weights are
random and whose norms make one input channel in a hundred an outlier, on random text. An error is that of a linear's
outputs on the calibration data, relative to the outputs; ``mean`` is over linears, ``ratio`` is to round to nearest.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from qerl_pl.quant.calibration import read_calibration
from qerl_pl.quant.quantize import FormatName, Method, quantize_checkpoint
from qerl_pl.tasks.arithmetic import distinct_expressions, question, solution
from qerl_pl.tools.tiny import make_tiny, make_tokenizer
from tests.bench.harness import SIZES, check, emit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS: tuple[FormatName, ...] = ("nvfp4", "mxfp4", "nf4")
METHODS: tuple[Method, ...] = ("rtn", "mse", "awq", "gptq")
OUTLIER_SHARE, OUTLIER = 0.01, 20.0


def outlier_block(folder: Path, size: str) -> Path:
    """A random model of one block, bf16."""
    torch.manual_seed(0)
    shape, tokenizer = SIZES[size], make_tokenizer()
    config = Qwen2Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=1,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_heads,
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).bfloat16()
    for name, weight in model.named_parameters():
        if "layernorm" in name:
            weight.data[torch.rand(weight.shape) < OUTLIER_SHARE] = OUTLIER
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def worked_problems(count: int) -> Iterator[str]:
    """Text like that of the tiny policy's own completions."""
    for expression in distinct_expressions(count, seed=0, validation=False):
        yield f"{question(expression)} {solution(expression)}"


def random_text(count: int) -> Iterator[str]:
    """Rows of random letters."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        letters = torch.randint(97, 123, (256,), generator=generator)
        yield bytes(letters.tolist()).decode()


def compare(
    name: str,
    model: Path,
    texts: Iterator[str],
    folder: Path,
    formats: Sequence[FormatName],
    ignore: Sequence[str] = ("lm_head",),
) -> None:
    """All methods on one model."""
    rows = folder / f"{name}.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    calibration = read_calibration(str(rows), model, samples=64, length=256)
    for fmt in formats:
        nearest = None
        for method in METHODS:
            start = time.perf_counter()
            layers = quantize_checkpoint(
                model,
                folder / f"{name}-{fmt}-{method}",
                format=fmt,
                method=method,
                ignore=ignore,
                calibration=calibration,
                device=DEVICE,
            )
            errors = [layer.output_error for layer in layers if layer.output_error is not None]
            check([(f"the number of linears of {name} without an error", float(len(layers) - len(errors)), 0)])
            mean = sum(errors) / len(errors)
            nearest = nearest or mean
            shape = {"model": f"{name}, {len(layers)} linears", "format": fmt}
            seconds = [time.perf_counter() - start]
            emit(f"methods/{method}", shape, fmt, seconds, mean=mean, worst=max(errors), ratio=mean / nearest)


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="7B" if DEVICE == "cuda" else "tiny", help="shape of the random block")
    parser.add_argument("--formats", nargs="*", default=FORMATS, choices=FORMATS)
    parser.add_argument("--ignore", nargs="*", default=[], help="linears of the block to leave out, e.g. re:.*mlp")
    parser.add_argument("--tiny", type=Path, help="folder of the tiny policy; default: it is made, in 90 seconds")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.tiny is None:
            args.tiny = folder / "tiny"
            make_tiny(args.tiny)
        compare("tiny policy", args.tiny, worked_problems(1024), folder, args.formats)
        block = outlier_block(folder / "block", args.size)
        compare(f"{args.size} block", block, random_text(128), folder, args.formats, ("lm_head", *args.ignore))


if __name__ == "__main__":
    main()
