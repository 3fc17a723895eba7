"""Metrics, based on torchmetrics, over the completions or tokens of all ranks, and a stopwatch.

These metrics communicate only if the run has several ranks. torchmetrics would use any process group that exists, and
vLLM creates one that has only NCCL in a run on one GPU, which fails for metrics on the CPU.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MaxMetric, Metric, SumMetric
from torchmetrics.utilities import dim_zero_cat

from qerl_pl.common import ranks


class Pooled(Metric):
    """Metric for statistics that need all values at once, such as quantiles: it gathers the values of all ranks, and
    calls ``statistics`` with a tensor [N] of them. This function returns scalar tensors by name, which must not depend
    on the order of the values."""

    full_state_update = False
    values: list[Tensor]

    def __init__(self, statistics: Callable[[Tensor], Mapping[str, Tensor]], **settings: Any) -> None:
        super().__init__(distributed_available_fn=ranks.are_several, **settings)
        self._statistics = statistics
        self.add_state("values", default=[], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        """Add [N] values. N may be 0 and may differ between ranks, but every rank has to call this."""
        self.values.append(values.detach().to(self.device))

    def compute(self) -> dict[str, Tensor]:
        """Return the statistics by name, as scalar tensors."""
        return dict(self._statistics(dim_zero_cat(self.values)))


class Mean(Metric):
    """Weighted mean in fp64; a nan or infinite value makes it nan or infinite.

    torchmetrics' MeanMetric (1.9.0) drops nan values or, with nan_strategy "disable", ignores the weights.
    """

    full_state_update = False
    weighted: Tensor
    weights: Tensor

    def __init__(self) -> None:
        super().__init__(distributed_available_fn=ranks.are_several)
        for name in ("weighted", "weights"):
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, weights: Tensor | None = None) -> None:
        """Add [...] values with [...] weights; None means equal weights."""
        values = values.double()
        weights = torch.ones_like(values) if weights is None else weights.double()
        self.weighted += (values * weights).sum()
        self.weights += weights.sum()

    def compute(self) -> Tensor:
        """Return the mean, a scalar fp64 tensor; nan if no values were added."""
        return self.weighted / self.weights


def total() -> Metric:
    """Create a metric that is the sum of its values, in fp64."""
    return SumMetric(distributed_available_fn=ranks.are_several).set_dtype(torch.float64)


def largest() -> Metric:
    """Create a metric that is the maximum of its values, in fp64."""
    return MaxMetric(distributed_available_fn=ranks.are_several).set_dtype(torch.float64)


def over_ranks(metric: Metric, *values: Tensor) -> Any:
    """Compute a metric over the values of all ranks, return its value, and reset the metric. The metric must be empty
    before, since values in it would be counted too. ``values`` are this rank's arguments of ``metric.update``. Every
    rank must call this function, because it waits for the values of all ranks."""
    device = ranks.device() if ranks.are_several() else values[0].device
    metric.to(device)
    metric.update(*(value.to(device) for value in values))
    result = metric.compute()
    metric.reset()
    return result


def quantile(values: Tensor, q: float) -> Tensor:
    """Return the q-quantile of N sorted values [N], without interpolation, as a scalar tensor."""
    # torch.quantile takes at most 16 million values
    return values[round(q * (len(values) - 1))]


class Stopwatch:
    """Stopwatch that adds up wall-clock seconds by phase, such as the rollout; a phase may be entered several times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of a ``with`` block, until the GPU kernels that it started have ended, to
        ``seconds[name]``."""
        start = _now()
        try:
            yield
        finally:
            self.seconds[name] += _now() - start


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
