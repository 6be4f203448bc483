#!/usr/bin/env python3
"""Runs the framework programs in tests/gpu/frameworks natively and in a mode of mpsshim and compares what they print.

    tests/gpu/frameworks.py --build target/release [--out DIR] [--parallel N] [--together] [PROGRAM...]

Lines are `name: value`; numbers may differ by --tolerance (relative), anything else not at all. `--together` runs all
programs at the same time on one server, again and again for --seconds. Exit status 1 if anything differs.
"""
import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benches", "gpu"))
import systems  # noqa: E402  The processes and the daemon are the benches'.

HERE = pathlib.Path(__file__).resolve().parent / "frameworks"


def run(program, env, timeout):
    began = time.monotonic()
    try:
        done = subprocess.run([sys.executable, HERE / f"{program}.py"], env=env, capture_output=True, text=True,
                              timeout=timeout, stdin=subprocess.DEVNULL)
        code, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        text = [b.decode(errors="replace") if isinstance(b, bytes) else b or "" for b in (late.stdout, late.stderr)]
        code, (out, err) = 124, text
    return {"code": code, "out": out, "err": err, "seconds": time.monotonic() - began}


def values(text):
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


def close(a, b, tolerance):
    try:
        a, b = float(a), float(b)
    except ValueError:
        return a == b
    return abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-3)


def compare(native, other, tolerance):
    """What differs, in words."""
    if native["code"] != other["code"]:
        return f"exit status {other['code']} instead of {native['code']}"
    expected, found = values(native["out"]), values(other["out"])
    if expected.keys() != found.keys():
        return f"lines {sorted(expected.keys() ^ found.keys())} are missing or new"
    for name, value in expected.items():
        if not close(value, found[name], tolerance):
            return f"{name}: {found[name]} instead of {value}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True, help="folder with libmpsshim.so, mps-control, mps-server")
    parser.add_argument("--mode", choices=systems.MODES, default="proxy", help="of the clients (%(default)s)")
    parser.add_argument("--out", default="frameworks-out")
    parser.add_argument("--parallel", type=int, default=4, help="programs at a time")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for each program")
    parser.add_argument("--tolerance", type=float, default=2e-3)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--seconds", type=float, default=600, help="how long --together lasts")
    parser.add_argument("programs", nargs="*")
    options = parser.parse_args()
    everything = sorted(path.stem for path in HERE.glob("*.py") if path.stem != "torch_ddp")
    programs = options.programs or everything
    out = pathlib.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=options.parallel)

    def all_of(env):
        return dict(zip(programs, pool.map(lambda p: run(p, env, options.timeout), programs)))

    wrong = 0
    with systems.running(options.mode, options.build) as (bare, system):
        native = all_of(bare.env())
        env = dict(system.env(), MPSSHIM_LOG=os.environ.get("MPSSHIM_LOG", ""))
        ours = all_of(env)
        for program in programs:
            a, b = native[program], ours[program]
            for who, done in (("native", a), (options.mode, b)):
                (out / f"{program}.{who}.txt").write_text(done["out"] + "\n--- stderr\n" + done["err"])
            differs = compare(a, b, options.tolerance)
            wrong += differs is not None or a["code"] != 0
            print(f"{program:20} native {a['code']} {a['seconds']:6.1f} s  {options.mode} {b['code']} {b['seconds']:6.1f} s"
                  f"  {differs or 'same'}", flush=True)
            if a["code"] != 0:
                print(f"    native: {a['err'].strip()[-300:]}")
            elif differs:
                print(f"    {options.mode}: {b['err'].strip()[-1200:]}")
        if options.together:
            until, rounds, failures = time.monotonic() + options.seconds, 0, 0
            everyone = concurrent.futures.ThreadPoolExecutor(max_workers=len(programs))

            def again(program):
                count, bad = 0, []
                while time.monotonic() < until:
                    difference = compare(native[program], run(program, env, options.timeout), options.tolerance)
                    count += 1
                    if difference:
                        bad.append(difference)
                return program, count, bad

            for program, count, bad in everyone.map(again, programs):
                rounds, failures = rounds + count, failures + len(bad)
                print(f"together {program:20} {count} runs, {len(bad)} differ {bad[:2]}")
            wrong += failures
        shutil.copytree(system.log, out / "log", dirs_exist_ok=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
