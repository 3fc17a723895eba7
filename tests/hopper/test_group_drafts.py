"""A sequence's drafts are the tokens that followed the longest match of its last tokens, found earlier in the sequence
or in another completion of the same prompt. The kernels run on the GPU if there is one, else in Triton's
interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import _uninitialised_memory_is_nan  # noqa: F401
from tests.reference.group_drafts import draft_reference

KERNELS = "qerl_pl.hopper.group_drafts"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_blocks(kernels, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 16)


def table(seed: int, *, num_rows: int = 7, length: int = 40, columns: int = 3, alphabet: int = 3) -> list[Tensor]:
    """Draw token sequences with few different tokens, so that matches of many lengths occur. Returns the tokens [rows,
    length], the length of each sequence, and for each sequence the indices of those in which its drafts are looked for
    (-1: none)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(alphabet, (num_rows, length), generator=generator, dtype=torch.int32)
    lengths = torch.randint(1, length + 1, (num_rows,), generator=generator, dtype=torch.int32)
    candidates = torch.full((num_rows, columns), -1, dtype=torch.int32)
    for row in range(num_rows):
        others = torch.randperm(num_rows, generator=generator)[: int(torch.randint(columns, (), generator=generator))]
        found = torch.cat([others[others != row], torch.tensor([row])])
        candidates[row, : len(found)] = found.sort().values
    return [tokens, lengths, candidates]


def run(kernels: Any, arguments: list[Tensor], rows: list[int], num_drafts: int) -> Tensor:
    moved = [each.to(DEVICE) for each in arguments]
    return kernels.draft(*moved, torch.tensor(rows, device=DEVICE, dtype=torch.int64), num_drafts).cpu()


@pytest.mark.parametrize("alphabet", [2, 20])
@pytest.mark.parametrize("seed", range(2))
def test_drafts_are_the_definitions(kernels, seed, alphabet):
    arguments, rows = table(seed, alphabet=alphabet), [5, 0, 3]
    for num_drafts in (1, 5):
        found = run(kernels, arguments, rows, num_drafts)
        assert torch.equal(
            found,
            draft_reference(*arguments, rows=torch.tensor(rows), num_drafts=num_drafts, longest=kernels.LONGEST_MATCH),
        )


@pytest.mark.parametrize("shape", [{"num_rows": 1, "length": 1, "columns": 1}, {"length": 16}, {"length": 17}], ids=str)
def test_odd_shapes(kernels, shape):
    arguments = table(0, **shape)
    rows = list(range(len(arguments[0])))
    found = run(kernels, arguments, rows, 3)
    assert torch.equal(
        found, draft_reference(*arguments, rows=torch.tensor(rows), num_drafts=3, longest=kernels.LONGEST_MATCH)
    )
    assert run(kernels, arguments, [], 3).shape == (0, 3)


def known(kernels: Any, texts: list[list[int]], candidates: list[list[int]]) -> list[int]:
    tokens = torch.zeros(len(texts), 30, dtype=torch.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    return run(kernels, [tokens, lengths, torch.tensor(candidates, dtype=torch.int32)], [0], 4)[0].tolist()


@pytest.mark.parametrize(
    ("own", "sibling", "due"),
    [
        ([1, 2, 3, 9, 1, 2], [], [3, 9, 1, 2]),
        ([1, 2], [7, 1, 2, 5, 6], [5, 6, 2, 2]),
        ([4, 1, 2], [4, 1, 2, 5, 9, 9, 1, 2, 6], [5, 9, 9, 1]),
        ([1, 2], [1, 2, 5, 0, 1, 2, 6], [6, 2, 2, 2]),
        ([1, 2, 8, 1, 2], [1, 2, 3, 4, 5, 6], [8, 1, 2, 2]),
        ([1, 2], [1, 3, 4], [2, 2, 2, 2]),
        ([5, 5, 5], [], [5, 5, 5, 5]),
    ],
    ids=["its own text", "a sibling's", "the longest match", "the latest", "later in its own", "no match", "a loop"],
)
def test_what_a_draft_is(kernels, own, sibling, due):
    assert known(kernels, [own, sibling], [[0, 1 if sibling else -1], [-1, -1]]) == due


def test_text_of_other_groups_is_not_read(kernels):
    assert known(kernels, [[1, 2], [1, 2, 3]], [[0, -1], [1, -1]]) == [2, 2, 2, 2]


def test_drafts_do_not_depend_on_where_rows_are(kernels):
    """vLLM may put a request into any row of its table of requests. Here all sequences move to other rows, and the
    drafts of each are looked for in the same sequences in the same order as before. The drafts stay the same."""
    tokens, lengths, candidates = table(3, alphabet=2)
    moved = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    back = moved.argsort()
    renamed = torch.where(candidates >= 0, back[candidates.clamp(min=0).long()], -1)[moved].int()
    rows = list(range(len(tokens)))
    found = run(kernels, [tokens[moved], lengths[moved], renamed], back[rows].tolist(), 5)
    assert torch.equal(found, run(kernels, [tokens, lengths, candidates], rows, 5))
