"""Settings of the teacher, the section ``model.teacher`` of YAML."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qerl_pl.base.folder import BaseFormat, check_base
from qerl_pl.base.prepared import prepared_base
from qerl_pl.model.quantization import Quantize, quantization_of
from qerl_pl.model.tokenizer import check_same_vocabulary, read_tokenizer
from qerl_pl.quant.declared import read_layout
from qerl_pl.quant.families import check_length

DENSE = "dense"


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """Settings of the teacher, a frozen model that ``model.objective.teacher`` draws the policy towards.

    Args:
        base: folder of a checkpoint, a GGUF file or a model's name on the hub, dense or quantised, with the policy's
            tokenizer; "dense": ``model.base`` before it is quantised, so that a 4-bit policy recovers the behaviour of
            the unquantised model.
        base_format: nvfp4, mxfp4 or nf4: load the teacher from the folder BASE-FORMAT (``models/qwen2.5-32b-nvfp4`` for
            ``base: models/qwen2.5-32b``), which ``python -m qerl_pl quantize`` has written; null: load ``base`` itself.
        quantize: quantise a dense teacher at the first start and keep the result in a cache: nvfp4, mxfp4 or nf4, or a
            mapping of the quantiser's settings; null: do not quantise.
        keep: where the teacher's weights are while it computes nothing: on the "gpu", or in "host" memory, from
            which they are copied once per rollout; "auto": on the GPU if the run then still fits into its memory, else
            in host memory.
    """

    base: str
    base_format: BaseFormat | None = None
    quantize: Quantize | None = None
    keep: Literal["auto", "gpu", "host"] = "auto"

    def __post_init__(self) -> None:
        if self.base == DENSE and (self.base_format or self.quantize):
            raise ValueError(
                "model.teacher.base is 'dense', the policy's base before it is quantised, and model.teacher has a "
                "format: leave base_format and quantize out"
            )

    def folder(self, base: str, policy: str, *, longest: int) -> str:
        """Return the teacher's checkpoint folder, after downloading or quantising it if necessary. ``base`` is
        ``model.base``, ``policy`` the policy's folder, and ``longest`` the most tokens of a prompt and its completion.
        Raises ValueError if the teacher cannot be loaded, has another vocabulary, or cannot score sequences of that
        length."""
        if self.base == DENSE:
            folder = prepared_base(base)
            if read_layout(Path(folder)) is not None:
                raise not_dense(base)
            return folder
        with as_teacher(self.base):
            folder = prepared_base(self.base, self.base_format, quantization_of(self.quantize))
            check_length(check_base(folder), longest=longest)
        check_same_vocabulary(read_tokenizer(policy), read_tokenizer(folder), base=self.base)
        return folder


@contextmanager
def as_teacher(base: str) -> Iterator[None]:
    """Context manager in which messages of ValueErrors about a model speak of the teacher, whose setting ``base`` is
    given: they name the settings under ``model.teacher`` in place of those of the policy's base."""
    try:
        yield
    except ValueError as error:
        text = re.sub(r"\bmodel\.(base_format|base|quantize)\b", r"model.teacher.\1", str(error))
        raise ValueError(text if "model.teacher." in text else f"model.teacher.base is {base}: {text}") from error


def not_dense(base: str) -> ValueError:
    """Return the error for the teacher "dense" of a base, the setting ``model.base``, that is in 4 bits already."""
    return ValueError(
        f"model.teacher.base is 'dense' and model.base is {base}, which is in 4 bits already: name the 16-bit model "
        "that it was made from"
    )
