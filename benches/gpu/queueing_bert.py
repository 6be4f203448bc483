"""Requests to a transformer encoder of BERT-base's size in half precision, one sequence of 128 at a time.

    queueing_bert.py START SECONDS

A client of benches/gpu/queueing.py. START is the wall-clock second at which to begin, 0 for at once; - prints ready=1,
then reads lines `START [SECONDS]` and does the work for each, until the end of the input. Each time it prints a line of
name=value pairs with the latencies. Needs PyTorch only; the weights are random.
"""

import sys
import time

import torch
from torch import nn

LAYERS, WIDTH, HEADS, INNER, WORDS, LENGTH = 12, 768, 12, 3072, 30522, 128


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.after_attention, self.after_inner = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape

        def heads(linear):
            return linear(x).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)

        mixed = nn.functional.scaled_dot_product_attention(heads(self.query), heads(self.key), heads(self.value))
        x = self.after_attention(x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return self.after_inner(x + self.narrow(nn.functional.gelu(self.wide(x))))


class Encoder(nn.Module):
    """Embeddings, twelve layers, and a classifier on the first word."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.classifier = nn.Linear(WIDTH, 2)

    def forward(self, words):
        return self.classifier(self.layers(self.norm(self.words(words) + self.places.weight))[:, 0])


def latencies(times):
    """The statistics of requests, in seconds, as benches/cuda/queueing.cu prints them."""
    times = sorted(times)
    values = {"count": len(times), "mean_ms": sum(times) / len(times) * 1e3}
    for percent in (50, 90, 99):
        values[f"p{percent}_ms"] = times[len(times) * percent // 100] * 1e3
    return values | {"max_ms": times[-1] * 1e3}


def serve(work, arguments):
    """Calls work(seconds), which gives names and values, at each START."""
    start, seconds = arguments[0], float(arguments[1])
    if start == "-":
        print("ready=1", flush=True)
    for line in sys.stdin if start == "-" else [start]:
        at, *given = line.split()
        late = max(0.0, time.time() - float(at)) if float(at) else 0.0
        while time.time() < float(at):
            time.sleep(0.0005)
        values = work(float(given[0]) if given else seconds) | {"late_ms": late * 1e3}
        print(" ".join(f"{name}={value:.4f}" for name, value in values.items()), flush=True)


def main():
    torch.manual_seed(0)
    device = sys.argv[3] if len(sys.argv) > 3 else "cuda"
    model = Encoder().half().to(device).eval()
    words = torch.randint(0, WORDS, (1, LENGTH)).to(device)

    @torch.inference_mode()
    def request():
        # To the host, as a server would do it: this waits for the result.
        return model(words).float().cpu()

    def work(seconds):
        times, end = [], time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            request()
            times.append(time.perf_counter() - began)
        return latencies(times)

    for _ in range(20):
        request()
    serve(work, sys.argv[1:])


if __name__ == "__main__":
    main()
