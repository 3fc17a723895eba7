"""Engines that are wrong in a part of what they do: in some rows or prompts, after some tokens, in some rollouts.

What a check of the engine samples (single tokens) is right in all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qerl_pl.common.types import Completion
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.base import Sampling
from tests.callbacks.faults import Instead
from tests.callbacks.rollout_faults import Groups, changed_output, honest, other_prompts, other_sampling, rescored

Fault = Callable[..., Any]
Prompts = Sequence[Sequence[int]]


def sampling_of_rollouts(wrong: Callable[[Any, Policy, Prompts, Sampling, Any], Groups]) -> Fault:
    """An engine whose training rollouts (several completions of several tokens) come from ``wrong``."""

    def fault(engine: Any, policy: Policy) -> Any:
        def generate(prompts: Prompts, sampling: Sampling, seed: Any, **more: Any) -> Groups:
            if sampling.max_tokens == 1 or sampling.num_completions == 1:
                return engine.generate(prompts, sampling, seed, **more)
            return wrong(engine, policy, prompts, sampling, seed)

        return Instead(engine, generate=generate)

    return fault


def of_rows(share: float, fault: Fault) -> Fault:
    """A share of the rows, drawn at random, comes from an engine with the fault."""

    def wrong(engine: Any, policy: Policy, prompts: Prompts, sampling: Sampling, seed: Any) -> Groups:
        right, others = (each.generate(prompts, sampling, seed) for each in (engine, fault(engine, policy)))
        draw = random.Random(hash(right[0][0].tokens))
        return [
            [bad if draw.random() < share else good for good, bad in zip(*both, strict=True)]
            for both in zip(right, others, strict=True)
        ]

    return sampling_of_rollouts(wrong)


def of_prompts(share: float, fault: Fault) -> Fault:
    """All rows of every n-th prompt come from an engine with the fault; n is 1 / share."""

    def wrong(engine: Any, policy: Policy, prompts: Prompts, sampling: Sampling, seed: Any) -> Groups:
        every = round(1 / share)
        groups = engine.generate(prompts, sampling, seed)
        seeds = seed if isinstance(seed, int) else list(seed)[::every]
        groups[::every] = fault(engine, policy).generate(prompts[::every], sampling, seeds)
        return groups

    return sampling_of_rollouts(wrong)


def in_rollouts(which: Callable[[int], bool], fault: Fault) -> Fault:
    """The fault is there in some rollouts only, counted from its first."""

    def begun(engine: Any, policy: Policy) -> Any:
        count = iter(range(10**6))

        def generate(prompts: Prompts, sampling: Sampling, seed: Any, **more: Any) -> Groups:
            several = sampling.max_tokens > 1 and sampling.num_completions > 1
            chosen = fault(engine, policy) if several and which(next(count)) else engine
            return chosen.generate(prompts, sampling, seed, **more)

        return Instead(engine, generate=generate)

    return begun


def row_by_row(share: float, change: Callable[[Completion, Completion], Completion]) -> Fault:
    """A share of the rows is changed, given the row and the one after it in the rollout."""

    def changed(groups: Groups, engine: Any, prompts: Prompts) -> Groups:
        rows = [row for group in groups for row in group]
        draw = random.Random(hash(rows[0].tokens))
        pairs = zip(rows, [*rows[1:], rows[0]], strict=True)
        found = iter([change(row, other) if draw.random() < share else row for row, other in pairs])
        return [[next(found) for _ in group] for group in groups]

    return changed_output(changed)


def cut(row: Completion, length: int, *, finished: bool) -> Completion:
    length = max(1, length)
    return Completion(row.tokens[:length], row.logprobs[:length], finished=finished)


def spliced(row: Completion, other: Completion) -> Completion:
    """The first half of one completion and the second half of another."""
    one, two = len(row.tokens) // 2, len(other.tokens) // 2
    return Completion(
        row.tokens[:one] + other.tokens[two:], row.logprobs[:one] + other.logprobs[two:], finished=other.finished
    )


def with_tokens(row: Completion, tokens: Sequence[int]) -> Completion:
    """Other tokens before the last, with the log-probabilities of the old ones."""
    return replace(row, tokens=(*tokens, row.tokens[-1]))


def with_logprobs(change: Callable[[float], float]) -> Callable[[Completion, Completion], Completion]:
    return lambda row, _: replace(row, logprobs=tuple(map(change, row.logprobs)))


def of_next_row(row: Completion, other: Completion) -> Completion:
    """The log-probabilities of another row."""
    return replace(row, logprobs=(*other.logprobs, *row.logprobs)[: len(row.tokens)])


def chosen(choose: Callable[[list[Completion], int], list[Completion]]) -> Fault:
    """Of twice as many completions, some are kept."""

    def wrong(engine: Any, policy: Policy, prompts: Prompts, sampling: Sampling, seed: Any) -> Groups:
        size = sampling.num_completions
        return [
            choose(group, size) for group in engine.generate(prompts, replace(sampling, num_completions=2 * size), seed)
        ]

    return sampling_of_rollouts(wrong)


def best(key: Callable[[Completion], float]) -> Callable[[list[Completion], int], list[Completion]]:
    """The half with the smallest numbers, in the order in which they were drawn."""

    def choose(group: list[Completion], size: int) -> list[Completion]:
        places = sorted(sorted(range(len(group)), key=lambda place: key(group[place]))[:size])
        return [group[place] for place in places]

    return choose


def distinct(group: list[Completion], size: int) -> list[Completion]:
    """Completions that are equal to an earlier one are left out as long as there are enough."""
    places: dict[tuple[int, ...], int] = {}
    for place, row in enumerate(group):
        places.setdefault(row.tokens, place)
    first = sorted(places.values())
    return [group[place] for place in [*first, *(p for p in range(len(group)) if p not in first)][:size]]


def other_adapter(change: Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]) -> Fault:
    """Rollouts are sampled with a changed adapter, and the right one is loaded again afterwards.

    Args:
        change: makes the adapter from the current one and from that of the rollout before.
    """

    def fault(engine: Any, policy: Policy) -> Any:
        def generate(prompts: Prompts, sampling: Sampling, seed: Any, **more: Any) -> Groups:
            now = {name: tensor.detach().clone() for name, tensor in policy.adapter_state().items()}
            engine.load_adapter(change(now, now))
            groups = engine.generate(prompts, sampling, seed, **more)
            engine.load_adapter(now)
            return groups

        return Instead(engine, generate=generate)

    return fault


def adapter_before(share: float) -> Fault:
    """A share of the rows is sampled with the adapter of the rollout before."""

    def begun(engine: Any, policy: Policy) -> Any:
        before: list[dict[str, Tensor]] = []

        def generate(prompts: Prompts, sampling: Sampling, seed: Any, **more: Any) -> Groups:
            if sampling.max_tokens == 1 or sampling.num_completions == 1:
                return engine.generate(prompts, sampling, seed, **more)
            now = {name: tensor.detach().clone() for name, tensor in policy.adapter_state().items()}
            before.append(now)
            old = before[max(0, len(before) - 2)]
            return of_rows(share, other_adapter(lambda *_: old))(engine, policy).generate(prompts, sampling, seed)

        return Instead(engine, generate=generate)

    return begun


def random_adapter(strength: float) -> Fault:
    """B gets random numbers of the size that gives the adapter a strength as that of the canary's probe adapters."""

    def change(now: dict[str, Tensor], _: dict[str, Tensor], policy: Policy) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        size = strength / policy.lora_scaling / policy.peft_config.r**0.5
        return {
            name: t + size * torch.randn(t.shape, generator=generator).to(t) if ".lora_B" in name else t
            for name, t in now.items()
        }

    return lambda engine, policy: other_adapter(lambda now, old: change(now, old, policy))(engine, policy)


def other_noise_while_sampling(noise: NormNoise) -> Fault:
    def fault(engine: Any, policy: Policy) -> Any:
        def generate(prompts: Prompts, sampling: Sampling, seed: Any, **more: Any) -> Groups:
            engine.set_norm_noise(noise)
            groups = engine.generate(prompts, sampling, seed, **more)
            engine.set_norm_noise(NormNoise())
            return groups

        return Instead(engine, generate=generate)

    return fault


def without_adapter(engine: Any, policy: Policy) -> Any:
    return Instead(engine, generate=lambda *args, **_: engine.generate(*args, adapter=False))


def in_two_parts(
    first: int,
    later: Callable[[Any, Policy], Any] = lambda engine, policy: engine,
    prompt: Callable[[Sequence[int]], Sequence[int]] = lambda prompt: prompt,
) -> Fault:
    """After the first tokens, completions go on by another engine, or as after another prompt."""

    def wrong(engine: Any, policy: Policy, prompts: Prompts, sampling: Sampling, seed: Any) -> Groups:
        begun = engine.generate(prompts, replace(sampling, max_tokens=first), seed)
        rows = [(index, row) for index, group in enumerate(begun) for row in group]
        open_ones = [place for place, (_, row) in enumerate(rows) if not row.finished]
        texts = [[*prompt(prompts[rows[place][0]]), *rows[place][1].tokens] for place in open_ones]
        rest = replace(sampling, max_tokens=sampling.max_tokens - first, num_completions=1)
        # every row has a seed of its own, because rows of a group may have begun equally
        seeds = [(seed if isinstance(seed, int) else 0) + place for place in open_ones]
        ends = later(engine, policy).generate(texts, rest, seeds) if texts else []
        found = [row for _, row in rows]
        for place, [end] in zip(open_ones, ends, strict=True):
            row = found[place]
            found[place] = Completion(row.tokens + end.tokens, row.logprobs + end.logprobs, finished=end.finished)
        size = sampling.num_completions
        return [found[start : start + size] for start in range(0, len(found), size)]

    return sampling_of_rollouts(wrong)


def other_logits(change: Callable[[Tensor], Tensor], *, scored: bool) -> Fault:
    """Tokens are drawn from changed logits [B, V].

    Args:
        change: function of the logits.
        scored: whether log-probabilities are those of the policy, and not of the changed logits.
    """

    def fault(engine: Any, policy: Policy) -> Any:
        @contextmanager
        def hooked() -> Iterator[None]:
            head = policy.causal_lm.get_output_embeddings()
            hook = head.register_forward_hook(lambda module, args, logits: change(logits[:, -1])[:, None])
            yield
            hook.remove()

        def generate(prompts: Prompts, sampling: Sampling, seed: Any, **more: Any) -> Groups:
            with hooked():
                groups = engine.generate(prompts, sampling, seed, **more)
            return rescored(engine, prompts, groups) if scored else groups

        return Instead(engine, generate=generate)

    return fault


def without_second(logits: Tensor) -> Tensor:
    """The second most likely token is never drawn."""
    return logits.scatter(1, logits.topk(2, dim=1).indices[:, 1:], -1e4)


def min_p(share: float) -> Callable[[Tensor], Tensor]:
    def change(logits: Tensor) -> Tensor:
        return logits.masked_fill(logits < logits.amax(dim=1, keepdim=True) + torch.tensor(share).log(), -1e4)

    return change


def exchanged_middle(prompt: Sequence[int]) -> list[int]:
    """Two tokens in the middle of the prompt change places."""
    half = len(prompt) // 2
    return [*prompt[: half - 1], prompt[half], prompt[half - 1], *prompt[half + 1 :]]


def previous_completions(share: float) -> Fault:
    """Every n-th group is that of the rollout before; n is 1 / share."""

    def begun(engine: Any, policy: Policy) -> Any:
        before: list[Groups] = []

        def changed(groups: Groups, *_: Any) -> Groups:
            before.append([list(group) for group in groups])
            every = round(1 / share)
            return [
                old if not place % every else group
                for place, (group, old) in enumerate(zip(groups, before[max(0, len(before) - 2)], strict=True))
            ]

        return changed_output(changed)(engine, policy)

    return begun


def sorted_half(key: Callable[[Completion], float]) -> Fault:
    """The completions of every other group are sorted."""
    return changed_output(
        lambda groups, *_: [sorted(group, key=key) if place % 2 else group for place, group in enumerate(groups)]
    )


def num_tokens(row: Completion) -> int:
    return len(row.tokens)


def unlikely(row: Completion) -> float:
    return -sum(row.logprobs)


OF_ANY_ENGINE: dict[str, Fault] = {
    # ends
    "a tenth loses its last token, reported as finished": row_by_row(
        0.1, lambda row, _: cut(row, len(row.tokens) - 1, finished=True)
    ),
    "a tenth is cut at half, reported as cut": row_by_row(
        0.1, lambda row, _: cut(row, len(row.tokens) // 2, finished=False)
    ),
    "a tenth ends with another token, reported as finished": row_by_row(
        0.1, lambda row, _: replace(row, tokens=(*row.tokens[:-1], 7), finished=True)
    ),
    # rows and tokens
    "a tenth with the tokens shifted by one": row_by_row(
        0.1, lambda row, _: with_tokens(row, [*row.tokens[1:-1], *row.tokens[:1]][: len(row.tokens) - 1])
    ),
    "a tenth with the last two tokens before the end exchanged": row_by_row(
        0.1, lambda row, _: with_tokens(row, [*row.tokens[:-3], *row.tokens[-3:-1][::-1]])
    ),
    "an eighth goes on with the second half of the next row": row_by_row(0.125, spliced),
    "a tenth has the log-probabilities of the next row": row_by_row(0.1, of_next_row),
    "a tenth is the next row": row_by_row(0.1, lambda row, other: other),
    "a tenth has log-probabilities 0": row_by_row(0.1, with_logprobs(lambda x: 0.0)),
    "a quarter has log-probabilities x 0.8": row_by_row(0.25, with_logprobs(lambda x: 0.8 * x)),
    "a half has log-probabilities in bits": row_by_row(0.5, with_logprobs(lambda x: x / 0.6931)),
    "log-probabilities rounded to 0.01": row_by_row(1.0, with_logprobs(lambda x: round(x, 2))),
    "every eighth group is that of the rollout before": previous_completions(0.125),
    # variety and choice
    "a quarter of the groups with the second half copied": of_prompts(
        0.25, changed_output(lambda groups, *_: [group[: len(group) // 2] * 2 for group in groups])
    ),
    "a tenth is the row before in its group": changed_output(
        lambda groups, *_: [
            [
                group[i - 1] if i and random.Random(hash(group[i].tokens) + i).random() < 0.1 else group[i]
                for i in range(len(group))
            ]
            for group in groups
        ]
    ),
    "equal completions of a group are drawn again": chosen(distinct),
    "the likelier half of twice as many": chosen(best(unlikely)),
    "the less likely half of twice as many": chosen(best(lambda row: -unlikely(row))),
    "the longer half of twice as many, in half of the groups": of_prompts(
        0.5, chosen(best(lambda row: -num_tokens(row)))
    ),
    "every other group sorted by length": sorted_half(num_tokens),
    "every other group sorted by log-probability": sorted_half(unlikely),
    # sampling
    "a third at temperature 0.5, scored at 1": of_rows(0.33, other_sampling(temperature=0.5)),
    "a quarter of the prompts at temperature 1.5, scored at 1": of_prompts(0.25, other_sampling(temperature=1.5)),
    "half of the rows greedy, scored at 1": of_rows(0.5, other_sampling(temperature=0)),
    "half of the rows top_k 2, scored over all": of_rows(0.5, other_sampling(top_k=2)),
    "half of the prompts top_p 0.8, scored over all": of_prompts(0.5, other_sampling(top_p=0.8)),
    "half of the rows temperature 1.3": of_rows(0.5, honest(temperature=1.3)),
    "temperature 1.5 in every other rollout, scored at 1": in_rollouts(
        lambda count: count % 2 == 0, other_sampling(temperature=1.5)
    ),
    # policy and prompts
    "a third without the adapter": of_rows(0.33, without_adapter),
    "half with the adapter of the rollout before": adapter_before(0.5),
    "a quarter of the prompts with the adapter doubled": of_prompts(
        0.25, other_adapter(lambda now, _: {name: 2 * t if ".lora_B" in name else t for name, t in now.items()})
    ),
    "a tenth with a random adapter": of_rows(0.1, random_adapter(0.25)),
    "one layer's adapter missing while sampling": sampling_of_rollouts(
        lambda engine, policy, *given: other_adapter(
            lambda now, _: {n: t * ("layers.0." not in n) if ".lora_B" in n else t for n, t in now.items()}
        )(engine, policy).generate(*given)
    ),
    "a quarter with noise on the norms": of_rows(0.25, other_noise_while_sampling(NormNoise(sigma=0.01, seed=3))),
    "a quarter of the prompts without the first token": of_prompts(0.25, other_prompts(lambda prompt: prompt[1:])),
    "a quarter of the prompts without the last token": of_prompts(0.25, other_prompts(lambda prompt: prompt[:-1])),
    "half of the rows with the first token twice": of_rows(0.5, other_prompts(lambda prompt: [prompt[0], *prompt])),
    "a tenth of the rows with two tokens of the prompt exchanged": of_rows(0.1, other_prompts(exchanged_middle)),
    "the prompt's beginning is forgotten after 8 tokens": in_two_parts(8, prompt=lambda prompt: prompt[4:]),
    "no adapter after 8 tokens": in_two_parts(8, later=without_adapter),
}

OF_THE_MODEL: dict[str, Fault] = {
    "half of the rows min_p 0.2, scored over all": of_rows(0.5, other_logits(min_p(0.2), scored=True)),
    "half of the rows min_p 0.2": of_rows(0.5, other_logits(min_p(0.2), scored=False)),
    "the second most likely token is never drawn, scored as if it could": sampling_of_rollouts(
        lambda engine, policy, *given: other_logits(without_second, scored=True)(engine, policy).generate(*given)
    ),
    "logits x 1.1 while sampling": sampling_of_rollouts(
        lambda engine, policy, *given: other_logits(lambda x: 1.1 * x, scored=False)(engine, policy).generate(*given)
    ),
    "logits with errors of 0.05": of_rows(0.5, other_logits(lambda x: x + 0.05 * torch.randn_like(x), scored=False)),
}
