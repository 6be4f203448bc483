#!/usr/bin/env python3
"""Measures managed memory, and programs without it beside it: native, NVIDIA MPS and mpsshim side by side on one GPU.

    benches/gpu/managed.py
    benches/gpu/managed.py --build DIRECTORY --program ./managed-bench --quick --budget 200
    benches/gpu/managed.py --systems nvidia,mpsshim --only kernels,beside

Scenarios:

    kernels     10,000 kernels of 3,199 blocks over 8 MB of managed memory that the host leaves alone meanwhile
    initialise  the host writes 1 GiB, one kernel, the host sums; the whole program
    turns       host and device change 64 MiB in turns, 200 times
    heat        a one-dimensional heat equation, four processes of 4 MiB that exchange their edges after each step
    beside      a program without managed memory, kernels of 0.5 ms and copies of 4 MiB, alone, beside the kernels of
                `kernels` on plain memory, and on managed memory
    calls       launch + wait, malloc + free in a program without managed memory
    limit       12 GiB of managed memory under a memory limit of 8 GiB, three passes; on mpsshim, and only with --limit

Every scenario runs on each system in turn, and the whole round is repeated; the table shows medians. A wrong result, an
error, and what hangs are in the list of what failed; the exit status is then 1. Python's standard library only; without
--program, nvcc compiles it into the build directory.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import measure
import report as reports
import run as bench
import systems
from systems import Failure
from table import Row

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "managed.cu")
RANKS = 4
# Until a flood must be ready and until it must have ended, s.
READY, END = 60, 30

# Scenario -> seconds that each of its programs may take, and its rows.
SCENARIOS = {
    "kernels": (
        120,
        (Row("kernels_s", "10,000 kernels of 3,199 blocks over 8 MB of managed memory", "s", 3),),
    ),
    "initialise": (
        60,
        (
            Row("initialise_s", "host writes 1 GiB of managed memory, one kernel, host sums: the program", "s", 2),
            Row("initialise_write_s", "of which: the host writes", "s", 3),
            Row("initialise_kernel_s", "of which: the kernel", "s", 3),
            Row("initialise_sum_s", "of which: the host sums", "s", 3),
        ),
    ),
    "turns": (120, (Row("turns_s", "host and device change 64 MiB in turns, 200 times", "s", 2),)),
    "heat": (120, (Row("heat_steps", "heat equation, four processes of 4 MiB, steps of each", "/s", 0),)),
    "beside": (
        60,
        (
            Row("beside_alone", "0.5 ms kernel and copies of 4 MiB without managed memory, alone", "/s", 0),
            Row("beside_plain", "the same beside a flood of kernels on plain memory", "/s", 0),
            Row("beside_managed", "the same beside this flood on managed memory", "/s", 0),
            Row("beside_plain_p99", "the same beside plain memory, p99", "ms", 2),
            Row("beside_managed_p99", "the same beside managed memory, p99", "ms", 2),
            Row("beside_plain_kernels", "kernels of the flood on plain memory", "/s", 0),
            Row("beside_managed_kernels", "kernels of the flood on managed memory", "/s", 0),
        ),
    ),
    "calls": (
        60,
        (
            Row("calls_launch", "launch + wait without managed memory, p50", "µs", 2),
            Row("calls_malloc", "malloc + free of 1 MiB without managed memory, p50", "µs", 2),
        ),
    ),
    "limit": (
        120,
        (Row("limit_rate", "12 GiB of managed memory under a limit of 8 GiB, three passes", "GB/s", 2),),
    ),
}


class Scenarios:
    """The scenarios on one system at a time; each gives its values."""

    def __init__(self, processes, program, seconds, quick):
        self.processes, self.program = processes, program
        self.seconds, self.quick = seconds, quick

    def start(self, system, *arguments, stdin=subprocess.DEVNULL, **variables):
        return self.processes.start([self.program, *map(str, arguments)], system.env() | variables, stdin)

    def values(self, text, name):
        values = measure.parse_values(text)
        if wrong := values.get("wrong"):
            raise Failure(f"{name}: {wrong:.0f} words are wrong")
        return values

    def run(self, system, limit, *arguments, **variables):
        process = self.start(system, *arguments, **variables)
        return self.values(self.processes.finish(process, limit), arguments[0])

    def kernels(self, system, limit):
        values = self.run(system, limit, "kernels", 2000 if self.quick else 10_000)
        return {"kernels_s": values["seconds"] * (5 if self.quick else 1)}

    def initialise(self, system, limit):
        began = time.monotonic()
        values = self.run(system, limit, "initialise", 1024)
        parts = {f"initialise_{name}": values[name] for name in ("write_s", "kernel_s", "sum_s")}
        return {"initialise_s": time.monotonic() - began} | parts

    def turns(self, system, limit):
        count = 40 if self.quick else 200
        return {"turns_s": self.run(system, limit, "turns", 64, count)["seconds"] * 200 / count}

    def heat(self, system, limit):
        steps = 500 if self.quick else 4000
        deadline = time.monotonic() + limit
        with tempfile.TemporaryDirectory(prefix="heat-") as folder:
            edges = os.path.join(folder, "edges")
            ranks = [self.start(system, "heat", edges, rank, RANKS, steps) for rank in range(RANKS)]
            try:
                found = [
                    self.values(self.processes.finish(rank, max(1, deadline - time.monotonic())), "heat")
                    for rank in ranks
                ]
            finally:
                for rank in ranks:
                    self.processes.end(rank)
        return {"heat_steps": min(values["steps_per_s"] for values in found)}

    def beside(self, system, limit):
        values = {"beside_alone": self.run(system, limit, "neighbour", self.seconds)["rounds_per_s"]}
        for kind in ("plain", "managed"):
            flood = self.start(system, "flood", kind, stdin=subprocess.PIPE)
            try:
                systems.read_until(flood, "ready", READY)
                found = self.run(system, limit, "neighbour", self.seconds)
                kernels = self.values(self.processes.finish(flood, END, ""), f"flood {kind}")["kernels_per_s"]
            finally:
                self.processes.end(flood)
            values[f"beside_{kind}"] = found["rounds_per_s"]
            values[f"beside_{kind}_p99"] = found["p99_ms"]
            values[f"beside_{kind}_kernels"] = kernels
        return values

    def calls(self, system, limit):
        values = self.run(system, limit, "calls", 2000 if self.quick else 10_000)
        return {"calls_launch": values["launch_wait_us"], "calls_malloc": values["malloc_free_us"]}

    def limit(self, system, limit):
        if system.name != "mpsshim":
            return {}
        found = self.run(system, limit, "passes", 12 << 10, 3, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="0=8G")
        return {"limit_rate": found["gb_per_s"]}


class Report(reports.ScenarioReport):
    """The medians of the rounds."""

    KIND, SCENARIOS = "managed", SCENARIOS

    def __init__(self, names, scenarios, about):
        super().__init__(names, scenarios, about)
        self.rounds = {}  # key -> system -> values, one for each round

    def add(self, system, values):
        for key, value in values.items():
            found = self.rounds.setdefault(key, {}).setdefault(system, [])
            found.append(value)
            super().add(system, {key: statistics.median(found)})

    def document(self):
        text = f"# Managed memory, {self.about['date']}\n\n{self.markdown()}\n\n"
        text += f"Medians of up to {self.about['repetitions']} rounds, all systems in turn within each round.\n\n"
        return text + reports.machine(self.about) + reports.remarks(self.notes, self.failures)

    def data(self):
        return super().data() | {"rounds": self.rounds}


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--build",
        default=os.path.join(bench.ROOT, "target", "release"),
        help="folder with libmpsshim.so, mps-control and mps-server (default: target/release)",
    )
    parser.add_argument("--program", help="compiled benches/gpu/managed.cu (default: compiled into BUILD with nvcc)")
    parser.add_argument(
        "--results",
        default=os.path.join(bench.ROOT, "docs", "results"),
        help="folder for the .json and .md files (default: docs/results)",
    )
    usual = [name for name in SCENARIOS if name != "limit"]
    parser.add_argument(
        "--only",
        type=bench.comma_list(SCENARIOS),
        help=f"scenarios to run, in this order, from {','.join(SCENARIOS)} (default: all but limit)",
    )
    parser.add_argument("--limit", action="store_true", help="run the scenario limit too, which needs 13 GiB of memory")
    names = ["native", "nvidia", "mpsshim"]
    parser.add_argument(
        "--systems",
        type=bench.comma_list(names),
        help=f"systems to measure, from {','.join(names)} (default: all available)",
    )
    parser.add_argument("--repetitions", type=int, help="number of rounds (default: 3; 1 with --quick)")
    parser.add_argument("--seconds", type=float, help="length of a stretch (default: 5; 2 with --quick)")
    parser.add_argument("--quick", action="store_true", help="fewer kernels, turns and steps, one round")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the daemons' and servers' logs here")
    parser.add_argument("--budget", type=float, help="seconds for the whole run (default: 1200; 280 with --quick)")
    options = parser.parse_args(arguments)
    options.only = options.only or usual
    if options.limit and "limit" not in options.only:
        options.only = [*options.only, "limit"]
    options.budget = options.budget or (280 if options.quick else 1200)
    options.seconds = options.seconds or (2 if options.quick else 5)
    options.repetitions = options.repetitions or (1 if options.quick else 3)
    options.given = options.systems is not None
    options.systems = options.systems or names
    if options.program and not os.access(options.program, os.X_OK):
        parser.error(f"--program {options.program}: no such program")
    return options


def start_systems(options, usable, scenarios, report):
    """Starts the systems; those that do not work leave the list."""
    for system in list(usable):
        try:
            system.start()
            client = scenarios.start(system, "flood", "plain", stdin=subprocess.PIPE)
            try:
                systems.read_until(client, "ready", READY)
                system.check_used()
                scenarios.processes.finish(client, END, "")
            finally:
                scenarios.processes.end(client)
        except Failure as failure:
            systems.give_up(system, failure, report, options.given)
            usable.remove(system)


def measure_one(name, system, scenarios, report, limit):
    began = time.monotonic()
    try:
        values = getattr(scenarios, name)(system, limit)
    except (Failure, KeyError, OSError) as failure:
        report.fail(system.name, name, repr(failure) if isinstance(failure, KeyError) else failure)
        systems.show_log(system)
        return
    report.add(system.name, values)
    shown = " ".join(f"{key}={value:.4g}" for key, value in values.items())
    print(f"{time.monotonic() - began:5.1f} s  {system.name:8} {name}: {shown or '–'}", flush=True)


def measure_all(options, usable, scenarios, report):
    until = time.monotonic() + options.budget
    for repetition in range(options.repetitions):
        for number, name in enumerate(options.only):
            for system in usable:
                left = until - time.monotonic()
                if left <= 0:
                    text = f"{reports.UNMEASURED} {repetition + 1}, the budget is spent: "
                    text += ", ".join(options.only[number:])
                    # What has a value of an earlier round is not missing.
                    (report.note if repetition else report.failures.append)(text)
                    return
                measure_one(name, system, scenarios, report, min(SCENARIOS[name][0], max(1, left)))
            # Whoever ends the run from outside keeps what was measured so far.
            report.save(options.results)


def main(arguments):
    options = parse_arguments(arguments)
    # A stop from outside must still end every daemon and client.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if not options.program:
        options.program = os.path.abspath(os.path.join(options.build, "managed-bench"))
        if reason := bench.current_program("--program", options.program, [SOURCE]):
            print(reason, file=sys.stderr)
            return 2
    about = reports.about(arguments, options.repetitions, "benches/gpu/managed.py")
    report = Report(list(options.systems), options.only, about)
    processes = systems.Processes()
    scenarios = Scenarios(processes, options.program, options.seconds, options.quick)
    with tempfile.TemporaryDirectory(prefix="managed-", ignore_cleanup_errors=True) as directory:
        usable = [systems.make_system(name, processes, directory, options.build) for name in options.systems]
        try:
            start_systems(options, usable, scenarios, report)
            measure_all(options, usable, scenarios, report)
        finally:
            processes.end_all()
            for system in usable:
                system.stop()
            processes.end_all()
            if options.logs:
                systems.keep_logs(usable, options.logs)
    return report.conclude(options.results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
