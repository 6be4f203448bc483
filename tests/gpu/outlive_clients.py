#!/usr/bin/env python3
"""Clients for outlive.py that are driven by requests: a line on standard input is one, the answer is `ok` or what is wrong.

    outlive_clients.py torch|torch-graph|torch-train|torch-times|cupy|jax|jax-train
    outlive_clients.py language|convolutions|fft|jax-scan|triton|compiled|dynamics|pools|products
"""
import os
import sys


def with_torch():
    import torch
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512)).cuda().eval().half()
    given = torch.randn(64, 512, device="cuda").half()

    def request():
        with torch.no_grad():
            return model(given).float().sum().item()
    return request


def with_torch_graph():
    """Inference by a captured graph."""
    import torch
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512)).cuda().eval().half()
    given = torch.randn(64, 512, device="cuda").half()
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(given)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = model(given)
    # The graph reads them.
    held = model, given

    def request():
        assert held
        result.zero_()
        graph.replay()
        return result.float().sum().item()
    return request


def with_torch_train():
    """Steps of training by a captured graph, each time from the same weights."""
    import torch
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 16)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    given, wanted = torch.randn(64, 256, device="cuda"), torch.randn(64, 16, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = torch.nn.functional.mse_loss(model(given), wanted)
        loss.backward()
        optimizer.step()
        return loss
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    state = list(model.parameters()) + [s["momentum_buffer"] for s in optimizer.state.values()]
    begin = [one.detach().clone() for one in state]
    # The graph reads them.
    held = model, optimizer, given, wanted

    def request():
        assert held
        with torch.no_grad():
            for one, first in zip(state, begin):
                one.copy_(first)
        for _ in range(20):
            graph.replay()
        return loss.item()
    return request


def with_cupy():
    import cupy
    given = cupy.arange(1 << 20, dtype=cupy.float32)
    kernel = cupy.ElementwiseKernel("float32 a", "float32 b", "b = a * 2 + 1", "twice")
    return lambda: float(kernel(given).get().sum())


def with_jax():
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    function = jax.jit(lambda a: jax.numpy.tanh(a @ a).sum())
    given = jax.random.normal(jax.random.PRNGKey(0), (256, 256))
    return lambda: float(function(given))


def with_jax_train():
    """Steps of training, each time from the same weights."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as jnp
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    begin = [jax.random.normal(keys[0], (128, 256)) * 0.1, jax.random.normal(keys[1], (256, 8)) * 0.1]
    given, wanted = jax.random.normal(keys[2], (64, 128)), jax.random.normal(keys[3], (64, 8))

    def loss(weights):
        return jnp.mean((jnp.tanh(given @ weights[0]) @ weights[1] - wanted) ** 2)

    @jax.jit
    def step(weights):
        value, slopes = jax.value_and_grad(loss)(weights)
        return value, [one - 0.1 * slope for one, slope in zip(weights, slopes)]

    def request():
        weights = begin
        for _ in range(20):
            value, weights = step(weights)
        return float(value)
    return request


def with_torch_times():
    """Timed events: what lies between two stays what it was, and between the first and a new one what the host's clock says,
    within 5 ms. The result is the number of these that hold."""
    import time
    import torch
    given = torch.randn(512, 512, device="cuda")

    def record():
        """An event, and the times between which it was recorded, ms."""
        event, before = torch.cuda.Event(enable_timing=True), time.monotonic() * 1e3
        event.record()
        torch.cuda.synchronize()
        return event, before, time.monotonic() * 1e3
    # The first one takes longer.
    record()
    start, earliest, latest = record()
    (given @ given).sum().item()
    end, _, _ = record()
    between = start.elapsed_time(end)

    def request():
        (given @ given).sum().item()
        now, before, after = record()
        elapsed = start.elapsed_time(now)
        is_same = abs(start.elapsed_time(end) - between) <= 2e-3
        return is_same + (before - latest - 5 <= elapsed <= after - earliest + 5)
    return request


def with_language():
    """Twenty words of a small decoder with a cache of keys and values, drawn at random from the same seed."""
    import torch
    from torch import nn
    torch.manual_seed(1)
    width, heads, layers, words, length = 256, 8, 4, 1000, 20

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ahead, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
            self.all, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x, cache):
            q, k, v = (each.view(1, 1, heads, -1).transpose(1, 2) for each in self.all(self.ahead(x)).chunk(3, -1))
            cache = [k, v] if cache is None else [torch.cat([old, new], 2) for old, new in zip(cache, (k, v))]
            mixed = nn.functional.scaled_dot_product_attention(q, *cache).transpose(1, 2).reshape(1, 1, width)
            x = x + self.out(mixed)
            return x + self.inner(self.behind(x)), cache

    embed, head = nn.Embedding(words, width).cuda().half(), nn.Linear(width, words).cuda().half()
    blocks = [Block().cuda().half() for _ in range(layers)]

    @torch.inference_mode()
    def request():
        draw = torch.Generator("cuda").manual_seed(1)
        word, caches, total = torch.zeros(1, 1, dtype=torch.long, device="cuda"), [None] * layers, 0
        for _ in range(length):
            x = embed(word)
            for at, block in enumerate(blocks):
                x, caches[at] = block(x, caches[at])
            word = torch.multinomial(head(x)[0].float().softmax(-1), 1, generator=draw)
            total += word.item()
        return float(total)
    return request


def with_convolutions():
    """Steps of training with convolutions, pinned batches and an optimizer, each time from the same weights."""
    import torch
    from torch import nn
    torch.manual_seed(1)
    torch.backends.cudnn.deterministic = True
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).cuda()
    begin = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [(torch.randn(32, 3, 32, 32).pin_memory(), torch.randint(0, 10, (32,)).pin_memory()) for _ in range(5)]

    def request():
        model.load_state_dict(begin)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for images, labels in batches:
            loss = nn.functional.cross_entropy(model(images.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()
    return request


def with_fft():
    """Transforms and solvers."""
    import torch
    torch.manual_seed(1)
    signal = torch.randn(64, 4096, device="cuda", dtype=torch.complex64)
    matrix = torch.randn(256, 256, device="cuda", dtype=torch.float64)
    matrix = matrix @ matrix.T + 256 * torch.eye(256, device="cuda", dtype=torch.float64)
    right = torch.randn(256, 4, device="cuda", dtype=torch.float64)

    def request():
        back = torch.fft.ifft(torch.fft.fft(signal) * 2).abs().mean()
        image = torch.fft.rfft2(signal.real.reshape(512, 512)).abs().mean()
        solved = torch.linalg.solve(matrix, right).sum() + torch.linalg.cholesky(matrix).diagonal().sum()
        values = torch.linalg.eigvalsh(matrix)
        return (back + image).item() + solved.item() + values.sum().item()
    return request


def with_jax_scan():
    """A scan and a loop that ends by a condition: XLA makes conditional graph nodes of them."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
        " --xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE"
        " --xla_gpu_graph_min_graph_size=1")
    import jax
    import jax.numpy as jnp
    weights = jax.random.normal(jax.random.PRNGKey(0), (128, 128)) * 0.1
    given = jax.random.normal(jax.random.PRNGKey(1), (50, 128))

    @jax.jit
    def function(state, inputs):
        state, outputs = jax.lax.scan(lambda h, x: ((h := jnp.tanh(h @ weights + x)), h.sum()), state, inputs)
        halved = jax.lax.while_loop(lambda v: jnp.abs(v).max() > 1e-3, lambda v: v * 0.5, state)
        return outputs.sum() + jnp.abs(halved).sum()

    return lambda: float(function(jnp.zeros(128), given))


def with_triton():
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def softmax(source, target, columns, block: tl.constexpr):
        row = tl.program_id(0)
        at = tl.arange(0, block)
        x = tl.load(source + row * columns + at, mask=at < columns, other=-float("inf"))
        e = tl.exp(x - tl.max(x, 0))
        tl.store(target + row * columns + at, e / tl.sum(e, 0), mask=at < columns)

    torch.manual_seed(1)
    given = torch.randn(512, 1000, device="cuda")

    def request():
        found = torch.empty_like(given)
        softmax[(512,)](given, found, 1000, block=1024)
        return (found * given).sum().item()
    return request


def with_compiled():
    """A compiled module that is launched as graphs."""
    import torch
    torch.manual_seed(1)
    layers = [torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.LayerNorm(512)] * 3
    module = torch.nn.Sequential(*layers).cuda().eval()
    compiled = torch.compile(module, mode="reduce-overhead")
    given = torch.randn(64, 512, device="cuda")

    @torch.no_grad()
    def request():
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(given).clone().sum().item()
    for _ in range(3):
        request()
    return request


def with_dynamics():
    """Steps of molecular dynamics with a kernel in CUDA C."""
    import cupy
    kernel = cupy.RawKernel(r"""
    extern "C" __global__ void forces(const float *at, float *force, int count) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= count) return;
        float x = at[3 * i], y = at[3 * i + 1], z = at[3 * i + 2], fx = 0, fy = 0, fz = 0;
        for (int j = 0; j < count; j++) {
            float dx = x - at[3 * j], dy = y - at[3 * j + 1], dz = z - at[3 * j + 2];
            float r = dx * dx + dy * dy + dz * dz + 0.5f, s = 1 / (r * r * r), f = s * (2 * s - 1) / r;
            fx += f * dx; fy += f * dy; fz += f * dz;
        }
        force[3 * i] = fx; force[3 * i + 1] = fy; force[3 * i + 2] = fz;
    }""", "forces")
    count = 4096
    begin = cupy.random.RandomState(1).rand(count, 3).astype(cupy.float32) * 20

    def request():
        at, velocity, force = begin.copy(), cupy.zeros_like(begin), cupy.empty_like(begin)
        for _ in range(20):
            kernel((count // 128,), (128,), (at, force, cupy.int32(count)))
            velocity += 1e-3 * force
            at += 1e-3 * velocity
        return float(cupy.abs(at).sum())
    return request


def with_pools():
    """Sums and transforms whose memory comes from the device's memory pool, and some that lasts in it."""
    import cupy
    cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    lasting = [cupy.arange(1 << 18, dtype=cupy.float32) * at for at in range(8)]

    def request():
        found = [cupy.sqrt(one + 1) for one in lasting]
        total = sum((one * one).sum() for one in found)
        lasting.append(lasting.pop(0) + 0)
        return float(total)
    return request


def with_products():
    import torch
    torch.manual_seed(1)
    a, b = (torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def request():
        c = a
        for _ in range(10):
            c = (c @ b) * 0.03
        return c.float().abs().sum().item()
    return request


def main():
    request = {
        "language": with_language, "convolutions": with_convolutions, "fft": with_fft, "jax-scan": with_jax_scan,
        "triton": with_triton, "compiled": with_compiled, "dynamics": with_dynamics, "pools": with_pools,
        "products": with_products,
        "torch": with_torch, "torch-graph": with_torch_graph, "torch-train": with_torch_train,
        "torch-times": with_torch_times, "cupy": with_cupy, "jax": with_jax, "jax-train": with_jax_train,
    }[sys.argv[1]]()
    expected = request()
    # The first ones load what the others use.
    request()
    print("started", flush=True)
    for _ in sys.stdin:
        try:
            found = request()
        except Exception as error:  # noqa: BLE001 - whatever the framework makes of a lost context
            print(f"{type(error).__name__}: {error}".replace("\n", " ")[:300], flush=True)
            os._exit(1)
        print("ok" if abs(found - expected) <= 1e-3 * abs(expected) else f"wrong: {found}, not {expected}", flush=True)


if __name__ == "__main__":
    main()
