"""In mixtures of experts, training can use the experts that the sampler chose for each token. Whether it does follows
from the setting, the base and the engine, and experts that an engine returns are checked first."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_pl.common.checks import CheckFailed
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.quant.experts import Routing
from qerl_pl.rollout.base import checked_routes
from qerl_pl.rollout.scored import collate
from qerl_pl.settings.model import replays_routes

ROUTING = Routing(num_layers=3, num_experts=8, chosen=2)
PROMPTS = [(9, 8), (7,)]


def completion(tokens: int, routes: Tensor | None) -> Completion:
    return Completion((9,) * tokens, (-1.0,) * tokens, True, routes=routes)


def right() -> list[list[Completion]]:
    """Make two completions of each prompt, with tokens 1 and 4."""
    groups = [[(len(prompt) + own - 1, own) for own in (1, 4)] for prompt in PROMPTS]
    shape = ROUTING.num_layers, ROUTING.chosen
    return [[completion(own, torch.full((rows, *shape), 7, dtype=torch.int16)) for rows, own in g] for g in groups]


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, torch.uint8), (256, torch.uint8), (257, torch.int16)])
def test_right_experts_are_kept_in_the_smallest_dtype(num_experts, dtype):
    groups = right()
    checked = checked_routes(groups, PROMPTS, ROUTING._replace(num_experts=num_experts), engine="Engine")
    for row, before in zip(chain(*checked), chain(*groups), strict=True):
        assert row.routes is not None
        assert before.routes is not None
        assert row.routes.dtype == dtype
        assert torch.equal(row.routes.short(), before.routes)
        assert row == before


def changed(routes: Tensor, value: int) -> Tensor:
    routes = routes.clone()
    routes[1, 2, 0] = value
    return routes


SHAPES = r"expected \[4, 3, 2\]: tokens without the last, layers and experts per token.*router_replay to off"
WRONG: dict[str, tuple[Any, str]] = {
    "none": (lambda routes: None, f"Engine returned no experts for completion 1 of prompt 1; {SHAPES}"),
    "a token too many": (lambda routes: routes[[0, *range(4)]], rf"shape \[5, 3, 2\] .*{SHAPES}"),
    "a layer too few": (lambda routes: routes[:, :2], rf"shape \[4, 2, 2\] .*{SHAPES}"),
    "an expert too few": (lambda routes: routes[..., :1], rf"shape \[4, 3, 1\] .*{SHAPES}"),
    "an unknown expert": (lambda routes: changed(routes, 8), r"returned expert 8 for completion 1 .*expected 0 to 7"),
    "unrecorded": (lambda routes: changed(routes, -1), r"returned expert -1 for completion 1 .*expected 0 to 7"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_experts_stop_the_run_and_are_named(fault):
    change, message = WRONG[fault]
    groups = right()
    groups[1][1] = completion(4, change(groups[1][1].routes))
    with pytest.raises(CheckFailed, match=message):
        checked_routes(groups, PROMPTS, ROUTING, engine="Engine")


def test_rows_are_padded_to_the_longest_and_hold_their_experts():
    rows = [row for group in right() for row in group]
    prompts = [Prompt(tokens, "") for tokens in PROMPTS for _ in range(2)]
    flags = torch.ones(4, dtype=torch.bool)
    experience = collate(prompts, rows, scored=flags, advantages=torch.zeros(4), in_loss=flags)
    assert experience.routes is not None
    assert experience.routes.shape == (4, 6, 3, 2)
    known = torch.arange(6) < experience.lengths.unsqueeze(1) - 1
    assert torch.equal(experience.routes, (7 * known)[..., None, None].expand(4, 6, 3, 2).short())


@pytest.mark.parametrize(
    ("has_experts", "returns_routes", "setting", "outcome"),
    [
        (True, True, "auto", True),
        (True, True, "on", True),
        (True, True, "off", False),
        (True, False, "auto", False),
        (True, False, "on", "model.router_replay is on and Engine returns no experts: set it to auto"),
        (False, True, "auto", False),
        (False, True, "on", "model.router_replay is on and the base has no mixtures of experts: set it to auto"),
    ],
)
def test_experts_are_replayed_if_base_engine_and_setting_allow_it(has_experts, returns_routes, setting, outcome):
    which = {"has_experts": has_experts, "returns_routes": returns_routes}
    if isinstance(outcome, str):
        with pytest.raises(ValueError, match=outcome):
            replays_routes(setting, **which, engine="Engine")
    else:
        assert replays_routes(setting, **which, engine="Engine") is outcome
