#!/usr/bin/env python3
"""Several programs with loops in their graphs beside each other: native, NVIDIA MPS and mpsshim.

    benches/gpu/loops.py [--build target/release] [--counts 1,2,4] [--seconds 8] [--repetitions 2]

A program is the client `jax-scan` of tests/gpu/outlive_clients.py, whose graphs have conditional nodes, and makes rounds
without a pause. In the last row one such program works beside two without loops (`products`, `torch-graph`). mpsshim is
measured with a server for each program with loops, as usual, and with turns in one server (MPSSHIM_OWN_SERVERS=0).

Needs JAX and PyTorch. Prints a table as Markdown: rounds per second, of all programs together and in the last row of each;
and the device memory that is used meanwhile. Exit status 1 when an answer was wrong or a program was lost.
"""
import argparse
import concurrent.futures
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import systems
from systems import Failure, Processes, make_system, read_line

CLIENTS = pathlib.Path(__file__).resolve().parents[2] / "tests" / "gpu" / "outlive_clients.py"
# Seconds until a program must be ready, and for one round.
START, ROUND = 120, 60
# Seconds of work before the measurement: servers for single programs are started in it.
AHEAD = 3


class Turns(systems.Mpsshim):
    """Programs with loops take turns in the server of all."""

    name = "turns"

    def daemon_env(self):
        return super().daemon_env() | {"MPSSHIM_OWN_SERVERS": "0"}


TITLES = systems.SYSTEM_TITLES | {"turns": "mpsshim, turns"}
NAMES = ["native", "nvidia", "mpsshim", "turns"]


class Client:
    """A program that makes rounds without a pause."""

    def __init__(self, name, system, processes):
        self.name, self.done = name, 0
        self.process = processes.start([sys.executable, str(CLIENTS), name], system.env(), stdin=subprocess.PIPE)
        if (line := read_line(self.process, START)) != "started":
            raise Failure(f"{name} did not begin: {line}")
        self.over, self.failure = threading.Event(), ""
        self.thread = threading.Thread(target=self.work, daemon=True)

    def work(self):
        try:
            while not self.over.is_set():
                self.process.stdin.write("round\n")
                self.process.stdin.flush()
                if (answer := read_line(self.process, ROUND)) != "ok":
                    raise Failure(answer)
                self.done += 1
        except (Failure, OSError) as failure:
            self.failure = f"{self.name}: {failure}"


def memory_used():
    """Device memory in use, MiB."""
    said = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                          capture_output=True, text=True, timeout=20, check=True)
    return int(said.stdout.splitlines()[0])


def measure(system, processes, names, seconds):
    """Rounds per second of each program, and the memory in use, MiB."""
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        clients = list(pool.map(lambda name: Client(name, system, processes), names))
    try:
        for client in clients:
            client.thread.start()
        time.sleep(AHEAD)
        before, began = [client.done for client in clients], time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        rates = [(client.done - done) / took for client, done in zip(clients, before)]
        used = memory_used()
    finally:
        for client in clients:
            client.over.set()
        for client in clients:
            client.thread.join()
            processes.end(client.process)
    if failures := [client.failure for client in clients if client.failure]:
        raise Failure("; ".join(failures))
    return rates, used


def cell(clients, runs):
    """Medians of the rates, together or for programs that differ each, and of the memory in use."""
    each = [statistics.median(rates) for rates in zip(*(rates for rates, _ in runs))]
    rates = each if len(set(clients)) > 1 else [sum(each)]
    used = statistics.median(used for _, used in runs) / 1024
    return f"{' + '.join(f'{rate:,.0f}' for rate in rates)} ({used:.1f} GiB)"


def table(rows, names, found):
    """Lines of Markdown. `found`: what was measured, by row and system."""
    yield "| rounds/s | " + " | ".join(TITLES[name] for name in names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for row, clients in rows.items():
        cells = (cell(clients, found[row, name]) if (row, name) in found else "–" for name in names)
        yield f"| {row} | " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="target/release")
    parser.add_argument("--counts", default="1,2,4", help="programs with loops at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=8, help="of each measurement (%(default)g)")
    parser.add_argument("--repetitions", type=int, default=2, help="medians are printed (%(default)s)")
    parser.add_argument("--systems", default=",".join(NAMES), help="(%(default)s)")
    options = parser.parse_args()
    names = options.systems.split(",")
    if unknown := set(names) - set(NAMES):
        parser.error(f"--systems: {', '.join(sorted(unknown))}; known are {', '.join(NAMES)}")
    try:
        counts = [int(count) for count in options.counts.split(",")]
    except ValueError:
        parser.error("--counts: numbers with commas between them")
    if min(*counts, options.repetitions) < 1 or options.seconds <= 0:
        parser.error("--counts, --repetitions and --seconds must be positive")
    rows = {f"{count} with loops": ["jax-scan"] * count for count in counts}
    rows["1 with loops, 2 without"] = ["jax-scan", "products", "torch-graph"]
    found, failed = {}, False
    for _ in range(options.repetitions):
        for name in names:
            processes = Processes()
            with tempfile.TemporaryDirectory(prefix="loops-") as directory:
                system = make_system(name, processes, directory, options.build, Turns if name == "turns" else None)
                try:
                    system.start()
                    for row, clients in rows.items():
                        try:
                            measured = measure(system, processes, clients, options.seconds)
                            found.setdefault((row, name), []).append(measured)
                        except Failure as failure:
                            print(f"{row}, {TITLES[name]}: {failure}", file=sys.stderr)
                            failed = True
                except systems.Missing as missing:
                    print(missing, file=sys.stderr)
                finally:
                    system.stop()
                    processes.end_all()
    print("\n".join(table(rows, names, found)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
