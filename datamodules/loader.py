"""Loaders of batches of prompts. They are iterables with a length, so Lightning neither prefetches nor adds a sampler.

torchdata's StatefulDataLoader is not used: it would need a batch sampler that contains the code of this module, starts
worker processes, which lists of tokens do not need, and draws from the global random state at every start.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property

import torch

from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.types import Prompt


def numbered(prompts: Iterable[Prompt], before: Sequence[Prompt] = ()) -> Iterator[Prompt]:
    """Set the field ``copy`` of each prompt to the number of earlier prompts with equal tokens, including those in
    ``before``. The seed of a completion is derived from the tokens of its prompt and from ``copy``. So the seed does
    not depend on the rank, and equal prompts get different completions."""
    seen = Counter(prompt.tokens for prompt in before)
    for prompt in prompts:
        yield prompt._replace(copy=seen[prompt.tokens])
        seen[prompt.tokens] += 1


def drawn_order(num: int, seed: int) -> list[int]:
    """Draw a permutation of ``num`` indices from a generator seeded by ``seed``, not torch's global one."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed)).tolist()


def check_batch_size(batch_size: int, num_prompts: int) -> None:
    """Raise ValueError if there are fewer training prompts than a batch needs."""
    if batch_size > num_prompts:
        raise ValueError(f"data.batch_size is {batch_size} but there are only {num_prompts} training prompts")


@dataclass(eq=False)
class TrainLoader:
    """Endless loader of batches of training prompts: each iteration over it yields one epoch, in an order that depends
    only on seed and epoch. Prompts that do not fill a batch at the end of an epoch are skipped in that epoch.
    ``batch_size`` is the number of prompts of all ranks, of which the loader yields those of ``rank``.

    Its state is the position in the data (epoch and batch), which Lightning saves in checkpoints. A resumed run
    continues from this position, also with another number of ranks. If its prompts differ from the checkpoint's,
    ``load_state_dict`` raises an error with the text ``hint``, which says what has changed. Raises ValueError if there
    are fewer prompts than a batch needs, or a batch cannot be divided equally among the ranks.
    """

    prompts: Sequence[Prompt]
    batch_size: int
    _: KW_ONLY
    seed: int
    rank: int = 0
    num_ranks: int = 1
    hint: str = ""
    epoch: int = field(default=0, init=False)
    next_batch: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size, len(self.prompts))
        if self.batch_size % self.num_ranks:
            raise ValueError(
                f"data.batch_size {self.batch_size} counts the prompts of all ranks and is no multiple of "
                f"{self.num_ranks}"
            )

    def __len__(self) -> int:
        return len(self.prompts) // self.batch_size

    def __iter__(self) -> Iterator[list[Prompt]]:
        """Yield the remaining batches of the current epoch or, if none remain, the batches of the next epoch."""
        # the epoch is advanced here and not after the loop, because Lightning stops iterating after len(self) batches
        if self.next_batch == len(self):
            self.epoch, self.next_batch = self.epoch + 1, 0
        order = drawn_order(len(self.prompts), derive_seed(self.seed, "data", self.epoch))
        while self.next_batch < len(self):
            start = self.next_batch * self.batch_size
            # advanced before the yield, because a checkpoint written during a step must count the step's batch as used
            self.next_batch += 1
            batch = list(numbered(self.prompts[row] for row in order[start : start + self.batch_size]))
            yield batch[self.rank :: self.num_ranks]

    def state_dict(self) -> dict[str, int | str]:
        """Return what a checkpoint stores of the loader: the position in the data (epoch and next batch) and, so that
        ``load_state_dict`` can refuse a state of other data, number and digest of the prompts, batch size and seed."""
        return {"epoch": self.epoch, "next_batch": self.next_batch, **self._identity()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue from a saved position. Raises ValueError if it was saved with other prompts, batch size or seed."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                hint = self.hint if name in ("num_prompts", "prompt_digest") else ""
                raise ValueError(
                    f"cannot resume: the checkpoint's data had {name} {state.get(name)}, this run's data has {value}; "
                    f"{hint}set it back, or start in another --run_dir"
                )
        self.epoch, self.next_batch = int(state["epoch"]), int(state["next_batch"])

    def _identity(self) -> dict[str, int | str]:
        identity = {"num_prompts": len(self.prompts), "batch_size": self.batch_size, "seed": self.seed}
        return {**identity, "prompt_digest": self._digest}

    @cached_property
    def _digest(self) -> str:
        """Return a digest, of 16 hex digits, of the tokens and known answers of all prompts in order."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            tokens, answer = array("q", prompt.tokens).tobytes(), prompt.answer.encode()
            digest.update(f"{len(tokens)} {len(answer)} ".encode() + tokens + answer)
        return digest.hexdigest()[:16]


class EvaluationLoader:
    """Loader of evaluation prompts: yields one rank's share of ``prompts`` once, in order, in batches of ``batch_size``
    prompts; the last batch may be smaller. Raises ValueError if there are fewer prompts than ranks."""

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, *, rank: int = 0, num_ranks: int = 1) -> None:
        if len(prompts) < num_ranks:
            raise ValueError(f"{len(prompts)} validation prompts are too few for {num_ranks} ranks; use fewer ranks")
        self.prompts = list(numbered(prompts))[rank::num_ranks]
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.prompts) // self.batch_size)

    def __iter__(self) -> Iterator[list[Prompt]]:
        for start in range(0, len(self.prompts), self.batch_size):
            yield self.prompts[start : start + self.batch_size]
