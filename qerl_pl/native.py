"""Access to the folder ``qerl_pl/hopper``, which has this project's CUDA kernels for Hopper GPUs ("native" kernels) and
run-time changes of vLLM that only make it faster. Without the folder, or with a version of vLLM that was never tested
with it, vLLM runs its own kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from qerl_pl.common.packages import TESTED, installed_vllm, is_tested

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HOPPER = "qerl_pl.hopper"


def is_installed() -> bool:
    """Return whether the folder is there."""
    return find_spec(HOPPER) is not None


def why_off() -> str | None:
    """Return the reason why vLLM runs without this package's kernels and changes for speed; None if it has them."""
    if not is_installed():
        return "this installation has no folder qerl_pl/hopper"
    package, version = installed_vllm()
    if is_tested("vllm", version):
        return None
    if not version:
        return "vLLM is not installed"
    return f"{package} {version} was never tested with this release (tested: {', '.join(TESTED['vllm'])})"


def for_vllm() -> Any:
    """Return the module ``qerl_pl/hopper/engine.py`` for the rollout engine; None if ``why_off`` has a reason."""
    return None if why_off() else import_module(f"{HOPPER}.engine")


def lacks(fmt: Any, dtype: torch.dtype) -> list[str]:
    """List the requirements of the CUDA kernels that are not met by this machine, the base's format ``fmt`` (None: not
    quantised) or the compute dtype. vLLM is not imported."""
    if not is_installed():
        return ["the folder qerl_pl/hopper of this project"]
    untested = [f"a tested vLLM ({', '.join(TESTED['vllm'])})"] if why_off() else []
    return import_module(HOPPER).lacks(fmt, dtype) + untested


def fits(shapes: Sequence[tuple[int, int]]) -> bool:
    """Return whether the CUDA kernels support the linear layer that vLLM makes by fusing layers of the given shapes (N
    outputs, K inputs), so that trainer and engine can share one copy of the weights."""
    return is_installed() and import_module(f"{HOPPER}.tile_order").fits(shapes)


def dequantize(weight: Any, dtype: torch.dtype) -> Tensor:
    """Dequantise a ``PackedWeight`` in the layout of this project's CUDA kernels to a tensor [N, K] of ``dtype``."""
    return import_module(f"{HOPPER}.tile_order").dequantize(weight, dtype)


def row_order(weight: Any) -> Any:
    """Return an NVFP4 ``PackedWeight`` in the layout of checkpoints: a copy if it is in the layout of this project's
    CUDA kernels, else the weight itself."""
    if weight.codes.element_size() == 1:
        return weight
    return import_module(f"{HOPPER}.tile_order").to_row_order(weight)
