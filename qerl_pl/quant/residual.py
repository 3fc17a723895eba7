"""Low-rank factors of a quantisation error W - Q(W), from which an adapter can start, so that the quantised model with
the adapter is nearer to the dense one (LoftQ, arXiv 2310.08659; QERA, arXiv 2410.06040)."""

from __future__ import annotations

import torch
from torch import Tensor


def residual_factors(
    residual: Tensor, second_moment: Tensor, rank: int, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the factors A and B for which the mean of |(E - B A) x|^2 over inputs x is smallest, where E is the
    residual W - Q(W).

    With M the mean of x x^T, the minimum over all products of this rank is Q Q^T E, where the columns of Q are the
    eigenvectors of E M E^T with the largest eigenvalues. This is the solution of QERA (Theorem 1), written without the
    inverse of a square root of M, so M may be singular. Since Q Q^T is an orthogonal projection, the product increases
    the error for no input at all, whatever M is. Row i of A and column i of B have equal norms. Where the product has
    no component left (E is 0, or the rank exceeds the matrix), A and B are ``fresh_factors``.

    Arithmetic is fp64. M should be summed in fp64 too: a channel of a pretrained model can have a mean square a million
    times that of others, and rounding errors of its fp32 sums would exceed what the others contribute.

    Args:
        residual: [N, K] floating, E.
        second_moment: [K, K] floating, M or a positive multiple of it.
        rank: number of columns of B.
        generator: draws the values without a component, on the CPU; None: torch's global one.

    Returns:
        A [rank, K] and B [N, rank], fp32 on the residual's device.

    Raises:
        ValueError: the rank is below 1.
    """
    if rank < 1:
        raise ValueError(f"the rank of the residual is {rank}; expected at least 1")
    error = residual.double()
    outputs, inputs = error.shape
    basis, inner = (None, error) if outputs <= inputs else torch.linalg.qr(error)  # the smaller eigenvalue problem
    power = inner @ second_moment.to(error) @ inner.T
    directions = torch.linalg.eigh(power).eigenvectors.flip(1)[:, :rank]  # largest first
    directions = directions if basis is None else basis @ directions  # [N, r]
    rows = directions.T @ error  # [r, K]
    size = rows.norm(dim=1)
    exists = size > torch.finfo(torch.float32).eps * error.norm()
    root = torch.where(exists, size, 1.0).sqrt()
    a, b = (factor.to(error) for factor in fresh_factors((outputs, inputs), rank, generator=generator))
    a[: len(size)] = torch.where(exists[:, None], rows / root[:, None], a[: len(size)])
    b[:, : len(size)] = torch.where(exists, directions * root, 0.0)
    return a.float(), b.float()


def fresh_factors(
    shape: tuple[int, int], rank: int, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw what LoRA starts with: A [rank, K] uniform in +-1/sqrt(K), and B [N, rank] of zeros, for a linear of shape
    [N, K]; fp32 on the CPU."""
    bound = shape[1] ** -0.5
    return torch.empty(rank, shape[1]).uniform_(-bound, bound, generator=generator), torch.zeros(shape[0], rank)
