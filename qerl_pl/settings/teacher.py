"""Settings of the teacher, the section ``model.teacher`` of YAML."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qerl_pl.base.folder import BaseFormat, check_base
from qerl_pl.base.prepared import prepared_base
from qerl_pl.model.quantization import Quantize, quantization_of
from qerl_pl.model.tokenizer import check_same_vocabulary, read_tokenizer
from qerl_pl.quant.declared import read_layout

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

    def folder(self, base: str, policy: str) -> str:
        """Return the checkpoint folder to load the teacher from, after downloading or quantising the teacher if
        necessary. ``base`` is the setting ``model.base``, and ``policy`` is the folder that the policy is loaded from.

        Raises:
            ValueError: the teacher cannot be loaded, or its vocabulary differs from the policy's.
        """
        if self.base == DENSE:
            folder = prepared_base(base)
            if (layout := read_layout(Path(folder))) is not None:
                raise ValueError(
                    f"model.teacher.base is 'dense' and model.base is {base}, which is in {layout.fmt.name} already: "
                    "name the 16-bit model that it was made from"
                )
            return folder
        folder = prepared_base(self.base, self.base_format, quantization_of(self.quantize))
        check_base(folder)
        check_same_vocabulary(read_tokenizer(policy), read_tokenizer(folder), base=self.base)
        return folder
