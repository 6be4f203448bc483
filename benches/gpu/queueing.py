#!/usr/bin/env python3
"""Measures short work beside long work: native, NVIDIA MPS and mpsshim side by side on one GPU.

    benches/gpu/queueing.py
    benches/gpu/queueing.py --build DIRECTORY --queueing ./queueing --quick --budget 330
    benches/gpu/queueing.py --queueing ./queueing --systems nvidia,mpsshim --only three-8x10,words
    benches/gpu/queueing.py --draw docs/results/queueing-2026-11-26-0900.json

mpsshim is measured with its default scheduling and, as `fifo`, after `mps-control set_scheduling fifo`; a daemon
without that command is left out. The scenarios, and --only's names:

    alone         requests of 16 blocks of 1 ms without a pause, alone
    one-40x1      the same beside one program that keeps three kernels of 40 full waves of 1 ms blocks queued
    three-40x1    beside three of them
    one-8x10, three-8x10, one-1x100, three-1x100
                  8 full waves of 10 ms, one full wave of 100 ms
    three-528b    528 blocks of 50 ms
    many          requests of 150 kernels of 16 blocks of 0.01 ms, 5 ms apart, alone and beside three programs of 40 waves
                  of 1 ms
    words         copies of 4 bytes beside three programs that copy 256 MiB both ways
    mixed         four clients with requests of 16 blocks of 1, 2, 5, 10 ms every 50 ms beside four programs of 40 waves
                  of 1 ms
    parts         kernels of one wave of 0.1 ms, 64 queued, against kernels of 40 waves of 10 ms: the part of each
    bert          requests to a transformer of BERT-base's size beside the training of a convolutional network

"Keeps" is the rate of the long work beside the short work, relative to the rate of the same processes without it. Every
scenario runs on each system in turn. What hangs is killed and is in the list of what failed; the exit status is then 1.
Python's standard library only, but for `bert`, which needs a Python with PyTorch. Without --queueing, nvcc compiles the
program into the build directory.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import measure
import plot
import report as reports
import run as bench
import systems
from systems import Failure
from table import Row

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(bench.ROOT, "benches", "cuda", "queueing.cu")
TITLES = systems.SYSTEM_TITLES | {"fifo": "mpsshim, fifo"}
COLOURS = plot.COLOURS | {"fifo": "#7fa8e0"}
NAMES = ["native", "nvidia", "mpsshim", "fifo"]

# Until a client must be ready, s; one with PyTorch.
READY, READY_TORCH = 20, 60
# From when a stretch is announced to its beginning, s: the long work begins 0.2 s before that.
AHEAD = 0.5
# What a client may take after the end of a stretch to report it, s.
REPORT = 15
# What a client may take to end, s: to be told, and after a kill.
END, KILLED = 5, 10
# A client that begins later than this is reported, ms.
LATE = 50

ASK = ("ask", "16", "1000", "0")
# A request of many kernels, and the pause behind it.
MANY = ("ask", "150x16", "10", "5000")
# Scenario -> what the requests run beside: number of programs, waves or blocks, µs of a block, and words for it.
BESIDE = {
    "one-40x1": (1, "40", 1000, "one program of 40 waves × 1 ms"),
    "three-40x1": (3, "40", 1000, "three programs of 40 waves × 1 ms"),
    "one-8x10": (1, "8", 10_000, "one program of 8 waves × 10 ms"),
    "three-8x10": (3, "8", 10_000, "three programs of 8 waves × 10 ms"),
    "one-1x100": (1, "1", 100_000, "one program of one wave × 100 ms"),
    "three-1x100": (3, "1", 100_000, "three programs of one wave × 100 ms"),
    "three-528b": (3, "528b", 50_000, "three programs of 528 blocks × 50 ms"),
}
MIXED = (1, 2, 5, 10)  # ms of a request's blocks
# The two of `parts`: waves and µs of a block, how many queued.
SHORT, LONG = (1, 100, 64), (40, 10_000, 3)


def beside_rows(name):
    words = BESIDE[name][3]
    return (
        Row(f"{name}_mean", f"16 blocks × 1 ms beside {words}, mean", "ms", 2),
        Row(f"{name}_p99", "the same, p99", "ms", 2),
        Row(f"{name}_keeps", "the long work keeps", "%", 1),
    )


# Scenario -> seconds it may take beyond its stretches, and its rows.
SCENARIOS = {
    "alone": (
        40,
        (
            Row("alone_mean", "16 blocks × 1 ms, alone, mean", "ms", 2),
            Row("alone_p99", "the same, p99", "ms", 2),
        ),
    ),
    **{name: (60, beside_rows(name)) for name in BESIDE},
    "many": (
        60,
        (
            Row("many_alone_mean", "150 kernels of 16 blocks × 0.01 ms, alone, mean", "ms", 2),
            Row("many_alone_p99", "the same, p99", "ms", 2),
            Row("many_mean", "150 kernels beside three programs of 40 waves × 1 ms, mean", "ms", 2),
            Row("many_p50", "the same, p50", "ms", 2),
            Row("many_p99", "the same, p99", "ms", 2),
            Row("many_keeps", "the long work keeps", "%", 1),
        ),
    ),
    "words": (
        60,
        (
            Row("words_alone_mean", "copy of 4 bytes and wait, alone, mean", "ms", 3),
            Row("words_alone_p99", "the same, p99", "ms", 3),
            Row("words_mean", "copy of 4 bytes beside three programs that copy 256 MiB both ways, mean", "ms", 3),
            Row("words_p99", "the same, p99", "ms", 3),
            Row("words_rate", "these programs without the short copies", "GB/s", 1),
            Row("words_keeps", "the long copies keep", "%", 1),
        ),
    ),
    "mixed": (
        60,
        (
            *(
                Row(
                    f"mixed_{ms}_times",
                    f"16 blocks × {ms} ms every 50 ms, four clients beside four programs of 40 waves × 1 ms: "
                    "p99 relative to alone",
                    "times",
                    2,
                )
                for ms in MIXED
            ),
            Row("mixed_made", "requests made, of those that were due", "%", 1),
            Row("mixed_keeps", "the long work keeps, of its sum", "%", 1),
        ),
    ),
    "parts": (
        60,
        (
            Row("parts_short", "one wave × 0.1 ms, 64 queued, against the next: its part of the device", "%", 1),
            Row("parts_long", "40 waves × 10 ms: its part of the device", "%", 1),
        ),
    ),
    "bert": (
        120,
        (
            Row("bert_alone_p50", "BERT-base fp16, one sequence, alone, p50", "ms", 2),
            Row("bert_alone_p99", "the same, p99", "ms", 2),
            Row("bert_p50", "BERT-base beside training, p50", "ms", 2),
            Row("bert_p99", "the same, p99", "ms", 2),
            Row("bert_p50_times", "p50 relative to alone", "times", 2),
            Row("bert_p99_times", "p99 relative to alone", "times", 2),
            Row("bert_train", "training without it", "steps/s", 2),
            Row("bert_keeps", "training keeps", "%", 1),
        ),
    ),
}
# The bars of the chart, ms.
CHART = {
    "alone_p99": "16 blocks × 1 ms, alone",
    **{f"{name}_p99": f"beside {beside[3]}" for name, beside in BESIDE.items()},
    "many_p99": "150 kernels beside three programs of 40 waves × 1 ms",
    "words_p99": "4 bytes beside long copies",
    "bert_p99": "BERT-base beside training",
    **{f"mixed_{ms}_p99": f"16 blocks × {ms} ms, one of four clients" for ms in MIXED},
}
ABOUT = (
    "Each block of a kernel takes a fixed time from when it began. With time slicing between processes (native) that "
    "time goes on while another process has the device, so long kernels keep their rate there and parts add up to more "
    "than 100 %: compare it by latencies only. The p99 of fewer than 100 requests is the longest; the .json file has "
    "the number of requests. – means that it did not come to that.\n\n"
)


def title(name):
    return TITLES.get(name, name)


# --------------------------------------------------------------------------------------------------------------------
# Numbers


def parse_line(text):
    """The numbers of a line of name=value pairs."""
    return measure.parse_values("\n".join(text.split()))


def percent(value, base):
    """What part of `base` a value is; None where there is no base."""
    return 100 * value / base if base else None


def times(value, base):
    return value / base if base else None


def part(rate, waves, block_us):
    """Per cent of the device's time that kernels take at a rate per second."""
    return 100 * rate * waves * block_us * 1e-6


def due(seconds, period_ms):
    """How many requests are due in a stretch."""
    return -int(-seconds * 1000 // period_ms)


def known(values):
    """Without what could not be told."""
    return {key: value for key, value in values.items() if value is not None}


def latency(key, values, *names):
    """Row key -> a statistic in ms: KEY_mean of mean_ms."""
    return {f"{key}_{name}": values[f"{name}_ms"] for name in names}


# --------------------------------------------------------------------------------------------------------------------
# Systems


class Unknown(systems.Missing):
    """The daemon does not have the command that makes the system what it is."""


class Fifo(systems.Mpsshim):
    """mpsshim that starts kernels in the order of their arrival."""

    name = "fifo"

    def start(self):
        super().start()
        try:
            self.command("set_scheduling", "fifo")
        except Failure as failure:
            if "unknown command" in str(failure).lower():
                raise Unknown("its daemon has no command set_scheduling") from None
            raise


def make_system(name, processes, directory, build):
    return systems.make_system(name, processes, directory, build, own=Fifo if name == "fifo" else None)


# --------------------------------------------------------------------------------------------------------------------
# Clients


class Client:
    """A process that works for a stretch each time it is told when to begin."""

    def __init__(self, processes, system, command, name):
        self.processes, self.name = processes, name
        self.process = processes.start(command, system.env(), stdin=subprocess.PIPE)

    def line(self, deadline, what):
        """The next line; a Failure that names this client, which is killed, if none comes in time."""
        try:
            return systems.read_line(self.process, max(0.1, deadline - time.monotonic()))
        except systems.Refused:
            raise
        except Failure as failure:
            pid = self.process.pid
            self.kill()
            raise Failure(f"{self.name}, process {pid}, no {what}: {failure}") from None

    def ready(self, deadline):
        while not self.line(deadline, "start").startswith("ready="):
            pass

    def begin(self, start, seconds):
        try:
            self.process.stdin.write(f"{start:.6f} {seconds:.3f}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `result` says why.

    def result(self, deadline, *wanted):
        """The numbers of the stretch's line, which must have these names."""
        values = parse_line(self.line(deadline, "result"))
        for name in wanted:
            if name not in values:
                raise Failure(f"{self.name} printed no {name}")
        return values

    def end(self):
        """Lets the process end, which the end of its input makes it do."""
        if self.process not in self.processes.started:
            return
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(END)
        except subprocess.TimeoutExpired:
            pid = self.process.pid
            self.kill()
            raise Failure(f"{self.name}, process {pid}, did not end in {END} s, killed") from None
        self.processes.end(self.process)
        if self.process.returncode != 0:
            raise Failure(f"{self.name} ended with {self.process.returncode}")

    def kill(self):
        if self.process not in self.processes.started:
            return
        self.process.kill()
        try:
            self.process.wait(KILLED)
        except subprocess.TimeoutExpired:
            # The driver does not let go of it; nobody waits for it any more.
            self.processes.started.remove(self.process)
            raise Failure(f"{self.name}, process {self.process.pid}, does not end even when killed") from None
        self.processes.end(self.process)


class Scenarios:
    """The scenarios, each a method that runs on one system and gives row key -> value."""

    def __init__(self, processes, program, python, seconds):
        self.processes, self.program, self.python, self.seconds = processes, program, python, seconds
        self.problems, self.clients = [], []

    def run(self, name, system, until):
        """The values of a scenario and what went wrong. `until` is the time of time.monotonic() at which it ends."""
        self.system, self.until = system, until
        self.problems, self.clients = [], []
        values = {}
        try:
            if name in BESIDE:
                values = self.beside(name)
            else:
                values = getattr(self, name)()
        except (Failure, OSError) as failure:
            self.problems.append(str(failure))
        finally:
            for client in self.clients:
                try:
                    if self.problems:
                        client.kill()
                    else:
                        client.end()
                except Failure as failure:
                    self.problems.append(str(failure))
        return known(values), self.problems

    def start(self, *clients):
        """Clients of the compiled program, each by its role and what follows its SECONDS; all are ready."""
        started = []
        for role, *rest in clients:
            command = [self.program, role, "-", f"{self.seconds:.3f}", *map(str, rest)]
            started.append(Client(self.processes, self.system, command, f"queueing {role}"))
            self.clients.append(started[-1])
        self.await_ready(started, READY)
        return started

    def torch(self, *scripts):
        started = []
        for script in scripts:
            command = [self.python, os.path.join(HERE, script), "-", f"{self.seconds:.3f}"]
            started.append(Client(self.processes, self.system, command, script))
            self.clients.append(started[-1])
        self.await_ready(started, READY_TORCH)
        return started

    def await_ready(self, clients, limit):
        deadline = min(time.monotonic() + limit, self.until)
        for client in clients:
            client.ready(deadline)

    def stretch(self, *clients):
        """The results of clients, each with the names that it must have, that work at the same time."""
        start = time.time() + AHEAD
        for client, *_ in clients:
            client.begin(start, self.seconds)
        deadline = min(time.monotonic() + AHEAD + self.seconds + REPORT, self.until)
        results = [client.result(deadline, *wanted) for client, *wanted in clients]
        for (client, *_), values in zip(clients, results):
            if values.get("late_ms", 0) > LATE:
                self.problems.append(f"{client.name} began {values['late_ms']:.0f} ms late")
        return results

    LATENCIES = ("count", "mean_ms", "p50_ms", "p99_ms")

    def alone(self):
        (ask,) = self.start(ASK)
        (values,) = self.stretch((ask, *self.LATENCIES))
        return latency("alone", values, "mean", "p50", "p99") | {"alone_count": values["count"]}

    def beside(self, name):
        count, waves, block_us, _ = BESIDE[name]
        *floods, ask = self.start(*[("flood", waves, block_us)] * count, ASK)
        return self.requests_beside(name, floods, (ask, *self.LATENCIES))

    def requests_beside(self, name, floods, ask):
        """The floods without the requests, then with them."""
        floods = [(flood, "rate") for flood in floods]
        before = sum(values["rate"] for values in self.stretch(*floods))
        *during, values = self.stretch(*floods, ask)
        rate = sum(values["rate"] for values in during)
        return latency(name, values, "mean", "p50", "p99") | {
            f"{name}_count": values["count"],
            f"{name}_rate_without": before,
            f"{name}_rate": rate,
            f"{name}_keeps": percent(rate, before),
        }

    def many(self):
        *floods, ask = self.start(*[("flood", "40", 1000)] * 3, MANY)
        ask = (ask, *self.LATENCIES)
        (alone,) = self.stretch(ask)
        return latency("many_alone", alone, "mean", "p99") | self.requests_beside("many", floods, ask)

    def words(self):
        *copies, words = self.start(*[("copies", 256, "both")] * 3, ("words", 100))
        copies, words = [(client, "gb_per_s") for client in copies], (words, *self.LATENCIES)
        (alone,) = self.stretch(words)
        before = sum(values["gb_per_s"] for values in self.stretch(*copies))
        *during, values = self.stretch(*copies, words)
        rate = sum(values["gb_per_s"] for values in during)
        found = latency("words_alone", alone, "mean", "p50", "p99") | latency("words", values, "mean", "p50", "p99")
        return found | {
            "words_count": values["count"],
            "words_rate": before,
            "words_keeps": percent(rate, before),
        }

    def bert(self):
        bert, train = self.torch("queueing_bert.py", "queueing_train.py")
        bert, train = (bert, *self.LATENCIES), (train, "steps_per_s")
        (alone,) = self.stretch(bert)
        (before,) = self.stretch(train)
        values, during = self.stretch(bert, train)
        found = latency("bert_alone", alone, "mean", "p50", "p99") | latency("bert", values, "mean", "p50", "p99")
        return found | {
            "bert_count": values["count"],
            "bert_p50_times": times(values["p50_ms"], alone["p50_ms"]),
            "bert_p99_times": times(values["p99_ms"], alone["p99_ms"]),
            "bert_train": before["steps_per_s"],
            "bert_keeps": percent(during["steps_per_s"], before["steps_per_s"]),
        }

    def mixed(self):
        """Each request client alone, then the four long programs, then all."""
        period_ms = 50
        clients = self.start(
            *[("flood", 40, 1000)] * 4, *[("ask", 16, ms * 1000, "every", period_ms * 1000) for ms in MIXED]
        )
        floods = [(client, "rate") for client in clients[:4]]
        asks = [(client, *self.LATENCIES) for client in clients[4:]]
        alone = [self.stretch(ask)[0] for ask in asks]
        before = sum(values["rate"] for values in self.stretch(*floods))
        results = self.stretch(*floods, *asks)
        found = {}
        for ms, apart, beside in zip(MIXED, alone, results[4:]):
            found |= latency(f"mixed_{ms}_alone", apart, "mean", "p99") | latency(f"mixed_{ms}", beside, "mean", "p99")
            found[f"mixed_{ms}_times"] = times(beside["p99_ms"], apart["p99_ms"])
        made = sum(values["count"] for values in results[4:])
        return found | {
            "mixed_count": made,
            "mixed_made": percent(made, len(MIXED) * due(self.seconds, period_ms)),
            "mixed_keeps": percent(sum(values["rate"] for values in results[:4]), before),
        }

    def parts(self):
        clients = self.start(*[("steady", *kind) for kind in (SHORT, LONG)])
        short, long = self.stretch(*[(client, "rate") for client in clients])
        return {
            "parts_short": part(short["rate"], *SHORT[:2]),
            "parts_long": part(long["rate"], *LONG[:2]),
            "parts_short_rate": short["rate"],
            "parts_long_rate": long["rate"],
        }


# --------------------------------------------------------------------------------------------------------------------
# The result


class Report(reports.ScenarioReport):
    """The values, with those of mpsshim in the order of submission."""

    KIND, SCENARIOS = "queueing", SCENARIOS
    title = staticmethod(title)

    @classmethod
    def load(cls, path):
        """The report that `save` wrote."""
        with open(path) as file:
            data = json.load(file)
        report = cls(data.pop("systems"), data.pop("scenarios"), data)
        for name in ("values", "notes", "failures"):
            setattr(report, name, data.pop(name))
        return report

    def document(self):
        text = f"# Short work beside long work, {self.about['date']}\n\n{self.markdown()}\n\n{ABOUT}"
        return text + reports.machine(self.about) + reports.remarks(self.notes, self.failures)


def bars(report):
    """The systems and the keys that the chart shows: all but native, all that have a value."""
    names = [name for name in report.systems if name != "native"]
    found = [key for key in CHART if any(report.values.get(key, {}).get(name) for name in names)]
    return [name for name in names if any(report.values[key].get(name) for key in found)], found


def draw(report, path):
    """Writes the chart as SVG; False when there is nothing to show."""
    names, keys = bars(report)
    if not keys:
        return False
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # As in plot.py: the same values and the same matplotlib give the same file.
    with pyplot.rc_context({"svg.hashsalt": "mpsshim", "svg.fonttype": "none", "font.family": "DejaVu Sans"}):
        figure, axes = pyplot.subplots(figsize=(7.2, 1.2 + 0.42 * len(keys)), layout="constrained")
        height = 0.8 / len(names)
        for number, name in enumerate(names):
            values = [report.values[key].get(name) for key in keys]
            at = [place + (number - (len(names) - 1) / 2) * height for place in range(len(keys))]
            drawn = [(place, value) for place, value in zip(at, values) if value]
            row = axes.barh(
                [place for place, _ in drawn],
                [value for _, value in drawn],
                height,
                label=title(name),
                color=COLOURS[name],
            )
            axes.bar_label(row, [f"{value:.3g}" for _, value in drawn], padding=2, fontsize=6)
        axes.set_xscale("log")
        every = [report.values[key][name] for key in keys for name in names if report.values[key].get(name)]
        axes.set_xlim(min(every) / 2, max(every) * 2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_yticks(range(len(keys)), [CHART[key] for key in keys], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("p99 of a request, ms; further left is better")
        figure.legend(loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
        figure.suptitle("Short work beside long work", fontsize=11)
        axes.set_title(plot.host(report), fontsize=7, color="#555555")
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
    return True


# --------------------------------------------------------------------------------------------------------------------
# The run


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--build",
        default=os.path.join(bench.ROOT, "target", "release"),
        help="folder with libmpsshim.so, mps-control and mps-server (default: target/release)",
    )
    parser.add_argument(
        "--queueing", help="compiled benches/cuda/queueing.cu (default: compiled into BUILD with nvcc)"
    )
    parser.add_argument("--python", help="a Python with PyTorch (default: the one that runs this program)")
    parser.add_argument(
        "--results",
        default=os.path.join(bench.ROOT, "docs", "results"),
        help="folder for the .json, .md and .svg files (default: docs/results)",
    )
    parser.add_argument(
        "--only",
        type=bench.comma_list(SCENARIOS),
        default=list(SCENARIOS),
        help=f"scenarios to run, in this order, from {','.join(SCENARIOS)}",
    )
    parser.add_argument(
        "--systems",
        type=bench.comma_list(NAMES),
        help=f"systems to measure, from {','.join(NAMES)} (default: all available)",
    )
    parser.add_argument("--seconds", type=float, help="length of a stretch (default: 4; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="shorter stretches")
    parser.add_argument("--budget", type=float, help="seconds for the whole run (default: 1200; 330 with --quick)")
    parser.add_argument("--draw", metavar="FILE.json", help="only draw the chart of an earlier run")
    options = parser.parse_args(arguments)
    options.budget = options.budget or (330 if options.quick else 1200)
    options.seconds = options.seconds or (1 if options.quick else 4)
    if options.seconds < 0.1:
        parser.error("--seconds: at least 0.1")
    options.given = options.systems is not None
    options.systems = options.systems or list(NAMES)
    for name in ("queueing", "python"):
        path = getattr(options, name)
        if path and not os.access(path, os.X_OK):
            parser.error(f"--{name} {path}: no such program")
    if options.queueing:
        options.queueing = os.path.abspath(options.queueing)
    return options


def find_python(options, report):
    """Leaves `bert` out where there is no PyTorch."""
    if options.python or "bert" not in options.only:
        return
    if importlib.util.find_spec("torch"):
        options.python = sys.executable
        return
    options.only = [name for name in options.only if name != "bert"]
    report.scenarios = options.only
    report.note(f"bert left out: no --python, and {os.path.basename(sys.executable)} has no torch")


def give_up(system, failure, report, given):
    """Stops a system that did not start; one that is not there, and fifo where there is none, is left out."""
    if isinstance(failure, Unknown) or (isinstance(failure, systems.Missing) and not given):
        report.note(f"{title(system.name)} left out: {failure}")
        report.systems.remove(system.name)
    else:
        report.fail(system.name, "start", failure)
        systems.show_log(system)
    system.stop()


def start_systems(options, usable, scenarios, report):
    """Starts the systems; those that do not work leave the list."""
    for system in list(usable):
        client = None
        try:
            system.start()
            command = [scenarios.program, ASK[0], "-", "1", *ASK[1:]]
            client = Client(scenarios.processes, system, command, "queueing ask")
            client.ready(time.monotonic() + READY)
            system.check_used()
            client.end()
        except Failure as failure:
            if client:
                # Also when it cannot be killed, the system is what failed.
                try:
                    client.kill()
                except Failure as further:
                    failure = Failure(f"{failure}; {further}")
            give_up(system, failure, report, options.given)
            usable.remove(system)


def measure_all(options, usable, scenarios, report):
    until = time.monotonic() + options.budget
    for number, name in enumerate(options.only):
        for system in list(usable):
            began = time.monotonic()
            if began > until:
                left = ", ".join(options.only[number:])
                report.failures.append(f"the budget is spent, left out from {title(system.name)} on: {left}")
                return
            limit = SCENARIOS[name][0] + 6 * options.seconds
            values, problems = scenarios.run(name, system, min(began + limit, until + END))
            report.add(system.name, values)
            shown = " ".join(f"{key}={value:.4g}" for key, value in values.items())
            print(f"{time.monotonic() - began:5.1f} s  {system.name:8} {name}: {shown or '–'}", flush=True)
            for problem in problems:
                report.fail(system.name, name, problem)
            if problems:
                systems.show_log(system)
                try:
                    # What hangs must not reach into the next scenario.
                    system.renew()
                except Failure as failure:
                    report.fail(system.name, "new start", failure)
                    system.stop()
                    usable.remove(system)
            # Whoever ends the run from outside keeps what was measured so far.
            report.save(options.results)


def draw_file(path):
    if reason := plot.missing():
        return f"no chart: {reason}; where it is, benches/gpu/queueing.py --draw {path} draws it"
    chart = os.path.splitext(path)[0] + ".svg"
    return chart if draw(Report.load(path), chart) else f"{path}: nothing to draw"


def main(arguments):
    options = parse_arguments(arguments)
    if options.draw:
        print(draw_file(options.draw))
        return 0
    # A stop from outside must still end every daemon and client.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if not options.queueing:
        options.queueing = os.path.abspath(os.path.join(options.build, "queueing"))
        if reason := bench.current_program("--queueing", options.queueing, [SOURCE]):
            print(reason, file=sys.stderr)
            return 2
    report = Report(list(options.systems), options.only, reports.about(arguments, 1, "benches/gpu/queueing.py"))
    find_python(options, report)
    processes = systems.Processes()
    scenarios = Scenarios(processes, options.queueing, options.python, options.seconds)
    with tempfile.TemporaryDirectory(prefix="queueing-", ignore_cleanup_errors=True) as directory:
        usable = [make_system(name, processes, directory, options.build) for name in options.systems]
        try:
            start_systems(options, usable, scenarios, report)
            measure_all(options, usable, scenarios, report)
        finally:
            processes.end_all()
            for system in usable:
                system.stop()
            processes.end_all()
    return report.conclude(options.results, draw_file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
