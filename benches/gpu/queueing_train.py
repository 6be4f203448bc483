"""Training of a convolutional network that fills the GPU: 256 images of 64 x 64, half precision, SGD.

    queueing_train.py START SECONDS

A client of benches/gpu/queueing.py; START is as in queueing_bert.py. Each time it prints steps_per_s. Two steps are
submitted ahead, so that the GPU does not wait for the program.
"""

import sys
import time

import torch
from torch import nn

from queueing_bert import serve

IMAGES, SIDE, WIDTH, AHEAD = 256, 64, 256, 2


def network():
    layers, channels = [], 3
    for _ in range(6):
        layers += [nn.Conv2d(channels, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU()]
        channels = WIDTH
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))


def main():
    torch.manual_seed(0)
    model = network().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    images = torch.randn(IMAGES, 3, SIDE, SIDE, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (IMAGES,), device="cuda")
    ends = [torch.cuda.Event() for _ in range(AHEAD)]

    def step(number):
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends[number % AHEAD].record()

    def work(seconds):
        """Steps are counted from the end of one to the end of another."""
        for number in range(AHEAD):
            step(number)
        ends[0].synchronize()
        begin, steps = time.perf_counter(), 0
        while time.perf_counter() < begin + seconds or steps == 0:
            step(steps)
            steps += 1
            ends[steps % AHEAD].synchronize()
        took = time.perf_counter() - begin
        torch.cuda.synchronize()
        return {"steps_per_s": steps / took, "steps": steps}

    for number in range(5):
        step(number)
    torch.cuda.synchronize()
    serve(work, sys.argv[1:])


if __name__ == "__main__":
    main()
