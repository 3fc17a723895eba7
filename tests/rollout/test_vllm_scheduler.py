"""The log-probabilities that the scheduler collects are those of the sampled tokens."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from qerl_pl.rollout.vllm import VLLMEngine
from tests.rollout.conftest import BLOCK_SIZE, MAX_MODEL_LEN, make_policy

pytestmark = pytest.mark.vllm

BLOCK, MAX_LENGTH = 4, 60  # of the KV cache, in tokens; of a request


def make_request(name: str, prompt: list[int], block: int = BLOCK) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    params = SamplingParams(max_tokens=MAX_LENGTH)
    return Request(name, list(prompt), params, None, block_hasher=get_request_block_hasher(block, sha256))


@pytest.fixture(scope="module")
def core(checkpoints):
    """Start a vLLM engine, and yield its EngineCore, which has all objects from which vLLM makes a scheduler."""
    engine = VLLMEngine(block_size=BLOCK_SIZE, max_num_seqs=8, kv_cache_bytes=2**20)
    engine.start(make_policy(checkpoints["dense"]), max_model_len=MAX_MODEL_LEN)
    yield engine._core().engine_core
    engine.close()


def make_scheduler(core: Any, num_blocks: int | None = None) -> Any:
    """Make a new scheduler like that of the engine; ``num_blocks`` replaces the number of blocks in the KV cache."""
    config = core.scheduler.kv_cache_config
    return type(core.scheduler)(
        vllm_config=core.vllm_config,
        kv_cache_config=replace(config, num_blocks=num_blocks) if num_blocks else config,
        structured_output_manager=core.structured_output_manager,
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )


class Played:
    """Runs a scheduler without a model. Two steps are scheduled ahead, and random numbers of drafts count as accepted.
    The tokens and log-probabilities that the model would return are numbers that tell to which request and position
    they belong."""

    def __init__(self, scheduler: Any, most_drafts: int, seed: int) -> None:
        self.scheduler, self.draw = scheduler, random.Random(seed)
        by_sequences = [most_drafts] * 6 + [most_drafts // 2]  # then 0
        scheduler.num_spec_tokens, scheduler._spec_token_placeholders = most_drafts, []
        scheduler.dynamic_sd_lookup = [*by_sequences, *[0] * 64]
        self.ahead: deque[Any] = deque()
        self.described: list[Any] = []
        """What the steps so far consisted of."""
        self.tokens: dict[str, list[int]] = {}
        self.requests = self.rejected = self.accepted = 0

    def add(self) -> None:
        name = f"{self.requests}-{'0' * 8}"
        prompt = [self.draw.randrange(2)] * self.draw.choice([1, 30, 40, 64])  # some share blocks of the cache
        request = make_request(name, prompt, BLOCK_SIZE)
        request.max_tokens, request.sampling_params.logprobs = self.draw.randrange(1, MAX_MODEL_LEN - 64), 0
        request.sampling_params.stop_token_ids = self.draw.choice([None, None, None, [2, 30]])
        request.sampling_params.stop = self.draw.choice([None, None, ["a stop string"]])
        self.scheduler.add_request(request)
        self.requests += 1

    def step(self) -> None:
        """Schedule until two steps wait for results, and give the scheduler results of the older step."""
        while len(self.ahead) < 2:
            step = self.scheduler.schedule()
            self.ahead.append(step)
            cached, drafts = step.scheduled_cached_reqs, step.num_spec_tokens_to_schedule
            self.described += [[*step.num_scheduled_tokens.items()], cached, step.total_num_scheduled_tokens, drafts]
            self.described += [step.finished_req_ids, step.preempted_req_ids, step.scheduled_spec_decode_tokens]
        self.answer(self.ahead.popleft())

    def answer(self, step: Any) -> None:
        import numpy as np
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        names = list(step.num_scheduled_tokens)
        self.draw.shuffle(names)
        sampled, logprobs, starts = [], [], [0]
        for name in names:
            drafts = len(step.scheduled_spec_decode_tokens.get(name, ()))
            accepted = min(self.draw.choice([0, 0, 1, 2, drafts]), drafts)
            request = self.scheduler.requests.get(name)
            first = request.num_output_tokens if request else 0
            sampled.append([first + place for place in range(accepted + 1)])
            logprobs += [-int(name.partition("-")[0]) - (first + place) / 1024 for place in range(accepted + 1)]
            logprobs += [float("nan")] * (drafts - accepted)
            starts.append(len(logprobs))
            self.accepted += accepted
            self.rejected += drafts - accepted
        values = np.array(logprobs, dtype=np.float32)[:, None]
        cumulative = starts if len(logprobs) > len(names) else None
        lists = LogprobsLists(np.zeros_like(values, dtype=np.int64), values, np.ones(len(values)), cumulative)
        rows = {name: row for row, name in enumerate(names)}
        output = ModelRunnerOutput(names, rows, sampled, lists if names else None)
        for outputs in self.scheduler.update_from_output(step, output).values():
            for each in outputs.outputs:
                self.tokens.setdefault(each.request_id, []).extend(each.new_token_ids)

    def blocks(self) -> dict[str, Any]:
        """Return the blocks of the KV cache of each request."""
        manager = self.scheduler.kv_cache_manager
        return {name: manager.get_block_ids(name) for name in self.scheduler.requests}


@pytest.fixture
def scheduler(core):
    """Make a new scheduler with two requests, a and b, of two tokens each."""
    scheduler = make_scheduler(core)
    for name in ("a", "b"):
        request = make_request(f"{name}-{'0' * 8}", [3, 4, 5])
        request.max_tokens, request.sampling_params.logprobs = 2, 0
        scheduler.add_request(request)
    return scheduler


def answer(sampled: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> Any:
    """Make what a model returns for a step of the requests a and b. ``sampled`` has a list with one token per request,
    or an empty list if the request's prompt is not finished."""
    import numpy as np
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    values = np.array(logprobs, dtype=np.float32)
    names = [f"{name}-{'0' * 8}" for name in ("a", "b")]
    return ModelRunnerOutput(
        names,
        {name: row for row, name in enumerate(names)},
        [list(tokens) for tokens in sampled],
        LogprobsLists(np.zeros_like(values, dtype=np.int64), values, np.ones(len(values), dtype=np.int64)),
    )


def test_log_probabilities_go_with_their_tokens_though_steps_are_scheduled_ahead(scheduler):
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first.total_num_scheduled_tokens == 6
    assert second.total_num_scheduled_tokens == 2, "before the first has an answer"
    found = scheduler.update_from_output(first, answer([[7], [8]], [[-1.5], [-2.5]]))
    assert all(output.new_logprobs is None for output in found[0].outputs)
    scheduler.update_from_output(second, answer([[9], [9]], [[-0.5], [-0.25]]))
    assert scheduler.take_logprobs() == {"a": [-1.5, -0.5], "b": [-2.5, -0.25]}
    assert scheduler.take_logprobs() == {}
    assert not scheduler.has_unfinished_requests()


def test_a_row_without_a_token_has_no_log_probability(scheduler):
    step = scheduler.schedule()
    scheduler.update_from_output(step, answer([[7], []], [[-1.5], [-2.5]]))
    assert scheduler.take_logprobs() == {"a": [-1.5]}


def test_rows_of_several_tokens_go_vllms_way(scheduler):
    step = scheduler.schedule()
    found = scheduler.update_from_output(step, answer([[7], [8]], [[-1.5, -3.0], [-2.5, -4.0]]))
    assert [output.new_logprobs.logprobs.tolist() for output in found[0].outputs] == [[[-1.5, -3.0]], [[-2.5, -4.0]]]
    assert scheduler.take_logprobs() == {}


@pytest.mark.parametrize("most_drafts", [0, 1, 4, 7])
@pytest.mark.parametrize("seed", range(3))
def test_log_probabilities_go_with_their_tokens_in_steps_of_several_tokens(core, most_drafts, seed):
    """Each log-probability belongs to its token, although a step can give several tokens: some drafts are rejected, and
    some requests are preempted and resumed, or end before the last token of a step."""
    scheduler = make_scheduler(core, num_blocks=16)
    preempted, preempt = [], scheduler._preempt_request
    scheduler._preempt_request = lambda *args, **more: (preempted.append(args), preempt(*args, **more))[1]
    played = Played(scheduler, most_drafts, seed)
    while played.requests < 30 or scheduler.has_unfinished_requests():
        if played.requests < 30 and len(scheduler.requests) < 8:
            played.add()
        played.step()
    while played.ahead:
        played.answer(played.ahead.popleft())
    logprobs = scheduler.take_logprobs()
    assert len(played.tokens) == len(logprobs) == 30
    for name, tokens in played.tokens.items():
        number = name.partition("-")[0]
        assert tokens == list(range(len(tokens)))
        assert logprobs[number] == [-int(number) - place / 1024 for place in tokens]
    assert preempted
    counts = scheduler.draft_counts
    emitted = counts.emitted.total() - counts.verified.total()
    assert emitted <= played.accepted, "some end within a step's tokens"
    assert (emitted > 0.8 * played.accepted) if most_drafts else not counts.verified
    assert 0 <= counts.drafted.total() - emitted <= played.accepted + played.rejected - emitted
    assert not most_drafts or (played.accepted > 50 and played.rejected > 50)


@pytest.mark.parametrize("most_drafts", [0, 4])
def test_experts_are_known_of_requests_that_end_while_they_are_preempted(core, most_drafts):
    """If a request is preempted while its last token is being computed, it ends without blocks of the KV cache. Here
    the recorded experts of a token are its position."""
    import torch

    from qerl_pl.quant.experts import Routing
    from qerl_pl.rollout.vllm.routes import RouteRecorder

    scheduler = make_scheduler(core, num_blocks=16)
    scheduler.recorder = recorder = RouteRecorder(Routing(num_layers=1, num_experts=512, chosen=1))
    [group] = scheduler.kv_cache_config.kv_cache_groups
    recorder.attention, manager = group.layer_names[0], scheduler.kv_cache_manager
    recorder._chosen = chosen = torch.full((16 * BLOCK_SIZE + 1, 1, 1), -1, dtype=torch.int16)
    without_blocks, free, schedule = [], scheduler._free_request, scheduler.schedule

    def compute() -> Any:
        step = schedule()
        for name, number in step.num_scheduled_tokens.items():
            [blocks], end = manager.get_block_ids(name), scheduler.requests[name].num_computed_tokens
            for place in range(end - number, end):
                chosen[blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE] = place
        return step

    def count(request: Any, *args: Any) -> Any:
        without_blocks.extend([request.request_id] * (manager.get_block_ids(request.request_id) == ([],)))
        return free(request, *args)

    scheduler.schedule, scheduler._free_request = compute, count
    played, lengths = Played(scheduler, most_drafts, seed=0), {}
    while played.requests < 100 or scheduler.has_unfinished_requests():
        if played.requests < 100 and len(scheduler.requests) < 8:
            played.add()
        lengths |= {name: request.num_prompt_tokens for name, request in scheduler.requests.items()}
        played.step()
    assert without_blocks
    routes = scheduler.take_routes()
    for name, tokens in played.tokens.items():
        expected = range(lengths[name] + len(tokens) - 1)
        assert routes[name.partition("-")[0]].flatten().tolist() == list(expected)


def test_waiting_requests_start_several_at_a_time(core):
    """Of 64 places for running requests, four are free before waiting ones start. So few steps compute prompts, hardly
    any place is empty, and every request gets its tokens."""
    steps, prompt_steps, tokens = {}, {}, {}
    for is_lean in (False, True):
        scheduler = make_scheduler(core, num_blocks=4000)
        scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = 64
        scheduler.is_lean, steps[is_lean], prompt_steps[is_lean] = is_lean, 0, 0
        played = Played(scheduler, 0, seed=0)
        for _ in range(300):
            played.add()
        while scheduler.has_unfinished_requests():
            played.step()
            steps[is_lean] += 1
            prompt_steps[is_lean] += bool(played.ahead[-1].scheduled_new_reqs)
        while played.ahead:
            played.answer(played.ahead.popleft())
        tokens[is_lean] = played.tokens
    assert tokens[True] == tokens[False]
    assert len(tokens[True]) == 300
    assert prompt_steps[True] < 0.5 * prompt_steps[False]
    assert steps[True] <= 1.1 * steps[False]


def test_the_last_waiting_request_starts_when_a_place_is_free(core):
    """Of 65 requests with 64 places, three end soon. The last one must not wait for a fourth place."""
    scheduler = make_scheduler(core, num_blocks=4000)
    scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = 64
    scheduler.is_lean = True
    played, longest = Played(scheduler, 0, seed=0), MAX_MODEL_LEN - 65
    for number in range(65):
        request = make_request(f"{number}-{'0' * 8}", [number], BLOCK_SIZE)
        request.max_tokens, request.sampling_params.logprobs = 2 if 20 <= number < 23 else longest, 0
        scheduler.add_request(request)
    steps = 0
    while scheduler.has_unfinished_requests():
        played.step()
        steps += 1
    assert steps < longest + 10
