"""Speculation changes no token: whatever the drafts are, tokens and log-probabilities equal those that are sampled one
token at a time, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from qerl_pl.policy.margins import keyed_noise, row_keys, token_keys
from tests.kernels.conftest import _uninitialised_memory_is_nan  # noqa: F401
from tests.reference.equal_drafts import accept as accept_by_loops

KERNELS = "qerl_pl.hopper.equal_drafts"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, LENGTH, PROMPT = 40, 24, 3


class Way(NamedTuple):
    """How a sequence is sampled."""

    seed: int
    temperature: float = 1.0
    top_k: int = VOCABULARY
    top_p: float = 1.0


@cache
def model(prefix: tuple[int, ...], way: Way) -> Tensor:
    """Imitate a language model: compute logits [V] after a prefix. As in vLLM's sampler when it adds noise, they are
    divided by the temperature, and -inf for tokens that top_k and top_p leave out. The logits are random but always the
    same for one prefix, and favour repetitions, so that drafts are sometimes right."""
    digest = hashlib.sha256(repr((prefix, way.seed % 2)).encode()).digest()
    logits = 2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(int.from_bytes(digest[:6], "big")))
    logits[prefix[-1]] += 2
    logits /= way.temperature or 1
    logits[logits < logits.topk(way.top_k).values[-1]] = float("-inf")
    order = logits.sort(descending=True)
    likelier = order.values.softmax(0).cumsum(0) - order.values.softmax(0)
    logits[order.indices[likelier >= way.top_p]] = float("-inf")
    return logits


class Sampler:
    """Samples rows of logits as vLLM does. Two mistakes can be switched on: ``noise_shifted`` uses the noise of the
    previous position in all rows but the first, ``scores_shifted`` returns the log-probabilities of the previous
    row."""

    def __init__(self, *, noise_shifted: bool = False, scores_shifted: bool = False) -> None:
        self.noise_shifted, self.scores_shifted = noise_shifted, scores_shifted

    def __call__(self, prefixes: Sequence[Sequence[int]], ways: Sequence[Way]) -> tuple[Tensor, Tensor]:
        """Sample one token after each of R prefixes. Returns the tokens [R] int64 and their log-probabilities [R]."""
        logits = torch.stack([model(tuple(prefix), way) for prefix, way in zip(prefixes, ways, strict=True)])
        positions = torch.tensor([len(prefix) - 1 for prefix in prefixes])
        positions[1:] -= int(self.noise_shifted)
        noise = keyed_noise(row_keys(torch.tensor([way.seed for way in ways]), positions), token_keys(VOCABULARY))
        noisy = torch.tensor([way.temperature > 0 for way in ways])
        tokens = (logits + noise * noisy[:, None]).argmax(1)
        scores = logits.log_softmax(1).gather(1, tokens[:, None])[:, 0]
        return tokens.to(DEVICE), scores.roll(1) if self.scores_shifted else scores


Found = list[tuple[list[int], list[float]]]


def one_by_one(sampler: Sampler, ways: Sequence[Way]) -> Found:
    """Sample each sequence alone, token by token; returns tokens and log-probabilities."""
    found: Found = []
    for way in ways:
        tokens, scores = [0] * PROMPT, []
        while len(tokens) < PROMPT + LENGTH:
            token, score = sampler([tokens], [way])
            tokens.append(int(token))
            scores.append(float(score))
        found.append((tokens[PROMPT:], scores))
    return found


Drafter = Callable[[int, list[int], int], list[int]]


def with_drafts(accept: Any, sampler: Sampler, ways: Sequence[Way], drafter: Drafter, most: int) -> Found:
    """Sample all sequences together, each with up to ``most`` drafts per step; returns tokens and log-probabilities."""
    tokens, scores = [[0] * PROMPT for _ in ways], [[] for _ in ways]
    while min(map(len, tokens)) < PROMPT + LENGTH:
        drafts = [drafter(index, each, most) for index, each in enumerate(tokens)]
        prefixes, of, starts = [], [], [0]
        for index, (each, guess) in enumerate(zip(tokens, drafts, strict=True)):
            prefixes += [each + guess[:length] for length in range(len(guess) + 1)]
            of += [ways[index]] * (len(guess) + 1)
            starts.append(len(prefixes))
        sampled, logprobs = sampler(prefixes, of)
        inputs = torch.tensor([9, *(prefix[-1] for prefix in prefixes)], dtype=torch.int32, device=DEVICE)
        rows = torch.arange(1, len(inputs), device=DEVICE)
        counted = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        emitted, counts = accept(sampled, inputs, rows, counted, most)
        for index, count in enumerate(counts.tolist()):
            tokens[index] += emitted[index, :count].tolist()
            scores[index] += logprobs[starts[index] : starts[index] + count].tolist()
    end = PROMPT + LENGTH
    return [(each[PROMPT:end], score[:LENGTH]) for each, score in zip(tokens, scores, strict=True)]


WAYS = [
    Way(0),
    Way(2**40 + 7),
    Way(5, 0.7),
    Way(-3, 1.5),
    Way(11, 0.0),
    Way(12, 1.0, top_k=3),
    Way(13, 1.3, top_p=0.6),
    Way(14, 0.8, top_k=10, top_p=0.9),
]


@pytest.fixture(scope="module")
def plain() -> Found:
    return one_by_one(Sampler(), WAYS)


def drafters(plain: Found) -> dict[str, Drafter]:
    def right(index: int, tokens: list[int], most: int) -> list[int]:
        return plain[index][0][len(tokens) - PROMPT :][:most]

    def half_right(index: int, tokens: list[int], most: int) -> list[int]:
        guess = right(index, tokens, most)
        return [*guess[: most // 2], *((token + 1) % VOCABULARY for token in guess[most // 2 :])]

    return {
        "none": lambda index, tokens, most: [],
        "right": right,
        "half right": half_right,
        "wrong": lambda index, tokens, most: [(each + 1) % VOCABULARY for each in right(index, tokens, most)],
        "the last token": lambda index, tokens, most: tokens[-1:] * most,
        "of another sequence": lambda index, tokens, most: right((index + 1) % len(plain), tokens, most),
        "sometimes": lambda index, tokens, most: right(index, tokens, (index + len(tokens)) % (most + 1)),
    }


NAMES = list(drafters([]))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        pytest.param(name, most, marks=[] if most == 7 or (most == 1 and name == "sometimes") else pytest.mark.long)
        for name in NAMES
        for most in (1, 4, 7)
    ],
)
def test_tokens_and_log_probabilities_are_those_without_drafts(kernels, plain, name, most):
    assert with_drafts(kernels.accept, Sampler(), WAYS, drafters(plain)[name], most) == plain


def test_sequences_differ_in_every_way(plain):
    """The sequences that the other tests compare are different. If they were alike, values of the wrong row or position
    would not be detected."""
    assert len({tuple(tokens) for tokens, _ in plain}) == len(WAYS)
    assert sum(len({*tokens}) for tokens, _ in plain) > 5 * len(WAYS)


def one_too_many(kernels: Any) -> Any:
    def accept(*arguments: Any) -> tuple[Tensor, Tensor]:
        sampled, _, _, starts, most = arguments
        _, counts = kernels.accept(*arguments)
        counts = (counts + 1).minimum(starts.diff())
        places = starts[:-1, None] + torch.arange(most + 1, device=DEVICE)
        return sampled[places.clamp(max=len(sampled) - 1)], counts

    return accept


def one_row_later(kernels: Any) -> Any:
    return lambda sampled, inputs, rows, *others: kernels.accept(sampled, inputs, rows.roll(-1), *others)


@pytest.mark.parametrize("mistake", ["accept one too many", "compare another row", "shift noise", "shift scores"])
def test_every_mistake_is_found(kernels, plain, mistake):
    accept, sampler = kernels.accept, Sampler()
    if mistake == "accept one too many":
        accept = one_too_many(kernels)
    elif mistake == "compare another row":
        accept = one_row_later(kernels)
    elif mistake == "shift noise":
        sampler = Sampler(noise_shifted=True)
    else:
        sampler = Sampler(scores_shifted=True)
    assert with_drafts(accept, sampler, WAYS, drafters(plain)["wrong"], 4) != plain


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_taken_as_the_definition_says(kernels, seed):
    """The kernel that decides which drafts are accepted gives on random inputs what loops give. There are only two
    different tokens, so drafts are often right by chance, even after a wrong draft; the numbers of rows per sequence
    differ."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=generator)

    most = int(draw(17, 1))
    num_rows = 1 + draw(most + 1, int(draw(9, 1)))
    starts = torch.cat([torch.zeros(1), num_rows.cumsum(0)]).int()
    total = int(num_rows.sum())
    rows = torch.randperm(total + 5, generator=generator)[:total]
    inputs, sampled = draw(2, total + 5).int(), draw(2, total)
    found = kernels.accept(*(each.to(DEVICE) for each in (sampled, inputs, rows, starts)), most)
    due = accept_by_loops(sampled, inputs, rows, starts, most)
    assert all(torch.equal(mine.cpu(), exact) for mine, exact in zip(found, due, strict=True))
