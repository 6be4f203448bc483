#!/usr/bin/env python3
"""Work of many shapes beside floods, 200 clients at once, and clients that need a context when the memory is full.

    tests/gpu/beside.py --build target/release [--nvcc nvcc] [--only shapes,crowd,full] [--seconds 3]

Compiles beside.cu and runs it through mpsshim:

    shapes  each shape of work (small kernels, a graph of 1,000 nodes, captures, cooperative launches, a green context, a part
            of the multiprocessors) beside three floods, and beside two floods and a program with long blocks
    crowd   200 clients with one stream each, beside a flood
    full    a device without memory for a further context: a program with long blocks, one with a heap, and small kernels

The programs check their results. Exit status 1 when one fails or makes no progress.
"""
import argparse
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benches" / "gpu"))
import measure  # noqa: E402
import systems  # noqa: E402

PARTS = ("shapes", "crowd", "full")
SHAPES = {
    "small": ("small",),
    "graph of 1,000 nodes": ("graph", "1000"),
    "captures": ("capture",),
    "cooperative": ("cooperative",),
    "green context": ("green",),
    "half of the multiprocessors": ("small",),
    "cooperative in half of them": ("cooperative",),
}
PERCENTAGE = {"half of the multiprocessors": "50", "cooperative in half of them": "50"}
CLIENTS = 200
# Until a client has made its first round, and until it has ended, s: long, so that only a hang exceeds them.
READY, END = 60, 60


class Beside:
    def __init__(self, system, folder):
        self.system, self.folder, self.failures = system, folder, []

    def start(self, words, percentage=None):
        env = self.system.env()
        if percentage:
            env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = percentage
        program = os.path.join(self.folder, "heap" if words[0] == "heap" else "beside")
        return self.system.processes.start([program, *words], env, stdin=subprocess.PIPE)

    def fail(self, name, why):
        print(f"{name}: {why}", flush=True)
        self.failures.append(name)

    def ready(self, name, process):
        try:
            systems.read_until(process, "ready=1", READY)
        except systems.Failure as failure:
            process.kill()
            last = process.communicate()[1].strip().splitlines()[-1:]
            self.fail(name, f"{failure} {' '.join(last)}")
            return False
        return True

    def finish(self, name, process):
        """Ends a client. Its rounds."""
        try:
            rounds = measure.parse_values(self.system.processes.finish(process, END, text=""))["rounds"]
        except systems.Failure as failure:
            return self.fail(name, failure)
        if not rounds:
            self.fail(name, "made no round")
        return rounds

    @contextlib.contextmanager
    def background(self, *commands):
        """Clients that run during the block; a failure of theirs counts too."""
        names = [" ".join(words) for words in commands]
        clients = [self.start(words) for words in commands]
        clients = [(name, one) for name, one in zip(names, clients) if self.ready(name, one)]
        try:
            yield
        finally:
            for name, one in clients:
                self.finish(name, one)

    def run_all(self, given, seconds):
        """Runs (name, process) at the same time for so long. The rounds of each."""
        given = [(name, one) for name, one in given if self.ready(name, one)]
        time.sleep(seconds)
        return [self.finish(name, one) for name, one in given]

    def shapes(self, seconds):
        flood, long = ("flood",), ("blocks", "100")
        for background in ((flood,) * 3, (flood, flood, long)):
            names = ", ".join(" ".join(words) for words in background)
            with self.background(*background):
                for name, words in SHAPES.items():
                    rounds = self.run_all([(name, self.start(words, PERCENTAGE.get(name)))], seconds)
                    print(f"{name}, beside {names}: {rounds} rounds", flush=True)

    def crowd(self, seconds):
        with self.background(("flood",)):
            began = time.monotonic()
            clients = [(f"client {number}", self.start(("small",))) for number in range(CLIENTS)]
            rounds = self.run_all(clients, seconds)
        made = [each for each in rounds if each]
        took = time.monotonic() - began
        print(f"{CLIENTS} clients: {len(made)} worked, {min(made, default=0)} to {max(made, default=0)} rounds, {took:.0f} s")

    def full(self, seconds):
        with self.background(("fill", "150")):
            given = [(words[0], self.start(words)) for words in (("blocks", "100"), ("heap",), ("small",), ("small",))]
            print(f"memory full: rounds {self.run_all(given, seconds)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True, help="folder with libmpsshim.so, mps-control, mps-server")
    parser.add_argument("--nvcc", default="nvcc", help="(%(default)s)")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas (%(default)s)")
    parser.add_argument("--seconds", type=float, default=3, help="of each run (%(default)g)")
    parser.add_argument("--logs", metavar="DIR", help="keep the daemon's and servers' logs here")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only: unknown: {', '.join(unknown)}")
    source = pathlib.Path(__file__).with_name("beside.cu")
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for name, define in (("beside", ()), ("heap", ("-DHEAP",))):
            program = os.path.join(folder, name)
            nvcc = [options.nvcc, "-O2", "-std=c++20", "-arch=native", *define, "-o", program, source, "-lcuda"]
            subprocess.run(nvcc, check=True)
        for part in parts:
            with systems.running("proxy", options.build) as (_, system):
                test = Beside(system, folder)
                try:
                    getattr(test, part)(options.seconds)
                finally:
                    if options.logs:
                        os.makedirs(os.path.join(options.logs, part), exist_ok=True)
                        systems.keep_logs([system], os.path.join(options.logs, part))
                failures += test.failures
    print("failed: " + (", ".join(failures) or "nothing"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
