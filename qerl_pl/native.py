"""Door to ``qerl_pl/hopper``: native kernels for Hopper GPUs, and changes of vLLM that only make it faster.

That folder may be left out; no other module imports it. Without it, or with a vLLM that it was not tested with, vLLM's
own kernels run.
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
    """Say why vLLM runs without this package's kernels and changes for speed; None if it runs with them."""
    if not is_installed():
        return "this installation has no folder qerl_pl/hopper"
    package, version = installed_vllm()
    if is_tested("vllm", version):
        return None
    if not version:
        return "vLLM is not installed"
    return f"{package} {version} was never tested with this release (tested: {', '.join(TESTED['vllm'])})"


def for_vllm() -> Any:
    """Return the module by which the engine uses the folder (``qerl_pl/hopper/engine.py``); None if it is off."""
    return None if why_off() else import_module(f"{HOPPER}.engine")


def lacks(fmt: Any, dtype: torch.dtype) -> list[str]:
    """List what the native kernels need and this machine, base format (None: not quantised) or compute dtype lacks,
    without importing vLLM."""
    if not is_installed():
        return ["the folder qerl_pl/hopper of this project"]
    untested = [f"a tested vLLM ({', '.join(TESTED['vllm'])})"] if why_off() else []
    return import_module(HOPPER).lacks(fmt, dtype) + untested


def fits(shapes: Sequence[tuple[int, int]]) -> bool:
    """Return whether trainer and engine can share the weights of linears of these shapes (N, K), which vLLM fuses into
    one: whether the native kernels take the fused linear."""
    return is_installed() and import_module(f"{HOPPER}.tile_order").fits(shapes)


def dequantize(weight: Any, dtype: torch.dtype) -> Tensor:
    """Dequantise a ``PackedWeight`` in the native kernels' order to [N, K]; only the folder makes such weights."""
    return import_module(f"{HOPPER}.tile_order").dequantize(weight, dtype)


def row_order(weight: Any) -> Any:
    """Return an NVFP4 ``PackedWeight`` in row order, copied if it is in the native kernels' order."""
    if weight.codes.element_size() == 1:
        return weight
    return import_module(f"{HOPPER}.tile_order").to_row_order(weight)
