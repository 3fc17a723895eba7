"""Measure how close 4-bit copies of a model are to the model itself: python -m tests.bench.bench_four_bits

    python -m tests.bench.bench_four_bits --models models/qwen2.5-coder-0.5b --train gsm8k_train.jsonl \
        --test gsm8k_test.jsonl --variants rtn gptq rtn+32 gptq+32 --calibrations gsm8k_train.jsonl policy

A variant is a way to make a 4-bit copy: METHOD, METHOD/LINEAR or METHOD/lastN, each optionally followed by +RANK.
METHOD/LINEAR keeps all linear layers of this name (e.g. down_proj) dense, and METHOD/lastN the last N blocks. +RANK
adds an adapter of this rank that starts at the quantisation error (``qerl quantize --residual``). With ~heal at the
end, configs/tasks/heal.yaml trains the adapter towards the dense model on training problems, and ``heal`` in the JSON
line has the curves of this run. A calibration is a text or JSON lines file, or "policy": completions that the dense
model samples at temperature 1 for training problems. A variant that reads no calibration data is measured once.

The dense policy, which is the model itself, samples completions of test problems at temperature 1, and every variant
scores the same tokens. The JSON line of a variant has these means over all sampled tokens: KL(dense, variant) of the
whole distributions and the entropy, in nats; the absolute difference between the log-probabilities of variant and dense
policy, in nats; and the share of tokens at which both have the same most likely token. A mean is written with its
standard error, in which completions count as independent and the tokens of a completion do not. ``kl_over_first`` is
the paired difference to the first variant's KL. With ``--accuracy``, the rollout engine answers all test problems
greedily, and the line has the accuracy for answers in a box (strict) and for answers of any form (lenient), and the
paired differences to the dense policy. The first line of a model has the dense policy's values; ``parts_s`` has the
seconds of each part.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from datamodules.gsm8k import GSM8K
from datamodules.prompts import PromptDataModule
from qerl_pl.base.folder import base_folder
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.model.quantization import Method
from qerl_pl.model.tokenizer import read_tokenizer
from qerl_pl.policy.logprobs import fp32_logits, soft_capped
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import DTYPES, Policy, load_policy
from qerl_pl.quant.calibration import Calibration, read_calibration
from qerl_pl.quant.quantize import quantize_checkpoint
from qerl_pl.quant.residual import START
from qerl_pl.results.curves import read_curves
from qerl_pl.rewards.math import NumericAnswer
from qerl_pl.rollout.base import RolloutEngine, Sampling
from qerl_pl.rollout.decode import completion_texts
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.tools.export import export_adapter
from tests.bench.harness import (
    DEVICE,
    DTYPE,
    GIB,
    RANK,
    child_environment,
    emit,
    fit_command,
    now,
    parser_with,
    task_file,
)

SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."
VERDICTS = {"strict": NumericAnswer("boxed"), "lenient": NumericAnswer("any", "last_number")}
METHOD = r"(?P<method>rtn|gptq)(/(last(?P<last>\d+)|(?P<linear>\w+)))?"
VARIANT = re.compile(METHOD + r"(\+(?P<rank>\d+))?(?P<healed>~heal)?")
POLICY = "policy"
PROMPT_TOKENS = 512  # longest prompt
LOGIT_BYTES = 2**28  # of the logits that exist at a time


class Variant(NamedTuple):
    """One way to quantise."""

    name: str
    method: Method
    rank: int | None
    linear: str | None
    last: int
    healed: bool

    def ignored(self, num_blocks: int) -> list[str]:
        """Return what stays dense, as ``quantize_checkpoint`` takes it."""
        dense = "|".join(str(num_blocks - 1 - index) for index in range(self.last))
        linear = [rf"re:.*\.{self.linear}$"] if self.linear else []
        return ["lm_head", *linear, *([rf"re:.*\.layers\.({dense})\."] if dense else [])]


class Sample(NamedTuple):
    """Completions as right-padded rows."""

    tokens: Tensor  # [B, S] int64, prompts and completions
    mask: Tensor  # [B, S] bool, True for tokens of completions


class Statistics(NamedTuple):
    """Comparison of a variant with the dense policy at each of N tokens: [N] fp64, in nats except for ``argmax_equal``,
    which is 0 or 1. If the dense policy is compared with itself, ``kl`` is 0."""

    kl: Tensor
    entropy: Tensor
    logprob_difference: Tensor
    argmax_equal: Tensor


def variant_of(name: str) -> Variant:
    """Parse a variant."""
    parts = VARIANT.fullmatch(name)
    if parts is None:
        raise argparse.ArgumentTypeError(
            f"{name!r} is no variant; expected e.g. rtn, rtn~heal, gptq+32, rtn/down_proj or gptq/last4"
        )
    rank = parts["rank"] and int(parts["rank"])
    last, healed = int(parts["last"] or 0), parts["healed"] is not None
    return Variant(name, cast(Method, parts["method"]), rank or None, parts["linear"], last, healed)


def mean_and_error(values: Tensor, rows: Tensor) -> tuple[float, float]:
    """Compute the mean over tokens, and the standard error of this mean. Rows count as independent samples, but the
    tokens of a row do not.

    Args:
        values: [N] fp64.
        rows: [N] int64, the row of each token.
    """
    mean = values.mean()
    sums = torch.zeros(int(rows.max()) + 1, dtype=values.dtype).index_add_(0, rows, values - mean)
    sums = sums[rows.unique()]
    correction = len(sums) / max(1, len(sums) - 1)
    return mean.item(), math.sqrt(correction * sums.square().sum().item()) / len(values)


def compare(
    dense: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], targets: Tensor, *, divisor: float, cap: float | None
) -> Statistics:
    """Compare two models' distributions at each sampled token: the divergence KL(dense, other), the entropy of
    ``other``, the absolute difference of the sampled token's log-probabilities, and whether both have the same most
    likely token.

    Args:
        dense: hidden states [N, H] and output matrix [V, H] of the dense model.
        other: hidden states and output matrix of the model that is compared with it.
        targets: [N] int64, the sampled tokens.
        divisor: number by which the logits are divided.
        cap: the model's soft cap of logits.
    """
    rows = max(1, LOGIT_BYTES // (4 * len(dense[1])))
    columns: list[tuple[Tensor, ...]] = []
    for start in range(0, len(targets), rows):
        part = slice(start, start + rows)
        p, q = (
            (soft_capped(fp32_logits(hidden[part], head), cap) / divisor).log_softmax(-1)
            for hidden, head in (dense, other)
        )
        chosen = targets[part, None]
        equal = p.argmax(-1) == q.argmax(-1)
        moved = (q.gather(1, chosen) - p.gather(1, chosen)).abs()[:, 0]
        entropy = -(q.exp() * q).sum(-1)
        columns.append(((p.exp() * p.sub_(q)).sum(-1), entropy, moved, equal))
    return Statistics(*(torch.cat(column).double().cpu() for column in zip(*columns, strict=True)))


@torch.no_grad()
def hidden_states(policy: Policy, sample: Sample, *, batch_tokens: int) -> Tensor:
    """Compute the hidden states [N, H] from which the sample's N tokens are predicted."""
    rows = max(1, batch_tokens // sample.tokens.shape[1])
    device = policy.causal_lm.device
    parts = zip(sample.tokens.split(rows), sample.mask.split(rows), strict=True)
    return torch.cat([policy._predicting(tokens.to(device), mask.to(device), None)[1] for tokens, mask in parts])


def rows_of(prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> Sample:
    """Make rows of prompts and their completions."""
    pairs = [(prompt.tokens, row.tokens) for prompt, group in zip(prompts, groups, strict=True) for row in group]
    longest = max(len(prompt) + len(completion) for prompt, completion in pairs)
    tokens, mask = (torch.zeros(len(pairs), longest, dtype=dtype) for dtype in (torch.int64, torch.bool))
    for index, (prompt, completion) in enumerate(pairs):
        end = len(prompt) + len(completion)
        tokens[index, :end] = torch.tensor([*prompt, *completion])
        mask[index, len(prompt) : end] = True
    return Sample(tokens, mask)


@contextmanager
def engine_of(policy: Policy, args: argparse.Namespace) -> Iterator[RolloutEngine]:
    """Start an engine with the policy's adapter."""
    cache = int(args.kv_cache_gib * GIB)
    engine = VLLMEngine(max_num_seqs=256, kv_cache_bytes=cache) if args.engine == "vllm" else TransformersEngine()
    engine.start(policy, max_model_len=PROMPT_TOKENS + max(args.tokens, args.answer_tokens))
    engine.load_adapter(policy.adapter_state())
    try:
        yield engine
    finally:
        engine.close()


def own_text(engine: RolloutEngine, prompts: Sequence[Prompt], args: argparse.Namespace) -> Calibration:
    """Sample calibration data from the policy: prompts with completions, one after another."""
    wanted, tokens = args.calibration_samples * args.calibration_length, []
    for start in range(0, len(prompts), 32):
        some = prompts[start : start + 32]
        sampling = Sampling(num_completions=1, max_tokens=args.tokens, temperature=1.0)
        groups = engine.generate([prompt.tokens for prompt in some], sampling, 1)
        for prompt, [completion] in zip(some, groups, strict=True):
            tokens += [*prompt.tokens, *completion.tokens]
        if len(tokens) >= wanted:
            break
    else:
        raise SystemExit(f"the training problems give {len(tokens)} tokens; {wanted} are wanted")
    return Calibration(torch.tensor(tokens[:wanted]).view(-1, args.calibration_length), POLICY)


def verdicts(engine: RolloutEngine, prompts: Sequence[Prompt], tokenizer: Any, *, tokens: int) -> dict[str, Tensor]:
    """Answer problems greedily and judge the answers. Returns a tensor for "strict" (only an answer in a box counts)
    and one for "lenient" (an answer of any form counts): [number of problems] fp64, 1 for a right answer and 0 for a
    wrong one."""
    sampling = Sampling(num_completions=1, max_tokens=tokens, temperature=0.0)
    rows = [group[0] for group in engine.generate([prompt.tokens for prompt in prompts], sampling, 0)]
    texts = completion_texts(tokenizer, rows, stop=())
    rows = [replace(row, text=text) for row, text in zip(rows, texts, strict=True)]
    return {name: torch.tensor(judge(prompts, rows), dtype=torch.float64) for name, judge in VERDICTS.items()}


def accuracies(answered: dict[str, Tensor], dense: dict[str, Tensor]) -> dict[str, Any]:
    """Compare a model's results of ``verdicts`` with those of the dense policy. For each kind of verdict the result has
    the accuracy and its difference to the dense accuracy, both as [mean, standard error], and the number of problems
    that only one of the two models solved."""

    def summary(values: Tensor) -> list[float]:
        return [values.mean().item(), values.std().item() / len(values) ** 0.5]

    return {
        name: {
            "accuracy": summary(right),
            "over_dense": summary(right - dense[name]),
            "verdicts_differ": int((right != dense[name]).sum()),
        }
        for name, right in answered.items()
    }


class Bench:
    """The dense policy's sample of one model, against which variants are measured."""

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        self.args, self.name, self.folder = args, model.name.removesuffix(".gguf"), Path(base_folder(str(model), None))
        self.data = PromptDataModule(
            GSM8K(str(args.train), str(args.test)),
            str(self.folder),
            max_prompt_tokens=PROMPT_TOKENS,
            system_prompt=SYSTEM,
            val_batch_size=10**6,
        )
        self.data.setup("fit")
        self.problems = next(iter(self.data.test_dataloader()))[: args.problems]
        self.tokenizer = read_tokenizer(str(self.folder))
        self.first: Tensor | None = None
        policy, seconds = self.policy(self.folder, None), {}
        with engine_of(policy, args) as engine:
            begin = now()
            prompts = self.problems[: args.prompts]
            sampling = Sampling(num_completions=args.completions, max_tokens=args.tokens, temperature=1.0)
            self.sample = rows_of(prompts, engine.generate([prompt.tokens for prompt in prompts], sampling, 0))
            seconds["sample"] = now() - begin
            self.calibrations = {source: self.calibration(source, engine) for source in args.calibrations}
            self.dense_verdicts, seconds["accuracy"] = self.answered(engine)
        begin = now()
        self.rows, columns = self.sample.mask.nonzero(as_tuple=True)
        self.targets = self.sample.tokens[self.rows, columns].to(DEVICE)
        self.dense = hidden_states(policy, self.sample, batch_tokens=args.batch_tokens), policy.head(1.0).weight
        seconds["score"] = now() - begin
        self.line({"variant": "dense", "calibration": None}, policy, seconds, self.dense_verdicts)

    def policy(self, folder: Path, adapter: Path | None) -> Policy:
        """Load a policy, with the adapter of a folder if there is one."""
        lora = LoraSettings(rank=RANK, alpha=RANK) if adapter is None else LoraSettings(start=str(adapter))
        return load_policy(str(folder), dtype=DTYPES[self.args.dtype], lora=lora, seed=0, device=DEVICE).eval()

    def heal(self, base: Path, adapter: Path | None, folder: Path) -> tuple[Path, dict[str, Any]]:
        """Train an adapter of a quantised base towards the dense model, from ``adapter`` if given. Returns the folder
        of the trained adapter and the run's curves."""
        args, run = self.args, folder / "run"
        sources = {"train_path": str(args.train.resolve()), "validation_path": str(args.test.resolve())}
        model = {"base": str(base), "dtype": args.dtype, "teacher": {"base": str(self.folder)}}
        if args.engine == "transformers":
            model["engine"] = "qerl_pl.rollout.hf.TransformersEngine"
        if adapter is not None:
            model["lora"] = {"rank": None, "alpha": None, "start": str(adapter)}
        settings = {"run_dir": str(run), "model": model, "data": {"source": {"init_args": sources}}}
        command = [*fit_command(folder, settings, task_file("heal")), *(f"--{setting}" for setting in args.heal)]
        subprocess.run(command, stdout=sys.stderr, env=child_environment(), check=True)
        export_adapter(run, folder / "healed")
        curves = {name.removeprefix("teacher/"): curve.values for name, curve in read_curves(run).items()}
        wanted = {name: curves[name] for name in ("kl", "divergence", "agreement")}
        return folder / "healed", wanted | {"steps_s": curves["time/step_s"]}

    def calibration(self, source: str, engine: RolloutEngine) -> Calibration:
        """Read or sample calibration data."""
        args = self.args
        if source == POLICY:
            return own_text(engine, self.data.some_train_prompts(4096), args)
        return read_calibration(source, self.folder, samples=args.calibration_samples, length=args.calibration_length)

    def answered(self, engine: RolloutEngine) -> tuple[dict[str, Tensor], float]:
        """Answer all problems, if asked to; returns verdicts and seconds."""
        begin = now()
        if not self.args.accuracy:
            return {}, 0.0
        right = verdicts(engine, self.problems, self.tokenizer, tokens=self.args.answer_tokens)
        return right, now() - begin

    def measure(self, variant: Variant, source: str | None) -> None:
        """Quantise, load, compare and print."""
        seconds: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as name:
            folder, begin = Path(name) / "packed", now()
            layers = quantize_checkpoint(
                self.folder,
                folder,
                method=variant.method,
                ignore=variant.ignored(self.num_blocks),
                calibration=None if source is None else self.calibrations[source],
                residual=variant.rank,
                device=DEVICE,
            )
            seconds["quantize"], begin = now() - begin, now()
            packed = sum(math.prod(layer.shape) for layer in layers)
            about: dict[str, Any] = {"variant": variant.name, "calibration": source, "packed_weights": packed}
            adapter = None if variant.rank is None else folder / START
            if variant.healed:
                adapter, about["heal"] = self.heal(folder, adapter, Path(name))
                seconds["heal"], begin = now() - begin, now()
            policy = self.policy(folder, adapter)
            seconds["load"] = now() - begin
            right: dict[str, Tensor] = {}
            if self.args.accuracy:
                begin = now()
                with engine_of(policy, self.args) as engine:
                    seconds["engine"] = now() - begin
                    right, seconds["accuracy"] = self.answered(engine)
            self.line(about, policy, seconds, right)

    def line(self, about: dict[str, Any], policy: Policy, seconds: dict[str, float], right: dict[str, Tensor]) -> None:
        """Compare a policy with the dense one, and print."""
        begin = now()
        hidden = hidden_states(policy, self.sample, batch_tokens=self.args.batch_tokens)
        head = policy.head(1.0)
        limits = {"divisor": head.temperature, "cap": head.logit_cap}
        values = compare(self.dense, (hidden, head.weight), self.targets, **limits)
        seconds["compare"] = now() - begin
        means = {name: mean_and_error(values, self.rows) for name, values in values._asdict().items()}
        if about["variant"] == "dense":
            self.num_blocks, self.entropy = policy.num_layers, values.entropy
        else:
            self.first = values.kl if self.first is None else self.first
            means["kl_over_first"] = mean_and_error(values.kl - self.first, self.rows)
            means["entropy_over_dense"] = mean_and_error(values.entropy - self.entropy, self.rows)
        args = self.args
        shape = {
            "prompts": args.prompts,
            "completions": args.completions,
            "max_tokens": args.tokens,
            "tokens": len(self.targets),
            "calibration_tokens": [args.calibration_samples, args.calibration_length],
        }
        results = accuracies(right, self.dense_verdicts)
        details = {**about, **means, **results, "parts_s": seconds}
        emit(f"four_bits/{self.name}", shape, args.dtype, output=args.output, **details)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = parser_with(__doc__, "--output")
    add = parser.add_argument
    add("--models", type=Path, nargs="+", required=True, help="folders or GGUF files of dense models")
    add("--train", type=Path, required=True, help="GSM8K's training problems, JSON lines")
    add("--test", type=Path, required=True, help="GSM8K's test problems, JSON lines")
    variants = [variant_of(name) for name in ("rtn", "gptq", "rtn+32", "gptq+32")]
    add("--variants", type=variant_of, nargs="+", default=variants)
    add("--calibrations", nargs="+", default=[POLICY], help='"policy", or .txt or .jsonl files')
    add("--calibration-samples", type=int, default=64)
    add("--calibration-length", type=int, default=256, help="tokens of a calibration sample")
    add("--prompts", type=int, default=64, help="test problems whose completions are compared")
    add("--completions", type=int, default=1, help="completions of each of these problems")
    add("--tokens", type=int, default=512, help="longest sampled completion")
    add("--accuracy", action="store_true", help="also answer all test problems greedily")
    add("--answer-tokens", type=int, default=1024, help="longest greedy completion")
    add("--heal", nargs="*", default=[], metavar="KEY=VALUE", help="settings of healing runs")
    add("--problems", type=int, help="number of test problems (default: all)")
    add("--engine", choices=("vllm", "transformers"), default="vllm")
    add("--kv-cache-gib", type=float, default=8.0)
    add("--batch-tokens", type=int, default=16384, help="tokens of a pass, with padding")
    add("--dtype", choices=DTYPES, default=str(DTYPE).removeprefix("torch."))
    args = parser.parse_args(argv)
    for model in args.models:
        bench = Bench(args, model)
        for variant in args.variants:
            reads = variant.method != "rtn" or variant.rank is not None
            for source in args.calibrations if reads else [None]:
                bench.measure(variant, source)


if __name__ == "__main__":
    main()
