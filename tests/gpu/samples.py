#!/usr/bin/env python3
"""Runs compiled CUDA samples natively and through mpsshim, and compares what they print and their exit status.

    tests/gpu/samples.py --programs DIR --build target/release [--out DIR]

DIR holds the samples' binaries (those missing are left out) with their .fatbin files beside them. Each sample runs
natively, then through the shim alone, then as four copies at once, then all samples at the same time. Times, rates and
counts that depend on them are not compared. Exit status 1 if anything differs.
"""

import argparse
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benches", "gpu"))
import systems  # noqa: E402  The processes and the daemon are the benches'.


@dataclasses.dataclass(frozen=True)
class Sample:
    name: str
    command: tuple


SAMPLES = [
    Sample(name, (name,))
    for name in (
        "vectorAdd",
        "simpleStreams",
        "asyncAPI",
        "simpleHyperQ",
        "simpleZeroCopy",
        "simpleOccupancy",
        "simpleCooperativeGroups",
        "matrixMul",
        "matrixMulDrv",
        "vectorAddDrv",
        "deviceQuery",
    )
] + [
    Sample("simpleZeroCopy-generic", ("simpleZeroCopy", "--use_generic_memory")),
    Sample("nbody-compare", ("nbody", "-compare")),
    Sample("nbody-compare-fp64", ("nbody", "-compare", "-fp64")),
    Sample("nbody-benchmark", ("nbody", "-benchmark", "-numbodies=14336", "-i=100")),
    Sample("nbody-hostmem", ("nbody", "-benchmark", "-hostmem", "-numbodies=4096", "-i=10")),
    Sample("bandwidth", ("microbench", "bandwidth", "--bytes", "16777216")),
    Sample("latency", ("microbench", "latency")),
]

# Lines that carry a time, a rate, or a count that depends on one.
VARIES = re.compile(
    r"[\d. ](ms|msec|us|usec|sec)\b|\ds\b|GB/s|MB/s|gflop|interactions per second|\btime\b|time=|iterations while"
    r"|^(memcopy|kernel|non-streamed|\d+ streams):",
    re.IGNORECASE,
)
# The values that microbench prints; the names are compared.
READING = re.compile(r"^(\w+)=[\d.]+$")


def comparable(output):
    """The lines of a sample's output that must not change from run to run."""
    return [
        READING.sub(r"\1=", line.rstrip())
        for line in output.splitlines()
        if READING.match(line) or not VARIES.search(line)
    ]


def first_difference(expected, got):
    """Where two lists of lines differ first, in words, or None."""
    for number, (a, b) in enumerate(zip(expected, got), 1):
        if a != b:
            return f"line {number}: {b!r} instead of {a!r}"
    if len(expected) != len(got):
        longer, how = (expected, "missing") if len(expected) > len(got) else (got, "too much")
        return f"{how}: {longer[min(len(expected), len(got))]!r}"
    return None


class Check:
    def __init__(self, processes, programs, out, timeout):
        self.processes = processes
        self.programs = programs
        self.out = out
        self.timeout = timeout
        self.failed = 0

    def present(self, sample):
        return os.access(os.path.join(self.programs, sample.command[0]), os.X_OK)

    def start(self, sample, env):
        program = os.path.join(self.programs, sample.command[0])
        # The driver API samples look for their .fatbin beside themselves and in the current directory.
        return self.processes.start([program, *sample.command[1:]], env, cwd=self.programs)

    def finish(self, process, label):
        """Exit status (None after a timeout) and output; the output is kept under `label`."""
        try:
            output, errors = process.communicate(timeout=self.timeout)
            status = process.returncode
        except subprocess.TimeoutExpired:
            self.processes.end(process)
            status, output, errors = None, "", ""
        with open(os.path.join(self.out, label + ".out"), "w") as file:
            file.write(output + errors + f"\n[exit status {status}]\n")
        self.processes.end(process)
        return status, output, errors

    def together(self, samples, env, how):
        """Starts all, waits for all; a result for each."""
        running = [(sample, self.start(sample, env)) for sample in samples]
        return [self.finish(process, f"{sample.name}.{how}{i}") for i, (sample, process) in enumerate(running)]

    def judge(self, sample, how, expected, results):
        problems = []
        for status, output, errors in results:
            if status is None:
                problems.append(f"still running after {self.timeout:.0f} s")
            elif status != expected[0]:
                last = ((errors.strip() or output.strip()).splitlines() or [""])[-1]
                problems.append(f"exit status {status} instead of {expected[0]}: {last}")
            elif difference := first_difference(comparable(expected[1]), comparable(output)):
                problems.append(difference)
        print(f"{'FAIL' if problems else 'PASS'}  {sample.name:26} {how}", *problems[:1], flush=True)
        self.failed += bool(problems)


def check_all(check, samples, native, shim, copies):
    expected = {}
    for sample in samples:
        (expected[sample],) = check.together([sample], native.env(), "native")
        status, output, errors = expected[sample]
        if status != 0:
            print(f"      {sample.name:26} natively ends with {status}: {(errors or output).strip()[-100:]!r}")
    for sample in samples:
        check.judge(sample, "alone", expected[sample], check.together([sample], shim.env(), "alone"))
    for sample in samples:
        check.judge(
            sample, f"{copies} at once", expected[sample], check.together([sample] * copies, shim.env(), "copy")
        )
    for sample, result in zip(samples, check.together(samples, shim.env(), "mixed")):
        check.judge(sample, "beside all others", expected[sample], [result])


def clients(shim):
    servers = shim.servers()
    return [client for server in servers for client in systems.parse_pids(shim.command("get_client_list", str(server)))]


def check_emptied(check, shim):
    """The server must have forgotten every client that has ended."""
    deadline = time.monotonic() + 5
    while (left := clients(shim)) and time.monotonic() < deadline:
        time.sleep(0.1)
    print(f"{'FAIL' if left else 'PASS'}  the server has no clients left", left or "")
    check.failed += bool(left)


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", required=True, help="directory of the compiled samples")
    parser.add_argument(
        "--build", default="target/release", help="where libmpsshim.so and mps-control are (%(default)s)"
    )
    parser.add_argument("--out", help="keep every run's output in this directory")
    parser.add_argument("--only", nargs="+", choices=[sample.name for sample in SAMPLES], metavar="SAMPLE")
    parser.add_argument("--copies", type=int, default=4, help="how many at once (%(default)s)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one run (%(default)s)")
    return parser.parse_args(arguments)


def main(arguments):
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    processes = systems.Processes()
    with tempfile.TemporaryDirectory(prefix="mpscheck-") as directory:
        out = options.out or os.path.join(directory, "out")
        os.makedirs(out, exist_ok=True)
        check = Check(processes, os.path.abspath(options.programs), out, options.timeout)
        wanted = [sample for sample in SAMPLES if not options.only or sample.name in options.only]
        samples = [sample for sample in wanted if check.present(sample)]
        for sample in wanted:
            if sample not in samples:
                print(f"      {sample.name:26} left out: no such program in {options.programs}")
        if not samples:
            print("no samples to run", file=sys.stderr)
            return 1
        native = systems.make_system("native", processes, directory, options.build)
        shim = systems.make_system("mpsshim", processes, directory, options.build)
        try:
            shim.start()
            check_all(check, samples, native, shim, options.copies)
            check_emptied(check, shim)
        except systems.Failure as failure:
            print(f"FAIL  {failure}")
            check.failed += 1
        finally:
            processes.end_all()
            if check.failed:
                print(shim.log_tail(), file=sys.stderr)
            if options.out and os.path.isdir(shim.log):
                shutil.copytree(shim.log, os.path.join(out, "log"), dirs_exist_ok=True)
            shim.stop()
    print(f"{check.failed} failed" if check.failed else "all passed")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
