"""Selective gradient checkpointing: keep results of a block's expensive operations, and recompute the other operations.

torch.utils.checkpoint runs a block twice: in forward, without keeping what backward needs, and in backward, to compute
it again. With ``keeping`` as its ``context_fn``, matrix products and attention store their results in the first run and
read them in the second. The element-wise operations between them (norms, rotary embeddings, activations, sums) are
cheap and run again. torch's own selective checkpointing selects operations by their dispatcher names. That does not
work here: adapted linears write into memory that an autograd node allocated, and weights are dequantised by kernels
that are not registered with the dispatcher. The linears and attention therefore call ``Kept`` themselves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")


class Kept:
    """Results of the first run of one block, in the order in which they were computed."""

    def __init__(self) -> None:
        self._results: deque[Tensor] = deque()
        self.recomputing = False

    def put(self, result: Tensor) -> None:
        """Store a result: its values and whether it requires a gradient, without its autograd graph."""
        self._results.append(result.detach().requires_grad_(result.requires_grad))

    def take(self) -> Tensor:
        """Remove and return the next result, a leaf tensor.

        Raises:
            RuntimeError: no result is left, because backward runs a second time over the same graph.
        """
        if not self._results:
            raise RuntimeError(
                "a second backward pass over one graph: set model.gradient_checkpointing to none or to blocks"
            )
        return self._results.popleft()

    def whole(self, compute: Callable[[], Tensor]) -> Tensor:
        """Compute a result and keep it together with its autograd graph, so that no part of it is computed again."""
        if self.recomputing:
            return self.take()
        with saved_tensors_hooks(_same, _same):
            result = compute()
        self.put(result)
        return result

    def unread(self, compute: Callable[[], T], instead: T) -> T:
        """Compute what only functions given to ``whole`` read.

        Backward runs the block again, and ``whole`` then returns what was kept, so ``instead`` is returned here.
        """
        if self.recomputing:
            return instead
        with saved_tensors_hooks(_same, _same):
            return compute()


def _same(tensor: Tensor) -> Tensor:
    """Keep a saved tensor as it is; this hook replaces the one of torch.utils.checkpoint, which drops it."""
    return tensor


class _Active(threading.local):  # autograd runs backward in its own threads
    kept: Kept | None = None


_ACTIVE = _Active()


def active() -> Kept | None:
    """Return the kept results of the block that this thread runs; None if the block does not keep results."""
    return _ACTIVE.kept


def keeping() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the context managers of a block's two runs: the ``context_fn`` of a non-reentrant checkpoint."""
    kept = Kept()
    return _Run(kept, recomputing=False), _Run(kept, recomputing=True)


class _Run:
    """Context of one run of a block; torch enters the second run's context again if backward is called twice."""

    def __init__(self, kept: Kept, *, recomputing: bool) -> None:
        self._kept, self._recomputing = kept, recomputing

    def __enter__(self) -> None:
        self._before, _ACTIVE.kept = _ACTIVE.kept, self._kept
        self._kept.recomputing = self._recomputing

    def __exit__(self, *_: object) -> None:
        _ACTIVE.kept = self._before
