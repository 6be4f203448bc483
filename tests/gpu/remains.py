#!/usr/bin/env python3
"""Whether a client finds in fresh memory what another client of its server has left there.

    tests/gpu/remains.py --build target/release [--nvcc nvcc]

Compiles remains.cu and runs it: natively by itself (what a program finds of its own: so the pattern is found where it is),
then through mpsshim beside an idle client, which keeps the server: three times one client that writes and one that looks, then one
that looks while the writer still lives. Prints a table; exit status 1 when a client finds another's words. What is not
cleared is in the table too: see docs/threat-model.md.
"""
import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benches" / "gpu"))
import systems  # noqa: E402

# In docs/threat-model.md.
NOT_CLEARED = ("heap of the device", "shared memory")


def words(text):
    rows = (line.rsplit(": ", 1) for line in text.splitlines() if ": " in line)
    return {name: int(count) for name, count in rows}


def look(processes, program, env):
    return words(processes.run([program, "read"], env, 120))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True, help="folder with libmpsshim.so, mps-control, mps-server")
    parser.add_argument("--nvcc", default="nvcc", help="(%(default)s)")
    options = parser.parse_args()
    source = pathlib.Path(__file__).with_name("remains.cu")
    with tempfile.TemporaryDirectory() as folder, systems.running("proxy", options.build) as (bare, system):
        program = os.path.join(folder, "remains")
        subprocess.run([options.nvcc, "-std=c++17", "-arch=native", "-o", program, source, "-lcuda"], check=True)
        processes = system.processes
        own = words(processes.run([program, "both"], bare.env(), 120))
        idle = processes.start([program, "read", "wait"], system.env(), stdin=subprocess.PIPE)
        systems.read_until(idle, "ready", 120)
        found = []
        for _ in range(3):
            processes.run([program, "write"], system.env(), 120)
            found.append(look(processes, program, system.env()))
        writer = processes.start([program, "write", "wait"], system.env(), stdin=subprocess.PIPE)
        systems.read_until(writer, "ready", 120)
        found.append(look(processes, program, system.env()))
        for process in (writer, idle):
            processes.finish(process, 60, text="")
    wrong = 0
    print(f"{'kind':32} {'its own, natively':>18}  another client's, through mpsshim")
    for name, count in own.items():
        others = [each[name] for each in found]
        wrong += any(others) and name not in NOT_CLEARED
        print(f"{name:32} {count:18}  {' '.join(map(str, others))}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
