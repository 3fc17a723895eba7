"""Selective gradient checkpointing: store the results of a decoder block's expensive operations (matrix products and
attention), and recompute the others, which are element-wise, in backward.

torch.utils.checkpoint runs a block in forward without keeping activations, and again in backward. With ``keeping`` as
its ``context_fn``, matrix products and attention store their results in the first run and return the stored results in
the second, and only the element-wise operations run again. torch's own selective checkpointing selects operations by
their dispatcher names. It cannot be used here, because the matrix products of linear layers with LoRA return no new
tensor to store, but write into memory that an autograd node allocated, and because weights are dequantised by kernels
that are not registered with the dispatcher. So the code of these layers and of attention calls the methods of ``Kept``.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")


class Kept:
    """Stored results of the expensive operations of one block, in the order in which forward computed them."""

    def __init__(self) -> None:
        self._results: deque[Tensor] = deque()
        self.recomputing = False

    def put(self, result: Tensor) -> None:
        """Store a result: its values and whether it requires a gradient, without its autograd graph."""
        self._results.append(result.detach().requires_grad_(result.requires_grad))

    def take(self) -> Tensor:
        """Remove the next of the results that ``put`` stored in the forward pass, in the order in which it stored them,
        and return it as a tensor without autograd history. Raises RuntimeError if none is left, which happens if
        backward runs a second time over the same graph."""
        if not self._results:
            raise RuntimeError(
                "a second backward pass over one graph: set model.gradient_checkpointing to none or to blocks"
            )
        return self._results.popleft()

    def whole(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of ``compute``, store it, and let autograd keep the tensors that its backward needs. When
        torch.utils.checkpoint runs the block again in backward, the stored result is returned instead."""
        if self.recomputing:
            return self.take()
        with saved_tensors_hooks(_same, _same):
            result = compute()
        self.put(result)
        return result

    def unread(self, compute: Callable[[], T], instead: T) -> T:
        """Return the result of ``compute`` in the forward pass, and ``instead`` when torch.utils.checkpoint runs the
        block again in backward. It is for values, such as rotated queries, that are read only by functions whose
        results ``whole`` stores: nothing reads the value in the second run."""
        if self.recomputing:
            return instead
        with saved_tensors_hooks(_same, _same):
            return compute()


def _same(tensor: Tensor) -> Tensor:
    """Return a tensor unchanged: a hook for tensors that autograd saves. It replaces the hook of
    torch.utils.checkpoint, which would not keep the tensor."""
    return tensor


class _Active(threading.local):  # autograd runs backward in its own threads
    kept: Kept | None = None


_ACTIVE = _Active()


def active() -> Kept | None:
    """Return the stored results of the block that this thread runs; None without selective checkpointing."""
    return _ACTIVE.kept


def kept_whole(compute: Callable[[], Tensor]) -> Tensor:
    """Compute a result by ``Kept.whole``, or plainly without selective checkpointing."""
    return compute() if (kept := active()) is None else kept.whole(compute)


def keeping() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the pair of context managers that torch.utils.checkpoint expects from its argument ``context_fn``, for a
    block's run in forward, which stores results, and for its second run in backward, which takes them."""
    kept = Kept()
    return _Run(kept, recomputing=False), _Run(kept, recomputing=True)


class _Run:
    """Context manager in which torch.utils.checkpoint computes a decoder block, in forward or again in backward. Within
    it, ``active`` returns the object with the results that were kept for the block in forward. torch may enter one such
    context several times, one after the other."""

    def __init__(self, kept: Kept, *, recomputing: bool) -> None:
        self._kept, self._recomputing = kept, recomputing

    def __enter__(self) -> None:
        self._before, _ACTIVE.kept = _ACTIVE.kept, self._kept
        self._kept.recomputing = self._recomputing

    def __exit__(self, *_: object) -> None:
        _ACTIVE.kept = self._before
