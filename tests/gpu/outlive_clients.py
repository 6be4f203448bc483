#!/usr/bin/env python3
"""Clients for outlive.py that are driven by requests: a line on standard input is one, the answer is `ok` or what is wrong.

    outlive_clients.py torch|torch-graph|torch-train|torch-times|cupy|jax|jax-train
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


def main():
    request = {
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
