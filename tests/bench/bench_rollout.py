"""Measure rollout tokens per second, each engine in a process of its own: python -m tests.bench.bench_rollout

Every process starts one vLLM engine on one base, and measures sampling with the adapter and without it, for every
number of sequences. As in a training rollout, completions are sampled at temperature 1 with log-probabilities; prompts
have 128 tokens and completions 256. Each line has the speed of decoding, without the time of the prompts, and its upper
bound: the speed if a step read every weight and every cached key and value once, at the measured bandwidth of the
memory, and nothing else took time.
"""

import argparse
import subprocess
import time
import warnings
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from qerl_pl.hopper import patches
from qerl_pl.memory.parts import adapter_values, kv_token_bytes
from qerl_pl.memory.shape import ModelShape, config_shape
from qerl_pl.model.family import FAMILIES
from qerl_pl.policy.lora import PROJECTIONS, LoraSettings
from qerl_pl.policy.policy import Policy, load_policy, make_policy
from qerl_pl.quant.experts import stack_experts
from qerl_pl.quant.loading import empty_model
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine, launch
from qerl_pl.rollout.vllm.worker import linear_kernels
from tests.bench import harness
from tests.bench.harness import CUDA, DEVICE, DTYPE, FORMATS, RANK
from tests.bench.together import is_together, turn
from tests.random_checkpoints import written_apart
from tests.random_models import MODELS, model_config, run_of

PROMPT_TOKENS, NEW_TOKENS = (128, 256) if CUDA else (16, 16)
DISK_LIMIT, DUMMY = 40e9, "-dummy"  # bytes; for a larger checkpoint, vLLM draws random weights itself


def policy_of(path: str, size: str, base: str, rank: int) -> Policy:
    """Make a policy for an engine to sample from, with a random adapter. Only an NVFP4 base is loaded, because on
    Hopper the engine computes with the trainer's copy of the NVFP4 weights; a base in another format has its shapes
    only (meta device), and the engine reads the weights itself."""
    lora = LoraSettings(rank=rank, alpha=rank)
    if base == "nvfp4":
        policy = load_policy(path, dtype=DTYPE, lora=lora, seed=0, device=DEVICE)
    else:
        model = empty_model(model_config(size), DTYPE)
        stack_experts(model)
        policy = make_policy(model.requires_grad_(False), base=path, dtype=DTYPE, lora=lora, seed=0)
    for module, leaf in policy._trained.values():
        setattr(module, leaf, nn.Parameter(torch.randn(module.get_parameter(leaf).shape, device=DEVICE) * 0.01))
    return policy


def measure(args: argparse.Namespace, size: str, base: str) -> None:
    """Start one engine and print its lines."""
    warnings.filterwarnings("ignore", message="Unsupported layer type")
    policy = policy_of(args.path, size, base, args.rank)
    kernel = harness.decoding_kernel(args.decoding_kernel, base, DTYPE)
    sequences = max(args.sequences)
    engine = VLLMEngine(max_num_seqs=sequences, kv_cache_dtype=args.kv_cache_dtype, decoding_kernel=kernel)
    if args.path.endswith(DUMMY):
        plainly = launch.llm_arguments
        launch.llm_arguments = lambda *args, **named: plainly(*args, **named) | {"load_format": "dummy"}
    if not args.adapter_only:
        patches.graphs_with_adapter = lambda: None  # so passes without the adapter have graphs, too
    if args.preferred_experts:
        prefer_other_experts()
    start = time.perf_counter()
    engine.start(policy, max_model_len=PROMPT_TOKENS + NEW_TOKENS + 8)
    start_s = time.perf_counter() - start
    kernels = engine._call(linear_kernels)
    assert ("NativeLinear" in kernels) == (kernel == "native"), kernels
    if is_together():
        engine.sleep()  # frees its KV cache for engines of other processes
    with turn():
        engine.wake()
        measure_started(args, size, base, engine, start_s, kernels)
        engine.close()  # the next one may need the room


def prefer_other_experts() -> None:
    """Let vLLM compute NVFP4 experts by the kernel that it prefers where there are no adapters. Without this, vLLM
    takes the Marlin kernel as soon as LoRA is enabled."""
    methods: Any = import_module(
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
        ".compressed_tensors_moe_w4a4_nvfp4"
    )
    select = methods.select_nvfp4_moe_backend
    methods.select_nvfp4_moe_backend = lambda config, **keys: select(replace(config, is_lora_enabled=False), **keys)


def measure_started(
    args: argparse.Namespace, size: str, base: str, engine: VLLMEngine, start_s: float, kernels: dict[str, int]
) -> None:
    """Print the lines of an engine that runs."""
    bytes_per_s = bandwidth()
    generator = torch.Generator().manual_seed(0)

    def prompts(count: int) -> list[list[int]]:
        return torch.randint(256, (count, PROMPT_TOKENS), generator=generator).tolist()

    if not args.path.endswith(DUMMY):
        harness.check_finite(*engine.score(prompts(1)), *engine.score(prompts(1), adapter=False))
    for count in args.sequences:

        def seconds(new_tokens: int, seed: int, *, adapter: bool, count: int = count) -> tuple[float, int]:
            begin = time.perf_counter()
            groups = engine.generate(prompts(count), Sampling(1, new_tokens), seed=seed, adapter=adapter)
            return time.perf_counter() - begin, sum(len(completion.tokens) for [completion] in groups)

        runs: dict[bool, list[tuple[float, int]]] = {True: [], **({} if args.adapter_only else {False: []})}
        prefill: dict[bool, float] = {}
        for adapter in runs:
            seconds(8, 0, adapter=adapter)  # a warm-up
            prefill[adapter] = min(seconds(1, repeat, adapter=adapter)[0] for repeat in range(args.repeats))
        for repeat in range(args.repeats):
            for adapter, samples in runs.items():
                samples.append(seconds(NEW_TOKENS, 1 + repeat, adapter=adapter))
        for adapter, samples in runs.items():
            harness.emit(
                "rollout/generate",
                shape_of(args, size, base, count, adapter=adapter),
                "bfloat16",
                sorted(took for took, _ in samples),
                tokens_per_s=max(tokens / took for took, tokens in samples),
                decoded_per_s=max((tokens - count) / (took - prefill[adapter]) for took, tokens in samples),
                roof_per_s=count / step_bytes(args, size, base, count, adapter=adapter) * bytes_per_s,
                prefill_s=prefill[adapter],
                start_s=start_s,
                kernels=kernels,
            )


def shape_of(args: argparse.Namespace, size: str, base: str, count: int, *, adapter: bool) -> dict[str, object]:
    """Make the settings by which lines are told apart."""
    return {
        "model": size,
        "base": base,
        "rank": args.rank,
        "adapter": "ours" if adapter else "none",
        "sequences": count,
        "kv": args.kv_cache_dtype,
        "decoding": harness.decoding_kernel(args.decoding_kernel, base, DTYPE),
        **({"experts": "preferred"} if args.preferred_experts else {}),
    }


def step_bytes(args: argparse.Namespace, size: str, base: str, count: int, *, adapter: bool) -> float:
    """Compute how many bytes a decoding step of ``count`` sequences has to read, halfway through the completions:
    blocks, output matrix, cached keys and values, and the adapter. In a mixture of experts, only as many experts count
    as ``count`` tokens are expected to choose."""
    config = model_config(size)
    shape = shape_in(size, base)
    head = shape.vocabulary * shape.hidden * DTYPE.itemsize
    cached = (PROMPT_TOKENS + NEW_TOKENS / 2) * kv_token_bytes(shape, DTYPE.itemsize, args.kv_cache_dtype)
    targets = FAMILIES[config.model_type].targets(PROJECTIONS)
    run = run_of(DTYPE.itemsize, rank=args.rank, targets=targets, expert_rank=0)
    values = adapter_values(shape, run) if adapter else 0
    experts = shape.experts
    idle = experts.num * (1 - experts.chosen / experts.num) ** count if experts.num else 0
    unread = (
        shape.num_layers * idle * 3 * experts.inner * shape.hidden * (9 / 16 if base == "nvfp4" else DTYPE.itemsize)
    )
    return shape.linear_bytes - unread + head + count * cached + values * DTYPE.itemsize


@cache
def shape_in(size: str, base: str) -> ModelShape:
    """Find the dimensions of a model whose base has the given format. The result is cached, because a large mixture of
    experts takes seconds."""
    return config_shape(model_config(size), NVFP4 if base == "nvfp4" else None, DTYPE)


def bandwidth() -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.zeros(2**30 if CUDA else 2**26, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    [seconds] = harness.timed({"copy": lambda: target.copy_(source)}, repeats=5).values()
    return 2 * source.nbytes / seconds[0]


def main(argv: list[str] | None = None) -> None:
    """Measure what ``--output`` lacks, each engine in a process of its own."""
    parser = harness.parser_with(
        __doc__, "--folder", "--output", "--path", rank=RANK, sequences=[8, 64, 256] if CUDA else [4], repeats=2
    )
    parser.add_argument("--sizes", nargs="*", choices=MODELS, default=["7B", "32B"] if CUDA else ["tiny"])
    parser.add_argument("--bases", nargs="*", choices=FORMATS, default=["nvfp4", "bf16"])
    parser.add_argument(
        "--preferred-experts", action="store_true", help="by the kernel that vLLM prefers, not Marlin's"
    )
    parser.add_argument("--adapter-only", action="store_true", help="nothing without the adapter")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--decoding-kernel", default="auto", choices=harness.DECODING_KERNELS, help="of NVFP4 bases")
    args = parser.parse_args(argv)
    if args.path:
        measure(args, args.sizes[0], args.bases[0])
        return
    done = [line["shape"] for line in harness.kept(args.output) if line["name"] == "rollout/generate"]
    options = ["--adapter-only"] * args.adapter_only + ["--preferred-experts"] * args.preferred_experts
    for name in ("rank", "repeats", "kv_cache_dtype", "decoding_kernel"):
        options += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    failed = []
    for size, base in product(args.sizes, args.bases):
        if left := [count for count in args.sequences if shape_of(args, size, base, count, adapter=True) not in done]:
            one = ["--sizes", size, "--bases", base, "--path", str(checkpoint(args.folder, size, base))]
            words = [*options, *one, "--sequences", *map(str, left)]
            try:
                harness.run_apart("bench_rollout", words, output=args.output)
            except subprocess.CalledProcessError:
                failed.append((size, base))
    if failed:
        raise SystemExit(f"failed: {failed}")


def checkpoint(folder: Path, size: str, base: str) -> Path:
    """Write a random checkpoint and return its folder. If the weights would be too large for a disk, only the
    configuration is written."""
    config = model_config(size)
    if base == "bf16" and shape_in(size, base).linear_bytes > DISK_LIMIT:
        path = folder / f"{size}-{base}{DUMMY}"
        config.architectures, config.dtype = [type(empty_model(config, DTYPE)).__name__], torch.bfloat16
        config.save_pretrained(path)
        save_file({}, path / "model.safetensors")  # a checkpoint of no weights
        return path
    return written_apart(folder, size, base)


if __name__ == "__main__":
    main()
