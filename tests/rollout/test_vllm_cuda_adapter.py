"""This project's LoRA kernels, called in vLLM on CUDA, with the batch metadata that vLLM passes. Without a GPU they run
in Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.interpreter import interpreted
from tests.reference import lora as reference
from tests.reference.lora_experts import add_lora_reference

pytestmark = pytest.mark.vllm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLICES = (24, 8)


@pytest.fixture(scope="module")
def cuda() -> Iterator[object]:
    """Import the module that calls the LoRA kernels in vLLM. It uses vLLM's module ``punica_gpu``, which imports the
    class ``LoRAKernelMeta`` only on a machine with a GPU, so that class is added to ``punica_gpu`` first."""
    with interpreted(), pytest.MonkeyPatch.context() as patch:
        from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
        from vllm.lora.punica_wrapper import punica_gpu

        patch.setattr(punica_gpu, "LoRAKernelMeta", LoRAKernelMeta, raising=False)
        from qerl_pl.rollout.vllm import cuda as vllm_cuda

        yield vllm_cuda


def make_kernels(cuda, adapter_ids: tuple[int, ...], *targets: str):
    """Make the object that calls the kernels, in its state after vLLM has announced a batch. ``adapter_ids`` has the
    number of the adapter that each token uses, or 0."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers import LoRAMapping

    config = LoRAConfig(max_loras=1, target_modules=[*targets] or None)
    kernels = cuda.adapter_kernels(128, 8, torch.device(DEVICE), lora_config=config)
    kernels.update_metadata(LoRAMapping(adapter_ids, adapter_ids), [7], 2, 100)
    return kernels


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE)


def operands(num_tokens: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    a = tuple(draw(1, 1, 8, 48, seed=width) for width in SLICES)
    b = tuple(draw(1, 1, width, 8, seed=width + 1) for width in SLICES)
    return draw(num_tokens, sum(SLICES)), draw(num_tokens, 48, seed=1), a, b


def expected(cuda, y: Tensor, x: Tensor, a: tuple[Tensor, ...], b: tuple[Tensor, ...], ids: tuple[int, ...]) -> Tensor:
    indices = torch.tensor(ids, device=DEVICE) - 1
    return reference.add_lora_reference(y, x, [m[0, 0] for m in a], [m[0, 0] for m in b], indices.clamp(max=0))


BATCHES = [(7, 7, 7), (0, 0, 0), (7, 0, 0, 7, 0), (0,), (7,)]


@pytest.mark.parametrize("ids", BATCHES, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_with_the_adapter_get_it_and_the_others_keep_what_they_had(cuda, ids, compiled):
    y, x, a, b = operands(len(ids))
    kernels = make_kernels(cuda, ids)

    def linear(y: Tensor, x: Tensor) -> Tensor:
        out = y + 0  # what a base linear returns
        kernels.add_lora_linear(out, x, a, b, 1.0, SLICES)
        return out * 1

    run = torch.compile(linear, backend="aot_eager", fullgraph=True, dynamic=True) if compiled else linear
    found = run(y, x)
    exact = expected(cuda, y, x, a, b, ids)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=2**-4)
    without = torch.tensor(ids, device=DEVICE) == 0
    assert torch.equal(found[without], y[without])


def test_a_compiled_pass_follows_the_next_batch(cuda):
    y, x, a, b = operands(4)
    kernels = make_kernels(cuda, (7, 7, 7, 7))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def linear(y: Tensor, x: Tensor) -> Tensor:
        out = y + 0
        kernels.add_lora_linear(out, x, a, b, 1.0, SLICES)
        return out

    from vllm.lora.layers import LoRAMapping

    for ids in [(7, 7, 7, 7), (0, 0, 0, 0), (0, 7, 0, 7), (7, 7, 7, 7)]:
        kernels.update_metadata(LoRAMapping(ids, ids), [7], 2, 100)
        torch.testing.assert_close(linear(y, x).double(), expected(cuda, y, x, a, b, ids), rtol=2**-8, atol=2**-4)


@pytest.mark.parametrize("ids", [*BATCHES, (7,) * 64, ()], ids=lambda ids: str(len(ids)))
def test_indices_and_flag_are_those_of_vllms_own_class(cuda, ids):
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    mapping = LoRAMapping(ids, ids[:2])
    found = make_kernels(cuda, (7, 0, 7), "experts")  # a batch before
    theirs = PunicaWrapperGPU(64, 8, torch.device(DEVICE), lora_config=LoRAConfig(max_loras=1))
    for kernels in (found, theirs):
        kernels.update_metadata(mapping, [7], 2, 100)
    assert torch.equal(found.tokens[0][: len(ids)], theirs._token_lora_indices[: len(ids)])
    meta, of_theirs = found.token_mapping_meta, theirs.token_mapping_meta
    assert torch.equal(found.tokens[1], of_theirs.no_lora_flag_cpu)
    # what vLLM's kernels for experts read; without any adapter, vLLM's class leaves the indices of the batch before
    assert torch.equal(meta.token_lora_mapping[: len(ids)].long(), found.tokens[0][: len(ids)])
    assert meta.active_lora_ids.tolist() == [0, -1]
    if any(ids):
        assert torch.equal(meta.token_lora_mapping[: len(ids)], of_theirs.token_lora_mapping[: len(ids)])
        assert set(of_theirs.active_lora_ids.tolist()) <= {0, -1}


def test_an_adapter_in_no_slot_is_an_error(cuda):
    with pytest.raises(ValueError, match="8 is not in list"):
        make_kernels(cuda, (7, 8))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_the_host_waits_for_nothing_when_the_batch_changes(cuda):
    kernels = make_kernels(cuda, (7, 7))
    from vllm.lora.layers import LoRAMapping

    torch.cuda.synchronize()
    torch.cuda._sleep(2**31)  # about a second
    kernels.update_metadata(LoRAMapping((7, 0, 7), (7, 0, 7)), [7], 2, 100)
    assert not torch.cuda.current_stream().query(), "the GPU is still asleep"
    assert kernels.tokens[0][:3].tolist() == [0, -1, 0]


@pytest.mark.parametrize("name", ["add_shrink", "add_expand", "add_lora_embedding", "add_lora_logits"])
def test_other_layers_than_linears_are_refused(cuda, name):
    with pytest.raises(NotImplementedError, match="for linears"):
        getattr(make_kernels(cuda, (7,)), name)(None, None)


class Mixture:
    """Random operands for the LoRA adapters of a mixture of 8 experts, of which each token uses 2, in the form in which
    vLLM passes them."""

    def __init__(self, num_tokens: int, rank: int = 8) -> None:
        self.x, self.y = draw(num_tokens, 48), draw(num_tokens, 2, 64, seed=1)
        self.inner, self.out = draw(2 * num_tokens, 32, seed=2), draw(num_tokens, 2, 48, seed=3)
        self.a, self.b = tuple(draw(1, 8, rank, 48, seed=n) for n in (4, 5)), tuple(draw(1, 8, 32, rank) for _ in "ab")
        self.down = (draw(1, 8, rank, 32, seed=6),), (draw(1, 8, 48, rank, seed=7),)
        self.ids = draw(num_tokens, 8, seed=9).argsort(dim=1).int()[:, :2].contiguous()  # as vLLM expects them
        self.weights = draw(num_tokens, 2, seed=8).abs().float()
        self.enabled = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
        self.bases = torch.empty(8, 64, 48, device="meta"), torch.empty(8, 48, 32, device="meta")

    def add(self, kernels, expert_map: Tensor | None = None, **options: object) -> tuple[Tensor, Tensor]:
        """Call ``kernels`` as vLLM's experts do, to add the adapters of gate and up to a copy of ``y``, and those of
        down to a copy of ``out``. Returns both copies."""
        y, out, sizes = self.y.clone(), self.out.clone(), (len(self.x), 2, 1)
        rows = kernels.add_lora_w13(
            *(y, self.x, self.a, self.b, self.ids, self.weights, expert_map, *self.bases, *sizes, self.enabled),
            *(8, 2, 2, False, False),
            **options,
        )
        rest = sizes[0], *self.bases, *sizes[1:], self.enabled, 2, False, 0, False
        kernels.add_lora_w2(out, self.inner, *self.down, self.weights, *rows, *rest, **options)
        return y, out


@pytest.mark.parametrize("ids", BATCHES, ids=str)
def test_adapters_of_experts_are_added_to_tokens_that_have_the_adapter(cuda, ids):
    mixture, indices = Mixture(len(ids)), torch.tensor(ids, device=DEVICE).clamp(max=1) - 1
    y, out = mixture.add(make_kernels(cuda, ids, "experts"))
    rest = indices, mixture.enabled, mixture.ids
    operands = mixture.a, mixture.b, *mixture.down
    a, b, down_a, down_b = ([matrix[0] for matrix in matrices] for matrices in operands)
    exact = add_lora_reference(mixture.y.flatten(0, 1), mixture.x, a, b, *rest)
    torch.testing.assert_close(y.flatten(0, 1).double(), exact, rtol=2**-8, atol=2**-3)
    exact = add_lora_reference(mixture.out.flatten(0, 1), mixture.inner, down_a, down_b, *rest, mixture.weights)
    torch.testing.assert_close(out.flatten(0, 1).double(), exact, rtol=2**-8, atol=2**-3)
    assert torch.equal(y[indices < 0], mixture.y[indices < 0])
    assert torch.equal(out[indices < 0], mixture.out[indices < 0])
    assert any(ids) or torch.equal(y, mixture.y)


@pytest.mark.parametrize("case", ["many rows", "expert parallel", "overwrite", "high rank"])
def test_what_the_kernel_for_experts_does_not_support_is_left_to_vllm(cuda, case, monkeypatch):
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    seen = []
    monkeypatch.setattr(PunicaWrapperGPU, "add_lora_w13", lambda self, *_, **__: seen.append("w13") or ("rows",) * 4)
    monkeypatch.setattr(PunicaWrapperGPU, "add_lora_w2", lambda self, *_, **__: seen.append("w2"))
    mixture = Mixture(129 if case == "many rows" else 3, rank=128 if case == "high rank" else 8)
    expert_map = torch.arange(8) if case == "expert parallel" else None
    kernels = make_kernels(cuda, (7,) * 3, "experts")
    mixture.add(kernels, expert_map, **({"add_inputs": False} if case == "overwrite" else {}))
    assert seen == ["w13", "w2"]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 128])
def test_adapters_of_experts_are_those_of_vllms_own_kernels(cuda, num_tokens, monkeypatch):
    ids = tuple(0 if token % 3 == 1 else 7 for token in range(num_tokens))
    mixture = Mixture(num_tokens)
    kernels = make_kernels(cuda, ids, "experts")
    found = mixture.add(kernels)
    monkeypatch.setattr(cuda.lora_experts, "is_faster", lambda *_: False)
    for ours, theirs in zip(found, mixture.add(kernels), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-8, atol=2**-4)


def test_more_than_one_adapter_is_left_to_vllm(cuda):
    from vllm.config.lora import LoRAConfig
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    kernels = cuda.adapter_kernels(64, 8, torch.device(DEVICE), lora_config=LoRAConfig(max_loras=2))
    assert type(kernels) is PunicaWrapperGPU


def test_compiling_runs_every_kernel_and_changes_no_adapter(cuda, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda.lora, "MOST_TOKENS", 300)  # the interpreter takes seconds for thousands
    a, b = operands(1)[2:]
    before = [matrix.clone() for matrix in (*a, *b)]
    seen, add_lora = [], cuda.lora.add_lora

    def watched(y: Tensor, *others: object) -> None:
        add_lora(y, *others)
        seen.append(len(y))
        assert not y.any(), "no row has the adapter"

    monkeypatch.setattr(cuda.lora, "add_lora", watched)
    for fewest in (1, 65):
        seen.clear()
        cuda.compile_kernels(a, b, fewest)
        assert seen == cuda.lora.token_counts(48, SLICES, 8, fewest=fewest)
    assert all(torch.equal(matrix, old) for matrix, old in zip((*a, *b), before, strict=True))


def test_nothing_is_compiled_for_what_cublas_computes(cuda, monkeypatch):
    monkeypatch.setattr(cuda.lora, "add_lora", lambda *_: pytest.fail("it runs"))
    a, b = operands(1)[2:]
    cuda.compile_kernels([matrix.float() for matrix in a], [matrix.float() for matrix in b])
    cuda.compile_kernels([draw(1, 1, 128, 48)], [draw(1, 1, 32, 128)])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_what_was_compiled_is_enough_for_any_number_of_tokens(cuda, monkeypatch):
    from triton import knobs

    y, x, a, b = operands(1100)
    indices, no_lora = torch.zeros(1100, dtype=torch.int64, device=DEVICE), torch.tensor([False])
    cuda.compile_kernels(a, b)
    compiled = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about["repr"]))
    for num_tokens in range(1, 1100):
        cuda.add_lora(y[:num_tokens], x[:num_tokens], cuda.slots(a), cuda.slots(b), indices, no_lora)
    assert not compiled
