#!/usr/bin/env python3
"""Measures native CUDA, NVIDIA MPS and mpsshim side by side on one GPU.

Every measurement runs on each system in turn, and the whole round is repeated, so that a change of the machine's state
meets all alike. The table shows medians and spread. With no arguments it takes what it finds: the binaries in
target/release, nvcc for benches/cuda/microbench.cu, PyTorch for the Python that runs it. What is missing is left out
and named.

    benches/gpu/run.py
    benches/gpu/run.py --build DIRECTORY --microbench ./microbench --nbody ./nbody --only latency,start --budget 120
"""

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import measure
import plot
import report as reports
import systems
import table

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
SOURCE = os.path.join(ROOT, "benches", "cuda", "microbench.cu")


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
    parser.add_argument(
        "--build",
        default=os.path.join(ROOT, "target", "release"),
        help="folder with libmpsshim.so, mps-control and mps-server (default: target/release)",
    )
    parser.add_argument(
        "--microbench", help="compiled benches/cuda/microbench.cu (default: compiled into BUILD with nvcc)"
    )
    parser.add_argument("--nbody", help="an nbody binary (default: the one in BUILD)")
    parser.add_argument(
        "--results",
        default=os.path.join(ROOT, "docs", "results"),
        help="folder for the .json, .md and .svg files (default: docs/results)",
    )
    parser.add_argument(
        "--only",
        type=comma_list(table.MEASUREMENTS),
        default=table.by_importance(table.MEASUREMENTS),
        help=f"measurements to run, in this order, from {','.join(table.MEASUREMENTS)}",
    )
    parser.add_argument(
        "--python", help="a Python with PyTorch and transformers (default: the one that runs this program)"
    )
    names = list(systems.SYSTEM_TITLES)
    parser.add_argument(
        "--systems", type=comma_list(names), help=f"systems to measure, from {','.join(names)} (default: all available)"
    )
    parser.add_argument(
        "--server-options",
        metavar="OPTIONS",
        action="append",
        default=[],
        help="measure mpsshim once more with these options of mps-server, such as '--launch-run 1'; may be repeated",
    )
    parser.add_argument("--repetitions", type=int, default=None, help="number of rounds (default: 3; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="shorter measurements, one round")
    parser.add_argument(
        "--budget",
        type=float,
        default=2400,
        help="seconds after which no further measurement is started; important ones come first (default: %(default)s)",
    )
    parser.add_argument(
        "--resume",
        metavar="FILE.json",
        help="add the missing measurements to the result of an earlier run on this machine",
    )
    options = parser.parse_args(arguments)
    if options.repetitions is None:
        options.repetitions = 1 if options.quick or options.resume else 3
    if options.repetitions < 1:
        parser.error("--repetitions: at least 1")
    if options.resume and options.repetitions > 1:
        parser.error("--resume adds what was never measured, one round of it: without --repetitions")
    for name in ("microbench", "nbody", "python"):
        path = getattr(options, name)
        if path and not os.access(path, os.X_OK):
            parser.error(f"--{name} {path}: no such program")
    options.given = options.systems is not None
    if not options.given:
        options.systems = names
    for given in dict.fromkeys(options.server_options):
        if not given.startswith("--"):
            parser.error(f"--server-options {given!r}: options begin with --; write --server-options='--launch-run 1'")
        options.systems = [*options.systems, systems.WITH_OPTIONS + given]
    return options


def nvcc():
    """The CUDA compiler's path, or None."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", "")] + [f"{h}/bin" for h in homes if h]))


def compile_program(option, to, sources, flags=()):
    """Compiles the program that `option` would have named; the reason why not, or None."""
    compiler = nvcc()
    if compiler is None:
        return f"no {option}, and no nvcc to compile it"
    print(f"compiling {to}", file=sys.stderr)
    os.makedirs(os.path.dirname(to), exist_ok=True)
    said = ""
    # For the GPU of this machine; for any when the compiler is too old to find out.
    for architecture in (["-arch=native"], []):
        command = [compiler, "-O2", "-std=c++17", *architecture, *flags, *sources, "-o", to + ".new"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode == 0:
            os.replace(to + ".new", to)
            return None
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    return f"no {option}, and {compiler} ended with {done.returncode}: {said}"


def current_program(option, path, sources, flags=()):
    """Compiles the program to this path unless it is there and newer than its sources; the reason why not, or None."""
    newest = max(os.path.getmtime(source) for source in sources)
    if os.access(path, os.X_OK) and os.path.getmtime(path) >= newest:
        return None
    return compile_program(option, path, sources, flags)


def find_programs(options):
    """Completes the options with what is there; program -> why it is not."""
    reasons = {}
    if not options.microbench:
        path = os.path.join(options.build, "microbench")
        reason = current_program("--microbench", path, [SOURCE])
        if reason is None:
            options.microbench = path
        else:
            reasons["microbench"] = reason
    if not options.nbody:
        path = os.path.join(options.build, "nbody")
        if os.access(path, os.X_OK):
            options.nbody = path
        else:
            reasons["nbody"] = f"no --nbody, and no {path}"
    if not options.python:
        lacking = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
        if lacking:
            reasons["python"] = f"no --python, and {sys.executable} has no {' and no '.join(lacking)}"
        else:
            options.python = sys.executable
    return reasons


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
            systems.give_up(system, failure, report, options.given)
            usable.remove(system)


def measure_one(measurement, system, bench, report):
    since = time.monotonic()
    try:
        values = bench.run(measurement, system)
    except systems.Refused as refused:
        print(f"{time.monotonic() - since:5.1f} s  {system.name:8} {measurement} refused: {refused}", flush=True)
        report.refuse(system.name, measurement, refused)
    except (systems.Failure, KeyError, OSError) as failure:
        report.fail(system.name, measurement, repr(failure) if isinstance(failure, KeyError) else failure)
        systems.show_log(system)
    else:
        report.add(system.name, values)
        shown = " ".join(f"{key}={value:.4g}" for key, value in values.items())
        print(f"{time.monotonic() - since:5.1f} s  {system.name:8} {shown or '–'}", flush=True)


def measure_all(options, usable, bench, report):
    begin = time.monotonic()
    possible = []
    for measurement in options.only:
        if reason := bench.possible(measurement):
            report.leave_out(measurement, reason)
        else:
            possible.append(measurement)
    for repetition in range(options.repetitions):
        for number, measurement in enumerate(possible):
            for system in usable:
                if time.monotonic() - begin > options.budget:
                    report.stop(repetition + 1, possible[number:])
                    return
                if system.name in report.refused.get(table.MEASUREMENTS[measurement].rows[0].key, {}):
                    continue  # Once is enough.
                if options.resume and report.has(system.name, measurement):
                    continue
                measure_one(measurement, system, bench, report)
            # Whoever ends the run from outside keeps what was measured so far.
            report.save(options.results)


def main(arguments):
    options = parse_arguments(arguments)
    # A stop from outside must still end every daemon and client.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    reasons = find_programs(options)
    about = reports.about(arguments, options.repetitions)
    report = reports.Report(list(options.systems), options.only, about)
    if options.resume:
        try:
            report = reports.Report.load(options.resume)
            report.resume(about, options.systems, options.only)
        except (OSError, ValueError, KeyError) as error:
            print(f"--resume {options.resume}: {error}", file=sys.stderr)
            return 2
    processes = systems.Processes()
    programs = {name: getattr(options, name) for name in ("microbench", "nbody", "python")}
    bench = measure.Bench(processes, **programs, quick=options.quick, reasons=reasons)
    if not any(bench.possible(measurement) is None for measurement in options.only):
        print("\n".join(["nothing can be measured:", *reasons.values()]), file=sys.stderr)
        return 2
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
    if cpus := report.cpu_table():
        print(f"\n{cpus}")
    stem = report.save(options.results)
    print(f"\nwritten to {stem}.md and .json")
    if reason := plot.missing():
        print(f"no plots: {reason}; where it is, benches/gpu/plot.py {stem}.json draws them")
    else:
        print("\n".join(plot.draw(stem + ".json")))
    missed = [row.title for row, reached in report.rows() if reached is False]
    if missed:
        print("not reached: " + "; ".join(missed))
    return 1 if report.failures or missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
