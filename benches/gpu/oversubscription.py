#!/usr/bin/env python3
"""Measures programs that need more memory together than the device has, through mpsshim with oversubscription.

    benches/gpu/oversubscription.py
    benches/gpu/oversubscription.py --build DIRECTORY --only moves,alternate --seconds 5

Scenarios, and --only's names:

    moves       16 GiB of a client to host memory (`suspend_client`) and back (`resume_client`), three times
    alternate   two programs that hold 60% of the device each and work in turns of --seconds
    both        the same two programs, both always busy
    servers     three programs that hold 40% each, a request every two seconds, in turn
    resident    a program with 256 MiB and rounds of 0.2 ms, beside moves of 40% of the device

"Of one after the other" is the sum of the work of both programs, each relative to its rate alone. Natively and under
NVIDIA MPS these programs do not start, for want of memory: --systems native,nvidia,mpsshim shows it. Each client checks
its memory at the end of a scenario; a wrong value is in the list of what failed, as is an error, and the exit status is
then 1. Needs PyTorch (--python).
"""

import argparse
import os
import signal
import sys
import tempfile
import time

import measure
import report as reports
import run as bench
import systems
from queueing import Client
from systems import Failure
from table import Row

HERE = os.path.dirname(os.path.abspath(__file__))
CLIENT = os.path.join(HERE, "oversubscription_client.py")
GIB = 1 << 30
# Until clients must be ready, and what a stretch may take beyond its length, s.
READY, LATE = 120, 60
# From when a stretch is announced to its beginning, s.
AHEAD = 0.2
# Pause between two requests of `servers`, s, and number of requests to each.
PAUSE, REQUESTS = 2, 5

SCENARIOS = {
    "moves": (
        Row("moves_out_first", "16 GiB to host memory, the first time", "s", 2),
        Row("moves_back", "back by resume_client", "s", 2),
        Row("moves_out_again", "to host memory again", "s", 2),
        Row("moves_call", "back by the client's next call: a round, less the time of one alone", "s", 2),
    ),
    "alternate": (
        Row("alternate_work", "two programs of 60% each, working in turn: work, of one after the other", "%", 1),
        Row("alternate_first", "first round after the other's turn, longest", "s", 2),
    ),
    "both": (
        Row("both_work", "the same two, both always busy: work, of one after the other", "%", 1),
        Row("both_least", "the one with less work", "%", 1),
    ),
    "servers": (
        Row("servers_first", "three programs of 40% each, a request to each in turn: mean", "s", 2),
        Row("servers_longest", "longest", "s", 2),
        Row("servers_goal", "size / 50 GB/s + 100 ms", "s", 2),
    ),
    "resident": (
        Row("resident_alone_longest", "rounds of 0.2 ms, alone: longest", "ms", 1),
        Row("resident_first_rate", "beside the first move of 40% of the device: rate, of alone", "%", 1),
        Row("resident_first_longest", "longest round", "ms", 1),
        Row("resident_rate", "beside further moves, out and back all the time: rate, of alone", "%", 1),
        Row("resident_longest", "longest round", "ms", 1),
        Row("resident_moved", "moved meanwhile", "GB/s", 1),
    ),
}


class Mpsshim(systems.Mpsshim):
    """mpsshim with oversubscription for all users."""

    def daemon_env(self):
        return super().daemon_env() | {"MPSSHIM_OVERSUBSCRIPTION": "on"}


def make_system(name, processes, directory, build):
    return systems.make_system(name, processes, directory, build, own=Mpsshim if name == "mpsshim" else None)


class Scenarios:
    """The scenarios, each a method that runs on one system and gives row key -> value."""

    def __init__(self, processes, options):
        self.processes, self.options = processes, options
        self.clients = []

    def run(self, name, system):
        self.system, self.clients = system, []
        try:
            values = getattr(self, name)()
            for client in self.clients:
                self.check(client)
            return values
        finally:
            for client in self.clients:
                client.kill()

    def start(self, *fractions, products=None):
        """Clients that hold these parts of the device's memory, started one after the other; all are ready."""
        started = []
        for fraction in fractions:
            command = [self.options.python, CLIENT, "-", "0", str(fraction), *([] if products is None else [str(products)])]
            client = Client(self.processes, self.system, command, f"client of {fraction:.0%}")
            self.clients.append(client)
            started.append(client)
            client.ready(time.monotonic() + READY)
        return started

    def stretch(self, seconds, *clients):
        """Lets clients work at the same time; the values of each."""
        start = time.time() + AHEAD
        for client in clients:
            client.begin(start, seconds)
        deadline = time.monotonic() + AHEAD + seconds + LATE
        return [client.result(deadline, "rounds_per_s", "first_ms", "longest_ms") for client in clients]

    def check(self, client):
        (values,) = self.stretch(0, client)
        if values["wrong"]:
            raise Failure(f"{client.name}: {values['wrong']:.0f} tensors are wrong")

    def order(self, command, client):
        """Seconds that a command for a client takes."""
        (server,) = self.system.servers()
        began = time.monotonic()
        self.system.command(command, str(server), str(client.process.pid), timeout=60)
        return time.monotonic() - began

    def moves(self):
        (client,) = self.start(self.options.bytes / self.options.total)
        (alone,) = self.stretch(1, client)
        values = {"moves_out_first": self.order("suspend_client", client)}
        values["moves_back"] = self.order("resume_client", client)
        self.check(client)
        time.sleep(0.2)
        values["moves_out_again"] = self.order("suspend_client", client)
        (after,) = self.stretch(0, client)
        values["moves_call"] = (after["first_ms"] - 1e3 / alone["rounds_per_s"]) / 1e3
        return values

    def rates(self, clients):
        """The rate of each client, measured while the others are idle; the first round, which may wait, apart."""
        found = []
        for client in clients:
            self.stretch(0, client)
            (values,) = self.stretch(self.options.seconds, client)
            found.append(values["rounds_per_s"])
        return found

    def alternate(self):
        clients = self.start(0.6, 0.6)
        rates = self.rates(clients)
        work, span, first = 0.0, 0.0, 0.0
        for _ in range(self.options.turns):
            for client, rate in zip(clients, rates):
                (values,) = self.stretch(self.options.seconds, client)
                work += values["rounds"] / rate
                span += values["rounds"] / values["rounds_per_s"]
                first = max(first, values["first_ms"] / 1e3)
        return {"alternate_work": 100 * work / span, "alternate_first": first}

    def both(self):
        clients = self.start(0.6, 0.6)
        rates = self.rates(clients)
        seconds = self.options.seconds * 6
        during = self.stretch(seconds, *clients)
        parts = [100 * values["rounds"] / rate / seconds for values, rate in zip(during, rates)]
        return {"both_work": sum(parts), "both_least": min(parts)}

    def servers(self):
        clients = self.start(0.4, 0.4, 0.4)
        took = []
        size = 0
        for number in range(REQUESTS):
            for client in clients:
                time.sleep(PAUSE)
                (values,) = self.stretch(0, client)
                size = values["bytes"]
                if number:
                    took.append(values["first_ms"] / 1e3)
        return {
            "servers_first": sum(took) / len(took),
            "servers_longest": max(took),
            "servers_goal": size / 50e9 + 0.1,
        }

    def resident(self):
        (resident,) = self.start((256 << 20) / self.options.total, products=0)
        (alone,) = self.stretch(self.options.seconds, resident)
        (moving,) = self.start(0.4)
        self.stretch(0, moving)
        values = {"resident_alone_longest": alone["longest_ms"]}
        for name in ("resident_first", "resident"):
            seconds = self.options.seconds
            resident.begin(time.time(), seconds)
            began, bytes_moved = time.monotonic(), 0
            while time.monotonic() < began + seconds - 1:
                self.order("suspend_client", moving)
                self.order("resume_client", moving)
                bytes_moved += 2 * 0.4 * self.options.total
                if name == "resident_first":
                    break
            span = time.monotonic() - began
            found = resident.result(time.monotonic() + seconds + LATE, "rounds_per_s", "longest_ms")
            values[f"{name}_rate"] = 100 * found["rounds_per_s"] / alone["rounds_per_s"]
            values[f"{name}_longest"] = found["longest_ms"]
            values["resident_moved"] = bytes_moved / span / 1e9
        return values


class Report(reports.ScenarioReport):
    KIND = "oversubscription"
    SCENARIOS = {name: (0, rows) for name, rows in SCENARIOS.items()}

    def __init__(self, names, scenarios, about):
        super().__init__(names, scenarios, about)
        self.refused = {}  # system -> scenarios for which memory was short

    def cell(self, row, system):
        short = self.refused.get(system, [])
        return "out of memory" if row.key.partition("_")[0] in short else super().cell(row, system)

    def data(self):
        return super().data() | {"refused": self.refused}

    def document(self):
        text = f"# More memory than the device has, {self.about['date']}\n\n{self.markdown()}\n\n"
        return text + reports.machine(self.about) + reports.remarks(self.notes, self.failures)


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--build",
        default=os.path.join(bench.ROOT, "target", "release"),
        help="folder with libmpsshim.so, mps-control and mps-server (default: target/release)",
    )
    parser.add_argument("--python", default=sys.executable, help="a Python with PyTorch (default: this one)")
    parser.add_argument(
        "--results",
        default=os.path.join(bench.ROOT, "docs", "results"),
        help="folder for the .json and .md files (default: docs/results)",
    )
    names = list(SCENARIOS)
    parser.add_argument(
        "--only", type=bench.comma_list(names), default=names, help=f"scenarios to run, from {','.join(names)}"
    )
    known = ["native", "nvidia", "mpsshim"]
    parser.add_argument(
        "--systems", type=bench.comma_list(known), default=["mpsshim"], help=f"from {','.join(known)} (default: mpsshim)"
    )
    parser.add_argument("--seconds", type=float, default=10, help="length of a turn (default: 10)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each program (default: 3)")
    parser.add_argument("--gib", type=float, default=16, help="memory of the client of `moves` (default: 16)")
    parser.add_argument("--logs", metavar="FOLDER", help="keep the daemons' and servers' logs here")
    options = parser.parse_args(arguments)
    options.bytes = int(options.gib * GIB)
    return options


def measure_one(name, system, scenarios, report):
    began = time.monotonic()
    try:
        values = scenarios.run(name, system)
    except (Failure, OSError, ValueError) as failure:
        if "out of memory" in str(failure).lower() and system.name != "mpsshim":
            report.refused.setdefault(system.name, []).append(name)
            print(f"{system.name} {name}: out of memory", flush=True)
            return
        report.fail(system.name, name, failure)
        systems.show_log(system)
        return
    report.add(system.name, values)
    shown = " ".join(f"{key}={value:.4g}" for key, value in values.items())
    print(f"{time.monotonic() - began:5.1f} s  {system.name:8} {name}: {shown}", flush=True)


def main(arguments):
    options = parse_arguments(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    total = measure.nvidia_smi("memory.total")
    if not total:
        print("nvidia-smi does not say how much memory the device has", file=sys.stderr)
        return 2
    options.total = int(total.split()[0]) << 20
    report = Report(options.systems, options.only, reports.about(arguments, 1, "benches/gpu/oversubscription.py"))
    processes = systems.Processes()
    scenarios = Scenarios(processes, options)
    with tempfile.TemporaryDirectory(prefix="oversubscription-", ignore_cleanup_errors=True) as directory:
        usable = [make_system(name, processes, directory, options.build) for name in options.systems]
        try:
            for name in options.only:
                for system in usable:
                    # One after the other: a system that runs has memory of the device.
                    try:
                        system.start()
                        measure_one(name, system, scenarios, report)
                    except Failure as failure:
                        report.fail(system.name, name, failure)
                    finally:
                        if options.logs:
                            systems.keep_logs([system], os.path.join(options.logs, name))
                        system.stop()
                report.save(options.results)
        finally:
            processes.end_all()
            for system in usable:
                system.stop()
    return report.conclude(options.results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
