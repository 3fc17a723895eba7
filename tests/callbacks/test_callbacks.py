"""Rules for every callback: its docstring shows how a YAML file names it, its hooks are marked as Lightning's, and
impossible settings raise an error."""

import inspect
import math
import re
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Callback

from callbacks.canary import SyncCanary
from callbacks.ledger import MismatchLedger
from callbacks.matched_temperature import MatchedTemperature
from callbacks.process import CloseEngine
from callbacks.rollout_evidence import RolloutEvidence

FOLDER = Path(__file__).parent.parent.parent / "callbacks"
CALLBACKS = [
    one
    for path in sorted(FOLDER.glob("[a-z]*.py"))
    for one in vars(import_module(f"callbacks.{path.stem}")).values()
    if inspect.isclass(one) and issubclass(one, Callback) and one.__module__ == f"callbacks.{path.stem}"
]
REFUSED: list[tuple[Any, dict[str, Any]]] = [
    *((SyncCanary, wrong) for wrong in ({"score_every": 0}, {"num_tokens": 31}, {"tolerance": 0.0})),
    (SyncCanary, {"tolerance": math.nan}),
    *((MismatchLedger, wrong) for wrong in ({"num_rows": 0}, {"max_tokens": 0}, {"every": 0})),
    *((RolloutEvidence, wrong) for wrong in ({"max_tokens": 0}, {"false_alarm": 0.0}, {"false_alarm": math.nan})),
    *((RolloutEvidence, wrong) for wrong in ({"max_gap": math.inf}, {"max_jump": 1.0}, {"warn_jump": math.nan})),
    *((RolloutEvidence, wrong) for wrong in ({"window": 1}, {"silent_rollouts": 0}, {"remembered": -1})),
    *((MatchedTemperature, {"curve": "none.json", **wrong}) for wrong in ({"gain": 0}, {"limits": [2, 1]})),
]


def test_they_are_found():
    assert len(CALLBACKS) >= 20


@pytest.mark.parametrize(
    "cls", [cls for cls in CALLBACKS if inspect.signature(cls).parameters], ids=lambda cls: cls.__name__
)
def test_the_example_is_yaml_that_makes_this_callback(cls):
    text = (inspect.getdoc(cls) or "").split("Example:\n")[-1]
    [entry] = yaml.safe_load(textwrap.dedent(text))["trainer"]["callbacks+"]
    assert entry["class_path"] == f"{cls.__module__}.{cls.__qualname__}"
    assert isinstance(cls(**entry.get("init_args", {})), cls)


@pytest.mark.parametrize(("cls", "settings"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_settings_that_mean_nothing_are_refused(cls, settings):
    name, value = list(settings.items())[-1]
    with pytest.raises(ValueError, match=rf"{name} (is|are) {re.escape(repr(value))}; expected"):
        cls(**settings)


def test_an_engine_that_cannot_be_closed_is_a_warning_and_does_not_hide_why_the_run_failed():
    class Broken:
        def close(self) -> None:
            raise RuntimeError("device lost")

    module: Any = type("Module", (), {"engine": Broken()})
    trainer: Any = None
    with pytest.warns(RuntimeWarning, match="could not be closed: RuntimeError..device lost"):
        CloseEngine().on_exception(trainer, module, ValueError("the run's own error"))
