"""Protocol of rollout engines, sampling settings, and checks of the completions that an engine returns and of the
weights that it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from qerl_pl.common.checks import CheckFailed, require_finite
from qerl_pl.common.types import Completion
from qerl_pl.memory.settings import EngineMemory
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.lora_product import scaled
from qerl_pl.quant.experts import Routing
from qerl_pl.rollout.checksums import checksums

if TYPE_CHECKING:
    from qerl_pl.policy.policy import Policy


LOWEST_TEMPERATURE = 0.01
SECTIONS = "model.sampling or model.val_sampling"
"""Names of the settings that are ``Sampling`` objects, for error messages."""


@dataclass(frozen=True)
class Sampling:
    """Settings by which a rollout engine samples completions.

    Args:
        num_completions: completions per prompt (GRPO's G).
        max_tokens: longest completion, in tokens.
        temperature: divisor of the logits, at least 0.01, or 0 for greedy decoding.
        top_p: sample from the most likely tokens up to this probability mass; 1 keeps all tokens.
        top_k: sample from this number of most likely tokens; 0 keeps all tokens.
        stop: strings that end a completion. The last token of the completion is the one that completes the string, and
            the completion counts as finished. In a configuration, set ``data.stop``, which applies to training and
            evaluation, instead of this field.
    """

    num_completions: int = 8
    max_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_finite("sampling", temperature=self.temperature, top_p=self.top_p)
        if self.num_completions < 1:
            raise ValueError(f"num_completions of {SECTIONS} is {self.num_completions}; expected at least 1")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens of {SECTIONS} is {self.max_tokens}; expected at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature of {SECTIONS} is {self.temperature}; expected 0 (greedy) or more")
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"temperature of {SECTIONS} is {self.temperature}; expected at least {LOWEST_TEMPERATURE} (vLLM raises "
                "lower ones to it), or 0 (greedy)"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p of {SECTIONS} is {self.top_p}; expected more than 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k of {SECTIONS} is {self.top_k}; expected 0 (off) or more")
        if self.temperature == 0 and self.num_completions > 1:
            raise ValueError(
                f"temperature 0 of {SECTIONS} gives {self.num_completions} equal completions; set its "
                "num_completions to 1, or sample"
            )
        if self.temperature == 0 and (self.top_p < 1 or self.top_k > 0):
            raise ValueError(
                f"{SECTIONS} has temperature 0, with which top_p ({self.top_p}) and top_k ({self.top_k}) have no "
                "effect; expected top_p 1 and top_k 0, or a temperature above 0"
            )


def check_groups(
    groups: Sequence[Sequence[Completion]], prompts: Sequence[object], sampling: Sampling, *, engine: str
) -> None:
    """Check the completions that ``RolloutEngine.generate`` returned. Raises CheckFailed if the number of groups, or of
    completions in a group, is not the requested one, or if a completion is empty, has more than ``sampling.max_tokens``
    tokens, does not have one log-probability per token, or has a log-probability that is not finite."""
    if len(groups) != len(prompts):
        raise CheckFailed(f"{engine} returned {len(groups)} groups of completions for {len(prompts)} prompts")
    for index, group in enumerate(groups):
        if len(group) != sampling.num_completions:
            raise CheckFailed(
                f"{engine} returned {len(group)} completions for prompt {index}; expected {sampling.num_completions}"
            )
        for number, completion in enumerate(group):
            count, where = len(completion.tokens), f"completion {number} of prompt {index}"
            if not 1 <= count <= sampling.max_tokens:
                raise CheckFailed(
                    f"{engine} returned {count} tokens as {where}; expected 1 to {sampling.max_tokens}, the token that "
                    "ends it included"
                )
            if len(completion.logprobs) != count:
                raise CheckFailed(
                    f"{engine} returned {count} tokens and {len(completion.logprobs)} log-probabilities as {where}"
                )
            if not math.isfinite(sum(completion.logprobs)):
                raise CheckFailed(f"{engine} returned a log-probability that is nan or infinite in {where}")


def checked_routes(
    groups: Sequence[Sequence[Completion]], prompts: Sequence[Sequence[int]], routing: Routing, *, engine: str
) -> list[list[Completion]]:
    """Check the routes of completions of a mixture-of-experts model, that is, the indices of the experts that computed
    each token (``Completion.routes``), and return the completions with routes in the smallest dtype that holds these
    indices. Raises CheckFailed if routes are missing, if they do not cover all tokens of prompt and completion except
    the last, or if an index is not in the range of the experts' indices."""
    checked = []
    for index, (group, prompt) in enumerate(zip(groups, prompts, strict=True)):
        checked.append([])
        for number, completion in enumerate(group):
            where = f"completion {number} of prompt {index}"
            expected = [len(prompt) + len(completion.tokens) - 1, routing.num_layers, routing.chosen]
            routes = completion.routes
            if routes is None or list(routes.shape) != expected:
                shape = "no experts" if routes is None else f"experts of shape {list(routes.shape)}"
                raise CheckFailed(
                    f"{engine} returned {shape} for {where}; expected {expected}: tokens without the last, layers and "
                    "experts per token. Set model.router_replay to off to train without them"
                )
            low, high = (int(value) for value in routes.aminmax())
            if low < 0 or high >= routing.num_experts:
                wrong = low if low < 0 else high
                raise CheckFailed(
                    f"{engine} returned expert {wrong} for {where}; expected 0 to {routing.num_experts - 1}. Set "
                    "model.router_replay to off to train without the engine's experts"
                )
            checked[-1].append(replace(completion, routes=routes.to(routing.dtype)))
    return checked


class RolloutEngine(Protocol):
    """Protocol of rollout engines, which sample completions from the policy. An engine object is created from settings
    in YAML, and loads the model only in ``start``.

    An adapter is a mapping from PEFT's names (``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``; a
    trained norm is ``base_model.model.model.layers.0.input_layernorm.weight``) to tensors. The noise of AQN (adaptive
    quantization noise) is always added to the original norm weights (the base's, or the adapter's if norms are trained)
    and never to noisy ones, so it does not accumulate.
    """

    @property
    def memory(self) -> EngineMemory | None:
        """Settings that decide how much GPU memory the engine takes; None if it samples with the trainer's model."""
        ...

    @property
    def returns_routes(self) -> bool:
        """Whether ``generate`` can return the indices of the experts that computed each token of a mixture-of-experts
        model (``Completion.routes``). ``generate`` must return them if ``Policy.replays_routes`` is set when the engine
        starts."""
        ...

    @property
    def batch_tokens(self) -> int:
        """Largest number of tokens in the KV cache of the sequences that are sampled together. The memory plan reads it
        only if ``memory`` is None."""
        ...

    def plan_memory(self, planned: EngineMemory | None) -> None:
        """Take the sizes that the memory plan has chosen; called before ``start``. ``planned`` is ``memory`` with
        values for all sizes that the settings leave open, such as the bytes of the KV cache; it is None if ``memory``
        is None."""
        ...

    def start(self, policy: Policy, *, max_model_len: int) -> None:
        """Load the policy's base and prepare to sample sequences of at most ``max_model_len`` tokens, prompts included.
        If the engine has been started already, do nothing."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int | Sequence[int], *, adapter: bool = True
    ) -> list[list[Completion]]:
        """Sample ``sampling.num_completions`` completions per prompt, and return them grouped by prompt. Calls with
        equal arguments return equal tokens, as long as adapter and noise are the same.

        Args:
            prompts: token ids of each prompt.
            sampling: settings such as the temperature.
            seed: one seed for the whole call, or one per prompt. With one per prompt, prompts with equal tokens need
                different seeds: with equal seeds, their completions may be equal.
            adapter: False samples from the base without the adapter.

        Raises ValueError, after which the engine can still be used, if a prompt is empty, has a token id outside the
        vocabulary, or leaves no room for a completion of ``sampling.max_tokens`` tokens.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]], *, adapter: bool = True) -> list[list[float]]:
        """Compute the log-probabilities of all tokens but the first of each sequence, in nats at temperature 1."""
        ...

    def load_adapter(self, adapter: Mapping[str, Tensor]) -> None:
        """Set the adapter with which completions are sampled. The norm weights keep their noise, and keys and values
        that were cached with the previous adapter are no longer used. Raises ValueError for tensors with other names or
        shapes."""
        ...

    def set_norm_noise(self, noise: NormNoise) -> int:
        """Replace the noise on the norm weights (AQN; ``Family.noise_norms`` names the norms). It is added to the
        weights without noise, and sigma 0 restores these bit for bit. Returns the number of norms that have noise, as
        read back from the engine; 0 if sigma is 0."""
        ...

    def fingerprint(self) -> dict[str, int]:
        """Compute checksums of the adapter and norm weights that the engine holds, by tensor name, for comparison with
        ``expected_fingerprint``. Raises CheckFailed if the engine's copy of the base model's weights differs from the
        policy's."""
        ...

    def sleep(self) -> None:
        """End sampling until ``wake`` is called, and free GPU memory of the engine, unless the memory plan says that
        it can stay allocated."""
        ...

    def free_cache(self) -> bool:
        """Free the KV cache of a sleeping engine, if the memory plan has let it stay allocated, and make every later
        ``sleep`` free it. The trainer calls this method when a forward or backward pass has run out of memory. Returns
        whether memory was freed."""
        ...

    def wake(self) -> None:
        """Allocate again the memory that ``sleep`` freed. If the engine is awake, do nothing."""
        ...

    def close(self) -> None:
        """Free all resources. ``start`` may be called again."""
        ...


def expected_fingerprint(
    adapter: Mapping[str, Tensor], norms: Mapping[str, Tensor], *, scaling: float, dtype: torch.dtype
) -> dict[str, int]:
    """Compute the checksums that ``RolloutEngine.fingerprint`` must return, from the trainer's tensors.

    ``adapter`` has the fp32 LoRA weights by PEFT's names; norm weights in it are ignored. ``norms`` has the noisy
    weights of all norms that get noise, by their names in the model. The checksums are of the values that engines hold:
    LoRA's A, and its B times ``scaling`` (alpha / r, or alpha / sqrt r), both rounded to ``dtype``, and norm weights in
    fp32.
    """
    due = {name: weight.to(torch.promote_types(weight.dtype, torch.float32)) for name, weight in norms.items()}
    for name, matrix in adapter.items():
        if "lora_A" in name:
            due[name] = matrix.to(dtype)
        elif "lora_B" in name:
            due[name] = scaled(matrix, scaling, dtype)
    return checksums(due)
