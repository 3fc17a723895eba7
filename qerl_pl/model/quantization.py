"""Settings by which a run quantises a 16-bit base model when it uses this model for the first time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

FormatName = Literal["nvfp4", "mxfp4", "nf4"]
Method = Literal["rtn", "gptq"]


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Settings of the quantiser, which are also options of ``python -m qerl_pl quantize``.

    Args:
        format: format of the 4-bit weights: nvfp4, mxfp4 or nf4.
        method: how weights are rounded. rtn: to nearest; gptq: column by column, where later columns compensate the
            rounding errors of earlier ones; null: with calibration data gptq, which leaves about a third of rtn's
            divergence from the dense policy (docs/real_models.md), and without such data rtn.
        calibration: text on which the model's activations are measured, which gptq needs: .txt or .jsonl file, or a
            data set of the hub.
        samples: number of calibration sequences.
        length: tokens per calibration sequence.
        ignore: linear layers that stay in 16 bits, each a name or "re:" and a regular expression for names.
    """

    format: FormatName = "nvfp4"
    method: Method | None = None
    calibration: str | None = None
    samples: int = 256
    length: int = 2048
    ignore: tuple[str, ...] = ("lm_head",)

    def __post_init__(self) -> None:
        for name, value, known in (("format", self.format, FormatName), ("method", self.method, Method)):
            if value not in get_args(known) and not (name == "method" and value is None):
                raise ValueError(f"model.quantize.{name} is {value!r}; expected one of {', '.join(get_args(known))}")
        if self.method == "gptq" and self.calibration is None:
            raise ValueError(
                f"model.quantize.method is {self.method!r}, which needs calibration data: set "
                "model.quantize.calibration to a .txt or .jsonl file or a data set of the hub"
            )
        if self.samples < 1 or self.length < 1:
            raise ValueError(
                f"model.quantize has samples {self.samples} and length {self.length}; expected at least 1 for each"
            )
        check_calibrated(self.calibration, self.samples, self.length, section="model.quantize has ")


def method_of(method: Method | None, calibration: str | None) -> Method:
    """Return the given rounding method or, for None, gptq with calibration data and rtn without."""
    return method or ("rtn" if calibration is None else "gptq")


def check_calibrated(calibration: str | None, samples: int, length: int, *, section: str = "--") -> None:
    """Raise ValueError if ``samples`` or ``length`` (number and tokens of calibration sequences) is not the default
    although there are no calibration data (``calibration`` is None), because the setting would have no effect. The
    message names the setting with ``section`` before it."""
    for name, value in (("samples", samples), ("length", length)) if calibration is None else ():
        if value != getattr(Quantization, name):
            raise ValueError(
                f"{section}{name} is {value} without calibration data; give calibration too, or leave {name} out"
            )


Quantize = FormatName | Quantization
"""Type of ``model.quantize`` in YAML: a format, or a mapping with the fields of ``Quantization``."""


def quantization_of(value: Quantize | Mapping[str, Any] | None) -> Quantization | None:
    """Convert and check the value of ``model.quantize``, a format's name or a mapping; None stays None."""
    if value is None or isinstance(value, Quantization):
        return value
    if isinstance(value, str):
        return Quantization(format=value)
    return Quantization(**{**value, "ignore": tuple(value.get("ignore", Quantization.ignore))})
