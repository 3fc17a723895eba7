"""Make a small policy that can do arithmetic but makes careless mistakes, for the quickstart and for tests.

It is a model of the Qwen2 architecture with 464 000 parameters, fine-tuned on worked solutions of arithmetic problems,
which a program writes with random mistakes (tasks/arithmetic.py). So the model can compute, but more often makes such
mistakes, and reinforcement learning improves it within minutes; if fine-tuning stopped early instead, it would hardly
ever earn a reward. The policy depends only on the seed; global random states are left as they are.
"""

import itertools
import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AddedToken, GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from qerl_pl.common.files import allow_reading
from qerl_pl.common.phases import counted, phase
from qerl_pl.common.seeding import derive_seed
from qerl_pl.tasks.arithmetic import NUM_OPERANDS, distinct_expressions, draw_expression, question, solution
from qerl_pl.tools.options import tiny_options

SFT_STEPS = 900  # with 450 steps, one policy of three cannot do the arithmetic, and RL stops at an accuracy of 0.77
BATCH_SIZE = 64
LEARNING_RATE = 2e-3  # with 3e-3, one policy of ten does not learn the arithmetic
WARMUP_STEPS = 30
SLIP = 0.6  # probability that the demonstrated solution has a mistake in a step with a carry or borrow
NUM_HELD_OUT = 512
ACCURACY_RANGE = (0.2, 0.5)
MIN_SKILL = 0.85
VOCAB_SIZE = 272  # 256 byte tokens, 3 control tokens and 4 tags, padded to a multiple of 16
NUM_THREADS = 2  # more threads do not speed up a model of this size
RECORD = "tiny.json"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
END_ID, PAD_ID = 256, 257  # the bytes come first
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main(argv: Sequence[str]) -> int:
    """Parse the command line, make the policy and print its accuracy and skill; returns the exit status."""
    args = tiny_options().parse_args(argv)
    torch.set_num_threads(min(NUM_THREADS, torch.get_num_threads()))
    if is_made(args.output, seed=args.seed):
        print(f"{args.output} already holds this policy (seed {args.seed}): nothing to do")
        return 0
    print(f"fine-tuning the policy: {SFT_STEPS} steps, two to three minutes on two cores", flush=True)
    record = make_tiny(args.output, seed=args.seed)
    print(f"{args.output}: made in {record['seconds']:.0f} s. {measured_words(record)}")
    return 0


def make_tiny(output: Path | str, *, seed: int = 0, sft_steps: int = SFT_STEPS) -> dict[str, float]:
    """Fine-tune a small policy on solutions with mistakes, and write it to a new or empty folder; after an error, the
    folder is left as it was. ``sft_steps`` is the number of optimizer steps; with 0, the weights are random. Returns
    the duration in ``seconds`` and, if the policy was trained, its ``accuracy`` and ``skill`` (see ``measure``). Raises
    ValueError if the folder is not empty, or accuracy or skill is out of range (see ``check``)."""
    output, started = Path(output), time.perf_counter()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is not an empty folder; remove it or choose another --output")
    partial = output.with_name(f".{output.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)  # raises before the training if the folder cannot be written
    shutil.rmtree(partial)
    tokenizer = make_tokenizer()
    model = random_model(tokenizer, seed=seed)
    fine_tune(model, tokenizer, seed=seed, steps=sft_steps)
    record: dict[str, float] = {}
    if sft_steps > 0:
        with phase("measuring the policy on held-out problems"):
            record = measure(model, tokenizer, seed=seed)
        check(record)
    record["seconds"] = time.perf_counter() - started
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for path in partial.iterdir():
        allow_reading(path)
    text = json.dumps({"settings": _settings(seed, sft_steps), "measured": record}, indent=2) + "\n"
    (partial / RECORD).write_text(text, encoding="utf-8")
    partial.replace(output)
    return record


def is_made(output: Path, *, seed: int, sft_steps: int = SFT_STEPS) -> bool:
    """Return whether a folder holds a finished policy that ``make_tiny`` wrote with this seed and number of steps."""
    if not all((output / name).is_file() for name in (RECORD, *FILES)):
        return False
    return json.loads((output / RECORD).read_text(encoding="utf-8"))["settings"] == _settings(seed, sft_steps)


def make_tokenizer() -> Qwen2Tokenizer:
    """Create a byte-level tokenizer: each UTF-8 byte of a text (in the normal form NFC) is a token. The tags
    ``<think>``, ``<answer>`` and their closing tags are one token each, and remain in decoded texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # AutoTokenizer loads every Qwen2 model's tokenizer with this class, whatever class the folder names.
    tokenizer = Qwen2Tokenizer(
        vocab={char: token for token, char in enumerate(alphabet)},
        merges=[],
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
    )
    for tag in TAGS:
        tokenizer.add_tokens(AddedToken(tag, special=False, normalized=False))
    return tokenizer


def random_model(tokenizer: Qwen2Tokenizer, *, seed: int) -> Qwen2ForCausalLM:
    """Create the model with random fp32 weights, which depend only on the seed."""
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,  # tokens; the longest GSM8K question has 991 bytes
        tie_word_embeddings=False,
        bos_token_id=None,
        **ends,
    )
    with torch.random.fork_rng(devices=[]):  # transformers draws weights from the global generator
        torch.default_generator.manual_seed(derive_seed(seed, "tiny/weights"))
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model


def fine_tune(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, *, seed: int, steps: int) -> None:
    """Train a model in place on newly drawn careless solutions; the loss covers only the solutions' tokens."""
    rng = random.Random(derive_seed(seed, "tiny/demonstrations"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
    model.train()
    for step in counted(range(steps), "warm start", total=steps, unit="steps"):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARMUP_STEPS, 1 - step / steps)
        expressions = [draw_expression(rng, validation=False) for _ in range(BATCH_SIZE)]
        solutions = [solution(expression, careless=lambda: rng.random() < SLIP) for expression in expressions]
        tokens, mask = encode(tokenizer, expressions, solutions)
        logits = model(tokens, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits[mask[:, 1:]], tokens[:, 1:][mask[:, 1:]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def encode(tokenizer: Qwen2Tokenizer, expressions: Sequence[str], solutions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Tokenise the chat prompts of B arithmetic expressions, each followed by its solution and the end token. Returns
    tokens [B, S] int64, right-padded, and a mask [B, S] bool, True on the tokens of the solution including the end
    token."""
    chats = [[{"role": "user", "content": question(expression)}] for expression in expressions]
    prompts = [str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)) for chat in chats]
    heads = tokenizer(prompts, add_special_tokens=False).input_ids
    tails = tokenizer([text + END for text in solutions], add_special_tokens=False).input_ids
    width = max(len(head) + len(tail) for head, tail in zip(heads, tails, strict=True))
    tokens = torch.full((len(heads), width), PAD_ID)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, (head, tail) in enumerate(zip(heads, tails, strict=True)):
        tokens[row, : len(head) + len(tail)] = torch.tensor(head + tail)
        mask[row, len(head) : len(head) + len(tail)] = True
    return tokens, mask


@torch.no_grad()
def reproduces(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, expressions: Sequence[str], solutions: Sequence[str]
) -> Tensor:
    """Return [B] bool: True where greedy decoding of an expression's prompt would give exactly the solution."""
    # One forward pass suffices: greedy decoding produces a text exactly if each token of the text is the most likely
    # one after the tokens before it.
    tokens, mask = encode(tokenizer, expressions, solutions)
    most_likely = model(tokens, use_cache=False).logits[:, :-1].argmax(-1)  # [B, S - 1]
    return ((most_likely == tokens[:, 1:]) | ~mask[:, 1:]).all(1)


def measure(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, *, seed: int) -> dict[str, float]:
    """Measure a policy's ``accuracy`` and ``skill`` on held-out problems with greedy decoding. The accuracy is the
    share of solutions without a mistake, the skill the share of solutions that have no mistakes, or only mistakes of
    the kind that the program makes. A solution in another format than the program's counts as wrong in both, so both
    are lower bounds."""
    expressions = distinct_expressions(NUM_HELD_OUT, seed=derive_seed(seed, "tiny/held-out"), validation=True)
    slips = list(itertools.product((False, True), repeat=max(NUM_OPERANDS) - 1))  # in the first, no step is careless
    texts = [
        list(dict.fromkeys(solution(expression, careless=iter(pattern).__next__) for pattern in slips))
        for expression in expressions
    ]
    rows = [(expression, text) for expression, options in zip(expressions, texts, strict=True) for text in options]
    written = reproduces(model, tokenizer, [row[0] for row in rows], [row[1] for row in rows])
    right = torch.tensor([text == options[0] for options in texts for text in options])
    # Greedy decoding produces one text, so at most one of an expression's possible solutions is produced.
    num = len(expressions)
    return {"accuracy": (written & right).sum().item() / num, "skill": written.sum().item() / num}


def measured_words(record: dict[str, float]) -> str:
    """Return a sentence for the user about the ``accuracy`` and ``skill`` of a policy."""
    return (
        f"With greedy decoding, the policy solves {record['accuracy']:.3f} of the held-out problems; this would be "
        f"{record['skill']:.3f} (its skill) without errors where a digit is carried or borrowed, which training removes"
    )


def check(record: dict[str, float]) -> None:
    """Raise ValueError if accuracy or skill is out of the range in which reinforcement learning visibly helps."""
    low, high = ACCURACY_RANGE
    if not low <= record["accuracy"] <= high:
        raise ValueError(
            f"greedy held-out accuracy is {record['accuracy']:.3f}; expected {low} to {high}: try another seed"
        )
    if record["skill"] < MIN_SKILL:
        raise ValueError(f"skill is {record['skill']:.3f}; expected at least {MIN_SKILL}: try another seed")


def _settings(seed: int, sft_steps: int) -> dict[str, float]:
    return {
        "seed": seed,
        "sft_steps": sft_steps,
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "warmup_steps": WARMUP_STEPS,
        "slip": SLIP,
    }
