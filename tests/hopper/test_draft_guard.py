"""After each rollout the draft guard decides, for each number of sequences that decode at the same time, whether
decoding steps of the next rollout with so many sequences are speculative. They are not if speculation saved no time in
such steps of recent rollouts. A resumed run makes the decisions that an uninterrupted run would make."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from callbacks.draft_guard import DraftGuard
from qerl_pl import native
from qerl_pl.hopper.costs import VERIFICATION
from qerl_pl.hopper.draft_guard import CLASSES, KNOWN, by_class, drafts_by_sequences, remembered
from qerl_pl.memory.settings import DRAFTS_BY_SEQUENCES, FEW_GRAPH_SEQUENCES, GRAPH_SEQUENCES
from qerl_pl.rollout.hf import TransformersEngine
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.rollout.vllm.draft_counts import DraftCounts

MOST = 72  # sequences
ALL = GRAPH_SEQUENCES  # tokens: all steps with drafts run as CUDA graphs
NOTHING: Any = None


def usual(sequences: int) -> int:
    return next((drafts for most, drafts in DRAFTS_BY_SEQUENCES if sequences <= most), 0)


def class_of(sequences: int) -> int:
    return next(most for most in CLASSES if sequences <= most)


def some_counts(draw: random.Random) -> list[list[int]]:
    rows = []
    for _ in CLASSES:
        number = draw.choice([0, KNOWN - 1, KNOWN, draw.randrange(100_000)])
        rows.append([7 * number, number, int(number * draw.uniform(1, 1.6))])
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_drafts_are_where_they_pay_or_nothing_is_known(seed):
    history = some_counts(random.Random(seed))
    table = drafts_by_sequences(history, MOST, graph_tokens=ALL)
    assert len(table) == MOST + 1
    for sequences in range(1, MOST + 1):
        if sequences > CLASSES[-1]:
            assert table[sequences] == 0
            continue
        _, verifications, tokens = history[CLASSES.index(class_of(sequences))]
        cost = VERIFICATION[class_of(sequences)][usual(sequences)]
        pays = verifications < KNOWN or tokens / verifications > cost
        assert table[sequences] == (usual(sequences) if pays else 0)


def test_each_number_of_sequences_has_a_cost_and_a_verification_is_never_free():
    for sequences in range(1, CLASSES[-1] + 1):
        assert VERIFICATION[class_of(sequences)][usual(sequences)] > 1
    no_draft_accepted = [[7 * KNOWN, KNOWN, KNOWN]] * len(CLASSES)
    assert not any(drafts_by_sequences(no_draft_accepted, MOST, graph_tokens=ALL))
    all_accepted = [[KNOWN, KNOWN, 2 * KNOWN]] * len(CLASSES)
    assert drafts_by_sequences(all_accepted, MOST, graph_tokens=ALL) == [0, *map(usual, range(1, MOST + 1))]


@pytest.mark.parametrize("most", [1, 5, 32, 64, 65])
def test_the_table_ends_with_the_engine_s_most_sequences(most):
    assert drafts_by_sequences([], most, graph_tokens=ALL) == [0, *map(usual, range(1, most + 1))]


def test_steps_that_would_be_too_large_for_a_graph_have_no_drafts():
    table = drafts_by_sequences([], MOST, graph_tokens=FEW_GRAPH_SEQUENCES)
    for sequences, drafts in enumerate(table):
        fits = sequences * (1 + usual(sequences)) <= FEW_GRAPH_SEQUENCES
        assert drafts == (usual(sequences) if sequences and fits else 0)
    assert table[FEW_GRAPH_SEQUENCES // 2] == 1
    assert table[FEW_GRAPH_SEQUENCES // 2 + 1] == 0


def test_counts_of_fewer_classes_are_those_of_a_history_with_zeros():
    new = some_counts(random.Random(0))
    short = some_counts(random.Random(1))[:-1]
    full = [*short, [0, 0, 0]]
    assert remembered(short, new) == remembered(full, new)
    assert drafts_by_sequences(short, MOST, graph_tokens=ALL) == drafts_by_sequences(full, MOST, graph_tokens=ALL)


def test_counts_are_added_up_within_classes():
    counts, draw = DraftCounts(), random.Random(0)
    for sequences in range(1, 100):
        counts.drafted[sequences], counts.verified[sequences] = draw.randrange(99), draw.randrange(99)
        counts.emitted[sequences] = draw.randrange(99)
    due = {most: [0, 0, 0] for most in CLASSES}
    for sequences in range(1, CLASSES[-1] + 1):
        for place, each in enumerate((counts.drafted, counts.verified, counts.emitted)):
            due[class_of(sequences)][place] += each[sequences]
    assert by_class(counts) == list(due.values())


def test_drafts_that_did_not_pay_are_tried_again_after_some_rollouts():
    history, rollouts = remembered([], [[70_000, 10_000, 10_000]] * len(CLASSES)), 0
    while not any(drafts_by_sequences(history, MOST, graph_tokens=ALL)):
        history, rollouts = remembered(history, [[0, 0, 0]] * len(CLASSES)), rollouts + 1
    assert 5 < rollouts < 20


def test_one_rollout_that_pays_soon_outweighs_the_past():
    bad, good = ([[0, 1000, tokens]] * len(CLASSES) for tokens in (1000, 3000))
    history: list[list[int]] = []
    for _ in range(50):
        history = remembered(history, bad)
    assert not any(drafts_by_sequences(history, MOST, graph_tokens=ALL))
    assert any(drafts_by_sequences(remembered(history, good), MOST, graph_tokens=ALL))


needs_hopper = pytest.mark.skipif(native.for_vllm() is None, reason="no tested vLLM")


class Run:
    """Imitates a run for the callback DraftGuard: calls the hooks of rollouts in which drafts are counted, with an
    engine that has not started."""

    def __init__(self, engine: Any = None, state: dict[str, Any] | None = None) -> None:
        self.engine = engine or VLLMEngine(max_num_seqs=MOST, speculation="on")
        self.logged: list[dict[str, float]] = []
        loop = SimpleNamespace(observers=[print])
        self.module: Any = SimpleNamespace(engine=self.engine, loop=loop, log_dict=self.logged.append)
        self.callback = DraftGuard()
        if state:
            self.callback.load_state_dict(state)
        self.callback.on_fit_start(NOTHING, self.module)

    def rollout(self, seed: int) -> list[int]:
        """Imitate a rollout with random counts of drafts; returns how many drafts per sequence the callback had allowed
        in it, by number of sequences."""
        history, draw = getattr(self.engine, "draft_history", []), random.Random(seed)
        table = drafts_by_sequences(history, MOST, graph_tokens=ALL)
        self.callback.on_train_batch_start(NOTHING, self.module)
        for sequences in range(1, CLASSES[-1] + 1):
            number = draw.randrange(2000) * (table[sequences] > 0)
            self.engine.draft_counts.drafted[sequences] += number * table[sequences]
            self.engine.draft_counts.verified[sequences] += number
            self.engine.draft_counts.emitted[sequences] += int(number * draw.uniform(1, 1.5))
        self.module.loop.observers[0](NOTHING)
        self.callback.on_train_batch_end(NOTHING, self.module, NOTHING)
        return table


@needs_hopper
@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_resumed_run_decides_the_same(stop):
    whole = Run()
    tables = [whole.rollout(seed) for seed in range(12)]
    assert len({tuple(table) for table in tables}) > 2
    first = Run()
    parts = [first.rollout(seed) for seed in range(stop)]
    first.engine.draft_counts.verified[3] += 10**6  # an evaluation after the last checkpoint
    second = Run(state=first.callback.state_dict())
    parts += [second.rollout(seed) for seed in range(stop, 12)]
    assert parts == tables
    assert first.logged + second.logged == whole.logged


@needs_hopper
def test_what_is_logged_is_what_was_counted():
    run = Run()
    run.rollout(0)
    counts, [logged] = by_class(run.engine.draft_counts), run.logged
    verified, emitted = (sum(row[place] for row in counts) for place in (1, 2))
    assert logged["speculation/drafted"] == sum(row[0] for row in counts)
    assert logged["speculation/accepted"] == emitted - verified
    means = {f"speculation/tokens_{most}": row[2] / row[1] for most, row in zip(CLASSES, counts, strict=True)}
    assert {name: logged[name] for name in logged if "tokens" in name} == means
    for most, (drafts, number, tokens) in zip(CLASSES, counts, strict=True):
        assert logged[f"speculation/drafted_{most}"] == drafts
        assert logged[f"speculation/accepted_{most}"] == tokens - number


@needs_hopper
def test_the_counts_of_all_ranks_decide(monkeypatch):
    alone, others = Run(), Run()
    alone.rollout(0)
    monkeypatch.setattr("callbacks.draft_guard.ranks.gather_values", lambda rows: [rows, rows])
    others.rollout(0)
    twice = (2 * torch.tensor(alone.callback.state_dict()["history"])).tolist()
    assert others.engine.draft_history == twice


@pytest.mark.parametrize("engine", [VLLMEngine(), TransformersEngine()])
def test_nothing_happens_without_speculation(engine):
    run = Run(engine)
    assert run.module.loop.observers == [print]
    run.callback.on_train_batch_start(NOTHING, run.module)
    run.callback.on_train_batch_end(NOTHING, run.module, NOTHING)
    assert not run.logged
    assert run.callback.state_dict() == {}
