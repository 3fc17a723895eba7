"""Rollout tokens a second, each engine in a process of its own: python -m tests.bench.bench_rollout

Every process measures one base, rank and kind of adapter kernels at every number of sequences, with the adapter and
without it (the same engine; vLLM has CUDA graphs for both). Prompts have 128 tokens and completions 256, sampled at
temperature 1 with log-probabilities, which is what a rollout is. Beside the speed of decoding, prompts left out, stands
its roof: what the memory's measured bandwidth would allow, if a step read every weight and every cached key and value
once and nothing else took time. With ``--profile`` there are two lines more: what the GPU and what the host spend a
decoding step on. Results are appended to ``--output``, and what is there already is not measured again.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from qerl_pl.memory.parts import adapter_values, kv_token_bytes
from qerl_pl.memory.shape import config_shape
from qerl_pl.policy.lora import PROJECTIONS, LoraLinear, LoraSettings
from qerl_pl.policy.policy import Policy, make_policy
from qerl_pl.quant.formats import Format
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.rollout.vllm import plugin as vllm_plugin
from qerl_pl.rollout.vllm.worker import linear_kernels
from tests.bench.checkpoints import written_apart
from tests.bench.harness import DECODING_KERNELS, check, decoding_kernel, emit, model_config, pack_linears, timed
from tests.bench.together import is_together, turn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
PROMPT_TOKENS, NEW_TOKENS = (128, 256) if DEVICE == "cuda" else (16, 16)
PROFILED_TOKENS, PROFILED_NAMES = (64 if DEVICE == "cuda" else 16), 25
DISK_LIMIT, DUMMY = 40e9, "-dummy"  # bytes of a checkpoint; of a larger one, vLLM draws the weights itself


def shell_policy(base: str, size: str, rank: int, fmt: Format | None) -> Policy:
    """What an engine needs of a policy: its adapter, and of its base the format (None: dense), on the meta device."""
    assert fmt in (None, NVFP4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(size), dtype=DTYPE)
    if fmt:
        pack_linears(model, DTYPE, "meta")
    lora = LoraSettings(rank=rank, alpha=rank)
    policy = make_policy(model.requires_grad_(False), base=base, dtype=DTYPE, lora=lora, seed=0)
    for module in policy.modules():
        if isinstance(module, LoraLinear):
            for matrix in (module.lora_A["default"], module.lora_B["default"]):
                value = torch.randn(matrix.get_parameter("weight").shape, device=DEVICE) * 0.01
                matrix.weight = nn.Parameter(value)
    return policy


def measure(args: argparse.Namespace, base: str) -> None:
    """Start one engine and print its lines."""
    warnings.filterwarnings("ignore", message="Unsupported layer type")
    dummy = base.endswith(DUMMY)
    policy = shell_policy(base, args.size, args.rank, format_of(args))
    kernel = decoding_kernel(args.decoding_kernel, args.base, DTYPE)
    engine = VLLMEngine(max_num_seqs=max(args.sequences), kv_cache_dtype=args.kv_cache_dtype, decoding_kernel=kernel)
    if dummy:
        engine._arguments["load_format"] = "dummy"
    if args.stock_adapter:
        vllm_plugin.register = lambda: None
        # vLLM hashes this: a cached graph calls other kernels.
        engine._arguments["additional_config"] = {
            "adapter_kernels": "stock",
            "decoding_kernel": kernel,
            "norms": "float32",
        }
    start = time.perf_counter()
    engine.start(policy, max_model_len=PROMPT_TOKENS + NEW_TOKENS + 8)
    start_s = time.perf_counter() - start
    found = engine._call(linear_kernels)
    assert any("nvfp4_decode" in name for name in found) == (kernel == "native"), found
    if is_together():
        engine.sleep()  # the others may need the room of its cache
    with turn():
        engine.wake()
        measure_started(args, engine, start_s, dummy=dummy)
        engine.close()  # the next one may need the room


def measure_started(args: argparse.Namespace, engine: VLLMEngine, start_s: float, *, dummy: bool) -> None:
    """Print the lines of an engine that runs."""
    bytes_per_s = bandwidth()
    generator = torch.Generator().manual_seed(0)

    def prompts(count: int) -> list[list[int]]:
        return torch.randint(256, (count, PROMPT_TOKENS), generator=generator).tolist()

    if not dummy:
        [row] = engine.score(prompts(1))
        [without] = engine.score(prompts(1), adapter=False)
        finite = torch.tensor([*row, *without]).isfinite().all()
        check([("the number of scores that are not finite", float(not finite), 0)])
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
            for adapter, found in runs.items():
                found.append(seconds(NEW_TOKENS, 1 + repeat, adapter=adapter))
        for adapter, found in runs.items():
            emit(
                "rollout/generate",
                shape_of(args, count, adapter=adapter),
                "bfloat16",
                sorted(took for took, _ in found),
                tokens_per_s=max(tokens / took for took, tokens in found),
                decoded_per_s=max((tokens - count) / (took - prefill[adapter]) for took, tokens in found),
                roof_per_s=count / step_bytes(args, count, adapter=adapter) * bytes_per_s,
                prefill_s=prefill[adapter],
                start_s=start_s,
            )
        if args.profile:
            run = partial(engine.generate, prompts(count), Sampling(1, PROFILED_TOKENS), seed=1)
            profile(run, shape_of(args, count, adapter=True))


def shape_of(args: argparse.Namespace, count: int, *, adapter: bool) -> dict[str, object]:
    """What tells a line from the others."""
    kernels = ("stock" if args.stock_adapter else "ours") if adapter else "none"
    return {
        "model": args.size,
        "base": args.base,
        "rank": args.rank,
        "adapter": kernels,
        "engine": "stock" if args.stock_adapter else "ours",
        "sequences": count,
        "kv": args.kv_cache_dtype,
        "decoding": decoding_kernel(args.decoding_kernel, args.base, DTYPE),
    }


def format_of(args: argparse.Namespace) -> Format | None:
    """Of the base; None is dense."""
    return NVFP4 if args.base == "nvfp4" else None


def step_bytes(args: argparse.Namespace, count: int, *, adapter: bool) -> float:
    """What a decoding step reads at least, halfway through: blocks, head, keys and values, and the adapter."""
    shape = config_shape(model_config(args.size), format_of(args), DTYPE)
    head = shape.vocabulary * shape.hidden * DTYPE.itemsize
    cached = (PROMPT_TOKENS + NEW_TOKENS / 2) * kv_token_bytes(shape, DTYPE.itemsize, args.kv_cache_dtype)
    values = adapter_values(shape, rank=args.rank, targets=PROJECTIONS, train_norms=False) if adapter else 0
    return shape.linear_bytes + head + count * cached + values * DTYPE.itemsize


def bandwidth() -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(2**30 if DEVICE == "cuda" else 2**26, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    [seconds] = timed({"copy": lambda: target.copy_(source)}, repeats=5).values()
    return 2 * source.nbytes / seconds[0]


def profile(run: Callable[[], object], shape: dict[str, object]) -> None:
    """Print what a decoding step took on the GPU, by kernel, and on the host, by function: the most expensive ones."""
    if DEVICE == "cuda":
        start = time.perf_counter()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            run()
        took = time.perf_counter() - start
        events = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
        busy = sum(event.self_device_time_total for event in events) * 1e-6 / took
        total = Counter[str]()
        for event in events:
            total[event.key[:80]] += event.self_device_time_total  # names of templates begin alike
        kernels = {name: us / PROFILED_TOKENS for name, us in total.most_common(PROFILED_NAMES)}
        emit("rollout/kernels", shape, "bfloat16", busy_share=busy, step_us=1e6 * took / PROFILED_TOKENS, us=kernels)
    watch = cProfile.Profile()
    watch.runcall(run)
    table = pstats.Stats(watch).stats  # pyright: ignore[reportAttributeAccessIssue]
    own = {f"{Path(file).name}:{line} {name}": found[2] for (file, line, name), found in table.items()}
    dear = sorted(own, key=lambda name: -own[name])[:PROFILED_NAMES]
    total = 1e6 * sum(own.values()) / PROFILED_TOKENS
    emit(
        "rollout/host", shape, "bfloat16", step_us=total, us={name: 1e6 * own[name] / PROFILED_TOKENS for name in dear}
    )


def main(argv: list[str] | None = None) -> None:
    """Measure what ``--output`` lacks."""
    cuda = DEVICE == "cuda"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", default=["7B", "32B"] if cuda else ["tiny"])
    parser.add_argument("--bases", nargs="*", default=["nvfp4", "bf16"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[32])
    parser.add_argument("--sequences", nargs="*", type=int, default=[8, 64, 256] if cuda else [4])
    parser.add_argument("--adapters", nargs="*", default=["ours"], choices=["ours", "stock"])
    parser.add_argument("--adapter-only", action="store_true", help="nothing without the adapter")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--decoding-kernel", default="auto", choices=DECODING_KERNELS, help="of NVFP4 bases")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="say what a decoding step spends its time on")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "qerl-bench")
    parser.add_argument("--output", type=Path, help="file of JSON lines to go on with; default: print them")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        one = json.loads(args.child)
        args.size, args.base, args.rank, args.stock_adapter = one["size"], one["base"], one["rank"], one["stock"]
        measure(args, one["path"])
        return
    lines = map(json.loads, args.output.read_text().splitlines()) if _has(args.output) else []
    done = [line["shape"] for line in lines if line["name"] == "rollout/generate"]
    failed = []
    for size in args.sizes:
        for base in args.bases:
            for rank in args.ranks:
                for adapter in args.adapters:
                    args.size, args.base, args.rank, args.stock_adapter = size, base, rank, adapter == "stock"
                    left = [n for n in args.sequences if shape_of(args, n, adapter=True) not in done]
                    if left and not spawn(args, left):
                        failed.append((size, base, rank, adapter))
    if failed:
        raise SystemExit(f"failed: {failed}")


def spawn(args: argparse.Namespace, sequences: list[int]) -> bool:
    """One engine in a new process; its lines go to the output. Returns whether it came to its end."""
    args.folder.mkdir(parents=True, exist_ok=True)
    path = checkpoint(args.folder, args.size, args.base)
    one = {"size": args.size, "base": args.base, "rank": args.rank, "stock": args.stock_adapter, "path": str(path)}
    command = [sys.executable, "-m", "tests.bench.bench_rollout", "--child", json.dumps(one)]
    command += ["--repeats", str(args.repeats), "--kv-cache-dtype", args.kv_cache_dtype]
    command += ["--decoding-kernel", args.decoding_kernel]
    command += ["--sequences", *map(str, sequences)]
    flags = {"--profile": args.profile, "--adapter-only": args.adapter_only}
    command += [flag for flag, wanted in flags.items() if wanted]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith('{"name"'):
                print(line, end="", file=sys.stderr)
            elif args.output:
                with args.output.open("a") as file:
                    file.write(line)
            else:
                print(line, end="", flush=True)
    return process.returncode == 0


def checkpoint(folder: Path, size: str, base: str) -> Path:
    """A random one, or the configuration alone where the weights would be too large for a disk."""
    config = model_config(size)
    blocks = config.num_hidden_layers * config.hidden_size * (config.intermediate_size * 3 + config.hidden_size * 2)
    if base == "bf16" and 2 * blocks > DISK_LIMIT:
        path = folder / f"{size}-{base}{DUMMY}"
        config.architectures, config.dtype = ["Qwen2ForCausalLM"], torch.bfloat16
        config.save_pretrained(path)
        save_file({}, path / "model.safetensors")  # a checkpoint of no weights
        return path
    return written_apart(folder, size, base)


def _has(path: Path | None) -> bool:
    return path is not None and path.exists()


if __name__ == "__main__":
    main()
