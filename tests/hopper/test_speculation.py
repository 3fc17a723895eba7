"""The settings for speculation that are passed to vLLM, and in which completions drafts are looked for."""

from __future__ import annotations

import random
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qerl_pl.hopper import draft_guard
from qerl_pl.memory.settings import DRAFTS_BY_SEQUENCES, GRAPH_SEQUENCES
from tests.interpreter import interpreted

pytestmark = pytest.mark.vllm
SIZES: dict[str, Any] = {"max_num_reqs": 6, "max_model_len": 40, "max_num_batched_tokens": 40}


@pytest.fixture
def speculation() -> Any:
    """Import qerl_pl/hopper's module for speculation."""
    with interpreted():
        return import_module("qerl_pl.hopper.speculation")


@pytest.mark.parametrize("most", [1, 3, 4, 5, 16, 17, 64, 65, 256])
def test_steps_with_drafts_fit_the_graphs(speculation, most):
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    settings = speculation.arguments(most)["speculative_config"]
    drafts = settings["num_speculative_tokens"]
    captured = build_dynamic_sd_schedule_lookup(settings["num_speculative_tokens_per_batch_size"], most, drafts)
    table = draft_guard.drafts_by_sequences([], most, graph_tokens=GRAPH_SEQUENCES)
    assert len(captured) == len(table) == most + 1
    assert {*table[1:]} | ({0} if most > 1 else set()) <= {*captured[1:]}
    for sequences in range(1, most + 1):
        due = next((number for last, number in DRAFTS_BY_SEQUENCES if sequences <= last), 0)
        assert table[sequences] == due
        assert captured[sequences] == due or (sequences == 1 and captured[1] == 0)
        assert due == 0 or sequences * (1 + due) <= GRAPH_SEQUENCES


@pytest.fixture
def drafts(speculation) -> Any:
    """Make an object that finds drafts for vLLM's table of 6 requests."""
    from vllm.v1.worker.gpu.states import RequestState

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    states = RequestState(num_speculative_steps=7, vocab_size=64, device=device, **SIZES)
    return speculation.GroupDrafts(SimpleNamespace(req_states=states, device=device, max_num_reqs=6))


def add(drafts: Any, name: str, *prompt: int, answer: tuple[int, ...] = ()) -> int:
    drafts.add_request(name, len(prompt), [*prompt, *answer], 0, 10)
    return drafts.states.req_id_to_index[name]


def siblings(drafts: Any, row: int) -> list[int]:
    return [other for other in drafts.candidates_np[row].tolist() if other >= 0]


def test_drafts_are_looked_for_in_completions_of_the_same_prompt(drafts):
    a, b, c = add(drafts, "a", 1, 2), add(drafts, "b", 1, 3), add(drafts, "c", 1, 2)
    assert siblings(drafts, a) == siblings(drafts, c) == [a, c]
    assert siblings(drafts, b) == [b]
    drafts.states.remove_request("a")
    assert siblings(drafts, c) == [a, c], "its text is still there"
    assert add(drafts, "d", 1, 3) == a
    assert siblings(drafts, c) == [c]
    assert siblings(drafts, b) == siblings(drafts, a) == [b, a]


def test_a_preempted_request_keeps_its_place(drafts):
    a, b = add(drafts, "a", 1, 2), add(drafts, "b", 1, 2)
    drafts.states.remove_request("a")
    other = add(drafts, "c", 9)
    assert other == a
    again = add(drafts, "a", 1, 2, answer=(5, 6))
    assert siblings(drafts, b) == siblings(drafts, again) == [again, b]


def test_nothing_of_an_earlier_call_is_read(drafts):
    add(drafts, "a", 1, 2)
    drafts.states.remove_request("a")
    drafts.forget()
    b = add(drafts, "b", 1, 2)
    assert siblings(drafts, b) == [b]


def test_a_large_group_is_read_in_part(drafts, speculation, monkeypatch):
    monkeypatch.setattr(speculation, "MOST_SIBLINGS", 3)
    rows = [add(drafts, f"{number}", 1) for number in range(6)]
    for place, row in enumerate(rows):
        found = siblings(drafts, row)
        assert row in found
        assert len(found) == 3
        assert found == rows[rows.index(found[0]) :][:3], place


@pytest.mark.parametrize("seed", range(5))
def test_candidates_are_those_that_the_rows_hold(drafts, seed):
    """Requests come, end and are preempted in random order."""
    draw, alive, number, held = random.Random(seed), {}, 0, {}
    for _ in range(80):
        if len(alive) == 6 or (alive and draw.random() < 0.4):
            name = draw.choice(sorted(alive))
            drafts.states.remove_request(name)
            prompt = alive.pop(name)
            if draw.random() < 0.5:
                continue
            held.pop(next(row for row, (_, other) in held.items() if other == name))
        else:
            name, prompt, number = f"{number}", (draw.randrange(2),), number + 1
        alive[name] = prompt
        held[add(drafts, name, *prompt)] = (prompt, name)
        for row, (prompt, _) in held.items():
            due = sorted((int(name), row) for row, (other, name) in held.items() if other == prompt)
            assert siblings(drafts, row) == [row for _, row in due]
