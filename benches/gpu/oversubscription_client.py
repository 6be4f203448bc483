"""A program that holds a part of the device's memory, works on it when told to, and checks each byte of it at the end.

    oversubscription_client.py START SECONDS FRACTION [PRODUCTS]

A client of benches/gpu/oversubscription.py. START is as in queueing_bert.py. FRACTION is the part of the device's memory
that it allocates, in tensors of 256 MiB. A round adds 1 to every tensor and multiplies matrices, then waits. Each time
it prints the number of rounds, the time of the first and of the longest one in ms, and the number of tensors with a wrong
value. SECONDS of 0 is one round. PRODUCTS is the number of products in a round, 40 by default. Needs PyTorch.
"""

import sys
import time

import torch

from queueing_bert import serve

TENSOR = 256 << 20
SIDE, PRODUCTS = 4096, 40


def main():
    fraction, products = float(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else PRODUCTS
    total = torch.cuda.get_device_properties(0).total_memory
    count = max(1, int(total * fraction) // TENSOR)
    words = TENSOR // 4
    tensors = [torch.full((words,), number, dtype=torch.int32, device="cuda") for number in range(count)]
    factor = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.float16)
    product = torch.empty_like(factor)
    rounds = 0

    def once():
        nonlocal rounds
        for tensor in tensors:
            tensor.add_(1)
        for _ in range(products):
            torch.mm(factor, factor, out=product)
        rounds += 1
        torch.cuda.synchronize()

    def wrong():
        """Tensors with a value other than their number and the number of rounds."""
        least = torch.stack([tensor.min() for tensor in tensors]).tolist()
        greatest = torch.stack([tensor.max() for tensor in tensors]).tolist()
        expected = [number + rounds for number in range(count)]
        return sum(found != (value, value) for found, value in zip(zip(least, greatest), expected))

    def work(seconds):
        took, begin = [], time.perf_counter()
        while True:
            began = time.perf_counter()
            once()
            took.append(time.perf_counter() - began)
            if time.perf_counter() >= begin + seconds:
                break
        span = time.perf_counter() - begin
        values = {"rounds": len(took), "rounds_per_s": len(took) / span, "first_ms": took[0] * 1e3}
        return values | {"longest_ms": max(took) * 1e3, "bytes": count * TENSOR, "wrong": wrong() if seconds == 0 else 0}

    once()
    wrong()
    serve(work, sys.argv[1:])


if __name__ == "__main__":
    main()
