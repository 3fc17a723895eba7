"""Rollouts that are wrong in ways of their own: what an engine hands over, or the model it samples with, is changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from callbacks.rollout_evidence import GAP_FLOOR
from qerl_pl.common.types import Completion
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.hf import TransformersEngine
from tests.callbacks.faults import FAULTS, Instead

Groups = list[list[Completion]]


def changed_output(change: Callable[[Groups, Any, Sequence[Sequence[int]]], Groups]) -> Callable[..., Any]:
    """Training rollouts (several completions of several tokens) are changed after they were sampled."""

    def fault(engine: Any, policy: Policy) -> Any:
        def generate(prompts: Sequence[Sequence[int]], sampling: Sampling, seed: Any, **more: Any) -> Groups:
            groups = engine.generate(prompts, sampling, seed, **more)
            return groups if sampling.max_tokens == 1 else change(groups, engine, prompts)

        return Instead(engine, generate=generate)

    return fault


def each(change: Callable[[Completion], Completion]) -> Callable[..., Any]:
    """Every completion by itself."""
    return changed_output(lambda groups, engine, prompts: [[change(row) for row in group] for group in groups])


def altered(completion: Completion, share: float = 0.02) -> Completion:
    """Some tokens are others; log-probabilities are of those that were sampled."""
    draw = random.Random(hash(completion.tokens))
    tokens = (draw.randrange(5, 200) if draw.random() < share else token for token in completion.tokens[:-1])
    return replace(completion, tokens=(*tokens, completion.tokens[-1]))  # it ends as before


def shorter_limit(engine: Any, policy: Policy) -> Any:
    """Completions are cut at a quarter of the limit, and reported as finished."""

    def generate(prompts: Sequence[Sequence[int]], sampling: Sampling, seed: Any, **more: Any) -> Groups:
        limit = max(1, sampling.max_tokens // 4)
        groups = engine.generate(prompts, replace(sampling, max_tokens=limit), seed, **more)
        return [[replace(row, finished=True) for row in group] for group in groups]

    return Instead(engine, generate=generate)


def further(completion: Completion) -> Completion:
    """The completion goes on after its end."""
    return replace(completion, tokens=(*completion.tokens, 5), logprobs=(*completion.logprobs, -0.1))


def shortest(*, in_order: bool) -> Callable[..., Any]:
    """Of twice as many completions the shorter half is kept, shortest first or in the order in which they were
    drawn."""

    def fault(engine: Any, policy: Policy) -> Any:
        def generate(prompts: Sequence[Sequence[int]], sampling: Sampling, seed: Any, **more: Any) -> Groups:
            size = sampling.num_completions
            if size == 1:
                return engine.generate(prompts, sampling, seed, **more)
            groups = engine.generate(prompts, replace(sampling, num_completions=2 * size), seed, **more)
            chosen = [
                sorted(range(2 * size), key=lambda i, group=group: len(group[i].tokens))[:size] for group in groups
            ]
            return [
                [group[place] for place in (sorted(places) if in_order else places)]
                for group, places in zip(groups, chosen, strict=True)
            ]

        return Instead(engine, generate=generate)

    return fault


def some_rows_exchanged(groups: Groups, engine: Any, prompts: Sequence[Sequence[int]]) -> Groups:
    """The first completion of every other group belongs to the group before."""
    firsts = [group[0] for group in groups]
    return [[firsts[index - index % 2], *group[1:]] for index, group in enumerate(groups)]


def altered_and_scored(share: float) -> Callable[..., Any]:
    """Some tokens are others, and the log-probabilities are those of the new tokens."""
    return changed_output(
        lambda groups, engine, prompts: rescored(
            engine, prompts, [[altered(row, share) for row in group] for group in groups]
        )
    )


def growing_gap(engine: Any, policy: Policy) -> Any:
    """Log-probabilities are off by 4 times the smallest gap that can be a jump (4e-5 nats in fp32), up and down in
    turns, and by 4 times as much in each further rollout."""
    sizes = [GAP_FLOOR[policy.dtype] * 4 ** (1 + rollout) for rollout in range(10)]

    def change(groups: Groups, engine: Any, prompts: Sequence[Sequence[int]]) -> Groups:
        size = sizes.pop(0) if len(groups[0]) > 1 else 0.0  # validation has one completion per prompt

        def off(row: Completion) -> Completion:
            return replace(row, logprobs=tuple(x + size * (-1) ** place for place, x in enumerate(row.logprobs)))

        return [[off(row) for row in group] for group in groups]

    return changed_output(change)(engine, policy)


def other_sampling(**settings: Any) -> Callable[..., Any]:
    """Tokens by other settings, scored at temperature 1 afterwards."""

    def fault(engine: Any, policy: Policy) -> Any:
        def generate(prompts: Sequence[Sequence[int]], sampling: Sampling, seed: Any, **more: Any) -> Groups:
            if settings.get("temperature") == 0:
                greedy = replace(sampling, temperature=0.0, num_completions=1)
                wanted = [group * sampling.num_completions for group in engine.generate(prompts, greedy, seed, **more)]
                wanted = [[row, *group[1:]] for group, row in zip(wanted, (group[0] for group in wanted), strict=True)]
            else:
                wanted = engine.generate(prompts, replace(sampling, **settings), seed, **more)
            return rescored(engine, prompts, wanted, **more)

        return Instead(engine, generate=generate)

    return fault


def rescored(engine: Any, prompts: Sequence[Sequence[int]], groups: Groups, **more: Any) -> Groups:
    """With the engine's own scores, at temperature 1."""
    rows = [[*prompt, *row.tokens] for prompt, group in zip(prompts, groups, strict=True) for row in group]
    scores = iter(engine.score(rows, **more))
    return [
        [replace(row, logprobs=tuple(next(scores)[len(prompt) - 1 :])) for row in group]
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def honest(**settings: Any) -> Callable[..., Any]:
    """Tokens by other settings, with the log-probabilities of those."""

    def fault(engine: Any, policy: Policy) -> Any:
        def generate(prompts: Sequence[Sequence[int]], sampling: Sampling, seed: Any, **more: Any) -> Groups:
            return engine.generate(prompts, replace(sampling, **settings), seed, **more)

        return Instead(engine, generate=generate)

    return fault


def other_prompts(change: Callable[[Sequence[int]], Sequence[int]]) -> Callable[..., Any]:
    """What is sampled follows other prompts."""

    def fault(engine: Any, policy: Policy) -> Any:
        def generate(prompts: Sequence[Sequence[int]], sampling: Sampling, seed: Any, **more: Any) -> Groups:
            return engine.generate([change(prompt) for prompt in prompts], sampling, seed, **more)

        return Instead(engine, generate=generate)

    return fault


def other_model(change: Callable[[Policy], dict[str, tuple[Tensor, Tensor]]], *, late: bool) -> Callable[..., Any]:
    """The engine computes with other weights than those that it holds.

    Args:
        change: name -> (the live tensor, its value in the engine).
        late: change the tensors before each forward pass, for those that the engine itself writes at the beginning of a
            call (adapter, norms of the blocks); else for the whole call, for those that are also used outside (head).
    """

    def fault(engine: Any, policy: Policy) -> Any:
        @contextmanager
        def wrong() -> Iterator[None]:
            tensors = change(policy)
            kept = {name: live.detach().clone() for name, (live, _) in tensors.items()}
            with torch.no_grad():
                for live, value in tensors.values():
                    live.copy_(value)
                yield
                for name, (live, _) in tensors.items():
                    live.copy_(kept[name])

        def during(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                with late_changes() if late else wrong():
                    return method(*args, **more)

            return call

        @contextmanager
        def late_changes() -> Iterator[None]:
            entered = ExitStack()
            model = policy.causal_lm.model
            before = model.register_forward_pre_hook(lambda *_: entered.enter_context(wrong()))
            after = model.register_forward_hook(lambda *_: entered.close(), always_call=True)
            yield
            before.remove()
            after.remove()

        return Instead(engine, generate=during(engine.generate), score=during(engine.score))

    return fault


def weights(policy: Policy, part: str) -> dict[str, Tensor]:
    """Of the model, floating point, those with this in their names."""
    named = [*policy.causal_lm.named_parameters(), *policy.causal_lm.named_buffers()]
    found = {name: tensor for name, tensor in named if part in name and tensor.is_floating_point()}
    assert found, f"nothing is called {part}"
    return found


def scaled(part: str, factor: float, *, late: bool = False) -> Callable[..., Any]:
    return other_model(lambda policy: {name: (t, t * factor) for name, t in weights(policy, part).items()}, late=late)


def swapped(one: str, other: str) -> Callable[..., Any]:
    def change(policy: Policy) -> dict[str, tuple[Tensor, Tensor]]:
        pairs = {name: (tensor, name.replace(one, other)) for name, tensor in weights(policy, one).items()}
        live = dict(policy.causal_lm.named_parameters())
        there = {name: (tensor, live[twin].detach().clone()) for name, (tensor, twin) in pairs.items()}
        back = {twin: (live[twin], tensor.detach().clone()) for tensor, twin in pairs.values()}
        return there | back

    return other_model(change, late=True)


def old_where_several(engine: Any, policy: Policy) -> Any:
    """The adapter of when the fault began, but only for the later completions of a group."""
    old = {name: tensor.clone() for name, tensor in policy.adapter_state().items()}
    current: dict[str, Any] = dict(old)

    def load(adapter: Any) -> None:
        current.update(adapter)
        engine.load_adapter(adapter)

    def generate(prompts: Sequence[Sequence[int]], sampling: Sampling, seed: Any, **more: Any) -> Groups:
        groups = engine.generate(prompts, sampling, seed, **more)
        if sampling.num_completions == 1:
            return groups
        now = {name: tensor.clone() for name, tensor in current.items()}
        engine.load_adapter(old)
        stale = engine.generate(prompts, sampling, seed, **more)
        engine.load_adapter(now)
        half = sampling.num_completions // 2
        return [group[:half] + others[half:] for group, others in zip(groups, stale, strict=True)]

    return Instead(engine, load_adapter=load, generate=generate)


def changed_while_sampling(engine: Any, policy: Policy) -> Any:
    """The second half of the prompts gets the adapter with random numbers in the matrices of one layer, of a size that
    is seen whether or not the policy has learned anything."""

    def generate(prompts: Sequence[Sequence[int]], sampling: Sampling, seed: Any, **more: Any) -> Groups:
        half = (len(prompts) + 1) // 2
        first = engine.generate(prompts[:half], sampling, seed, **more)
        adapter = {name: tensor.clone() for name, tensor in policy.adapter_state().items()}
        if not prompts[half:] or sampling.max_tokens == 1:
            return [*first, *(engine.generate(prompts[half:], sampling, seed, **more) if prompts[half:] else [])]
        engine.load_adapter(
            {
                name: t + 0.1 * torch.randn_like(t) if "layers.1." in name and "lora_B" in name else t
                for name, t in adapter.items()
            }
        )
        second = engine.generate(prompts[half:], sampling, seed, **more)
        engine.load_adapter(adapter)
        return [*first, *second]

    return Instead(engine, generate=generate)


def constant_seed(engine: Any, policy: Policy) -> Any:
    """Every completion of a group is drawn with one seed."""

    def generate(prompts: Sequence[Sequence[int]], sampling: Sampling, seed: Any, **more: Any) -> Groups:
        one = engine.generate(prompts, replace(sampling, num_completions=1), 0, **more)
        return [group * sampling.num_completions for group in one]

    return Instead(engine, generate=generate)


def old_from_some_layers(engine: Any, policy: Policy) -> Any:
    """Old matrices in one layer."""
    old = {name: tensor.clone() for name, tensor in policy.adapter_state().items()}

    def load(adapter: Any) -> None:
        engine.load_adapter({name: old[name] if "layers.0." in name else tensor for name, tensor in adapter.items()})

    return Instead(engine, load_adapter=load)


def by_name(fault: Callable[..., Any]) -> Callable[..., Any]:
    return lambda engine, policy: fault(engine, policy.adapter_state())


OF_ANY_ENGINE: dict[str, Callable[..., Any]] = {
    "2 % of the tokens altered": each(altered),
    "log-probabilities shifted by one": each(lambda row: replace(row, logprobs=(*row.logprobs[1:], row.logprobs[0]))),
    "log-probabilities rounded to 0.1": each(
        lambda row: replace(row, logprobs=tuple(round(x, 1) for x in row.logprobs))
    ),
    "log-probabilities that are off by 4 times as much in each rollout": growing_gap,
    "log-probabilities NaN": each(lambda row: replace(row, logprobs=tuple(float("nan") for _ in row.logprobs))),
    "completions of a group exchanged, not their log-probabilities": changed_output(
        lambda groups, engine, prompts: [
            [
                replace(row, logprobs=(*other.logprobs, *row.logprobs)[: len(row.tokens)])
                for row, other in zip(group, (*group[1:], group[0]), strict=True)
            ]
            for group in groups
        ]
    ),
    "completions of other prompts": changed_output(lambda groups, engine, prompts: [*groups[1:], groups[0]]),
    "one completion copied over its group": changed_output(
        lambda groups, engine, prompts: [[groups[0][0]] * len(groups[0]), *groups[1:]]
    ),
    "a constant seed": constant_seed,
    "the second half of each group copied from the first": changed_output(
        lambda groups, engine, prompts: [group[: len(group) // 2] * 2 for group in groups]
    ),
    "every second completion copied from the one before": changed_output(
        lambda groups, engine, prompts: [[group[i - i % 2] for i in range(len(group))] for group in groups]
    ),
    "a limit of a quarter of the tokens, reported as finished": shorter_limit,
    "finished completions reported as cut": each(lambda row: replace(row, finished=False)),
    "completions that go on after their end": each(further),
    "shortest half of twice as many, sorted": shortest(in_order=False),
    "shortest half of twice as many, in order": shortest(in_order=True),
    "one completion of every second group from another": changed_output(some_rows_exchanged),
    "6 % of the tokens altered, scored afterwards": altered_and_scored(0.06),
    "old adapter for later completions": old_where_several,
    "adapter changed while sampling": changed_while_sampling,
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
    "old adapter in one layer": old_from_some_layers,
    **{name.replace("_", " "): by_name(fault) for name, fault in FAULTS.items()},
}

OF_THE_MODEL: dict[str, Callable[..., Any]] = {
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
}


def faults_of(engine: Any) -> dict[str, Callable[..., Any]]:
    """Those that an engine can be given: weights are changed in the trainer's model, which one engine samples with."""
    return OF_ANY_ENGINE | (OF_THE_MODEL if isinstance(engine, TransformersEngine) else {})
