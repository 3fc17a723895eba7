"""Time whole rollouts of pretrained models with and without speculation: python -m tests.bench.bench_drafts

    python -m tests.bench.bench_drafts --models qwen2.5-coder-0.5b.gguf --train gsm8k_train.jsonl \
        --test gsm8k_test.jsonl --output docs/results/drafts.jsonl

For each model, format of the base, number of prompts and temperature, the same rollouts of GSM8K problems are sampled
with speculation off and on, each in a process of its own. A line ``drafts/MODEL`` has the seconds of the rollouts, the
mean surprisal of the sampled tokens (nats; the entropy of the distribution that is sampled, estimated), the lengths of
the completions, and, with speculation, drafts and accepted tokens. As in training, ``qerl_pl/hopper/draft_guard.py``
decides after each rollout, for each number of sequences that decode at the same time, whether the next rollout uses
drafts. The first rollout, in which vLLM compiles kernels, is not timed. With --speculation, tests/bench/together.py can
start several of these programs at once.
"""

import argparse
import time
from itertools import product
from pathlib import Path
from statistics import mean

from datamodules.gsm8k import GSM8K
from datamodules.prompts import PromptDataModule
from qerl_pl import native
from qerl_pl.base.prepared import prepared_base
from qerl_pl.model.quantization import Quantization
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.bench import harness
from tests.bench.bench_four_bits import PROMPT_TOKENS, SYSTEM
from tests.bench.harness import DEVICE, DTYPE, FORMATS, RANK
from tests.bench.together import turn


def measure(args: argparse.Namespace, model: Path, base: str) -> None:
    """Start one engine and print its lines."""
    path = prepared_base(str(model), None, Quantization(format="nvfp4") if base == "nvfp4" else None)
    data = PromptDataModule(
        GSM8K(str(args.train), str(args.test)), path, max_prompt_tokens=PROMPT_TOKENS, system_prompt=SYSTEM
    )
    data.setup("fit")
    prompts = [prompt.tokens for prompt in data.some_train_prompts(max(args.prompts) * (args.repeats + 1))]
    policy = load_policy(path, dtype=DTYPE, lora=LoraSettings(rank=RANK, alpha=RANK), seed=0, device=DEVICE)
    engine = VLLMEngine(max_num_seqs=max(args.prompts) * args.completions, speculation=args.speculation)
    engine.start(policy, max_model_len=PROMPT_TOKENS + args.tokens)
    engine.load_adapter(policy.adapter_state())
    with turn():
        for count, temperature in product(args.prompts, args.temperatures):
            sampling = Sampling(args.completions, args.tokens, temperature)
            seconds, completions, engine.draft_history = [], [], []
            for repeat in range(args.repeats + 1):
                engine.draft_counts.clear()
                begin = time.perf_counter()
                groups = engine.generate(prompts[repeat * count : (repeat + 1) * count], sampling, repeat)
                if repeat:
                    seconds.append(time.perf_counter() - begin)
                    completions += [each for group in groups for each in group]
                if args.speculation == "on":
                    guard = native.for_vllm().guard
                    engine.draft_history = guard.remembered(engine.draft_history, guard.by_class(engine.draft_counts))
            lengths = sorted(len(each.tokens) for each in completions)
            harness.emit(
                f"drafts/{model.name.removesuffix('.gguf')}",
                {
                    "base": base,
                    "prompts": count,
                    "completions": args.completions,
                    "max_tokens": args.tokens,
                    "temperature": temperature,
                    "speculation": args.speculation,
                },
                DTYPE,
                sorted(seconds),
                output=args.output,
                rollout_s=seconds,
                tokens=sum(lengths),
                surprisal=-mean(value for each in completions for value in each.logprobs),
                lengths=[mean(lengths), lengths[len(lengths) // 2], lengths[-1]],
                drafts_by_class=engine.draft_history,  # drafts, verifications and tokens, later rollouts counting more
            )
    engine.close()


def main(argv: list[str] | None = None) -> None:
    """Measure each engine in a process of its own."""
    parser = harness.parser_with(
        __doc__, "--output", prompts=[16, 1], completions=8, tokens=1024, temperatures=[1.0, 1.6], repeats=4
    )
    add = parser.add_argument
    add("--models", type=Path, nargs="+", required=True, help="folders or GGUF files of dense models")
    add("--train", type=Path, required=True, help="GSM8K's training problems, JSON lines")
    add("--test", type=Path, required=True, help="GSM8K's test problems, JSON lines")
    add("--bases", nargs="+", choices=FORMATS, default=["nvfp4"], help="formats of the base's weights")
    add("--speculation", choices=("off", "on"), help="measure in this process (default: off and on, apart)")
    args = parser.parse_args(argv)
    for model, base in product(args.models, args.bases):
        if args.speculation:
            measure(args, model, base)
            continue
        options = ["--models", str(model), "--bases", base, "--train", str(args.train), "--test", str(args.test)]
        for name in ("prompts", "completions", "tokens", "temperatures", "repeats"):
            value = getattr(args, name)
            options += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        for speculation in ("off", "on"):
            harness.run_apart("bench_drafts", [*options, "--speculation", speculation], output=args.output)


if __name__ == "__main__":
    main()
