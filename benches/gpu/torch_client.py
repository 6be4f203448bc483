"""One PyTorch client of benches/gpu/run.py: inference of a BERT, or training of a small convolutional network.

    torch_client.py bert|train [--wait] [--seconds N] [--batch N]

Prints `ready=1` and works for --seconds, then prints name=value lines. With --wait it reads the second (since the epoch)
at which to begin, and does so again for every line until its input ends.
"""
import argparse
import sys
import time

import torch
from torch import nn


def bert(batch):
    """A BERT-base classifier with random weights in half precision, sequences of 128."""
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig()).half().cuda().eval()
    tokens = torch.randint(0, 30000, (batch, 128), device="cuda")

    def step():
        with torch.inference_mode():
            return model(tokens).logits.float().sum()

    return step, batch


def train(batch):
    """A step of Adam on images of 64 x 64, 32 at a time."""
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    images = torch.randn(32, 3, 64, 64, device="cuda")
    labels = torch.randint(0, 10, (32,), device="cuda")

    def step():
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workload", choices=("bert", "train"))
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    step, each = globals()[options.workload](options.batch)
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    print("ready=1", flush=True)
    if not options.wait:
        measure(step, each, options.seconds, time.time())
    for line in sys.stdin if options.wait else ():
        measure(step, each, options.seconds, float(line))


def measure(step, each, seconds, begin):
    late = time.time() - begin
    while time.time() < begin:
        time.sleep(0.0005)
    start, cpu, steps = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - start < seconds:
        value = step()
        torch.cuda.synchronize()
        steps += 1
    took = time.perf_counter() - start
    print(f"cpus={(time.process_time() - cpu) / took:.3f}")
    print(f"late_ms={max(0.0, late) * 1e3:.1f}")
    print(f"value={value.item():.5f}")
    print(f"per_s={steps * each / took:.2f}", flush=True)


if __name__ == "__main__":
    main()
