"""Faults of rollouts, to test which of them the checks of a run detect. Each fault changes either an engine's output or
the model from which the engine samples.

A fault is a function of an engine and the policy that returns a faulty engine. Faults in ``PARTIAL`` change only some
rows or prompts, only later tokens, or only some rollouts. They leave the single tokens that the callback SyncCanary
samples right, so that other checks have to detect them.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from qerl_pl.common.types import Completion
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.gaps import GAP_FLOOR
from tests.callbacks.faults import FAULTS, Instead

Fault = Callable[[Any, Policy], Any]
Groups = list[list[Completion]]
Prompts = Sequence[Sequence[int]]
Adapter = dict[str, Tensor]


def sampled(wrong: Callable[..., Groups], when: Callable[[Sampling], bool] = lambda _: True) -> Fault:
    """Make a fault from a function wrong(engine, policy, prompts, sampling, seed) that returns completions. Calls for
    whose sampling settings ``when`` is true are answered by this function, other calls by the engine."""

    def fault(engine: Any, policy: Policy) -> Any:
        def generate(prompts: Prompts, sampling: Sampling, seed: Any, **options: Any) -> Groups:
            if not when(sampling):
                return engine.generate(prompts, sampling, seed, **options)
            return wrong(engine, policy, prompts, sampling, seed, **options)

        return Instead(engine, generate=generate)

    return fault


def in_training(wrong: Callable[..., Groups]) -> Fault:
    """Make a fault that answers only calls as training makes them: for several completions per prompt, of several
    tokens each. All other calls, such as those of the callback SyncCanary, go to the engine."""
    return sampled(wrong, lambda sampling: sampling.max_tokens > 1 and sampling.num_completions > 1)


def only_in_training(fault: Fault) -> Fault:
    return in_training(lambda engine, policy, *arguments: fault(engine, policy).generate(*arguments))


def changed_output(change: Callable[[Groups, Any, Prompts], Groups]) -> Fault:
    """Make a fault that changes completions after the engine has sampled them. Calls for completions of a single token
    are not affected."""

    def wrong(engine: Any, policy: Policy, prompts: Prompts, *arguments: Any, **options: Any) -> Groups:
        return change(engine.generate(prompts, *arguments, **options), engine, prompts)

    return sampled(wrong, lambda sampling: sampling.max_tokens > 1)


def every_row(change: Callable[[Completion], Completion]) -> Fault:
    return changed_output(lambda groups, *_: [[change(row) for row in group] for group in groups])


def some_rows(share: float, change: Callable[[Completion, Completion], Completion]) -> Fault:
    """Make a fault that changes a random share of the completions: each is replaced by ``change`` of itself and of the
    next completion in the rollout."""

    def changed(groups: Groups, *_: Any) -> Groups:
        rows = [row for group in groups for row in group]
        draw = random.Random(hash(rows[0].tokens))
        pairs = zip(rows, [*rows[1:], rows[0]], strict=True)
        new = iter([change(row, other) if draw.random() < share else row for row, other in pairs])
        return [[next(new) for _ in group] for group in groups]

    return changed_output(changed)


def of_rows(share: float, fault: Fault) -> Fault:
    """Make a fault that hits only a random share of the completions: these come from an engine with the given fault,
    all others from the right engine."""

    def wrong(engine: Any, policy: Policy, *arguments: Any) -> Groups:
        right, others = (source.generate(*arguments) for source in (engine, fault(engine, policy)))
        draw = random.Random(hash(right[0][0].tokens))
        return [
            [bad if draw.random() < share else good for good, bad in zip(*both, strict=True)]
            for both in zip(right, others, strict=True)
        ]

    return in_training(wrong)


def of_prompts(share: float, fault: Fault) -> Fault:
    """Make a fault that hits only every n-th prompt, n = 1 / share: all completions of this prompt come from an engine
    with the given fault, those of other prompts from the right engine."""

    def wrong(engine: Any, policy: Policy, prompts: Prompts, sampling: Sampling, seed: Any) -> Groups:
        every = round(1 / share)
        groups = engine.generate(prompts, sampling, seed)
        seeds = seed if isinstance(seed, int) else list(seed)[::every]
        groups[::every] = fault(engine, policy).generate(prompts[::every], sampling, seeds)
        return groups

    return in_training(wrong)


def in_every_other_rollout(fault: Fault) -> Fault:
    def begun(engine: Any, policy: Policy) -> Any:
        rollouts = count()

        def wrong(engine: Any, policy: Policy, *arguments: Any) -> Groups:
            return (engine if next(rollouts) % 2 else fault(engine, policy)).generate(*arguments)

        return in_training(wrong)(engine, policy)

    return begun


# Faults of rows, tokens and log-probabilities


def altered(completion: Completion, share: float = 0.02) -> Completion:
    """Replace a share of the tokens by random ones, but keep the log-probabilities that were reported for the replaced
    tokens."""
    draw = random.Random(hash(completion.tokens))
    tokens = (draw.randrange(5, 200) if draw.random() < share else token for token in completion.tokens[:-1])
    return replace(completion, tokens=(*tokens, completion.tokens[-1]))  # it ends as before


def rescored(engine: Any, prompts: Prompts, groups: Groups, **options: Any) -> Groups:
    """Replace the log-probabilities of completions by those that the engine computes for the same tokens at temperature
    1."""
    rows = [[*prompt, *row.tokens] for prompt, group in zip(prompts, groups, strict=True) for row in group]
    scores = iter(engine.score(rows, **options))
    return [
        [replace(row, logprobs=tuple(next(scores)[len(prompt) - 1 :])) for row in group]
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def growing_gap(engine: Any, policy: Policy) -> Any:
    """Add an error to the log-probabilities whose sign alternates from token to token. In the first rollout the error
    is 4 times ``GAP_FLOOR``, the mean difference between trainer and engine below which RolloutEvidence never finds a
    sudden increase, so 4e-5 nats in fp32. In each further rollout it is 4 times as large as before."""
    sizes = [GAP_FLOOR[policy.dtype] * 4 ** (1 + rollout) for rollout in range(10)]

    def change(groups: Groups, *_: Any) -> Groups:
        size = sizes.pop(0) if len(groups[0]) > 1 else 0.0  # validation has one completion per prompt

        def off(row: Completion) -> Completion:
            return replace(row, logprobs=tuple(x + size * (-1) ** place for place, x in enumerate(row.logprobs)))

        return [[off(row) for row in group] for group in groups]

    return changed_output(change)(engine, policy)


def logprobs_by(change: Callable[[float], float]) -> Callable[..., Completion]:
    return lambda row, *_: replace(row, logprobs=tuple(map(change, row.logprobs)))


def scores_of(row: Completion, other: Completion) -> Completion:
    """Replace a row's log-probabilities by those of another row."""
    return replace(row, logprobs=(*other.logprobs, *row.logprobs)[: len(row.tokens)])


def cut(row: Completion, length: int, *, finished: bool) -> Completion:
    length = max(1, length)
    return Completion(row.tokens[:length], row.logprobs[:length], finished=finished)


def spliced(row: Completion, other: Completion) -> Completion:
    """Join the first half of one completion and the second half of another."""
    one, two = len(row.tokens) // 2, len(other.tokens) // 2
    tokens, logprobs = row.tokens[:one] + other.tokens[two:], row.logprobs[:one] + other.logprobs[two:]
    return Completion(tokens, logprobs, finished=other.finished)


def with_tokens(row: Completion, tokens: Sequence[int]) -> Completion:
    """Replace all tokens of a completion but the last, and keep the log-probabilities that were reported for the old
    tokens."""
    return replace(row, tokens=(*tokens, row.tokens[-1]))


def previous_completions(engine: Any, policy: Policy) -> Any:
    """Replace every eighth group of completions by the group at the same place in the previous rollout."""
    before: list[Groups] = []

    def changed(groups: Groups, *_: Any) -> Groups:
        before.append([list(group) for group in groups])
        olds = before[max(0, len(before) - 2)]
        return [group if place % 8 else old for place, (group, old) in enumerate(zip(groups, olds, strict=True))]

    return changed_output(changed)(engine, policy)


def some_rows_exchanged(groups: Groups, *_: Any) -> Groups:
    """Replace the first completion of every second group by the first completion of the preceding group, which answers
    another prompt."""
    firsts = [group[0] for group in groups]
    return [[firsts[index - index % 2], *group[1:]] for index, group in enumerate(groups)]


def some_rows_copied(groups: Groups, *_: Any) -> Groups:
    """Replace about a tenth of the completions by the preceding completion of the same group."""

    def is_copy(row: Completion, place: int) -> bool:
        return place > 0 and random.Random(hash(row.tokens) + place).random() < 0.1

    return [[group[i - 1] if is_copy(group[i], i) else group[i] for i in range(len(group))] for group in groups]


# Faults of choice among completions


def chosen(choose: Callable[[list[Completion], int], list[Completion]]) -> Fault:
    """Make a fault of an engine that samples twice as many completions per prompt as wanted, and returns those that
    ``choose`` selects. ``choose`` is called with all sampled completions of one prompt and the wanted number."""

    def wrong(engine: Any, policy: Policy, prompts: Prompts, sampling: Sampling, seed: Any) -> Groups:
        size = sampling.num_completions
        groups = engine.generate(prompts, replace(sampling, num_completions=2 * size), seed)
        return [choose(group, size) for group in groups]

    return in_training(wrong)


def best(key: Callable[[Completion], float]) -> Fault:
    """Make a fault of an engine that samples twice as many completions per prompt as wanted, and returns for each
    prompt the half with the smallest ``key``, in the order in which the completions were sampled."""

    def choose(group: list[Completion], size: int) -> list[Completion]:
        places = sorted(sorted(range(len(group)), key=lambda place: key(group[place]))[:size])
        return [group[place] for place in places]

    return chosen(choose)


def distinct(group: list[Completion], size: int) -> list[Completion]:
    """Choose ``size`` completions of a group (all sampled completions of one prompt), as many different ones as
    possible: copies of earlier completions are taken only if there are too few different completions."""
    places: dict[tuple[int, ...], int] = {}
    for place, row in enumerate(group):
        places.setdefault(row.tokens, place)
    first = sorted(places.values())
    return [group[place] for place in [*first, *(p for p in range(len(group)) if p not in first)][:size]]


def sorted_half(key: Callable[[Completion], float]) -> Fault:
    """Make a fault of an engine that returns the completions of every second prompt sorted by ``key``."""
    return changed_output(
        lambda groups, *_: [sorted(group, key=key) if place % 2 else group for place, group in enumerate(groups)]
    )


def num_tokens(row: Completion) -> int:
    return len(row.tokens)


def unlikely(row: Completion) -> float:
    return -sum(row.logprobs)


# Faults of sampling settings and prompts


def honest(**settings: Any) -> Fault:
    """Make a fault of an engine that samples with other settings than it was asked for, and reports the
    log-probabilities of the distribution from which it really sampled."""
    return sampled(
        lambda engine, policy, prompts, sampling, seed, **options: engine.generate(
            prompts, replace(sampling, **settings), seed, **options
        )
    )


def other_sampling(**settings: Any) -> Fault:
    """Make a fault of an engine that samples with other settings than it was asked for, and hides this: the
    log-probabilities that it reports are those at temperature 1."""

    def wrong(engine: Any, policy: Policy, prompts: Prompts, sampling: Sampling, seed: Any, **options: Any) -> Groups:
        if settings.get("temperature") == 0:
            greedy = replace(sampling, temperature=0.0, num_completions=1)
            groups = [group * sampling.num_completions for group in engine.generate(prompts, greedy, seed, **options)]
        else:
            groups = engine.generate(prompts, replace(sampling, **settings), seed, **options)
        return rescored(engine, prompts, groups, **options)

    return sampled(wrong)


def shorter_limit(
    engine: Any, policy: Policy, prompts: Prompts, sampling: Sampling, seed: Any, **options: Any
) -> Groups:
    """Cut completions at a quarter of the limit, and report them as finished."""
    limit = max(1, sampling.max_tokens // 4)
    groups = engine.generate(prompts, replace(sampling, max_tokens=limit), seed, **options)
    return [[replace(row, finished=True) for row in group] for group in groups]


def constant_seed(
    engine: Any, policy: Policy, prompts: Prompts, sampling: Sampling, seed: Any, **options: Any
) -> Groups:
    """Draw all completions of a group with the same seed, so that they are equal."""
    one = engine.generate(prompts, replace(sampling, num_completions=1), 0, **options)
    return [group * sampling.num_completions for group in one]


def other_prompts(change: Callable[[Sequence[int]], Sequence[int]]) -> Fault:
    """Make a fault that samples completions of changed prompts."""
    return sampled(
        lambda engine, policy, prompts, *arguments, **options: engine.generate(
            [change(prompt) for prompt in prompts], *arguments, **options
        )
    )


def exchanged_middle(prompt: Sequence[int]) -> list[int]:
    """Exchange the two tokens in the middle of a prompt."""
    half = len(prompt) // 2
    return [*prompt[: half - 1], prompt[half], prompt[half - 1], *prompt[half + 1 :]]


def in_two_parts(
    later: Fault = lambda engine, policy: engine,
    prompt: Callable[[Sequence[int]], Sequence[int]] = lambda prompt: prompt,
) -> Fault:
    """Make a fault that hits only tokens after the first 8 of a completion: these are sampled by an engine with the
    fault ``later``, or as the continuation of a changed prompt."""

    def wrong(engine: Any, policy: Policy, prompts: Prompts, sampling: Sampling, seed: Any) -> Groups:
        begun = engine.generate(prompts, replace(sampling, max_tokens=8), seed)
        rows = [row for group in begun for row in group]
        size = sampling.num_completions
        open_ones = [place for place, row in enumerate(rows) if not row.finished]
        texts = [[*prompt(prompts[place // size]), *rows[place].tokens] for place in open_ones]
        rest = replace(sampling, max_tokens=sampling.max_tokens - 8, num_completions=1)
        # every row has a seed of its own, because rows of a group may have begun equally
        seeds = [(seed if isinstance(seed, int) else 0) + place for place in open_ones]
        ends = later(engine, policy).generate(texts, rest, seeds) if texts else []
        for place, [end] in zip(open_ones, ends, strict=True):
            row = rows[place]
            rows[place] = Completion(row.tokens + end.tokens, row.logprobs + end.logprobs, finished=end.finished)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    return in_training(wrong)


# Faults of adapter and noise


def copied(adapter: Adapter) -> Adapter:
    return {name: tensor.detach().clone() for name, tensor in adapter.items()}


def scaled_b(adapter: Adapter, factor: float, layer: str = "") -> Adapter:
    """Multiply the matrices B, of all layers or of one, by a factor."""
    return {name: t * factor if ".lora_B" in name and layer in name else t for name, t in adapter.items()}


def other_adapter(change: Callable[[Adapter], Adapter]) -> Fault:
    """Make a fault that loads a changed adapter before each call for completions, and the right adapter again
    afterwards."""

    def wrong(engine: Any, policy: Policy, *arguments: Any, **options: Any) -> Groups:
        adapter = copied(policy.adapter_state())
        engine.load_adapter(change(adapter))
        groups = engine.generate(*arguments, **options)
        engine.load_adapter(adapter)
        return groups

    return sampled(wrong)


def adapter_before(engine: Any, policy: Policy) -> Any:
    """Sample half of the rows with the adapter of the previous rollout."""
    before: list[Adapter] = []

    def wrong(engine: Any, policy: Policy, *arguments: Any) -> Groups:
        before.append(copied(policy.adapter_state()))
        old = before[max(0, len(before) - 2)]
        return of_rows(0.5, other_adapter(lambda _: old))(engine, policy).generate(*arguments)

    return in_training(wrong)(engine, policy)


def random_adapter(engine: Any, policy: Policy) -> Any:
    """Sample with random numbers added to the matrices B. The numbers are as large as in the probe adapter of strength
    0.25 with which the callback SyncCanary tests engines."""
    size = 0.25 / policy.lora_scaling / policy.peft_config.r**0.5

    def change(adapter: Adapter) -> Adapter:
        generator = torch.Generator().manual_seed(0)
        return {
            name: t + size * torch.randn(t.shape, generator=generator).to(t) if ".lora_B" in name else t
            for name, t in adapter.items()
        }

    return other_adapter(change)(engine, policy)


def old_where_several(engine: Any, policy: Policy) -> Any:
    """Sample the second half of each group with the adapter that the policy had when the fault began. Calls for one
    completion per prompt, such as those of the callback SyncCanary, use the right adapter."""
    old = copied(policy.adapter_state())
    loaded = dict(old)

    def load(adapter: Adapter) -> None:
        loaded.update(copied(adapter))
        engine.load_adapter(adapter)

    def wrong(
        _engine: Any, _policy: Policy, prompts: Prompts, sampling: Sampling, *arguments: Any, **options: Any
    ) -> Groups:
        groups = engine.generate(prompts, sampling, *arguments, **options)
        engine.load_adapter(old)
        stale = engine.generate(prompts, sampling, *arguments, **options)
        engine.load_adapter(dict(loaded))
        half = sampling.num_completions // 2
        return [group[:half] + others[half:] for group, others in zip(groups, stale, strict=True)]

    return sampled(wrong, lambda sampling: sampling.num_completions > 1)(Instead(engine, load_adapter=load), policy)


def changed_while_sampling(engine: Any, policy: Policy, prompts: Prompts, *arguments: Any, **options: Any) -> Groups:
    """Sample completions of the second half of the prompts with random numbers added to the matrices B of one layer.
    The numbers are so large that the change can be detected even if the policy has not learned anything yet."""

    def change(adapter: Adapter) -> Adapter:
        return {
            name: t + 0.1 * torch.randn_like(t) if "layers.1." in name and "lora_B" in name else t
            for name, t in adapter.items()
        }

    half = (len(prompts) + 1) // 2
    groups = engine.generate(prompts[:half], *arguments, **options)
    if prompts[half:]:
        groups += other_adapter(change)(engine, policy).generate(prompts[half:], *arguments, **options)
    return groups


def old_in_one_layer(engine: Any, policy: Policy) -> Any:
    old = copied(policy.adapter_state())

    def load(adapter: Adapter) -> None:
        engine.load_adapter({name: old[name] if "layers.0." in name else tensor for name, tensor in adapter.items()})

    return Instead(engine, load_adapter=load)


def noisy(engine: Any, policy: Policy, *arguments: Any, **options: Any) -> Groups:
    """Sample with noise on the norms where there should be none."""
    engine.set_norm_noise(NormNoise(sigma=0.01, seed=3))
    groups = engine.generate(*arguments, **options)
    engine.set_norm_noise(NormNoise())
    return groups


def without_noise(engine: Any, policy: Policy) -> Any:
    """Sample a quarter of the rows without the noise that is on the norms."""
    held = [NormNoise()]

    def hold(noise: NormNoise) -> int:
        held.append(noise)
        return engine.set_norm_noise(noise)

    def clean(_engine: Any, _policy: Policy, *arguments: Any, **options: Any) -> Groups:
        engine.set_norm_noise(NormNoise())
        groups = engine.generate(*arguments, **options)
        engine.set_norm_noise(held[-1])
        return groups

    return of_rows(0.25, sampled(clean))(Instead(engine, set_norm_noise=hold), policy)


def without_adapter(engine: Any, policy: Policy) -> Any:
    return Instead(engine, generate=lambda *arguments, **_: engine.generate(*arguments, adapter=False))


# Faults of the model


def other_model(change: Callable[[Policy], dict[str, tuple[Tensor, Tensor]]], *, late: bool) -> Fault:
    """Make a fault by which an engine computes with other weights than those of the policy.

    Args:
        change: returns name -> (a tensor of the policy's model, the value that this tensor has while the engine
            computes).
        late: change the tensors only during each forward pass. This is needed for tensors that the engine itself
            writes at the beginning of a call (the adapter, and the blocks' norms). Otherwise they are changed during
            the whole call, which is needed for tensors that are also used outside of the model's forward pass (the
            head).
    """

    def fault(engine: Any, policy: Policy) -> Any:
        @contextmanager
        def wrong() -> Iterator[None]:
            tensors = change(policy)
            right = {name: live.detach().clone() for name, (live, _) in tensors.items()}
            with torch.no_grad():
                for live, value in tensors.values():
                    live.copy_(value)
                yield
                for name, (live, _) in tensors.items():
                    live.copy_(right[name])

        @contextmanager
        def late_changes() -> Iterator[None]:
            entered, model = ExitStack(), policy.causal_lm.model
            before = model.register_forward_pre_hook(lambda *_: entered.enter_context(wrong()))
            after = model.register_forward_hook(lambda *_: entered.close(), always_call=True)
            yield
            before.remove()
            after.remove()

        def during(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                with late_changes() if late else wrong():
                    return method(*args, **options)

            return call

        return Instead(engine, generate=during(engine.generate), score=during(engine.score))

    return fault


def weights(policy: Policy, part: str) -> dict[str, Tensor]:
    """Return the floating-point parameters and buffers of the policy's model with ``part`` in their names. If there are
    none, the assertion fails."""
    named = [*policy.causal_lm.named_parameters(), *policy.causal_lm.named_buffers()]
    tensors = {name: tensor for name, tensor in named if part in name and tensor.is_floating_point()}
    assert tensors, f"nothing is called {part}"
    return tensors


def scaled(part: str, factor: float, *, late: bool = False) -> Fault:
    return other_model(lambda policy: {name: (t, t * factor) for name, t in weights(policy, part).items()}, late=late)


def swapped(one: str, other: str) -> Fault:
    def change(policy: Policy) -> dict[str, tuple[Tensor, Tensor]]:
        pairs = {name: (tensor, name.replace(one, other)) for name, tensor in weights(policy, one).items()}
        live = dict(policy.causal_lm.named_parameters())
        there = {name: (tensor, live[twin].detach().clone()) for name, (tensor, twin) in pairs.items()}
        back = {twin: (live[twin], tensor.detach().clone()) for tensor, twin in pairs.values()}
        return there | back

    return other_model(change, late=True)


def other_logits(change: Callable[[Tensor], Tensor], *, is_scored: bool) -> Fault:
    """Make a fault that changes the logits [B, V] before sampling. With ``is_scored``, the reported log-probabilities
    are those of the unchanged logits, otherwise those of the changed ones."""

    def wrong(engine: Any, policy: Policy, prompts: Prompts, *arguments: Any, **options: Any) -> Groups:
        head = policy.causal_lm.get_output_embeddings()
        hook = head.register_forward_hook(lambda module, args, logits: change(logits[:, -1])[:, None])
        groups = engine.generate(prompts, *arguments, **options)
        hook.remove()
        return rescored(engine, prompts, groups) if is_scored else groups

    return sampled(wrong)


def without_second(logits: Tensor) -> Tensor:
    """Make the second most likely token so unlikely that it is never drawn."""
    return logits.scatter(1, logits.topk(2, dim=1).indices[:, 1:], -1e4)


def min_p(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits < logits.amax(dim=1, keepdim=True) + torch.tensor(0.2).log(), -1e4)


def by_name(fault: Callable[[Any, Adapter], Any]) -> Fault:
    return lambda engine, policy: fault(engine, policy.adapter_state())


WHOLE: dict[str, Fault] = {
    "2 % of the tokens altered": every_row(altered),
    "log-probabilities shifted by one": every_row(
        lambda row: replace(row, logprobs=(*row.logprobs[1:], row.logprobs[0]))
    ),
    "log-probabilities rounded to 0.1": every_row(logprobs_by(lambda x: round(x, 1))),
    "log-probabilities that are off by 4 times as much in each rollout": growing_gap,
    "log-probabilities NaN": every_row(logprobs_by(lambda x: float("nan"))),
    "completions of a group exchanged, not their log-probabilities": changed_output(
        lambda groups, *_: [list(map(scores_of, group, (*group[1:], group[0]))) for group in groups]
    ),
    "completions of other prompts": changed_output(lambda groups, *_: [*groups[1:], groups[0]]),
    "one completion copied over its group": changed_output(
        lambda groups, *_: [[groups[0][0]] * len(groups[0]), *groups[1:]]
    ),
    "a constant seed": sampled(constant_seed),
    "the second half of each group copied from the first": changed_output(
        lambda groups, *_: [group[: len(group) // 2] * 2 for group in groups]
    ),
    "every second completion copied from the one before": changed_output(
        lambda groups, *_: [[group[i - i % 2] for i in range(len(group))] for group in groups]
    ),
    "a limit of a quarter of the tokens, reported as finished": sampled(shorter_limit),
    "finished completions reported as cut": every_row(lambda row: replace(row, finished=False)),
    "completions that go on after their end": every_row(
        lambda row: replace(row, tokens=(*row.tokens, 5), logprobs=(*row.logprobs, -0.1))
    ),
    "shortest half of twice as many, sorted": chosen(lambda group, size: sorted(group, key=num_tokens)[:size]),
    "shortest half of twice as many, in order": best(num_tokens),
    "one completion of every second group from another": changed_output(some_rows_exchanged),
    "6 % of the tokens altered, scored afterwards": changed_output(
        lambda groups, engine, prompts: rescored(
            engine, prompts, [[altered(row, 0.06) for row in group] for group in groups]
        )
    ),
    "old adapter for later completions": old_where_several,
    "adapter changed while sampling": sampled(changed_while_sampling, lambda sampling: sampling.max_tokens > 1),
    "temperature 1.5, scored at 1": other_sampling(temperature=1.5),
    "temperature 0.5, scored at 1": other_sampling(temperature=0.5),
    "temperature 1.3, scored at 1": other_sampling(temperature=1.3),
    "greedy, scored at 1": other_sampling(temperature=0),
    "top_k 5, scored over all": other_sampling(top_k=5),
    "top_p 0.8, scored over all": other_sampling(top_p=0.8),
    "temperature 1.3": honest(temperature=1.3),
    "top_p 0.8": honest(top_p=0.8),
    "prompts rotated": other_prompts(lambda prompt: [*prompt[1:], prompt[0]]),
    "prompts cut": other_prompts(lambda prompt: prompt[3:]),
    "old adapter in one layer": old_in_one_layer,
    **{name.replace("_", " "): by_name(fault) for name, fault in FAULTS.items()},
}
PARTIAL: dict[str, Fault] = {
    # ends
    "a tenth loses its last token, reported as finished": some_rows(
        0.1, lambda row, _: cut(row, len(row.tokens) - 1, finished=True)
    ),
    "a tenth is cut at half, reported as cut": some_rows(
        0.1, lambda row, _: cut(row, len(row.tokens) // 2, finished=False)
    ),
    "a tenth ends with another token, reported as finished": some_rows(
        0.1, lambda row, _: replace(row, tokens=(*row.tokens[:-1], 7), finished=True)
    ),
    # rows and tokens
    "a tenth with the tokens shifted by one": some_rows(
        0.1, lambda row, _: with_tokens(row, [*row.tokens[1:-1], *row.tokens[:1]][: len(row.tokens) - 1])
    ),
    "a tenth with the last two tokens before the end exchanged": some_rows(
        0.1, lambda row, _: with_tokens(row, [*row.tokens[:-3], *row.tokens[-3:-1][::-1]])
    ),
    "an eighth goes on with the second half of the next row": some_rows(0.125, spliced),
    "a tenth has the log-probabilities of the next row": some_rows(0.1, scores_of),
    "a tenth is the next row": some_rows(0.1, lambda row, other: other),
    "a tenth has log-probabilities 0": some_rows(0.1, logprobs_by(lambda x: 0.0)),
    "a quarter has log-probabilities x 0.8": some_rows(0.25, logprobs_by(lambda x: 0.8 * x)),
    "a half has log-probabilities in bits": some_rows(0.5, logprobs_by(lambda x: x / 0.6931)),
    "log-probabilities rounded to 0.01": some_rows(1.0, logprobs_by(lambda x: round(x, 2))),
    "every eighth group is that of the rollout before": previous_completions,
    # variety and choice
    "a quarter of the groups with the second half copied": of_prompts(
        0.25, WHOLE["the second half of each group copied from the first"]
    ),
    "a tenth is the row before in its group": changed_output(some_rows_copied),
    "equal completions of a group are drawn again": chosen(distinct),
    "the likelier half of twice as many": best(unlikely),
    "the less likely half of twice as many": best(lambda row: -unlikely(row)),
    "the longer half of twice as many, in half of the groups": of_prompts(0.5, best(lambda row: -num_tokens(row))),
    "every other group sorted by length": sorted_half(num_tokens),
    "every other group sorted by log-probability": sorted_half(unlikely),
    # sampling
    "a third at temperature 0.5, scored at 1": of_rows(0.33, other_sampling(temperature=0.5)),
    "a quarter of the prompts at temperature 1.5, scored at 1": of_prompts(0.25, other_sampling(temperature=1.5)),
    "half of the rows greedy, scored at 1": of_rows(0.5, other_sampling(temperature=0)),
    "half of the rows top_k 2, scored over all": of_rows(0.5, other_sampling(top_k=2)),
    "half of the prompts top_p 0.8, scored over all": of_prompts(0.5, other_sampling(top_p=0.8)),
    "half of the rows temperature 1.3": of_rows(0.5, honest(temperature=1.3)),
    "temperature 1.5 in every other rollout, scored at 1": in_every_other_rollout(other_sampling(temperature=1.5)),
    # policy and prompts
    "a third without the adapter": of_rows(0.33, without_adapter),
    "half with the adapter of the rollout before": adapter_before,
    "a quarter of the prompts with the adapter doubled": of_prompts(
        0.25, other_adapter(lambda adapter: scaled_b(adapter, 2))
    ),
    "a tenth with a random adapter": of_rows(0.1, random_adapter),
    "one layer's adapter missing while sampling": only_in_training(
        other_adapter(lambda adapter: scaled_b(adapter, 0, "layers.0."))
    ),
    "a quarter with noise on the norms": of_rows(0.25, sampled(noisy)),
    "a quarter without the noise": without_noise,
    "a quarter of the prompts without the first token": of_prompts(0.25, other_prompts(lambda prompt: prompt[1:])),
    "a quarter of the prompts without the last token": of_prompts(0.25, other_prompts(lambda prompt: prompt[:-1])),
    "half of the rows with the first token twice": of_rows(0.5, other_prompts(lambda prompt: [prompt[0], *prompt])),
    "a tenth of the rows with two tokens of the prompt exchanged": of_rows(0.1, other_prompts(exchanged_middle)),
    "the prompt's beginning is forgotten after 8 tokens": in_two_parts(prompt=lambda prompt: prompt[4:]),
    "no adapter after 8 tokens": in_two_parts(later=without_adapter),
}
OF_ANY_ENGINE = WHOLE | PARTIAL
OF_THE_MODEL: dict[str, Fault] = {
    "every norm x 1.02": scaled("layernorm", 1.02, late=True),
    "final norm x 1.1": scaled("model.norm", 1.1),
    "head x 0.9 (logits)": scaled("embed_tokens", 0.9),
    "embedding of some tokens exchanged": other_model(
        lambda policy: {name: (t, t.roll(1, 0)) for name, t in weights(policy, "embed_tokens").items()}, late=False
    ),
    "bias x 1.5": scaled("q_proj.base_layer.bias", 1.5),
    "layers' norms swapped": swapped("layers.0.input_layernorm", "layers.1.input_layernorm"),
    "RoPE theta": scaled("inv_freq", 0.5),
    "o_proj's adapter x 1.5": scaled("o_proj.lora_B", 1.5, late=True),
    "gate's and up's adapters swapped": swapped("gate_proj.lora_B", "up_proj.lora_B"),
    # in a part, with what the canary samples right
    "half of the rows min_p 0.2, scored over all": of_rows(0.5, other_logits(min_p, is_scored=True)),
    "half of the rows min_p 0.2": of_rows(0.5, other_logits(min_p, is_scored=False)),
    "the second most likely token is never drawn, scored as if it could": only_in_training(
        other_logits(without_second, is_scored=True)
    ),
    "logits x 1.1 while sampling": only_in_training(other_logits(lambda x: 1.1 * x, is_scored=False)),
    "logits with errors of 0.05": of_rows(0.5, other_logits(lambda x: x + 0.05 * torch.randn_like(x), is_scored=False)),
}
