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
import pathlib
import statistics
import sys
import tempfile
import time

import systems
from measure import nvidia_smi
from systems import Failure, Processes, make_system

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests" / "gpu"))
import outlive  # noqa: E402

# Seconds of work before the measurement: servers for single programs are started in it.
AHEAD = 3


class Turns(systems.Mpsshim):
    """Programs with loops take turns in the server of all."""

    name = "turns"

    def daemon_env(self):
        return super().daemon_env() | {"MPSSHIM_OWN_SERVERS": "0"}


TITLES = systems.SYSTEM_TITLES | {"turns": "mpsshim, turns"}
NAMES = ["native", "nvidia", "mpsshim", "turns"]


def measure(system, processes, names, options):
    """Rounds per second of each program, and the device memory in use, MiB."""
    rounds = [outlive.Rounds(client, 0, 0) for client in outlive.start(system, processes, options, names)]
    try:
        time.sleep(AHEAD)
        before, began = [one.done for one in rounds], time.monotonic()
        time.sleep(options.seconds)
        took = time.monotonic() - began
        rates = [(one.done - done) / took for one, done in zip(rounds, before)]
        if not (used := nvidia_smi("memory.used")):
            raise Failure("nvidia-smi does not say how much memory is in use")
    finally:
        for one in rounds:
            one.end()
            processes.end(one.client.process)
    if failures := [f"{one.client.name}: {one.answer}" for one in rounds if not one.answer.startswith("ok")]:
        raise Failure("; ".join(failures))
    return rates, int(used)


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
                            measured = measure(system, processes, clients, options)
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
