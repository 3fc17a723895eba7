"""Launch Triton kernels with little work on the host.

Before each launch, Triton takes about 50 us to inspect every argument, longer than many kernels run. Triton compiles a
variant of a kernel for each combination of the dtypes of its tensors and of whether its integers are 1 or multiples of
16. ``launch`` finds the variant faster, by these properties alone.
"""

# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# Triton's type hints do not have its launch options and scalars.
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton import JITFunction, knobs
from triton.compiler import CompiledKernel

MULTIPLE, OTHER = 16, 17  # examples of the integers above 1 for which Triton compiles two variants


def cache_folder() -> str:
    """Return Triton's cache folder, in which compiled CUDA C++ kernels are stored as well."""
    return knobs.cache.dir


def dot_size(size: int) -> int:
    """Return the smallest power of 2 that is at least ``size`` and that tensor cores can multiply, that is, at least
    16."""
    return max(16, triton.next_power_of_2(size))


def has_pdl(tensor: Tensor) -> bool:
    """Return whether the tensor's device has programmatic dependent launch (PDL)."""
    return tensor.is_cuda and _has_dependent_launch(tensor.device)


def pdl_options(tensor: Tensor) -> dict[str, bool]:
    """Return the launch option for programmatic dependent launch, if the tensor's device has it."""
    return {"launch_pdl": True} if has_pdl(tensor) else {}


def launch(
    kernel: Any,
    grid: Sequence[int],
    arguments: Sequence[Tensor | int],
    constants: Mapping[str, int],
    **options: int | bool,
) -> None:
    """Launch a Triton kernel on the current stream; also works in Triton's interpreter.

    Args:
        grid: number of programs, up to three dimensions.
        arguments: tensors and integers, in the kernel's order. The first is a tensor.
        constants: the kernel's parameters of type ``tl.constexpr``, in the kernel's order, which are its last ones.
        options: launch options such as ``num_warps``.
    """
    first = arguments[0]
    assert isinstance(first, Tensor)
    if first.is_cuda and all(_is_plain(argument) for argument in arguments):
        kinds = tuple(argument.dtype if isinstance(argument, Tensor) else _kind(argument) for argument in arguments)
        compiled = _compiled(kernel, first.device, kinds, tuple(constants.items()), tuple(options.items()))
        compiled[tuple([*grid, 1, 1][:3])](*arguments, *constants.values())
    else:
        kernel[tuple(grid)](*arguments, **constants, **options)


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _compiled(
    kernel: JITFunction[Any],
    _device: torch.device,
    kinds: tuple[torch.dtype | int, ...],
    constants: tuple[tuple[str, int], ...],
    options: tuple[tuple[str, int | bool], ...],
) -> CompiledKernel:
    """Compile a Triton kernel for the current device, or return the variant that an earlier call compiled. ``kinds``
    has one entry per argument of the kernel: the dtype of a tensor, which must start at a multiple of 16 bytes, or, for
    an integer, the result of ``_kind``: a number that stands for all integers that use the same variant."""
    return kernel.warmup(*kinds, **dict(constants), **dict(options), grid=(1,))


def _is_plain(argument: Tensor | int) -> bool:
    """Return whether ``launch`` may choose the variant without Triton's inspection of ``argument``, an argument of the
    kernel: it is a tensor whose address is a multiple of 16, or an integer below 2^31."""
    return argument.data_ptr() % 16 == 0 if isinstance(argument, Tensor) else argument < 2**31


def _kind(number: int) -> int:
    return number if number == 1 else OTHER if number % MULTIPLE else MULTIPLE
