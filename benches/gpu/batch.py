#!/usr/bin/env python3
"""Runs all programs of a folder several at a time, natively, under NVIDIA MPS and through mpsshim, and compares the times.

    benches/gpu/batch.py --programs DIR --build target/release [--with-long PROGRAM] [--results DIR]

DIR holds compiled programs, CUDA samples for instance, and their data files. First each program runs by itself; those
that fail, or take longer than --longest, are left out, and the others are the batch: each started twice, in one shuffled
order, --jobs at a time, in two passes on each system. --with-long adds programs with kernels of 1 ms to 5 s, of a compiled
benches/cuda/standstill.cu. Exit status 1 when something that passes by itself fails in mpsshim's
batch, 2 for wrong arguments.
"""

import argparse
import concurrent.futures
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

import report as reports
import scenarios
import systems

# A program may take so many times as long as under NVIDIA MPS, and so many seconds more.
TIMES, MORE = 3, 2
class Program:
    def __init__(self, name, command, folder=None):
        self.name, self.command, self.folder = name, command, folder


def is_program(path):
    with open(path, "rb") as file:
        return os.access(path, os.X_OK) and file.read(4) == b"\x7fELF" and ".so" not in path.name


def long_programs(program):
    for name, options in scenarios.batch_programs(quick=True):
        yield Program(name, [os.path.abspath(program), "newcomer", *options])


def run(program, env, timeout):
    """Exit status, None for one that was ended, and seconds."""
    with tempfile.TemporaryDirectory(prefix="batch-") as scratch:
        work = scratch
        if program.folder:
            # A folder of its own: several programs write a file of the same name.
            work = os.path.join(scratch, "work")
            shutil.copytree(program.folder, work, copy_function=link_or_copy)
        began = time.monotonic()
        try:
            done = subprocess.run(
                program.command, cwd=work, env=env, timeout=timeout,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = None
        return status, time.monotonic() - began


def link_or_copy(source, target):
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class Batch:
    def __init__(self, programs, options):
        self.order = [program for program in programs for _ in range(2)]
        random.Random(options.seed).shuffle(self.order)
        self.jobs, self.timeout = options.jobs, options.timeout

    def run(self, env):
        """Seconds for all, and (program, status, seconds) of each."""
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            done = list(pool.map(lambda program: run(program, env, self.timeout), self.order))
        return time.monotonic() - began, [(program.name, *one) for program, one in zip(self.order, done)]


def late(ours, theirs):
    """Runs of programs that took longer than they may by the longest run of the same program under NVIDIA MPS."""
    longest = {}
    for name, _, seconds in theirs:
        longest[name] = max(seconds, longest.get(name, 0))
    return [
        f"{name}: {seconds:.1f} s, {longest[name]:.1f} s under NVIDIA MPS"
        for name, _, seconds in ours
        if seconds > TIMES * longest.get(name, seconds) + MORE
    ]


def measure(options, programs, found, failures):
    with tempfile.TemporaryDirectory(prefix="batch-") as directory:
        processes = systems.Processes()
        for name in options.systems:
            system = systems.make_system(name, processes, directory, options.build)
            try:
                system.start()
                for _ in range(2):
                    seconds, runs = Batch(programs, options).run(system.env())
                    found.setdefault(name, []).append((seconds, runs))
                    failed = [f"{systems.title(name)}: {one}, status {status}" for one, status, _ in runs if status != 0]
                    print(f"{name:8} {seconds:6.1f} s, {len(failed)} of {len(runs)} failed", flush=True)
                    failures.extend(failed)
            except systems.Failure as failure:
                failures.append(f"{systems.title(name)}: {failure}")
            finally:
                if options.logs:
                    systems.keep_logs([system], options.logs)
                system.stop()
                processes.end_all()


def document(options, programs, found, left_out, failures, about):
    names = [name for name in options.systems if name in found]
    rows = [("first pass", lambda passes: f"{passes[0][0]:.1f} s")]
    rows.append(("second pass", lambda passes: f"{passes[-1][0]:.1f} s" if len(passes) > 1 else "–"))
    rows.append(("failed", lambda passes: str(sum(one[1] != 0 for _, runs in passes for one in runs))))
    lines = ["| | " + " | ".join(map(systems.title, names)) + " |", "|---|" + "---|" * len(names)]
    lines += [f"| {title} | " + " | ".join(cell(found[name]) for name in names) + " |" for title, cell in rows]
    slow = []
    if "nvidia" in found and "mpsshim" in found:
        both = [[run for _, runs in found[name] for run in runs] for name in ("mpsshim", "nvidia")]
        slow = late(*both)
    text = f"# A batch of programs, {about['date']}\n\n"
    text += f"{len(programs)} programs, each twice, {options.jobs} at a time, in one shuffled order, two passes.\n\n"
    text += "\n".join(lines) + "\n\n"
    title = f"Runs over {TIMES} times the longest one under NVIDIA MPS and {MORE} s"
    text += f"{title}: {len(slow)}\n" + "".join(f"- {one}\n" for one in slow) + "\n"
    text += f"Left out, since they fail or take longer than {options.longest:g} s by themselves: {', '.join(left_out) or 'none'}.\n\n"
    return text + reports.machine(about) + reports.remarks([], failures)


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--programs", metavar="DIR", required=True, help="folder with compiled programs and their data")
    parser.add_argument("--build", default="target/release", help="folder with libmpsshim.so and mps-control (%(default)s)")
    parser.add_argument("--with-long", metavar="PROGRAM", help="compiled standstill.cu: add programs with long kernels")
    parser.add_argument("--without", metavar="NAMES", default="", help="programs to leave out, by commas: those that fault")
    parser.add_argument("--systems", default="native,nvidia,mpsshim", help="systems, by commas (%(default)s)")
    parser.add_argument("--jobs", type=int, default=8, help="programs at a time (%(default)s)")
    parser.add_argument("--alone-jobs", type=int, default=2, help="the same in the first run (%(default)s)")
    parser.add_argument("--longest", type=float, default=10, help="seconds that a program may take by itself (%(default)g)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds after which a program is ended (%(default)g)")
    parser.add_argument("--seed", type=int, default=1, help="of the order (%(default)s)")
    parser.add_argument("--results", metavar="DIR", help="write the table and the times here")
    parser.add_argument("--logs", metavar="DIR", help="keep the daemons' and servers' logs here")
    options = parser.parse_args(arguments)
    options.systems = options.systems.split(",")
    if not os.path.isdir(options.programs):
        parser.error(f"--programs: there is no folder {options.programs}")
    if unknown := [name for name in options.systems if name not in ("native", "nvidia", "mpsshim", "direct")]:
        parser.error(f"--systems: unknown: {', '.join(unknown)}")
    return options


def main(arguments):
    options = parse_arguments(arguments)
    without = options.without.split(",")
    files = sorted(path for path in pathlib.Path(options.programs).resolve().iterdir() if path.is_file())
    paths = [path for path in files if is_program(path) and path.name not in without]
    programs = [Program(path.name, [f"./{path.name}"], path.parent) for path in paths]
    with concurrent.futures.ThreadPoolExecutor(options.alone_jobs) as pool:
        alone = list(pool.map(lambda program: run(program, dict(os.environ), options.longest), programs))
    left_out = [program.name for program, (status, _) in zip(programs, alone) if status != 0]
    programs = [program for program, (status, _) in zip(programs, alone) if status == 0]
    if options.with_long:
        programs += long_programs(options.with_long)
    if not programs:
        print(f"{options.programs}: no program passes by itself", file=sys.stderr)
        return 2
    found, failures = {}, []
    about = reports.about(arguments, 1, "benches/gpu/batch.py")
    measure(options, programs, found, failures)
    text = document(options, programs, found, left_out, failures, about)
    print(text)
    if options.results:
        stem = reports.save(options.results, "batch", about["date"], about | {"runs": found}, text)
        print(f"written to {stem}.md and .json")
    ours = [run for _, runs in found.get("mpsshim", []) for run in runs]
    return 1 if any(status != 0 for _, status, _ in ours) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
