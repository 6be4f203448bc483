#!/usr/bin/env python3
"""Measures native CUDA, NVIDIA MPS and mpsshim side by side on one GPU.

Every measurement runs on each system in turn, and the whole round is repeated, so that a change of the machine's state
meets all three alike. The table shows medians. Needs python3, the built binaries, and benches/cuda/microbench.cu
compiled with nvcc (the command is at its top); nbody is the CUDA sample's binary, or ours from examples/.

    benches/gpu/run.py --build target/release --microbench ./microbench --nbody ./nbody
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import systems

# --------------------------------------------------------------------------------------------------------------------
# The table


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a value that a measurement yields, and what mpsshim has to reach."""

    key: str
    title: str
    unit: str
    digits: int
    # ("at most" | "at least", number), ("within" | "times", factor of native), or None where nothing is asked for.
    target: tuple | None = None

    def target_text(self):
        if self.target is None:
            return ""
        kind, number = self.target
        if kind == "within":
            return f"within {round((number - 1) * 100)}% of native"
        if kind == "times":
            return f"{number:g} times native"
        return f"{kind} {number:,g} {self.unit}"

    def reached(self, native, ours):
        """True, False, or None when it cannot be told."""
        if self.target is None or ours is None:
            return None
        kind, number = self.target
        if kind == "within":
            return None if native is None else ours <= native * number
        if kind == "times":
            return None if native is None else ours >= native * number
        return ours <= number if kind == "at most" else ours >= number


# Measurement -> rows. The order is that of the table.
MEASUREMENTS = {
    "nbody1": [Row("nbody1", "nbody 512000, 10 iterations, one copy", "ms", 1, ("within", 1.01))],
    "nbody3": [Row("nbody3", "nbody 14336, 10000 iterations, three copies, each", "ms", 0, ("at most", 6900))],
    "latency": [
        Row("launch_burst", "launch, client side, queue not full", "µs", 3, ("at most", 0.15)),
        Row("launch_steady", "launch, steady state", "µs", 2),
        Row("launch_sync", "launch + synchronize, p50", "µs", 2, ("at most", 7.75)),
        Row("launch_sync_p99", "launch + synchronize, p99", "µs", 2),
        Row("h2d_4", "4-byte copy to the device, p50", "µs", 2, ("at most", 0.3)),
        Row("d2h_4", "4-byte copy from the device, p50", "µs", 2, ("at most", 6.5)),
        Row("malloc_free", "malloc + free of 1 MiB, p50", "µs", 2),
    ],
    "small8": [Row("small8", "50 µs kernel + synchronize, 8 clients, total", "/s", 0, ("at least", 145_000))],
    "small16": [Row("small16", "50 µs kernel + synchronize, 16 clients, total", "/s", 0, ("at least", 260_000))],
    "small32": [
        Row("small32", "50 µs kernel of 4 blocks + synchronize, 32 clients, total", "/s", 0, ("at least", 310_000))
    ],
    "empty8": [Row("empty8", "empty kernels, 256 then synchronize, 8 clients, total", "/s", 0)],
    "start": [
        Row("start", "runtime start (cudaFree(0)) with a running server", "ms", 1, ("at most", 60)),
        Row("first_kernel", "first kernel done after", "ms", 1),
    ],
    "memory": [Row("memory", "device memory for each further idle client", "MiB", 1, ("at most", 5))],
    "bandwidth": [
        Row("h2d_pinned", "pinned copy, 256 MiB, to the device", "GB/s", 1, ("at least", 54)),
        Row("d2h_pinned", "pinned copy, 256 MiB, from the device", "GB/s", 1, ("at least", 54)),
        Row("h2d_pageable", "pageable copy, 256 MiB, to the device", "GB/s", 1),
        Row("d2h_pageable", "pageable copy, 256 MiB, from the device", "GB/s", 1),
    ],
    "bert1": [Row("bert1", "BERT-base fp16, batch 1, one client", "/s", 0, ("times", 1.3))],
    "bert2": [Row("bert2", "the same, 2 clients, total", "/s", 0, ("at least", 850))],
    "bert4": [Row("bert4", "the same, 4 clients, total", "/s", 0, ("at least", 1600))],
    "bert8": [
        Row("bert8", "the same, 8 clients, total", "/s", 0, ("at least", 2800)),
        Row("bert_memory", "device memory of the eighth", "MiB", 0, ("at most", 330)),
        Row("bert_memory_all", "device memory of all eight", "MiB", 0, ("at most", 3000)),
    ],
    "bert4x8": [Row("bert4x8", "BERT-base fp16, batch 8, 4 clients, total", "/s", 0, ("at least", 10_900))],
    "train1": [Row("train1", "training a small convnet, one client, steps", "/s", 0, ("times", 1))],
    "train4": [Row("train4", "the same, 4 clients, total", "/s", 0, ("times", 1))],
    "idle": [Row("idle", "CPU of idle daemon and server, one idle client", "ms/s", 1, ("at most", 0))],
}

# --------------------------------------------------------------------------------------------------------------------
# Parsing what programs print


def parse_values(text):
    """name=value lines as a dictionary of numbers; other lines are skipped."""
    values = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        try:
            if equals:
                values[name.strip()] = float(value)
        except ValueError:
            pass
    return values


def parse_nbody(text):
    """The milliseconds that nbody's benchmark reports."""
    found = re.search(r"total time for \d+ iterations: ([\d.]+) ms", text)
    if not found:
        raise systems.Failure("nbody printed no total time")
    return float(found[1])


# --------------------------------------------------------------------------------------------------------------------
# Measurements


class Bench:
    """The measurements, each a method that runs on one system and returns row key -> value."""

    def __init__(self, processes, microbench, nbody, quick=False, python=None):
        self.processes = processes
        self.python = python
        self.microbench = microbench and os.path.abspath(microbench)
        self.nbody = nbody and os.path.abspath(nbody)
        self.quick = quick

    def possible(self, name):
        """Why a measurement cannot run here, or None."""
        if name.startswith("nbody"):
            return None if self.nbody else "no --nbody"
        if name.startswith(("bert", "train")):
            return None if self.python else "no --python"
        return None if self.microbench else "no --microbench"

    def run(self, name, system):
        if name.startswith("small"):
            clients = int(name.removeprefix("small"))
            return {name: self.kernels(system, clients, "small", "--blocks", "4" if clients >= 32 else "8")}
        if name.startswith("empty"):
            return {name: self.kernels(system, int(name.removeprefix("empty")), "empty", "--batch", "256")}
        if name.startswith(("bert", "train")):
            return self.torch(name, system)
        return getattr(self, name)(system)

    def micro(self, system, *arguments, timeout=60):
        return parse_values(self.processes.run([self.microbench, *arguments], system.env(), timeout))

    def hold(self, system):
        """An idle client that has its context."""
        process = self.processes.start([self.microbench, "hold"], system.env(), stdin=subprocess.PIPE)
        systems.read_until(process, "ready=", 30)
        return process

    def release(self, holders):
        try:
            for holder in holders:
                self.processes.finish(holder, 20, "")
        finally:
            for holder in holders:
                self.processes.end(holder)

    def nbody_run(self, system, copies, bodies, iterations):
        command = [self.nbody, "-benchmark", f"-numbodies={bodies}", f"-i={iterations}"]
        running = [self.processes.start(command, system.env()) for _ in range(copies)]
        try:
            return [parse_nbody(self.processes.finish(process, 90)) for process in running]
        finally:
            for process in running:
                self.processes.end(process)

    def nbody1(self, system):
        scale = 10 if self.quick else 1
        (took,) = self.nbody_run(system, 1, 512000, 10 // scale)
        return {"nbody1": took * scale}

    def nbody3(self, system):
        scale = 10 if self.quick else 1
        return {"nbody3": statistics.mean(self.nbody_run(system, 3, 14336, 10000 // scale)) * scale}

    def latency(self, system):
        values = self.micro(system, "latency")
        return {
            "launch_burst": values["launch_burst_ns"] / 1e3,
            "launch_steady": values["launch_steady_ns"] / 1e3,
            "launch_sync": values["launch_sync_p50_us"],
            "launch_sync_p99": values["launch_sync_p99_us"],
            "h2d_4": values["h2d_4_bytes_p50_us"],
            "d2h_4": values["d2h_4_bytes_p50_us"],
            "malloc_free": values["malloc_free_p50_us"],
        }

    def kernels(self, system, clients, *arguments):
        """Kernels a second of clients that begin together, added up."""
        seconds = "1" if self.quick else "2"
        command = [self.microbench, arguments[0], "--wait", "--seconds", seconds, *arguments[1:]]
        return self.together(system, clients, command, "kernels_per_s")[0]

    def torch(self, name, system):
        """Sequences or training steps a second of PyTorch clients that begin together, added up."""
        workload, clients, batch = re.fullmatch(r"(bert|train)(\d+)(?:x(\d+))?", name).groups()
        seconds = "2" if self.quick else "4"
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_client.py")
        command = [self.python, program, workload, "--wait", "--seconds", seconds, "--batch", batch or "1"]
        rate, memory = self.together(system, int(clients), command, "per_s", memory=name == "bert8")
        values = {name: rate}
        if memory:
            values |= {"bert_memory": memory[-1] - memory[-2], "bert_memory_all": memory[-1] - memory[0]}
        return values

    def together(self, system, clients, command, key, memory=False):
        """What clients that begin together print as `key`, added up; the device's memory before and after each client."""
        running, used = [], []
        note = lambda: used.append(self.device_memory(None)) if memory else None  # noqa: E731
        try:
            note()
            for _ in range(clients):
                running.append(self.processes.start(command, system.env(), stdin=subprocess.PIPE))
                if memory:
                    systems.read_until(running[-1], "ready=", 120)
                    note()
            for process in [] if memory else running:
                systems.read_until(process, "ready=", 120)
            begin = time.time() + 0.2
            for process in running:
                process.stdin.write(f"{begin}\n")
                process.stdin.flush()
            results = [parse_values(self.processes.finish(process, 60)) for process in running]
        finally:
            for process in running:
                self.processes.end(process)
        late = max(result["late_ms"] for result in results)
        if late > 100:
            raise systems.Failure(f"a client began {late:.0f} ms late")
        return sum(result[key] for result in results), used

    def start(self, system):
        holder = self.hold(system)
        try:
            system.check_used()
            results = [self.micro(system, "start") for _ in range(3 if self.quick else 5)]
        finally:
            self.release([holder])
        return {
            "start": statistics.median(result["runtime_start_ms"] for result in results),
            "first_kernel": statistics.median(result["first_kernel_ms"] for result in results),
        }

    def memory(self, system):
        more = 4
        holders = [self.hold(system)]
        try:
            before = self.device_memory(holders[0])
            holders += [self.hold(system) for _ in range(more)]
            after = self.device_memory(holders[0])
        finally:
            self.release(holders)
        return {"memory": (after - before) / more}

    def device_memory(self, holder):
        """MiB in use on the first device: from nvidia-smi, or as a client sees it where there is none."""
        if shutil.which("nvidia-smi"):
            text = nvidia_smi("memory.used")
            if text and text.split()[0].isdigit():
                return float(text.split()[0])
        if holder is None:
            raise systems.Failure("there is no nvidia-smi to ask")
        holder.stdin.write("?\n")
        holder.stdin.flush()
        return parse_values(systems.read_until(holder, "used_mib=", 10))["used_mib"]

    def bandwidth(self, system):
        values = self.micro(system, "bandwidth")
        return {
            f"{way}_{kind}": values[f"{way}_{kind}_gb_s"] for way in ("h2d", "d2h") for kind in ("pinned", "pageable")
        }

    def idle(self, system):
        holder = self.hold(system)
        try:
            pids = system.pids()
            if not pids:
                return {}
            time.sleep(1)  # What the client's start left to do is not idling.
            seconds = 2 if self.quick else 4
            before = cpu_ms(pids)
            time.sleep(seconds)
            return {"idle": (cpu_ms(pids) - before) / seconds}
        finally:
            self.release([holder])


def cpu_ms(pids):
    """Milliseconds of CPU that the processes have used so far."""
    ticks = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                ticks += systems.parse_stat(stat.read())[1]
        except OSError:
            raise systems.Failure(f"process {pid} has ended") from None
    return ticks * 1000 / os.sysconf("SC_CLK_TCK")


def nvidia_smi(field):
    """One field of the first GPU, or None."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


# --------------------------------------------------------------------------------------------------------------------
# The report


class Report:
    def __init__(self, names, measurements, about):
        self.systems = names
        self.measurements = measurements
        self.about = about
        self.values = {}  # row key -> system -> list of values
        self.failures = []

    def add(self, system, values):
        for key, value in values.items():
            self.values.setdefault(key, {}).setdefault(system, []).append(value)

    def fail(self, system, measurement, failure):
        text = f"{systems.SYSTEM_TITLES[system]}, {measurement}: {failure}"
        print(text, file=sys.stderr)
        self.failures.append(text)

    def median(self, key, system):
        values = self.values.get(key, {}).get(system)
        return statistics.median(values) if values else None

    def rows(self):
        for measurement in self.measurements:
            for row in MEASUREMENTS[measurement]:
                yield row, row.reached(self.median(row.key, "native"), self.median(row.key, "mpsshim"))

    def markdown(self):
        lines = ["| | " + " | ".join(systems.SYSTEM_TITLES[s] for s in self.systems) + " | to reach | |"]
        lines.append("|---|" + "---|" * (len(self.systems) + 2))
        for row, reached in self.rows():
            cells = []
            for system in self.systems:
                value = self.median(row.key, system)
                cells.append("–" if value is None else f"{value:,.{row.digits}f} {row.unit}")
            verdict = {True: "yes", False: "**no**", None: ""}[reached]
            lines.append(f"| {row.title} | " + " | ".join(cells) + f" | {row.target_text()} | {verdict} |")
        return "\n".join(lines)

    def document(self):
        text = f"# Native, NVIDIA MPS and mpsshim, {self.about['date']}\n\n{self.markdown()}\n\n"
        text += f"Medians of {self.about['repetitions']} rounds, all systems in turn within each round.\n\n"
        for name in ("command", "commit", "gpu", "driver", "cpus", "kernel"):
            text += f"- {name}: {self.about[name]}\n"
        if self.failures:
            text += "\nWhat failed:\n\n" + "".join(f"- {failure}\n" for failure in self.failures)
        return text

    def data(self):
        return self.about | {"values": self.values, "failures": self.failures}

    def save(self, directory):
        os.makedirs(directory, exist_ok=True)
        stem = os.path.join(directory, "gpu-" + self.about["date"][:16].replace(":", "").replace(" ", "-"))
        with open(stem + ".json", "w") as file:
            json.dump(self.data(), file, indent=1)
            file.write("\n")
        with open(stem + ".md", "w") as file:
            file.write(self.document())
        return stem


def about(arguments, repetitions):
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=os.path.dirname(os.path.abspath(__file__)),
            capture_output=True,
            text=True,
        ).stdout.strip()
    except OSError:
        commit = ""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["benches/gpu/run.py", *arguments]),
        "commit": commit or "unknown",
        "gpu": nvidia_smi("name") or "unknown",
        "driver": nvidia_smi("driver_version") or "unknown",
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "repetitions": repetitions,
    }


# --------------------------------------------------------------------------------------------------------------------
# The run


def comma_list(known):
    def parse(text):
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--build", default="target/release", help="where libmpsshim.so, mps-control and mps-server are")
    parser.add_argument("--microbench", help="compiled benches/cuda/microbench.cu")
    parser.add_argument("--nbody", help="an nbody binary; its rows are left out without it")
    parser.add_argument("--results", default="docs/results", help="where the .json and .md files go (%(default)s)")
    parser.add_argument(
        "--only", type=comma_list(MEASUREMENTS), default=list(MEASUREMENTS), help=f"of {','.join(MEASUREMENTS)}"
    )
    parser.add_argument("--python", help="a python with PyTorch and transformers; its rows are left out without it")
    names = list(systems.SYSTEM_TITLES)
    parser.add_argument("--systems", type=comma_list(names), default=names, help=f"of {','.join(names)}")
    parser.add_argument("--repetitions", type=int, default=None, help="rounds (2; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="shorter measurements, one round")
    parser.add_argument(
        "--budget", type=float, default=360, help="seconds after which no measurement begins (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.repetitions is None:
        options.repetitions = 1 if options.quick else 2
    if options.repetitions < 1:
        parser.error("--repetitions: at least 1")
    for name in ("microbench", "nbody", "python"):
        path = getattr(options, name)
        if path and not os.access(path, os.X_OK):
            parser.error(f"--{name} {path}: no such program")
    if not (options.microbench or options.nbody or options.python):
        parser.error("give at least one of --microbench, --nbody and --python")
    return options


def start_systems(options, usable, bench, report):
    """Starts the systems; those that do not work leave the list."""
    for system in list(usable):
        try:
            system.start()
            if options.microbench:
                holder = bench.hold(system)
                try:
                    system.check_used()
                finally:
                    bench.release([holder])
        except systems.Failure as failure:
            report.fail(system.name, "start", failure)
            systems.show_log(system)
            system.stop()
            usable.remove(system)


def measure_all(options, usable, bench, report):
    begin = time.monotonic()
    for repetition in range(options.repetitions):
        for measurement in options.only:
            reason = bench.possible(measurement)
            if reason:
                if repetition == 0:
                    print(f"{measurement}: left out, {reason}", file=sys.stderr)
                continue
            for system in usable:
                if time.monotonic() - begin > options.budget:
                    report.fail(system.name, measurement, f"left out of round {repetition + 1}, the budget is spent")
                    continue
                since = time.monotonic()
                try:
                    values = bench.run(measurement, system)
                except (systems.Failure, KeyError, OSError) as failure:
                    report.fail(system.name, measurement, repr(failure) if isinstance(failure, KeyError) else failure)
                    systems.show_log(system)
                    continue
                report.add(system.name, values)
                shown = " ".join(f"{key}={value:.4g}" for key, value in values.items())
                print(f"{time.monotonic() - since:5.1f} s  {system.name:8} {shown or '–'}", flush=True)


def main(arguments):
    options = parse_arguments(arguments)
    # A stop from outside must still end every daemon and client.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    report = Report(options.systems, options.only, about(arguments, options.repetitions))
    processes = systems.Processes()
    bench = Bench(processes, options.microbench, options.nbody, options.quick, options.python)
    with tempfile.TemporaryDirectory(prefix="mpsbench-") as directory:
        usable = [systems.make_system(name, processes, directory, options.build) for name in options.systems]
        try:
            start_systems(options, usable, bench, report)
            measure_all(options, usable, bench, report)
        finally:
            processes.end_all()
            for system in usable:
                system.stop()
            processes.end_all()
    print()
    print(report.markdown())
    print(f"\nwritten to {report.save(options.results)}.md and .json")
    missed = [row.title for row, reached in report.rows() if reached is False]
    if missed:
        print("not reached: " + "; ".join(missed))
    return 1 if report.failures or missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
