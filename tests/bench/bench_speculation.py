"""Measure what verifying drafts costs, and how rounding depends on the batch: python -m tests.bench.bench_speculation

A step that verifies k drafts for each of n sequences reads the weights once for n (1 + k) tokens, and the cached keys
and values of n sequences. ``speculation/step`` is the time of a decoding step of M sequences with one token each, at a
given number of tokens of context. The difference between two contexts is the time of reading keys and values. The cost
of verification is therefore the time of a step with M = n (1 + k) sequences, less their reading of keys and values,
plus that of n sequences. ``speculation/cost`` has this cost divided by the time of a step of n sequences, next to the
same quotient in the table ``VERIFICATION`` of `qerl_pl/hopper/costs.py`, by which ``qerl_pl/hopper/draft_guard.py``
decides whether drafts save time.

``speculation/logprobs`` is how much rounding changes the log-probabilities of 8 sequences if more sequences decode in
the same steps, as happens with the rows of drafts. Prompts, seeds and the pass over the prompts are the same; each
sequence is compared up to the first token that differs.
"""

import argparse
import time
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from qerl_pl.hopper.costs import VERIFICATION
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine, requests
from qerl_pl.rollout.vllm.worker import linear_kernels
from tests.bench import harness
from tests.bench.bench_rollout import policy_of
from tests.bench.harness import CUDA, DTYPE
from tests.random_checkpoints import written_apart

SEQUENCES = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128] if CUDA else [1, 4, 8]
CONTEXT, LONGER = (1000, 3000) if CUDA else (16, 48)  # tokens; the longer one for numbers of sequences in VERIFICATION
COMPARED = [8, 16, 32, 64] if CUDA else [2, 4]  # sequences that decode together, of which the first are compared
STEPS, COMPARED_STEPS, COMPARED_PROMPT, FIRST_STEPS = (64, 256, 64, 8) if CUDA else (16, 16, 8, 2)


@dataclass
class Watch:
    """Times an engine's decoding steps: records when the engine's scheduler receives the results of each step."""

    engine: VLLMEngine
    times: list[tuple[int, float]] = field(default_factory=list)
    """For each step the number of its sequences (0 if the step had tokens of a prompt), and the time in seconds."""

    def steps(self, sequences: int, context: int, seed: int) -> list[float]:
        """Sample ``STEPS`` tokens after each of ``sequences`` random prompts of ``context`` tokens. Returns, sorted,
        the seconds of the steps in which all sequences got a token."""
        scheduler: Any = self.engine._scheduler()
        update = scheduler.update_from_output

        def timed(output: Any, *others: Any) -> Any:
            is_decoding = output.total_num_scheduled_tokens == len(output.num_scheduled_tokens)
            self.times.append((len(output.num_scheduled_tokens) * is_decoding, time.perf_counter()))
            return update(output, *others)

        self.times.clear()
        with patch.object(scheduler, "update_from_output", timed):
            completions = self.engine.generate(prompts(sequences, context, seed), Sampling(1, STEPS), seed=seed)
        harness.check_finite(*(each.logprobs for [each] in completions))
        both = [later - time for (before, time), (now, later) in pairwise(self.times) if before == now == sequences]
        assert len(both) > FIRST_STEPS, (sequences, context, len(both))
        return sorted(both[FIRST_STEPS:])  # vLLM launches the first steps, and captures their graphs


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Draw prompts."""
    return torch.randint(256, (count, tokens), generator=torch.Generator().manual_seed(seed)).tolist()


def measure(args: argparse.Namespace) -> None:
    """Start one engine and print its lines."""
    policy = policy_of(args.path, args.size, args.base, args.rank)
    kernel = harness.decoding_kernel(args.decoding_kernel, args.base, DTYPE)
    engine = VLLMEngine(max_num_seqs=max(SEQUENCES), decoding_kernel=kernel, enforce_eager=args.eager)
    engine.start(policy, max_model_len=LONGER + STEPS + 8)
    kernels = engine._call(linear_kernels)
    assert ("NativeLinear" in kernels) == (kernel == "native"), kernels
    shape = {"model": args.size, "base": args.base, "rank": args.rank, "decoding": kernel}
    watch, seconds = Watch(engine), {}
    for context in (CONTEXT, LONGER):
        for count in SEQUENCES:
            if context == CONTEXT or count in VERIFICATION:
                samples = [step for repeat in range(args.repeats) for step in watch.steps(count, context, repeat)]
                seconds[count, context] = median(samples)
                named = {"sequences": count, "context": context}
                harness.emit("speculation/step", shape | named, "bfloat16", sorted(samples), output=args.output)
    costs(seconds, shape, args.output)
    rounding(engine, shape, args.output)
    engine.close()


def costs(seconds: dict[tuple[int, int], float], shape: dict[str, object], output: Path | None) -> None:
    """Compute and print the cost of verifying k drafts for each of n sequences, for the n and k in ``VERIFICATION``:
    the time of a decoding step of n (1 + k) sequences, less that of reading keys and values for n k of them, divided by
    the time of a step of n sequences. ``seconds`` has the median time of a step without drafts, by the numbers of
    sequences and of tokens of context."""
    pairs = [(count, seconds[count, LONGER] - seconds[count, CONTEXT]) for count, at in seconds if at == LONGER]
    # least squares: the seconds per sequence of reading keys and values at the first context
    reading = sum(count * s for count, s in pairs) / sum(count**2 for count, _ in pairs) * CONTEXT / (LONGER - CONTEXT)
    for count, by_drafts in VERIFICATION.items():
        for drafts, expected in by_drafts.items():
            rows = count * (1 + drafts)
            if (rows, CONTEXT) in seconds:
                verify = seconds[rows, CONTEXT] - reading * (rows - count)
                cost = verify / seconds[count, CONTEXT]
                named = {"sequences": count, "drafts": drafts, "context": CONTEXT}
                harness.emit(
                    "speculation/cost",
                    shape | named,
                    "bfloat16",
                    output=output,
                    cost=cost,
                    expected=expected,
                    off=cost / expected - 1,
                    verify_s=verify,
                    step_s=seconds[count, CONTEXT],
                    reading_s_per_sequence=reading,
                )


def rounding(engine: VLLMEngine, shape: dict[str, object], output: Path | None) -> None:
    """Print how much the log-probabilities of the same few sequences change if more sequences decode in the same
    steps."""
    fewest, most = COMPARED[0], COMPARED[-1]
    inputs, found = prompts(most, COMPARED_PROMPT, 0), []
    for count in [*COMPARED, fewest]:  # the last one again: equal calls should give equal bits
        params = requests.sampling_params(Sampling(1, COMPARED_STEPS), range(most), [])
        for each in params[count:]:
            each.max_tokens = 1  # so the pass over the prompts is the same for all
        engine._scheduler().take_logprobs()
        outputs = engine._run(inputs, params, adapter=True)
        logprobs = engine._scheduler().take_logprobs()
        found.append([requests.completion(each, logprobs[each.request_id]) for each in outputs[:fewest]])
    for count, others in zip([*COMPARED[1:], fewest], found[1:], strict=True):
        differences, flips = [], 0
        for mine, other in zip(found[0], others, strict=True):
            both = mine.tokens, other.tokens
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=False)))
            flips += same < len(mine.tokens)
            differences += [abs(a - b) for a, b in zip(mine.logprobs[:same], other.logprobs[:same], strict=True)]
        harness.emit(
            "speculation/logprobs",
            shape | {"sequences": count, "against": fewest, "prompt": COMPARED_PROMPT},
            "bfloat16",
            output=output,
            mean_abs=sum(differences) / len(differences),
            p99_abs=sorted(differences)[int(0.99 * len(differences))],
            max_abs=max(differences),
            compared=len(differences),
            other_tokens=flips,  # sequences that took another token, each counted once
            mean_logprob=sum(sum(each.logprobs) for each in others) / sum(len(each.logprobs) for each in others),
        )


def main(argv: list[str] | None = None) -> None:
    """Measure one engine, in a process of its own."""
    options = ("--size", "--folder", "--base", "--output", "--eager", "--path")
    parser = harness.parser_with(__doc__, *options, rank=harness.RANK, repeats=1)
    parser.add_argument("--decoding-kernel", default="auto", choices=harness.DECODING_KERNELS, help="of NVFP4 bases")
    args = parser.parse_args(argv)
    args.path = args.path or str(written_apart(args.folder, args.size, args.base))
    measure(args)


if __name__ == "__main__":
    main()
