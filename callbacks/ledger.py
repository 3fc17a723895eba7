"""Measure how much each cause contributes to the difference between trainer's and sampler's log-probabilities."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from typing_extensions import override

from qerl_pl.common import ranks
from qerl_pl.common.batching import micro_batches
from qerl_pl.common.checks import require_at_least
from qerl_pl.common.loggers import log_at
from qerl_pl.common.metrics import over_ranks
from qerl_pl.memory.settings import check_limit
from qerl_pl.module import QeRLModule
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.base import RolloutEngine
from qerl_pl.rollout.loop import Rollout
from qerl_pl.training.metrics import gap


class MismatchLedger(Callback):
    """Logs the causes of the difference between the trainer's and the sampler's log-probabilities of sampled tokens, as
    one term for each cause, on some completions of some rollouts.

    ============ ================================================== ====================================================
    routing      trainer, experts of sampler - trainer, own experts routers of trainer and sampler choose differently
    kernel       trainer, own experts - engine, no noise            kernels, precision, weights packed or dequantised
    noise        engine, no noise - engine, noise                   adaptive quantization noise; exactly 0 without it
    decode       engine, noise - reported by the engine             scoring all tokens at once, sampling one by one
    staleness    trainer after its updates - trainer before         how far the policy has moved since the rollout
    ============ ================================================== ====================================================

    The second column says which log-probabilities of the tokens are subtracted, in nats, at temperature 1, at which
    engines score. Log-probabilities "reported by the engine" when it sampled are at the sampling temperature. If this
    temperature is not 1, "decode" is left out; if it is 1, all terms but "staleness" add up to the difference between
    trainer and sampler. "routing" exists only for mixture-of-experts models that are trained with the experts that the
    sampler chose (``model.router_replay``).

    Each term is logged as ``ledger/{cause}/{k1,k3,mean_abs,p99,max,outside_share}`` (see
    ``qerl_pl.objective.correction.Mismatch``) over the completions of all ranks. The engine scores the completions
    before the update, without and with the rollout's noise, and has this noise again afterwards.

    Args:
        num_rows: number of completions scored per measured rollout, spread evenly over it and over the ranks; at least
            one per rank.
        max_tokens: limit on the tokens of these completions with their prompts, over all ranks; fewer completions are
            scored if they would exceed it. Each token is scored up to four times.
        every: rollouts from one measured rollout to the next; the first one of a run is measured. A measurement takes
            about a tenth of the time of an RL iteration (part of `time/check_s`).

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.ledger.MismatchLedger
              init_args: {num_rows: 8, every: 4}
    """

    def __init__(self, num_rows: int = 8, max_tokens: int = 4096, every: int = 1) -> None:
        hint = " (leave the callback out to measure nothing)"
        require_at_least(1, num_rows=num_rows, max_tokens=max_tokens, every=every, hint=hint)
        self.num_rows, self.max_tokens, self.every = num_rows, max_tokens, every
        self._gap = gap()
        self._rollout: int | None = None
        self._tokens = self._sampled = self._before = torch.empty(0, 0)
        self._routes: Tensor | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        pl_module.loop.observers.append(partial(self._measure, pl_module))

    def _measure(self, pl_module: QeRLModule, rollout: Rollout) -> None:
        index = pl_module.rollout_index
        self._rollout = None if index % self.every else index
        if self._rollout is None:
            return
        experience, engine, noise = rollout.experience, pl_module.loop.engine, pl_module.norm_noise
        limits = {"num_rows": self.num_rows, "max_tokens": self.max_tokens}
        rows = few_rows(experience.lengths, num_ranks=ranks.num_ranks(), **limits)
        self._tokens = experience.tokens[rows].to(pl_module.device)
        self._sampled = experience.sampled[rows].to(pl_module.device)
        self._routes = None if experience.routes is None else experience.routes[rows].to(pl_module.device)
        self._before, lengths = self._trainer(pl_module, self._routes), experience.lengths[rows]
        own = self._before
        if self._routes is not None:
            own = self._trainer(pl_module, None)
            self._log(pl_module, "routing", self._before - own)
        noisy = clean = engine_logprobs(engine, self._tokens, lengths)
        if noise.sigma > 0:
            engine.set_norm_noise(NormNoise())
            clean = engine_logprobs(engine, self._tokens, lengths)
            engine.set_norm_noise(noise)
        self._log(pl_module, "kernel", own - clean)
        self._log(pl_module, "noise", clean - noisy)
        if pl_module.sampling.temperature == 1:
            self._log(pl_module, "decode", noisy - experience.sampler_logprobs[rows].to(noisy.device))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        if self._rollout is not None:
            self._log(pl_module, "staleness", self._trainer(pl_module, self._routes) - self._before)

    def _trainer(self, pl_module: QeRLModule, routes: Tensor | None) -> Tensor:
        limit = check_limit(pl_module.settings.longest_row)
        return trainer_logprobs(pl_module.policy, self._tokens, self._sampled, routes, micro_batch_tokens=limit)

    def _log(self, pl_module: QeRLModule, cause: str, log_ratio: Tensor) -> None:
        statistics = over_ranks(self._gap, log_ratio[self._sampled])
        del statistics["count"]
        values = {f"ledger/{cause}/{name}": float(value) for name, value in statistics.items()}
        assert self._rollout is not None
        log_at(pl_module.trainer.loggers, values, step=self._rollout)


def few_rows(lengths: Tensor, *, num_rows: int, max_tokens: int, num_ranks: int = 1) -> Tensor:
    """Choose the completions of this rank for which the engine's log-probabilities are compared with the trainer's,
    spread evenly over the rank's B completions; returns their indices, int64. ``num_rows`` and ``max_tokens`` (prompts
    included) are limits for all ranks together, of which each rank has an equal share. This rank takes as many
    completions as its share of both allows, but at least one, however long. ``lengths`` [B] has the number of tokens of
    each completion with its prompt."""
    most, max_tokens = min(-(-num_rows // num_ranks), len(lengths)), max_tokens // num_ranks
    spread = [torch.arange(count) * len(lengths) // count for count in range(most, 0, -1)] or [torch.arange(0)]
    return next((rows for rows in spread if lengths[rows].sum() <= max_tokens), spread[-1])


@torch.no_grad()
def trainer_logprobs(
    policy: Policy, tokens: Tensor, sampled: Tensor, routes: Tensor | None = None, *, micro_batch_tokens: int
) -> Tensor:
    """Compute the policy's log-probabilities of sampled tokens at temperature 1, without dropout, [B, S] fp32 in nats,
    0 at other tokens. ``tokens`` [B, S] are right-padded; ``sampled`` [B, S] is never True in column 0; ``routes`` [B,
    S, L, k] are the experts to use, None for those that the trainer's routers choose."""
    logprobs = torch.zeros(tokens.shape, device=tokens.device)
    # Only tokens up to a row's last sampled one count towards the limit.
    lengths = (sampled * torch.arange(1, sampled.shape[1] + 1, device=sampled.device)).amax(dim=1)
    with policy.evaluating():
        for rows in micro_batches(lengths.cpu(), micro_batch_tokens):
            rows = rows.to(sampled.device)
            how = {"temperature": 1.0, "routes": None if routes is None else routes[rows]}
            logprobs[rows] = policy.token_stats(tokens[rows], sampled[rows], **how).logprobs
    return logprobs


def engine_logprobs(engine: RolloutEngine, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Let a rollout engine score all tokens at temperature 1, with the adapter and the noise that it holds. ``tokens``
    [B, S] are right-padded rows with ``lengths`` [B] tokens; returns [B, S] fp32 in nats, 0 for the first token of a
    row and in padding."""
    logprobs = torch.zeros(tokens.shape)
    rows = zip(tokens.tolist(), lengths.tolist(), strict=True)
    for row, scores in enumerate(engine.score([row[:length] for row, length in rows])):
        logprobs[row, 1 : 1 + len(scores)] = torch.tensor(scores)
    return logprobs.to(tokens.device)
