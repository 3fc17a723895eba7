"""What a rollout engine is: the protocol, its settings, and what proves that it holds a policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from qerl_pl.common.finite import require_finite
from qerl_pl.common.types import Completion
from qerl_pl.memory.settings import EngineMemory
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.lora_product import scaled
from qerl_pl.rollout.checksums import checksums

if TYPE_CHECKING:
    from qerl_pl.policy.policy import Policy


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled.

    Args:
        num_completions: completions a prompt (GRPO's G).
        max_tokens: longest completion, in tokens.
        temperature: 0 is greedy.
        top_p: keep the most likely tokens up to this probability mass; 1 keeps all.
        top_k: keep this many most likely tokens; 0 keeps all.

    Raises:
        ValueError: a value is out of its range, or greedy decoding is asked for several completions.
    """

    num_completions: int = 8
    max_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        require_finite("sampling", temperature=self.temperature, top_p=self.top_p)
        if self.num_completions < 1:
            raise ValueError(f"num_completions is {self.num_completions}; expected at least 1")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; expected at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; expected 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected more than 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; expected 0 (off) or more")
        if self.temperature == 0 and self.num_completions > 1:
            raise ValueError(
                f"temperature 0 gives {self.num_completions} equal completions; set num_completions to 1 or sample"
            )


def check_groups(
    groups: Sequence[Sequence[Completion]], prompts: Sequence[object], sampling: Sampling, *, engine: str
) -> None:
    """Refuse what is no answer to a call of ``RolloutEngine.generate``.

    Raises:
        RuntimeError: names the engine, the prompt and the completion, and what was expected.
    """
    if len(groups) != len(prompts):
        raise RuntimeError(f"{engine} returned {len(groups)} groups of completions for {len(prompts)} prompts")
    for index, group in enumerate(groups):
        if len(group) != sampling.num_completions:
            raise RuntimeError(
                f"{engine} returned {len(group)} completions for prompt {index}; expected {sampling.num_completions}"
            )
        for number, completion in enumerate(group):
            count, where = len(completion.tokens), f"completion {number} of prompt {index}"
            if not 1 <= count <= sampling.max_tokens:
                raise RuntimeError(
                    f"{engine} returned {count} tokens as {where}; expected 1 to {sampling.max_tokens}, the token that "
                    "ends it included"
                )
            if len(completion.logprobs) != count:
                raise RuntimeError(
                    f"{engine} returned {count} tokens and {len(completion.logprobs)} log-probabilities as {where}"
                )
            if not math.isfinite(sum(completion.logprobs)):
                raise RuntimeError(f"{engine} returned a log-probability that is nan or infinite in {where}")


class RolloutEngine(Protocol):
    """Samples completions from the policy. Built cheaply from YAML; ``start`` takes the memory.

    The adapter is a mapping from PEFT's names (``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``; a
    trained norm is ``base_model.model.model.layers.0.input_layernorm.weight``) to tensors. Noise is always applied to
    the clean norm weights (the base's, or the adapter's where norms are trained), so it never accumulates.
    """

    @property
    def memory(self) -> EngineMemory | None:
        """The settings that decide how much GPU memory it takes; None: it samples with the trainer's own model."""
        ...

    @property
    def batch_tokens(self) -> int:
        """Tokens in the cache of one batch, where ``memory`` is None."""
        ...

    def plan_cache(self, num_bytes: int | None) -> None:
        """Take so many bytes for the key/value cache when it starts; None: what its own settings say."""
        ...

    def start(self, policy: Policy, *, max_model_len: int) -> None:
        """Load the base that ``policy`` names and get ready. A second call on a started engine does nothing.

        Args:
            policy: where the base lies, its adapter's configuration and its compute dtype.
            max_model_len: longest prompt plus completion, in tokens.
        """
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int | Sequence[int], *, adapter: bool = True
    ) -> list[list[Completion]]:
        """``sampling.num_completions`` completions for each prompt, in order. Equal arguments give equal tokens.

        ``seed`` is one for the call, or one for each prompt: prompts of equal tokens and seeds get equal completions.

        Raises:
            ValueError: a prompt is empty, holds an unknown token, or leaves no room for a completion. The engine stays
                usable.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]], *, adapter: bool = True) -> list[list[float]]:
        """Log-probabilities of given tokens in nats at temperature 1: one a token from the second token on."""
        ...

    def load_adapter(self, adapter: Mapping[str, Tensor]) -> None:
        """Sample from this adapter from now on. Clears cached prefixes. Keeps the noise that is set.

        Raises:
            ValueError: a name or shape is not what the policy's configuration says.
        """
        ...

    def set_norm_noise(self, noise: NormNoise) -> int:
        """Put this noise on both norms of every block, from the clean weights; sigma 0 restores them bit for bit.

        Returns:
            How many norms hold their noisy weights, read back: twice the number of layers, or 0 for sigma 0.
        """
        ...

    def fingerprint(self) -> dict[str, int]:
        """Checksums read back from what the engine really holds; compare with ``expected_fingerprint``."""
        ...

    def sleep(self) -> None:
        """Give memory back until ``wake``."""
        ...

    def wake(self) -> None:
        """Take the memory that ``sleep`` gave back. Does nothing on an engine that is awake."""
        ...

    def close(self) -> None:
        """Give everything back. ``start`` may follow."""
        ...


def expected_fingerprint(
    adapter: Mapping[str, Tensor], norms: Mapping[str, Tensor], *, scaling: float, dtype: torch.dtype
) -> dict[str, int]:
    """What ``RolloutEngine.fingerprint`` must return for an adapter and the norm weights that rollouts should use.

    Args:
        adapter: PEFT names to tensors, fp32 master weights; entries that are not LoRA matrices are passed over (a
            trained norm counts through ``norms``).
        norms: the model's own names (``model.layers.0.input_layernorm.weight``) to weights, noise included. Engines
            hold them in fp32.
        scaling: LoRA's alpha / r (or alpha / sqrt r): engines fold it into B.
        dtype: the engine's compute dtype.
    """
    due = {name: weight.to(torch.promote_types(weight.dtype, torch.float32)) for name, weight in norms.items()}
    for name, matrix in adapter.items():
        if "lora_A" in name:
            due[name] = matrix.to(dtype)
        elif "lora_B" in name:
            due[name] = scaled(matrix, scaling, dtype)
    return checksums(due)
