"""Control the sampling temperature so that the entropy of the rollouts follows a given curve."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from qerl_pl.common.metrics import Mean, over_ranks
from qerl_pl.module import QeRLModule
from qerl_pl.results.curves import SURPRISAL, at_every_step, read_curves
from qerl_pl.rollout.base import LOWEST_TEMPERATURE
from qerl_pl.rollout.common import all_logprobs


class MatchedTemperature(Callback):
    """Sets the sampling temperature of each rollout so that the sampling entropy follows a given curve, for example
    that of earlier runs with adaptive quantization noise (AQN, Gaussian noise on the sampler's norm weights).

    Noise raises the entropy of rollouts. A run without noise but with equal entropy is the control that shows whether
    noise has other effects too. The curve has one value of ``rollout/surprisal`` per rollout: the mean -log p of the
    sampled tokens under the distribution that they were sampled from, noise and temperature included, which estimates
    the entropy of this distribution. After each rollout the temperature is multiplied by exp(gain (target - surprisal)
    / target), where surprisal is the rollout's value and target the curve's value for the next rollout. The temperature
    of validations does not change.

    Args:
        curve: folder of a run that logged ``rollout/surprisal``, or a JSON file with a list of nats per token, one per
            rollout; rollouts beyond its end use the last value, and those that the run did not log
            (``trainer.log_every_n_steps``) interpolated values. A resumed run keeps the values of its first start.
            ``python -m qerl_pl study STUDY.yaml --analyse`` writes such a file for each arm (variant) of a study,
            analysis/surprisal/ARM.json, with the mean over the arm's runs (one per seed).
        gain: gain in the formula above; with a higher one, the entropy comes back to the curve faster.
        limits: lowest (at least 0.01) and highest temperature that is set. If the formula gives one outside, the nearer
            limit is set, the first time with a warning.

    Raises:
        ValueError: a setting is out of its range; or, when training starts, ``curve`` does not exist or does not hold a
            curve.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.matched_temperature.MatchedTemperature
              init_args: {curve: studies/pilot/analysis/surprisal/bf16+aqn.json}
    """

    def __init__(self, curve: str, gain: float = 0.3, limits: tuple[float, float] = (0.5, 2.0)) -> None:
        if not 0 < gain < math.inf:
            raise ValueError(f"gain is {gain}; expected a finite number above 0")
        if not LOWEST_TEMPERATURE <= limits[0] < limits[1] < math.inf:
            raise ValueError(
                f"limits are {list(limits)}; expected two temperatures from {LOWEST_TEMPERATURE}, the lower one first"
            )
        self.curve, self.gain, self.limits = curve, gain, limits
        self._targets: list[float] = []
        self._temperature: float | None = None
        self._mean = Mean()
        self._warned = False

    @override
    def setup(self, trainer: Trainer, pl_module: QeRLModule, stage: str) -> None:
        if stage == "fit":
            self._targets = _read(Path(self.curve).expanduser())

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"temperature": self._temperature, "curve": self.curve, "targets": self._targets}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._temperature = state_dict["temperature"]
        if state_dict.get("curve") == self.curve:  # what it names may have changed, as a run that goes on does
            self._targets = list(state_dict["targets"])

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: QeRLModule, *_: Any) -> None:
        if self._temperature is None:
            self._temperature = float(pl_module.sampling.temperature)
        pl_module.sampling = replace(pl_module.sampling, temperature=self._temperature)
        pl_module.log("matched/temperature", self._temperature)
        pl_module.log("matched/target", self._target(pl_module.rollout_index))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        surprisal = float(-over_ranks(self._mean, all_logprobs(outputs["rollout"].sampled.completions)))
        target = self._target(outputs["rollout_index"] + 1)
        assert self._temperature is not None
        wanted = self._temperature * math.exp(self.gain * (target - surprisal) / target)
        low, high = self.limits
        self._temperature = min(max(wanted, low), high)
        if self._temperature != wanted and not self._warned:
            self._warned = True
            rank_zero_warn(f"a temperature of {wanted:.3g} would match the curve and is outside of {low} to {high}")

    def _target(self, rollout_index: int) -> float:
        return self._targets[min(rollout_index, len(self._targets) - 1)]


def _read(path: Path) -> list[float]:
    if path.is_dir():
        curves = read_curves(path)
        if SURPRISAL not in curves:
            raise ValueError(f"curve {path} is the folder of a run that did not log {SURPRISAL}")
        values = at_every_step(curves[SURPRISAL])
        if not all(map(_is_target, values)):
            raise ValueError(f"curve {path} is a run whose {SURPRISAL} is not above 0 in every rollout; choose another")
        return values
    if not path.is_file():
        raise ValueError(f"curve {path} does not exist; expected a run's folder, or a JSON list of nats per rollout")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"curve {path} is no JSON: {error}") from error
    if not isinstance(values, list) or not values or not all(map(_is_target, values)):
        raise ValueError(f"curve {path} is no list of numbers above 0: nats per token, one per rollout")
    return list(map(float, values))


def _is_target(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
