"""Triton: a vector kernel and a matrix product with autotuning."""
import torch
import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask) + tl.load(y + offsets, mask), mask)


@triton.autotune([triton.Config({"M": 64, "N": 64, "K": 32}, num_warps=w) for w in (4, 8)], key=["size"])
@triton.jit
def matmul(a, b, c, size, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, size, K):
        left = tl.load(a + rows[:, None] * size + (k + inner)[None, :])
        right = tl.load(b + (k + inner)[:, None] * size + columns[None, :])
        total += tl.dot(left, right)
    tl.store(c + rows[:, None] * size + columns[None, :], total)


torch.manual_seed(0)
x, y = torch.randn(100_000, device="cuda"), torch.randn(100_000, device="cuda")
out = torch.empty_like(x)
add[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
print(f"add: {bool(torch.equal(out, x + y))}")
a, b = torch.randn(512, 512, device="cuda").half(), torch.randn(512, 512, device="cuda").half()
c = torch.empty(512, 512, device="cuda")
matmul[lambda meta: (512 // meta["M"], 512 // meta["N"])](a, b, c, 512)
print(f"matmul_close: {bool(torch.allclose(c, (a @ b).float(), atol=0.1, rtol=0.01))}")
