"""Metrics over the rows and tokens of all ranks, by torchmetrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MaxMetric, Metric, SumMetric
from torchmetrics.utilities import dim_zero_cat

from qerl_pl.common import ranks


class Pooled(Metric):
    """Statistics that need the values of all ranks together, such as quantiles: every value is kept until ``reset``.

    Args:
        statistics: from [N] values, in the order in which ranks and then updates gave them, to named [] tensors. It
            must not depend on that order where two ranks are to give the same as one.
    """

    full_state_update = False
    values: list[Tensor]

    def __init__(self, statistics: Callable[[Tensor], Mapping[str, Tensor]], **settings: Any) -> None:
        super().__init__(**settings)
        self._statistics = statistics
        self.add_state("values", default=[], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        """Add [N] values; N may be 0 and may differ between ranks, but every rank has to update."""
        self.values.append(values.detach().to(self.device))

    def compute(self) -> dict[str, Tensor]:
        """The statistics by name."""
        return dict(self._statistics(dim_zero_cat(self.values)))


class Mean(Metric):
    """Weighted mean in fp64; a value that is nan or infinite stays in it.

    torchmetrics' MeanMetric drops nan, or with nan_strategy "disable" the weights (1.9.0).
    """

    full_state_update = False
    weighted: Tensor
    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("weighted", "weights"):
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, weights: Tensor | None = None) -> None:
        """Add [...] values, with equal weights or with [...] weights."""
        values = values.double()
        weights = torch.ones_like(values) if weights is None else weights.double()
        self.weighted += (values * weights).sum()
        self.weights += weights.sum()

    def compute(self) -> Tensor:
        """[] fp64, nan where there is no value."""
        return self.weighted / self.weights


def total() -> Metric:
    """A sum in fp64."""
    return SumMetric().set_dtype(torch.float64)


def largest() -> Metric:
    """A maximum in fp64."""
    return MaxMetric().set_dtype(torch.float64)


def over_ranks(metric: Metric, *values: Tensor) -> Any:
    """What a metric makes of these values of all ranks, and of none that it was given before. Collective.

    Args:
        metric: of torchmetrics; it is left reset, on the device of the collectives or, on one rank, of the values.
        values: arguments of its update on this rank.
    """
    device = ranks.device() if ranks.num_ranks() > 1 else values[0].device
    metric.to(device)
    metric.update(*(value.to(device) for value in values))
    found = metric.compute()
    metric.reset()
    return found


def quantile(values: Tensor, q: float) -> Tensor:
    """[] the value at a share q of [N] sorted ones; torch.quantile takes at most 16 million."""
    return values[round(q * (len(values) - 1))]
