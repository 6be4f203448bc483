#!/usr/bin/env python3
"""Measures whether clients stand still beside long kernels: native, NVIDIA MPS and mpsshim side by side on one GPU.

    benches/gpu/standstill.py
    benches/gpu/standstill.py --build DIRECTORY --program ./standstill --quick --budget 280
    benches/gpu/standstill.py --program ./standstill --systems nvidia,mpsshim --only first,endless

Scenarios:

    beside     four clients of 50 µs kernels beside one of 2 s kernels, alone and while 20 newcomers start, work, and
               end or are killed, two at a time
    first      a newcomer's first result beside a client of 2 s kernels, its image seen before or never seen
    ninth      a newcomer beside eight clients of 1 s kernels, and what those lose
    endless    two clients of 50 µs kernels and a newcomer beside a kernel that does not end
    handshake  a kernel that waits for what the first kernel of another process writes
    batch      programs with kernels of 1 ms to 5 s, few blocks or the whole device, eight at a time, all twice

Every scenario runs on each system in turn, with a new server. What hangs is ended by a limit and is in the list of
what failed; the exit status is then 1. Python's standard library only; without --program, nvcc compiles it into the
build directory.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time

import report as reports
import run as bench
import systems
from scenarios import END, PROGRAM, Client, Scenarios
from systems import Failure
from table import Row

SOURCES = [os.path.join(bench.ROOT, "benches", "cuda", name) for name in ("standstill.cu", "standstill_variable.cu")]
FLAGS = ["--no-compress"]
# mpsshim may take so many times NVIDIA's time for a program of the batch, and some seconds.
TIMES, MORE = 3, 2

# Scenario -> seconds it may take, with --quick and without, and its rows.
SCENARIOS = {
    "beside": (
        (40, 120),
        (
            Row("beside_alone", "four clients of 50 µs kernels beside 2 s kernels, rounds", "/s", 0),
            Row("beside_newcomers", "the same while newcomers come and go", "/s", 0),
            Row("beside_percent", "the same, relative to without newcomers", "%", 1),
            Row("beside_longest_alone", "longest round without newcomers", "ms", 1),
            Row("beside_longest", "longest round with newcomers", "ms", 1),
            Row("beside_longest_at", "that round began so long after the first newcomer's start", "s", 1),
            Row("beside_p999", "p99.9 of the rounds with newcomers, of the slowest client", "ms", 2),
            Row("beside_kernel", "longest wall of a 2 s kernel with newcomers", "ms", 0),
            Row("beside_ended", "newcomers that ended, of those that were to", "%", 0),
            Row("beside_took", "20 newcomers, two at a time, took", "s", 1),
            Row("beside_wrong", "wrong results", "", 0),
        ),
    ),
    "first": (
        (40, 150),
        (
            Row("first_seen", "newcomer beside 2 s kernels, image seen before: first result, median", "ms", 0),
            Row("first_seen_max", "the same, longest", "ms", 0),
            Row("first_never", "image never seen: first result, median", "ms", 0),
            Row("first_never_max", "the same, longest", "ms", 0),
            Row("first_seen_end", "image seen before: the end of its 12 kernels, median", "ms", 0),
            Row("first_never_end", "image never seen: the end of its 12 kernels, median", "ms", 0),
        ),
    ),
    "ninth": (
        (40, 90),
        (
            Row("ninth_first", "ninth client beside eight of 1 s kernels: first result", "ms", 0),
            Row("ninth_end", "the same: its end", "ms", 0),
            Row("ninth_rate", "kernels of the eight without it", "/s", 2),
            Row("ninth_percent", "kernels of the eight with it, relative", "%", 1),
            Row("ninth_kernel", "longest wall of a 1 s kernel with it", "ms", 0),
        ),
    ),
    "endless": (
        (40, 90),
        (
            Row("endless_alone", "two clients of 50 µs kernels, alone, rounds", "/s", 0),
            Row("endless_percent", "the same beside an endless kernel, relative", "%", 1),
            Row("endless_longest", "longest round beside it", "ms", 1),
            Row("endless_first", "newcomer beside the endless kernel: first result", "ms", 0),
            Row("endless_end", "newcomer beside the endless kernel: its end", "ms", 0),
            Row("endless_longest_newcomer", "longest round of the two meanwhile", "ms", 1),
        ),
    ),
    "handshake": (
        (55, 120),
        (
            Row("handshake_seen", "another process' first kernel ends a waiting one, image seen before", "ms", 0),
            Row("handshake_never", "the same, image never seen", "ms", 0),
        ),
    ),
    "batch": (
        (80, 400),
        (
            Row("batch_first", "batch of programs, eight at a time, first pass", "s", 1),
            Row("batch_second", "the same, second pass", "s", 1),
            Row("batch_late", f"programs that had not ended after {PROGRAM} s", "", 0),
            Row("batch_wrong", "programs with wrong results or an error", "", 0),
            Row("batch_over", f"programs over {TIMES} times their time under NVIDIA MPS + {MORE} s", "", 0),
        ),
    ),
}


def over(times, reference):
    """How many runs of programs took more than they may by the times of another system; None where there are none."""
    compared = [
        (ours, theirs)
        for name in times
        for ours, theirs in zip(times[name], reference.get(name, []))
        if theirs is not None
    ]
    if not compared:
        return None
    return sum(ours is None or ours > TIMES * theirs + MORE for ours, theirs in compared)


class Report(reports.ScenarioReport):
    """The values and the times of the batch's programs."""

    KIND, SCENARIOS = "standstill", SCENARIOS

    def __init__(self, names, scenarios, about):
        super().__init__(names, scenarios, about)
        self.times = {}

    def compare(self, times):
        """Sets the times of the batch's programs against NVIDIA's."""
        self.times = times
        for system, found in times.items():
            count = over(found, times.get("nvidia", {}))
            if system != "nvidia" and count is not None:
                self.add(system, {"batch_over": count})

    def document(self):
        text = f"# Clients beside long kernels, {self.about['date']}\n\n{self.markdown()}\n\n"
        text += "First results and ends count from the start of the process. – means that it did not come to that.\n\n"
        return text + reports.machine(self.about) + reports.remarks(self.notes, self.failures)

    def data(self):
        return super().data() | {"times": self.times}


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--build",
        default=os.path.join(bench.ROOT, "target", "release"),
        help="folder with libmpsshim.so, mps-control and mps-server (default: target/release)",
    )
    parser.add_argument(
        "--program", help="compiled benches/cuda/standstill.cu (default: compiled into BUILD with nvcc)"
    )
    parser.add_argument(
        "--results",
        default=os.path.join(bench.ROOT, "docs", "results"),
        help="folder for the .json and .md files (default: docs/results)",
    )
    parser.add_argument(
        "--only",
        type=bench.comma_list(SCENARIOS),
        default=list(SCENARIOS),
        help=f"scenarios to run, in this order, from {','.join(SCENARIOS)}",
    )
    names = ["native", "nvidia", "mpsshim"]
    parser.add_argument(
        "--systems",
        type=bench.comma_list(names),
        help=f"systems to measure, from {','.join(names)} (default: all available)",
    )
    parser.add_argument("--seconds", type=float, help="length of a stretch (default: 10; 4 with --quick)")
    parser.add_argument("--quick", action="store_true", help="shorter stretches, fewer newcomers and programs")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the daemons' and servers' logs here")
    parser.add_argument("--budget", type=float, help="seconds for the whole run (default: 1500; 280 with --quick)")
    options = parser.parse_args(arguments)
    options.budget = options.budget or (280 if options.quick else 1500)
    options.seconds = options.seconds or (4 if options.quick else 10)
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
            client = Client(scenarios.processes, system, scenarios.program, "short", "--windows")
            try:
                client.wait("ready", time.monotonic() + 30)
                system.check_used()
                client.end(time.monotonic() + END)
            finally:
                client.kill()
        except Failure as failure:
            systems.give_up(system, failure, report, options.given)
            usable.remove(system)


def measure_all(options, usable, scenarios, report):
    until = time.monotonic() + options.budget
    for number, name in enumerate(options.only):
        for system in list(usable):
            began = time.monotonic()
            if began > until:
                left = ", ".join(options.only[number:])
                report.failures.append(f"the budget is spent, left out from {systems.title(system.name)} on: {left}")
                return
            if number > 0:
                try:
                    # What hangs, and what a server has loaded, must not reach into the next scenario.
                    system.renew()
                except Failure as failure:
                    report.fail(system.name, "new start", failure)
                    system.stop()
                    usable.remove(system)
                    continue
            limit = SCENARIOS[name][0][0 if options.quick else 1]
            values, problems = scenarios.run(name, system, min(time.monotonic() + limit, until))
            report.add(system.name, values)
            report.compare(scenarios.times)
            shown = " ".join(f"{key}={value:.4g}" for key, value in values.items())
            print(f"{time.monotonic() - began:5.1f} s  {system.name:8} {name}: {shown or '–'}", flush=True)
            for problem in problems:
                report.fail(system.name, name, problem)
            if problems:
                systems.show_log(system)
            # Whoever ends the run from outside keeps what was measured so far.
            report.save(options.results)


def main(arguments):
    options = parse_arguments(arguments)
    # A stop from outside must still end every daemon and client.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if not options.program:
        options.program = os.path.join(options.build, "standstill")
        if reason := bench.current_program("--program", options.program, SOURCES, FLAGS):
            print(reason, file=sys.stderr)
            return 2
    report = Report(list(options.systems), options.only, reports.about(arguments, 1, "benches/gpu/standstill.py"))
    processes = systems.Processes()
    scenarios = Scenarios(processes, options.program, options.seconds, options.quick)
    directory = tempfile.mkdtemp(prefix="standstill-")
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
        shutil.rmtree(directory, ignore_errors=True)
    return report.conclude(options.results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
