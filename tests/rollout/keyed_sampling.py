"""Sampling by adding noise that follows from seed and position (keyed noise), with speculation, in vLLM's model runner
for a CPU, so that tests without a GPU sample as rollouts on a GPU do. On a CPU vLLM itself draws from one random
generator per request, and verifies drafts by rejection sampling."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback

from qerl_pl.policy.margins import keyed_noise, row_keys, token_keys
from qerl_pl.rollout.vllm import VLLMEngine, worker
from tests.reference.equal_drafts import accept as accept_by_loops

MOST_DRAFTS = 7


class Drafter:
    """Proposes for each sequence the drafts that ``guess`` returns for the sequence's tokens. vLLM creates the object,
    so tests set ``guess`` on the class."""

    guess: Callable[[list[int]], Sequence[int]] = staticmethod(lambda tokens: ())

    def __init__(self, config: Any) -> None:
        self.max_model_len = config.model_config.max_model_len

    def load_model(self, *_: object) -> None:
        """Nothing to load."""

    def propose(self, sampled: list[list[int]], lengths: Any, tokens: Any, **_: object) -> list[list[int]]:
        """Return the drafts for each sequence, at most ``MOST_DRAFTS``. A sequence that got no token in this step,
        because its prompt is not finished, gets none."""
        drafts = []
        for row, new in enumerate(sampled):
            known = tokens[row, : lengths[row]].tolist()
            room = min(MOST_DRAFTS, self.max_model_len - len(known) - 1)
            drafts.append([int(token) for token in Drafter.guess(known)][: max(room, 0)] if new else [])
        return drafts


SPECULATION = {
    "method": "custom_class",
    "model": "tests.rollout.keyed_sampling.Drafter",
    "num_speculative_tokens": MOST_DRAFTS,
}


@contextmanager
def keyed_sampling(engine: VLLMEngine, accept: Callable[..., Any] = accept_by_loops) -> Iterator[list[int]]:
    """Within the context, make an engine sample, of all tokens, the one with the largest sum of its logit and a random
    number that follows from seed and position (keyed noise), and call ``accept`` to verify drafts. Yields a list to
    which each verification of a sequence's drafts adds the number of tokens that the sequence gets."""
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    runner: Any = engine._call(lambda worker: worker.model_runner)
    by_vllm, taken = runner._sample, list[int]()

    def sample(logits: Any, drafts: Any) -> Any:
        names = runner.input_batch.req_ids
        if any(runner.requests[name].sampling_params.seed is None for name in names):  # requests that only score
            return by_vllm(logits, drafts)
        ends = torch.from_numpy(runner.query_start_loc.np[1 : len(names) + 1]).long()
        counts = [1] * len(names) if drafts is None else [number + 1 for number in drafts.num_draft_tokens]
        rows = ends - 1 if drafts is None else drafts.logits_indices.long()
        ways = [runner.requests[name].sampling_params for name in names]
        ways = [way for way, count in zip(ways, counts, strict=True) for _ in range(count)]
        logits = logits.float() / torch.tensor([[way.temperature or 1] for way in ways])
        for row, way in zip(logits, ways, strict=True):
            limit(row, way)
        keys = row_keys(torch.tensor([way.seed for way in ways]), runner.positions[rows])
        noise = keyed_noise(keys, token_keys(logits.shape[1]))
        noise[torch.tensor([way.temperature == 0 for way in ways])] = 0
        sampled = (logits + noise).argmax(1)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        most = max(counts) - 1
        tokens, accepted = accept(sampled, runner.input_ids.cpu, rows, starts, most)
        taken.extend(accepted[torch.tensor(counts) > 1].tolist())
        padded = torch.where(torch.arange(most + 1) < accepted[:, None], tokens, -1).int()
        places = (starts[:-1, None] + torch.arange(most + 1)).clamp(max=len(sampled) - 1).flatten()
        scores = logits.log_softmax(1).gather(1, sampled[:, None])[places]
        scored = LogprobsTensors(sampled[places, None], scores, torch.ones(len(places), dtype=torch.int64))
        return SamplerOutput(sampled_token_ids=padded, logprobs_tensors=scored)

    with patch.object(runner, "_sample", sample):
        yield taken


def limit(logits: torch.Tensor, way: Any) -> None:
    """Set the logits [V] of the tokens that the settings top_k and top_p of a sequence leave out to -inf, in place."""
    if way.top_k > 0:
        logits[logits < logits.topk(way.top_k).values[-1]] = float("-inf")
    if way.top_p < 1:
        order = logits.sort(descending=True)
        likelier = order.values.softmax(0).cumsum(0) - order.values.softmax(0)
        logits[order.indices[likelier >= way.top_p]] = float("-inf")


class SampleByKeys(Callback):
    """Makes the vLLM engine of a run on a CPU sample by keyed noise, and say so, from the first rollout on."""

    def __init__(self) -> None:
        self._entered = ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.rollout_index == 0:
            pl_module.start_engine()
            self._entered.enter_context(patch.object(worker, "samples_by_keyed_noise", lambda _: True))
            self._entered.enter_context(keyed_sampling(pl_module.loop.engine))

    def teardown(self, *_: Any, **__: Any) -> None:
        self._entered.close()

    def on_exception(self, *_: Any) -> None:
        self._entered.close()
