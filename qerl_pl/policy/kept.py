"""Results that a checkpointed block keeps, so that its recomputation reads them instead of computing them again.

torch.utils.checkpoint runs a block twice: in forward, where it drops what autograd would keep, and in backward to get
that back. With ``keeping`` as its ``context_fn``, matrix products and attention put their results aside the first time
and take them the second time. What is between them (norms, rotations, activations, sums) is cheap and runs again.
torch's own selective checkpointing decides by dispatched operation. Our products write into memory that an autograd
node handed out, and their weights come out of kernels that no dispatcher sees, so they say themselves what is kept.
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
    """Results of one run of one block, in the order in which they are made."""

    def __init__(self) -> None:
        self._results: deque[Tensor] = deque()
        self.recomputing = False

    def put(self, result: Tensor) -> None:
        """Set a result aside, with its values and whether it has a gradient, without its graph."""
        self._results.append(result.detach().requires_grad_(result.requires_grad))

    def take(self) -> Tensor:
        """The next result, a leaf; it is held no longer.

        Raises:
            RuntimeError: backward runs a second time over the same graph.
        """
        if not self._results:
            raise RuntimeError(
                "a second backward pass over one graph: set model.gradient_checkpointing to none or to blocks"
            )
        return self._results.popleft()

    def whole(self, compute: Callable[[], Tensor]) -> Tensor:
        """A result whose autograd graph is kept with all that it saves, so that nothing of it runs again."""
        if self.recomputing:
            return self.take()
        with saved_tensors_hooks(_same, _same):
            result = compute()
        self.put(result)
        return result

    def unread(self, compute: Callable[[], T], instead: T) -> T:
        """Results that nothing but ``whole`` reads: computed the first time, ``instead`` of them the second time."""
        if self.recomputing:
            return instead
        with saved_tensors_hooks(_same, _same):
            return compute()


def _same(tensor: Tensor) -> Tensor:
    """A hook of saved tensors that keeps them, in place of those of the checkpoint."""
    return tensor


class _Active(threading.local):  # backward runs in threads of autograd's own
    kept: Kept | None = None


_ACTIVE = _Active()


def active() -> Kept | None:
    """Results of the block that is running in this thread; None where nothing is set aside."""
    return _ACTIVE.kept


def keeping() -> tuple[AbstractContextManager, AbstractContextManager]:
    """A ``context_fn`` for torch.utils.checkpoint, without re-entrance: contexts of the two runs of a block."""
    kept = Kept()
    return _Run(kept, recomputing=False), _Run(kept, recomputing=True)


class _Run:
    """Context of one run; torch enters that of a recomputation again where backward runs a second time."""

    def __init__(self, kept: Kept, *, recomputing: bool) -> None:
        self._kept, self._recomputing = kept, recomputing

    def __enter__(self) -> None:
        self._before, _ACTIVE.kept = _ACTIVE.kept, self._kept
        self._kept.recomputing = self._recomputing

    def __exit__(self, *_: object) -> None:
        _ACTIVE.kept = self._before
