"""Measure time and memory of forward and backward of whole random models: python -m tests.bench.bench_model

A step is what the policy does in training: packed rows of different lengths, gradient checkpointing, log-probabilities
and entropies, and backward into the adapter. ``ratio`` is tokens per second divided by those of ``bf16+peft``: a dense
base with PEFT's LoRA layers and a bf16 adapter, everything else the same; ``bf16+peft-fp32`` has the fp32 adapter that
PEFT makes by default. ``peak_bytes`` is what a step takes in addition to ``resident_bytes``, which are base and
adapter.

With ``--rungs`` only the NVFP4 base is measured, with every value of ``model.gradient_checkpointing``, once with
transformers' sequences of kernels and once with liger-kernel's (where it is installed). The JSON lines have the speed,
the measured and the predicted time and peak of memory (predicted by the memory plan), and how much log-probabilities
and gradients differ from those of a policy that recomputes all blocks without fused kernels.
"""

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from qerl_pl.memory import parts
from qerl_pl.memory.fitting import time_per_token
from qerl_pl.memory.shape import config_shape
from qerl_pl.model.family import FAMILIES
from qerl_pl.policy.elementwise import fused_wanted
from qerl_pl.policy.lora import PROJECTIONS, LoraSettings
from qerl_pl.policy.policy import Policy, make_policy
from qerl_pl.policy.recompute import ladder
from qerl_pl.quant.nvfp4 import NVFP4
from tests.bench import harness
from tests.bench.harness import CUDA, DEVICE, RANK
from tests.random_models import MIXTURES, densify, model_config, random_model, run_of

DTYPE = torch.bfloat16
Build = Callable[[PretrainedConfig], Policy]


def ours(model: PreTrainedModel, **settings: Any) -> Policy:
    """Make a policy with this repository's LoRA layers on a base."""
    lora = LoraSettings(rank=RANK, alpha=RANK)
    return make_policy(model, base="random", dtype=DTYPE, lora=lora, seed=0, **settings).to(DEVICE)


def peft(model: PreTrainedModel, *, fp32: bool) -> Policy:
    """Make a policy with PEFT's LoRA layers on a base."""
    targets = list(FAMILIES[model.config.model_type].targets(PROJECTIONS))
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config, autocast_adapter_dtype=fp32)
    assert isinstance(adapted, PeftModel)
    policy = Policy(adapted, base="random", dtype=DTYPE)
    policy.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    return policy.train().to(DEVICE)


def variants() -> dict[str, Build]:
    """Return, by the name that the results use, functions that build a policy from a model's configuration."""

    def base(config: PretrainedConfig, *, packed: bool) -> PreTrainedModel:
        return random_model(config, NVFP4 if packed else None, dtype=DTYPE, device=DEVICE)

    return {
        "nvfp4": lambda config: ours(base(config, packed=True), gradient_checkpointing=True),
        "bf16": lambda config: ours(base(config, packed=False), gradient_checkpointing=True),
        "bf16+peft": lambda config: peft(base(config, packed=False), fp32=False),
        "bf16+peft-fp32": lambda config: peft(base(config, packed=False), fp32=True),
        "nvfp4-offload": lambda config: ours(base(config, packed=True), gradient_checkpointing="offload"),
    }


def draw(tokens: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Draw rows with ``tokens`` tokens together, and the mask of their completions, both [B, S]. The lengths of rows
    range from 0.25 to 1.75 times their mean; each prompt is an eighth of this mean."""
    rows = max(1, tokens // 2048)
    mean = tokens // rows
    lengths = torch.linspace(0.25, 1.75, rows).mul(mean).round().long() if rows > 1 else torch.tensor([tokens])
    lengths[-1] += tokens - int(lengths.sum())
    column = torch.arange(int(lengths.max()))
    mask = (column >= mean // 8) & (column < lengths.unsqueeze(1))
    drawn = torch.randint(vocabulary, mask.shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(DEVICE), mask.to(DEVICE)


def step(policy: Policy, tokens: Tensor, mask: Tensor) -> Tensor:
    """Do forward and backward, and drop the gradients; returns the log-probabilities."""
    stats = policy.token_stats(tokens, mask, temperature=1.0)
    (stats.logprobs.sum() / mask.sum()).backward()
    policy.zero_grad()
    return stats.logprobs.detach()


def measured(
    policy: Policy, batch: tuple[Tensor, Tensor], held: int, *, repeats: int, warmups: int
) -> tuple[list[float], int]:
    """Run steps (see ``step``); returns their seconds, sorted, and the peak of the GPU's allocated bytes minus
    ``held``, the bytes that were allocated before."""
    harness.reset_peak()
    [seconds] = harness.timed({"step": lambda: step(policy, *batch)}, repeats=repeats, warmups=warmups).values()
    return seconds, torch.cuda.max_memory_allocated() - held


def errors(size: str) -> Iterator[tuple[str, float, float]]:
    """Compare log-probabilities and gradients of policies with the same weights, in models of two blocks: an NVFP4 base
    with a dense one, and this project's LoRA layers (NVFP4) and PEFT's (dense) with the computation in fp32. Yields
    what is compared, the relative error, and the error that is allowed."""
    config = model_config(size, num_layers=2)
    tokens, mask = draw(600, config.vocab_size)
    model = random_model(config, NVFP4, dtype=DTYPE, device=DEVICE)

    def outcome(policy: Policy, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                generator = torch.Generator(DEVICE).manual_seed(len(name))
                torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        policy.dtype = dtype
        stats = policy.token_stats(tokens, mask, temperature=1.0)
        stats.logprobs.sum().backward()
        gradients = [p.grad.flatten().float() for p in policy.parameters() if p.grad is not None]
        policy.model.unload()
        return stats.logprobs.detach(), torch.cat(gradients)

    packed = outcome(ours(model, gradient_checkpointing=True), DTYPE)
    dense = densify(model, DTYPE)
    same = outcome(ours(dense, gradient_checkpointing=True), DTYPE)
    stock = outcome(peft(dense, fp32=False), DTYPE)
    exact = outcome(ours(dense.float(), gradient_checkpointing=True), torch.float32)
    yield "packed base against dense base", harness.relative_error(packed[0], same[0]), 1e-6
    # The attention's backward adds up in any order.
    yield "its gradient", harness.relative_error(packed[1], same[1]), 2**-8
    if size in MIXTURES:  # in fp32, tokens near the boundary choose other experts than in bf16
        return
    for name, (logprobs, gradient) in (("nvfp4", packed), ("bf16+peft", stock)):
        yield f"{name} against fp32", harness.relative_error(logprobs, exact[0]), 0.02
        yield f"{name}'s gradient against fp32", harness.relative_error(gradient, exact[1]), 0.05


def run_step(size: str, tokens: int, names: list[str], repeats: int) -> None:
    """Measure the named policies of ``variants`` one after the other, because two of the largest models do not fit into
    the GPU's memory together."""
    config = model_config(size)
    batch = draw(tokens, config.vocab_size)
    builds, speeds = variants(), {}
    for name in names:
        clear()
        policy = builds[name](config)
        held = torch.cuda.memory_allocated()
        seconds, peak = measured(policy, batch, held, repeats=repeats, warmups=2)
        speeds[name] = tokens / median(seconds)
        harness.emit(
            f"step/{name}",
            {"model": size, "tokens": tokens, "rows": len(batch[0]), "rank": RANK},
            DTYPE,
            seconds,
            tokens_per_s=speeds[name],
            ratio=speeds[name] / speeds["bf16+peft"] if "bf16+peft" in speeds else None,
            peak_bytes=peak,
            resident_bytes=held,
        )
        del policy


def run_rungs(size: str, tokens: int, repeats: int, only: list[str]) -> None:
    """Measure every setting of gradient checkpointing in order of increasing memory, first without fused kernels and
    then with them. If ``only`` has names such as "plain-blocks", only these are measured."""
    config = model_config(size)
    batch = draw(tokens, config.vocab_size)
    shape = config_shape(config, NVFP4, DTYPE)
    exact = None
    for fused in (False, True):
        kind = "fused" if fused else "plain"
        if fused and not (CUDA and fused_wanted("auto")):
            print("rungs, fused: left out, they need a GPU and liger-kernel", file=sys.stderr)
            return
        if only and not any(name.startswith(kind) for name in only):
            continue
        clear()
        torch.manual_seed(0)
        policy = ours(random_model(config, NVFP4, dtype=DTYPE, device=DEVICE), fused_elementwise=fused)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.02)  # so that A has a gradient too
        held = torch.cuda.memory_allocated()
        for how in reversed(ladder(config.num_hidden_layers)):
            name = f"rungs/{kind}-{how.setting(config.num_hidden_layers)}"
            if only and name.removeprefix("rungs/") not in only:
                continue
            try:
                policy.set_recompute(how)
                clear()
                seconds, peak = measured(policy, batch, held, repeats=repeats, warmups=1)
                logprobs, gradient = gradients(policy, *batch)
            except torch.OutOfMemoryError as error:
                policy.zero_grad()
                print(f"{name}: {str(error).partition(chr(10))[0]}", file=sys.stderr)
                continue
            exact = exact or (logprobs, gradient)  # of the first: plain, with every block recomputed
            targets = FAMILIES[config.model_type].targets(PROJECTIONS)
            run = run_of(DTYPE.itemsize, rank=RANK, targets=targets, fused=fused)
            predicted = (
                parts.checkpoints(shape, tokens, DTYPE.itemsize, how=how)
                + max(parts.blocks_kept(shape, run, tokens, how=how))
                + parts.block_backward(shape, run, tokens)
            )
            harness.emit(
                name,
                {"model": size, "tokens": tokens, "rows": len(batch[0]), "rank": RANK},
                "bfloat16",
                seconds,
                tokens_per_s=tokens / median(seconds),
                peak_bytes=peak,
                predicted_bytes=predicted,
                peak_error=predicted / peak - 1 if peak else None,
                predicted_time=time_per_token(shape, run, how, tokens),
                resident_bytes=held,
                logprob_error=harness.relative_error(logprobs, exact[0]),
                gradient_error=harness.relative_error(gradient, exact[1]),
            )
        del policy


def gradients(policy: Policy, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of a step, and all its gradients as one vector."""
    stats = policy.token_stats(tokens, mask, temperature=1.0)
    (stats.logprobs.sum() / mask.sum()).backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    policy.zero_grad()
    return stats.logprobs.detach(), gradient


def clear() -> None:
    """Return unused memory to the GPU."""
    gc.collect()
    torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    sizes = ["7B", "3B", "14B", "32B"] if CUDA else ["tiny"]
    parser = harness.parser_with(__doc__, sizes=sizes, tokens=16384 if CUDA else 256, repeats=3)
    parser.add_argument("--rungs", action="store_true", help="measure gradient checkpointing, and nothing else")
    parser.add_argument(
        "--only", nargs="*", default=[], help="nothing but these, such as nvfp4, or with --rungs fused-none"
    )
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="The PEFT config's|Unsupported layer type")
    if args.rungs:
        for size in args.sizes:
            run_rungs(size, args.tokens, args.repeats, args.only)
        return
    first = args.sizes[0]
    harness.check(errors(first))
    for size in args.sizes:
        names = ["bf16+peft", "nvfp4"] if size != first else ["bf16+peft", *(n for n in variants() if n != "bf16+peft")]
        run_step(size, args.tokens, args.only or names, args.repeats)


if __name__ == "__main__":
    main()
