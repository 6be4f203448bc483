"""PyTorch: torch.compile (Triton), FFT, linear algebra, sorting, sparse, random numbers, pinned copies."""
import torch

torch.manual_seed(0)
a = torch.randn(512, 512).pin_memory().to("cuda", non_blocking=True)
print(f"pinned_copy_sum: {a.double().sum().item():.5f}")
print(f"fft: {torch.fft.fft2(a).abs().mean().item():.4f}")
spd = a @ a.T + 512 * torch.eye(512, device="cuda")
print(f"cholesky: {torch.linalg.cholesky(spd).diagonal().log().sum().item():.3f}")
print(f"inverse: {torch.linalg.inv(spd).trace().item():.5f}")
print(f"eigenvalues: {torch.linalg.eigvalsh(spd).sum().item():.1f}")
print(f"svd: {torch.linalg.svdvals(a[:128, :128]).sum().item():.2f}")
print(f"sort: {a.flatten().sort().values[1000].item():.5f}")
print(f"topk: {a.flatten().topk(5).values.sum().item():.5f}")
sparse = (a * (a > 2)).to_sparse_csr()
print(f"sparse: {(sparse @ a).sum().item():.2f}")
print(f"unique: {torch.randint(0, 100, (10000,), device='cuda').unique().numel()}")
print(f"scaled_dot_product: {torch.nn.functional.scaled_dot_product_attention(a.view(4, 8, 16, 512).half(), a.view(4, 8, 16, 512).half(), a.view(4, 8, 16, 512).half()).float().sum().item():.1f}")
compiled = torch.compile(lambda x: (x.sin() + x.cos()).relu().sum(1))
print(f"compile: {compiled(a).sum().item():.3f}")
tuned = torch.compile(lambda x, y: torch.nn.functional.gelu(x @ y), mode="reduce-overhead")
for _ in range(3):
    out = tuned(a, a)
print(f"compile_reduce_overhead: {out.sum().item():.1f}")
host = torch.empty(512, 512, pin_memory=True)
host.copy_(a, non_blocking=True)
torch.cuda.synchronize()
print(f"back: {bool((host == a.cpu()).all())}")
free, total = torch.cuda.mem_get_info()
print(f"memory_info_sane: {0 < free <= total}")
try:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("out_of_memory: raised")
