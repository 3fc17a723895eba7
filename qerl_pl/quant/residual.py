"""Initial LoRA adapter for a quantised checkpoint, a low-rank approximation of the quantisation error W - Q(W).

With this adapter the quantised model is nearer to the dense one (LoftQ, arXiv 2310.08659; QERA, arXiv 2410.06040). It
is written as a PEFT folder inside the checkpoint, and training can start from it.

Letters: N outputs, K inputs of a linear layer.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor

from qerl_pl.quant.output import write_tensors

START = "start"
"""Name of the adapter's folder in the checkpoint."""
_ITERATIONS = 8  # of pretrained models' errors, a millionth more is left than by the best factors
_WEIGHTS, _PREFIX = "adapter_model.safetensors", "base_model.model."


def residual_factors(
    residual: Tensor, second_moment: Tensor, rank: int, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the factors A [rank, K] and B [N, rank], fp32, for which the mean of |(E - B A) x|^2 over inputs x is
    smallest, where E [N, K] is the residual, the dense weight minus the quantised one.

    Let M [K, K] be the mean of x x^T, or a positive multiple of it (``second_moment``). The best B A is V V^T E, where
    the columns of V are the eigenvectors of E M E^T with the largest eigenvalues (``largest_directions``). This is
    QERA's solution (Theorem 1) without the inverse of a square root of M, so M may be singular. Since V V^T is an
    orthogonal projection, |(E - B A) x| is at most |E x| for every x, whatever M is. Row i of A and column i of B have
    equal norms. If the rank of E is less than ``rank``, the rows and columns beyond it are those of a new LoRA adapter
    (``fresh_factors``).

    Arithmetic is fp64. M should be summed in fp64 too: a channel of a pretrained model can have a mean square a million
    times that of other channels, and rounding errors of its fp32 sums would exceed the contributions of the others.
    """
    error = residual.double()
    a, b = (factor.to(error) for factor in fresh_factors((len(error), error.shape[1]), rank, generator=generator))
    directions = largest_directions(error, second_moment.to(error), rank, generator=generator)  # [N, r]
    rows = directions.T @ error  # [r, K]
    size = rows.norm(dim=1)
    exists = size > torch.finfo(torch.float32).eps * error.norm()
    root = torch.where(exists, size, 1.0).sqrt()
    a[: len(size)] = torch.where(exists[:, None], rows / root[:, None], a[: len(size)])
    b[:, : len(size)] = torch.where(exists, directions * root, 0.0)
    return a.float(), b.float()


def largest_directions(error: Tensor, moment: Tensor, rank: int, *, generator: torch.Generator | None) -> Tensor:
    """Compute eigenvectors of E M E^T with the largest eigenvalues, [N, min(rank, N, K)] with orthonormal columns,
    largest first, where ``error`` is E [N, K] and ``moment`` is M [K, K], symmetric, both fp64.

    For large matrices these are approximations from ``_ITERATIONS`` steps of subspace iteration with more directions
    than are returned, from a start that ``generator`` draws (Halko et al., arXiv 0909.4061, algorithm 4.4): on a GPU,
    finding all eigenvectors of a 7B model's matrices would take several times as long as GPTQ.
    """
    outputs, inputs = error.shape
    width = 2 * rank + 10
    if min(outputs, inputs) <= 4 * width:
        basis, inner = (None, error) if outputs <= inputs else torch.linalg.qr(error)  # the smaller eigenvalue problem
        directions = torch.linalg.eigh(inner @ moment @ inner.T).eigenvectors.flip(1)[:, :rank]
        return directions if basis is None else basis @ directions
    basis = torch.randn(outputs, width, dtype=torch.float64, generator=generator).to(error)
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(error @ (moment @ (error.T @ basis))).Q
    seen = error.T @ basis  # [K, width]
    return basis @ torch.linalg.eigh(seen.T @ moment @ seen).eigenvectors.flip(1)[:, :rank]


def fresh_factors(
    shape: tuple[int, int], rank: int, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw a new LoRA adapter's factors, fp32 on the CPU: A [rank, K] uniform in +-1/sqrt(K), and B [N, rank] zeros."""
    bound = shape[1] ** -0.5
    return torch.empty(rank, shape[1]).uniform_(-bound, bound, generator=generator), torch.zeros(shape[0], rank)


def adapter_tensors(linear: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Return the LoRA factors A and B of a linear layer, by the names that PEFT gives them in its files."""
    return {f"{_PREFIX}{linear}.lora_A.weight": a, f"{_PREFIX}{linear}.lora_B.weight": b}


def with_adapter(weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's ``weights``, by parameter name, with the product B A added, unscaled, to the weight of each
    linear layer for which ``adapter`` has LoRA matrices A and B."""
    added = dict(weights)
    for name, b in adapter.items():
        if name.endswith(".lora_B.weight"):
            product = b @ adapter[name.replace(".lora_B.", ".lora_A.")]
            weight = name.removeprefix(_PREFIX).replace(".lora_B.", ".")
            added[weight] = (added[weight].float() + product).to(added[weight].dtype)
    return added


class StartFolder:
    """PEFT folder ``start`` inside a checkpoint that is being written, with the LoRA adapter that approximates this
    checkpoint's quantisation errors. There is one file per decoder block, until ``finish`` joins them. If ``rank`` is
    None there is no adapter: nothing is written, and ``read`` returns no tensors."""

    def __init__(self, checkpoint: Path, *, rank: int | None) -> None:
        self.folder, self.parts, self.rank = checkpoint / START, checkpoint / f"{START}.parts", rank

    def add(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        """Write the adapter's tensors for the checkpoint's file ``part``, if there are any."""
        if tensors:
            write_tensors(self.parts / part, tensors)

    def read(self, part: str, device: torch.device | str) -> dict[str, Tensor]:
        """Read the adapter's tensors for the checkpoint's file ``part``."""
        return {} if self.rank is None else load_file(self.parts / part, device=str(device))

    def finish(self, *, base: Path) -> None:
        """Join the adapter's files, one per decoder block, to one PEFT adapter, and write its settings: the names of
        the adapted linear layers, alpha equal to the rank, so that B A is added without scaling, and the absolute path
        of the quantised checkpoint. An interrupted call can be repeated."""
        if self.rank is None:
            return
        if not (self.folder / _WEIGHTS).exists():
            parts = map(load_file, sorted(self.parts.iterdir()))
            tensors = {name: tensor for part in parts for name, tensor in part.items()}
            targets = sorted({name.split(".")[-3] for name in tensors})
            config = LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules=targets, task_type="CAUSAL_LM")
            config.base_model_name_or_path, config.inference_mode = str(base.resolve()), True
            config.save_pretrained(str(self.folder))
            write_tensors(self.folder / _WEIGHTS, tensors)
        shutil.rmtree(self.parts, ignore_errors=True)
