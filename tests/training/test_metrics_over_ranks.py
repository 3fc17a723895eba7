"""Metrics that are computed over two ranks, each with a part of the rows, equal those of one rank with all rows."""

import math

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torchmetrics import Metric

from qerl_pl.common.metrics import Mean, Pooled, largest, over_ranks, quantile, total
from qerl_pl.evaluation.pass_at_k import accuracy
from qerl_pl.training.metrics import gap
from tests.two_ranks import on_two_ranks

NAN = math.nan


def means_of(statistics: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values.mean() for name, values in statistics.items()}


def metrics() -> dict[str, tuple[Metric, list[tuple[Tensor, ...]]]]:
    """Make metrics of all kinds, by name. With each comes a pair of arguments for it: those on the first rank and those
    on the second, which may be empty."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, generator=generator)
    none, scores = torch.empty(0), torch.tensor([1.0, 0.0, NAN, 1.0])
    deciles = Pooled(lambda values: {f"{q}": quantile(values.sort().values, q / 10) for q in range(11)})
    right = torch.tensor([0, 3, 4, 1])
    return {
        "mean": (Mean(), [(rows[:7],), (rows[7:],)]),
        "weighted mean": (Mean(), [(rows[:4], rows[:4].abs()), (rows[4:], rows[4:].abs())]),
        "mean of nothing on one rank": (Mean(), [(rows,), (none,)]),
        "nan stays": (Mean(), [(rows,), (scores,)]),
        "sum": (total(), [(rows[:2],), (rows[2:],)]),
        "largest": (largest(), [(rows[:2],), (rows[2:],)]),
        "quantiles": (deciles, [(rows[:1],), (rows[1:],)]),
        "gap": (gap(), [(rows,), (none,)]),
        "no gap": (gap(), [(none,), (none,)]),
        "pass@k": (Pooled(lambda right: means_of(accuracy(right, 4))), [(right[:3],), (right[3:],)]),
    }


def values_on(rank: int) -> dict[str, dict[str, float]]:
    """Compute every metric twice, together with the other rank, and return the second results. They show whether a
    metric wrongly keeps values of its first use."""
    found = {}
    for name, (metric, shares) in metrics().items():
        for _ in range(2):
            value = over_ranks(metric, *shares[rank])
        found[name] = {k: float(v) for k, v in value.items()} if isinstance(value, dict) else {"": float(value)}
    return found


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return on_two_ranks(values_on, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", metrics())
def test_a_metric_of_two_ranks_is_that_of_one(name, on_two):
    metric, (first, second) = metrics()[name]
    both = zip(first, second, strict=True)
    value = over_ranks(metric, *(torch.cat(parts) if parts[0].ndim else torch.stack(parts).sum() for parts in both))
    expected = {k: float(v) for k, v in value.items()} if isinstance(value, dict) else {"": float(value)}
    for rank in on_two:
        assert rank[name] == pytest.approx(expected, rel=1e-6, nan_ok=True), name


@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 0.0, 2.0, 5.0])])
def test_a_mean_is_the_weighted_sum_over_the_weights(weights):
    values = torch.tensor([3.0, -1.0, 0.5, 8.0])
    given = torch.ones(4) if weights is None else weights
    expected = sum(v * w for v, w in zip(values.tolist(), given.tolist(), strict=True)) / given.sum().item()
    found = over_ranks(Mean(), values) if weights is None else over_ranks(Mean(), values, weights)
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_a_mean_over_a_value_that_is_not_finite_is_not_finite():
    assert over_ranks(Mean(), torch.tensor([1.0, NAN])).isnan()
    assert over_ranks(Mean(), torch.tensor([1.0, math.inf])).isinf()
    assert over_ranks(Mean(), torch.empty(0)).isnan()


@pytest.fixture
def group_of_one_gpu(tmp_path):
    """Make a process group like the one that vLLM leaves in a run on one GPU: it has one process, and no backend for
    tensors on the CPU, so that any collective of such tensors fails."""
    dist.init_process_group("cuda:gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", metrics())
@pytest.mark.usefixtures("group_of_one_gpu")
def test_one_rank_needs_no_collective(name):
    metric, (arguments, _) = metrics()[name]
    over_ranks(metric, *arguments)


@pytest.mark.usefixtures("group_of_one_gpu")
def test_the_group_of_one_has_no_collective_on_the_cpu():
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.zeros(1))
