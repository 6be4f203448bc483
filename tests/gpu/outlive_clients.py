#!/usr/bin/env python3
"""Clients for outlive.py that are driven by requests: a line on standard input is one, the answer is `ok` or what is wrong.

    outlive_clients.py torch|cupy|jax
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


def main():
    request = {"torch": with_torch, "cupy": with_cupy, "jax": with_jax}[sys.argv[1]]()
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
