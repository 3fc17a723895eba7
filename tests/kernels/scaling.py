"""A small Triton kernel, which `test_launching.py` launches."""

# pyright: reportCallIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl


@triton.jit
def scaling_kernel(x, out, size, stride, number, BLOCK: tl.constexpr):
    """Compute out[i] = x[i * stride] * number + BLOCK."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i * stride, mask=i < size, other=0.0)
    tl.store(out + i, (value.to(tl.float32) * number + BLOCK).to(out.dtype.element_ty), mask=i < size)
