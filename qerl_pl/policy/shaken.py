"""Estimate how much the results of another correct implementation of a model would differ: run the model with random
relative errors of the size of rounding errors added (Monte Carlo arithmetic, Parker 1997).

If two implementations add and round in different orders, how much their results differ depends on the model: in a
pretrained model, a few huge activations magnify rounding errors, which average out in a model with random weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SHAKES = 8
"""Number of copies of a sequence, each computed with other random rounding errors."""


@contextmanager
def shaken(model: nn.Module, dtype: torch.dtype, *, seed: int) -> Iterator[None]:
    """Add random rounding errors, inside the context, to the outputs of the modules of each decoder block (norms,
    attention, MLP) of a Hugging Face causal language model.

    Each element x becomes x (1 + e n), with n drawn from N(0, 1) and e about the root mean square of the relative
    rounding errors of ``dtype`` (2^-9 in bfloat16). Each row of a batch gets different errors.
    """
    error = torch.finfo(dtype).eps / 4
    generators: dict[torch.device, torch.Generator] = {}

    def shake(x: Tensor) -> Tensor:
        if x.device not in generators:
            generators[x.device] = torch.Generator(x.device).manual_seed(seed)
        drawn = torch.randn(x.shape, generator=generators[x.device], device=x.device)
        return torch.addcmul(x.float(), x.float(), drawn, value=error).to(x.dtype)

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return (shake(output[0]), *output[1:]) if isinstance(output, tuple) else shake(output)

    layers: Any = model.get_submodule("model.layers")
    hooks = [part.register_forward_hook(hook) for block in layers for part in block.children()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def with_rounding(
    score: Callable[[int], Tensor], model: nn.Module, dtype: torch.dtype, *, seed: int
) -> tuple[Tensor, Tensor]:
    """Compute N log-probabilities by a forward pass over a sequence, and estimate by how much rounding errors change
    each of them. Returns two tensors [N] in nats: the log-probabilities without added errors, and the root mean square
    of their changes in ``SHAKES`` copies of the sequence, each computed with other random rounding errors of the size
    of ``dtype``.

    The caller's function ``score(copies)`` has to run ``model`` on ``copies`` copies of the sequence and to return the
    N log-probabilities for each copy, [copies, N].
    """
    [plain] = score(1)
    return plain, rounding_of(plain, score, model, dtype, seed=seed)


def rounding_of(
    plain: Tensor, score: Callable[[int], Tensor], model: nn.Module, dtype: torch.dtype, *, seed: int
) -> Tensor:
    """Estimate by how much rounding errors change each of N log-probabilities, which a forward pass over a sequence
    without added errors gave as ``plain`` [N]. Returns the root mean square of the changes in ``SHAKES`` copies of the
    sequence, each with other random rounding errors of the size of ``dtype``, [N] in nats. The other arguments are
    those of ``with_rounding``."""
    with shaken(model, dtype, seed=seed):
        errors = score(SHAKES) - plain
    return errors.square().mean(dim=0).sqrt()
