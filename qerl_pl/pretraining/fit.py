"""Supervised training of a policy from scratch; an interrupted training continues from its last saved state."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from qerl_pl.common.seeding import derive_seed
from qerl_pl.pretraining.batches import Batches, Rows, rows_of
from qerl_pl.pretraining.policy import make_tokenizer, random_model
from qerl_pl.tasks.word_problems import check_operations, draw_problems

NUM_TEXTS = 1000  # number of problems that the tokenizer is learnt from; every word occurs in many of them
LAST_SECONDS = 60.0  # between two saves of the training state

SHAPES: dict[str, dict[str, int]] = {
    # Widths, and the output size of a fused q/k/v projection, are multiples of 256 except in "toy", as the NVFP4
    # kernels require.
    "toy": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"num_key_value_heads": 1},
    "10m": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 4}
    | {"num_key_value_heads": 2},
    "30m": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9, "num_attention_heads": 8}
    | {"num_key_value_heads": 4},
}
LEARNING_RATES = {"toy": 3e-3, "10m": 1e-3, "30m": 6e-4}


@dataclass(frozen=True)
class Settings:
    """Settings of pretraining, which together with the kind of device determine the trained weights.

    Attributes:
        seed: seed of weights and problems.
        size: a key of SHAPES; "10m" and "30m" have about 10 and 29 million parameters, "toy" is for tests.
        steps: optimizer steps.
        batch_size: problems per step.
        operations: fewest and most operations of most problems.
        rare: probability that a problem has more operations than that, up to 14. Without such problems, accuracy on
            problems with more operations than in training would be 0, instead of falling gradually.
        learning_rate: highest learning rate; it falls linearly to 0 after the warm-up.
        warmup_steps: optimizer steps.
        vocab_size: vocabulary size of the tokenizer, including control tokens and tags.
        micro_batch_tokens: most tokens of one forward pass, padding included.

    Raises:
        ValueError: a value is out of its range.
    """

    seed: int = 0
    size: str = "10m"
    steps: int = 3000
    batch_size: int = 512
    operations: tuple[int, int] = (2, 9)
    rare: float = 0.02
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    vocab_size: int = 768
    micro_batch_tokens: int = 65536

    def __post_init__(self) -> None:
        if self.size not in SHAPES:
            raise ValueError(f"size is {self.size!r}; expected one of {', '.join(SHAPES)}")
        check_operations(self.operations)
        for name in ("steps", "batch_size", "learning_rate", "warmup_steps", "micro_batch_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0")
        if not 0 <= self.rare < 1:
            raise ValueError(f"rare is {self.rare}; expected a probability, at least 0 and less than 1")
        if self.vocab_size < 320 or self.vocab_size % 64:
            raise ValueError(f"vocab_size is {self.vocab_size}; expected a multiple of 64, at least 320")

    def as_json(self) -> dict[str, Any]:
        """Convert the settings to values that JSON stores and reads back without change."""
        return json.loads(json.dumps(asdict(self)))


def new_policy(settings: Settings) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    """Create a model with random weights and a tokenizer that is learnt from generated problems."""
    problems = draw_problems(NUM_TEXTS, seed=derive_seed(settings.seed, "pretrain/tokenizer"), split="train")
    texts = (text for problem in problems for text in (problem.question, problem.solution))
    tokenizer = make_tokenizer(texts, vocab_size=settings.vocab_size - 16)  # 7 control tokens and tags are added
    shape = SHAPES[settings.size] | {"vocab_size": settings.vocab_size, "max_position_embeddings": 2048}
    return random_model(tokenizer, seed=settings.seed, purpose="pretrain/weights", **shape), tokenizer


def train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    settings: Settings,
    *,
    state: Path,
    device: torch.device,
    num_workers: int,
    save_seconds: float = LAST_SECONDS,
) -> None:
    """Train a model in place: bf16 matrix products on a GPU, fp32 on a CPU; weights and AdamW's state in fp32 on both.

    Args:
        model: model with the initial weights, on the device.
        tokenizer: tokenizer of the model.
        settings: settings of the training.
        state: file to which weights, optimizer and step are saved during training; if it exists, training continues
            from it.
        device: device of the model.
        num_workers: processes that draw problems; 0 means this process.
        save_seconds: seconds between two saves.

    Raises:
        ValueError: the file ``state`` was saved with other settings.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    done = _restore(state, model, optimizer, settings, device)
    batches = Batches(
        tokenizer,
        seed=settings.seed,
        num_steps=settings.steps,
        batch_size=settings.batch_size,
        operations=settings.operations,
        rare=settings.rare,
        micro_batch_tokens=settings.micro_batch_tokens,
    )
    held_out = _held_out(tokenizer, settings)
    loader: DataLoader[list[Rows]] = DataLoader(
        batches,
        batch_size=None,
        sampler=range(done, settings.steps),
        num_workers=num_workers,
        prefetch_factor=2 if num_workers else None,
        generator=torch.Generator(),  # it would draw from the global stream
    )
    progress = tqdm(loader, initial=done, total=settings.steps, desc="pretraining", unit="step", disable=None)
    last = time.monotonic()
    for step, rows in enumerate(progress, start=done):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        model.train()
        loss = train_step(model, optimizer, rows, device)
        if step % 20 == 0:  # reading the loss waits for the GPU
            progress.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        if time.monotonic() - last >= save_seconds or step + 1 == settings.steps:
            _save(state, model, optimizer, settings, step + 1)
            share = reproduced(model, held_out, device)
            tqdm.write(
                f"step {step + 1}: loss {loss.item():.4f}; {share:.1%} of held-out solutions are written greedily"
            )
            last = time.monotonic()
    model.eval()


def learning_rate(settings: Settings, step: int) -> float:
    """Compute the learning rate of an optimizer step: linear warm-up, then linear decay to 0 at the last step."""
    return settings.learning_rate * min((step + 1) / settings.warmup_steps, 1 - step / settings.steps)


def train_step(
    model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, rows: Sequence[Rows], device: torch.device
) -> Tensor:
    """Do one optimizer step; returns the mean loss over the solutions' tokens, in nats: [] fp32."""
    num_tokens = sum(int(some.mask.sum()) for some in rows)
    total = torch.zeros((), device=device)
    for some in rows:
        loss = token_losses(model, some, device).sum() / num_tokens
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def token_losses(model: Qwen2ForCausalLM, rows: Rows, device: torch.device) -> Tensor:
    """Compute the cross-entropy of each token of the solutions, [T] fp32 in nats; right padding needs no mask."""
    tokens, mask = rows.tokens.to(device).long(), rows.mask[:, 1:].to(device)
    logits = _solution_logits(model, tokens, mask, device)
    return F.cross_entropy(logits.float(), tokens[:, 1:][mask], reduction="none")


@torch.no_grad()
def reproduced(model: Qwen2ForCausalLM, batches: Sequence[Rows], device: torch.device) -> float:
    """Compute the share of rows whose solution greedy decoding would produce: each of its tokens is the most likely
    one."""
    model.eval()
    right = num = 0
    for rows in batches:
        tokens, mask = rows.tokens.to(device).long(), rows.mask[:, 1:].to(device)
        wrong = _solution_logits(model, tokens, mask, device).argmax(-1) != tokens[:, 1:][mask]
        row_of = mask.nonzero()[:, 0]
        missed = torch.zeros(len(tokens), device=device).index_add(0, row_of, wrong.float())
        right, num = right + int((missed == 0).sum()), num + len(tokens)
    return right / num


def _solution_logits(model: Qwen2ForCausalLM, tokens: Tensor, mask: Tensor, device: torch.device) -> Tensor:
    """Compute the logits [T, V] that predict the tokens of the solutions.

    On a GPU, they are computed with the weights rounded to bf16, through which gradients reach the fp32 weights. With
    autocast the residual stream and the norms would stay in fp32, which takes twice the memory traffic.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = {name: weight.to(dtype) for name, weight in model.named_parameters()}
    decoder = {name.removeprefix("model."): weight for name, weight in weights.items() if name != "lm_head.weight"}
    output = functional_call(model.model, decoder, (tokens[:, :-1],), {"use_cache": False})
    return F.linear(output.last_hidden_state[mask], weights["lm_head.weight"])


def _held_out(tokenizer: Qwen2Tokenizer, settings: Settings) -> list[Rows]:
    problems = draw_problems(
        128,
        seed=derive_seed(settings.seed, "pretrain/held out"),
        split="validation",
        operations=settings.operations,
    )
    return rows_of(tokenizer, problems, micro_batch_tokens=settings.micro_batch_tokens)


def _save(path: Path, model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, settings: Settings, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states | {"settings": settings.as_json(), "step": step}, temporary)
    os.replace(temporary, path)


def _restore(
    path: Path, model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, settings: Settings, device: torch.device
) -> int:
    """Load model and optimizer from the saved training state, if it exists; returns the number of finished steps."""
    if not path.exists():
        return 0
    found = torch.load(path, weights_only=True, map_location=device)
    if found["settings"] != settings.as_json():
        raise ValueError(
            f"{path} is of an interrupted training with other settings ({found['settings']}); continue with those, "
            "or remove its folder"
        )
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return found["step"]
