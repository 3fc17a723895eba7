"""Supervised training of a policy, from random weights or those of another policy; an interrupted training continues
from its last saved state."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from qerl_pl.common.files import replacing
from qerl_pl.common.phases import counted
from qerl_pl.common.seeding import derive_seed
from qerl_pl.pretraining.batches import Batches, Rows, rows_of
from qerl_pl.pretraining.loss import mean_loss, prepare, token_losses
from qerl_pl.pretraining.policy import make_tokenizer, random_model
from qerl_pl.pretraining.sizes import SHAPES
from qerl_pl.tasks.word_problems import check_operations, draw_problems, leave_out_lines

NUM_TEXTS = 1000  # number of problems that the tokenizer is learnt from; every word occurs in many of them


@dataclass(frozen=True)
class Settings:
    """Settings of pretraining, which together with the kind of device determine the trained weights.

    Attributes:
        seed: seed of weights and problems.
        size: a key of ``sizes.SHAPES``; "10m" and "30m" have about 10 and 29 million parameters, "toy" is for tests.
        steps: optimizer steps.
        batch_size: problems per step.
        operations: fewest and most operations of most problems.
        rare: probability that a problem has more operations than that, up to 14. Without such problems, accuracy on
            problems with more operations than in training would be 0, instead of falling gradually.
        left_out: probability that a line of a worked solution, except the last one, is left out. A policy that was
            trained on complete solutions (``start``) gets the habit of leaving out lines by further training with this.
            It is then wrong more often, and RL can improve it by what it has learnt before: writing all lines. Language
            models that were pretrained on text have such habits, too.
        start: digest of the weights that training starts from; None: random weights.
        learning_rate: highest learning rate; it falls linearly to 0 after the warm-up.
        warmup_steps: optimizer steps.
        vocab_size: vocabulary size of the tokenizer, including control tokens and tags.
        micro_batch_tokens: most tokens of one forward pass; 512 problems have about 79,000.

    Raises:
        ValueError: a value is out of its range.
    """

    seed: int = 0
    size: str = "10m"
    steps: int = 4000
    batch_size: int = 512
    operations: tuple[int, int] = (2, 5)
    rare: float = 0.02
    left_out: float = 0.0
    start: str | None = None
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    vocab_size: int = 768
    micro_batch_tokens: int = 131072

    def __post_init__(self) -> None:
        if self.size not in SHAPES:
            raise ValueError(f"size is {self.size!r}; expected one of {', '.join(SHAPES)}")
        check_operations(self.operations)
        for name in ("steps", "batch_size", "learning_rate", "warmup_steps", "micro_batch_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0")
        for name in ("rare", "left_out"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a probability, at least 0 and less than 1")
        if self.vocab_size < 320 or self.vocab_size % 64:
            raise ValueError(f"vocab_size is {self.vocab_size}; expected a multiple of 64, at least 320")

    def as_json(self) -> dict[str, Any]:
        """Convert the settings to values that JSON stores and reads back without change."""
        return json.loads(json.dumps(asdict(self)))


class Saves(NamedTuple):
    """When the training state is saved: as soon as either number is reached since the last time."""

    seconds: float = 60.0
    steps: int = 1000


SAVES = Saves()


class Stopped(Exception):
    """Raised when pretraining was asked to stop, and everything that it has done is saved."""


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
    saves: Saves = SAVES,
    stop: Callable[[], bool] = lambda: False,
) -> float:
    """Train a model in place: bf16 matrix products on a GPU, fp32 on a CPU; weights and AdamW's state in fp32 on both.

    Returns the seconds that training has taken, those before an interruption included.

    Args:
        model: model with the initial weights, on the device.
        tokenizer: tokenizer of the model.
        settings: settings of the training.
        state: file to which weights, optimizer and step are saved during training; if it exists, training continues
            from it.
        device: device of the model.
        num_workers: processes that draw problems; 0 means this process.
        saves: when the state is saved.
        stop: called after each step; if it returns True, the state is saved and training stops.

    Raises:
        ValueError: the file ``state`` was saved with other settings.
        Stopped: ``stop`` returned True before the last step.
    """
    prepare(model, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    done, spent = _restore(state, model, optimizer, settings, device)
    held_out = _held_out(tokenizer, settings)
    loader = loader_of(batches_of(tokenizer, settings), done=done, num_workers=num_workers)
    began = saved_at = time.monotonic()
    saved = done
    steps_left = counted(loader, "pretraining", total=settings.steps - done, unit="steps")
    for step, rows in enumerate(steps_left, start=done):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        model.train()
        loss = train_step(model, optimizer, rows, device)
        is_last, stopped = step + 1 == settings.steps, stop()
        seconds, steps = time.monotonic() - saved_at, step + 1 - saved
        if is_last or stopped or seconds >= saves.seconds or steps >= saves.steps:
            _save(state, model, optimizer, settings, step + 1, spent + time.monotonic() - began)
            held = mean_loss(model, held_out, device)
            print(
                f"step {step + 1}: loss {loss.item():.4f} nats per token, {held:.4f} on held-out problems", flush=True
            )
            saved, saved_at = step + 1, time.monotonic()
        if stopped and not is_last:
            raise Stopped(f"stopped after step {step + 1} of {settings.steps}")
    model.eval()
    return spent + time.monotonic() - began


def batches_of(tokenizer: Qwen2Tokenizer, settings: Settings) -> Batches:
    """Create the data set of the training's batches."""
    return Batches(
        tokenizer,
        seed=settings.seed,
        num_steps=settings.steps,
        batch_size=settings.batch_size,
        operations=settings.operations,
        rare=settings.rare,
        left_out=settings.left_out,
        micro_batch_tokens=settings.micro_batch_tokens,
    )


def loader_of(batches: Batches, *, done: int, num_workers: int) -> DataLoader[list[Rows]]:
    """Create the loader of the batches after the first ``done``, which are drawn by so many processes, or by this one
    if there are none."""
    return DataLoader(
        batches,
        batch_size=None,
        sampler=range(done, len(batches)),
        num_workers=num_workers,
        prefetch_factor=2 if num_workers else None,
        collate_fn=_unchanged,
        generator=torch.Generator(),  # it would draw from the global stream
    )


def learning_rate(settings: Settings, step: int) -> float:
    """Compute the learning rate of an optimizer step: linear warm-up, then linear decay to 0 at the last step."""
    return settings.learning_rate * min((step + 1) / settings.warmup_steps, 1 - step / settings.steps)


def train_step(
    model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, rows: Sequence[Rows], device: torch.device
) -> Tensor:
    """Do one optimizer step; returns the mean loss over the solutions' tokens, in nats: [] fp32."""
    num_tokens = sum(len(some.wanted) for some in rows)
    total = torch.zeros((), device=device)
    for some in rows:
        loss = token_losses(model, some, device).sum() / num_tokens
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def _unchanged(rows: list[Rows]) -> list[Rows]:
    return rows  # PyTorch would convert arrays to tensors


def _held_out(tokenizer: Qwen2Tokenizer, settings: Settings) -> list[Rows]:
    seed = derive_seed(settings.seed, "pretrain/held out")
    problems = draw_problems(128, seed=seed, split="validation", operations=settings.operations)
    rng = random.Random(seed)
    shortened = [leave_out_lines(rng, problem, settings.left_out) for problem in problems]
    return rows_of(tokenizer, shortened, micro_batch_tokens=settings.micro_batch_tokens)


def _save(
    path: Path,
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    step: int,
    seconds: float,
) -> None:
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with replacing(path) as temporary:
        torch.save(states | {"settings": settings.as_json(), "step": step, "seconds": seconds}, temporary)


def _restore(
    path: Path, model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, settings: Settings, device: torch.device
) -> tuple[int, float]:
    """Load model and optimizer from the saved training state, if it exists; returns the number of finished steps and
    the seconds that they took."""
    if not path.exists():
        return 0, 0.0
    found = torch.load(path, weights_only=True, map_location=device)
    if found["settings"] != settings.as_json():
        raise ValueError(
            f"{path} is of an interrupted training with other settings ({found['settings']}); continue with those, "
            "or remove its folder"
        )
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return found["step"], found["seconds"]
