#!/usr/bin/env python3
"""Runs every program of a folder natively and in a mode of mpsshim, and prints a table of both.

    tests/gpu/programs.py --programs DIR --build target/release [--out DIR] [--jobs N] [--markdown FILE] [NAME...]

DIR holds compiled CUDA samples and their data files. A program passes natively when it exits with status 0 (2 counts as
waived: it lacks something on this machine); under mpsshim when it exits with the same status. Where the outputs
differ in more than times and addresses the first such line is shown. Exit status 1 when a program that passes natively
does not under mpsshim.
"""
import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benches", "gpu"))
import systems  # noqa: E402  The processes and the daemon are the benches'.
from batch import is_program, link_or_copy  # noqa: E402

WAIVED = 2
# These end with a fault on the device on purpose. In one shared context that takes the server's other clients along
# (docs/faults.md), so they run by themselves, last.
FAULTING = ("simpleAssert", "simpleAssert_nvrtc")
# What differs from run to run: numbers with a point or an exponent, addresses, process ids, times.
VARIES = re.compile(r"0x[0-9a-fA-F]+|\d+\.\d+(e[-+]?\d+)?|\d+(?= ?(ms|us|usec|msec|sec|GB|MB|cycles|clocks))|nan|[\d,.]+%")
SKIPPED_LINES = re.compile(r"time|speed|bandwidth|throughput|GB/s|MB/s|GFLOP|second|free|pid|\bseed|perf|clock", re.I)


def run(program, folder, env, timeout):
    began = time.monotonic()
    try:
        done = subprocess.run([program], cwd=folder, env=env, capture_output=True, timeout=timeout,
                              stdin=subprocess.DEVNULL)
        status, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        status, out, err = None, late.stdout or b"", late.stderr or b""
    return status, out.decode(errors="replace"), err.decode(errors="replace"), time.monotonic() - began


def comparable(text):
    return [VARIES.sub("#", line).strip() for line in text.splitlines() if not SKIPPED_LINES.search(line)]


def difference(expected, found):
    for a, b in zip(comparable(expected), comparable(found)):
        if a != b:
            return f"{b[:70]!r} instead of {a[:70]!r}"
    return None


def word(status):
    return {None: "timeout", 0: "pass", WAIVED: "waived"}.get(status, f"status {status}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", required=True)
    parser.add_argument("--build", default="target/release", help="folder with libmpsshim.so and mps-control")
    parser.add_argument("--mode", choices=systems.MODES, default="proxy", help="of the clients (%(default)s)")
    parser.add_argument("--out", help="keep every output here")
    parser.add_argument("--jobs", type=int, default=4, help="programs at a time (%(default)s)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one run (%(default)s)")
    parser.add_argument("--markdown", help="write the table here")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    folder = pathlib.Path(options.programs).resolve()
    programs = sorted(p for p in folder.iterdir() if p.is_file() and is_program(p))
    if options.names:
        programs = [p for p in programs if p.name in options.names]
    faulting = [p for p in programs if p.name in FAULTING]
    harmless = [p for p in programs if p not in faulting]
    pool = concurrent.futures.ThreadPoolExecutor(options.jobs)

    def all_of(env):
        with tempfile.TemporaryDirectory(prefix="programs-") as scratch:

            def one(program):
                # A folder of its own: several samples write a file of the same name.
                work = pathlib.Path(scratch, program.name)
                shutil.copytree(folder, work, copy_function=link_or_copy)
                status, out, err, seconds = run(work / program.name, work, env, options.timeout)
                return status, out.replace(str(work), "."), err, seconds

            results = dict(zip(harmless, pool.map(one, harmless)))
            results.update((p, one(p)) for p in faulting)
            return [results[p] for p in programs]

    with systems.running(options.mode, options.build) as (bare, system):
        native = all_of(bare.env())
        ours = all_of(system.env())
        server = pathlib.Path(system.log, "server.log")
        log = server.read_text() if server.exists() else ""
    rows, passing, same = [], 0, 0
    for program, a, b in zip(programs, native, ours):
        note = ""
        if b[0] != a[0]:
            lines = (b[2].strip() or b[1].strip()).splitlines() or [""]
            note = lines[-1][:160]
        elif a[0] == 0:
            note = difference(a[1], b[1]) or ""
        if a[0] == 0:
            passing += 1
            same += b[0] == 0
        rows.append((program.name, word(a[0]), word(b[0]), note))
        mark = "FAIL" if a[0] == 0 and b[0] != 0 else "diff" if note else "    "
        print(f"{mark} {program.name:32} {word(a[0]):10} {a[3]:5.1f} s  {word(b[0]):10} {b[3]:5.1f} s  {note}")
        if options.out:
            kept = pathlib.Path(options.out)
            kept.mkdir(parents=True, exist_ok=True)
            for who, done in (("native", a), (options.mode, b)):
                (kept / f"{program.name}.{who}.txt").write_text(done[1] + "\n--- stderr\n" + done[2])
            (kept / "server.log").write_text(log)
    print(f"{len(programs)} programs, {passing} pass natively, {same} of these in {options.mode} mode")
    if options.markdown:
        text = f"| program | native | {options.mode} | note |\n|---|---|---|---|\n"
        text += "".join(f"| {n} | {a} | {b} | {note.replace('|', '/')} |\n" for n, a, b, note in rows)
        pathlib.Path(options.markdown).write_text(text)
    return 0 if same == passing else 1


if __name__ == "__main__":
    sys.exit(main())
