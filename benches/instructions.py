#!/usr/bin/env python3
"""Counts the instructions that calls take in the client, on softgpu, with valgrind.

    benches/instructions.py --build target/release [--rounds 2000]

Runs `queries --count CALL` for some rounds and for three times as many; the difference is what the calls take, without the
first ones. Counted are instructions of libmpsshim.so within the calls, not those of the waits between them. One `name=value`
per line; a launch is one of 64 in a row with a wait behind.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile

CLIENT = ("libmpsshim.so",)


def instructions(folder, prefix, objects):
    """The sum over callgrind's files of what objects with these names took themselves."""
    total = 0
    for name in os.listdir(folder):
        if not name.startswith(prefix):
            continue
        names, counted, called = {}, False, False
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as lines:
            for line in lines:
                found = re.match(r"ob=(\(\d+\))(?: (.*))?", line)
                if found:
                    number, path = found.groups()
                    if path:
                        names[number] = path
                    counted = os.path.basename(names.get(number, "")) in objects
                elif line.startswith("calls="):
                    called = True
                elif counted and re.match(r"[+\-*\d]", line):
                    # The line behind "calls=" is what the called function took.
                    if not called:
                        total += int(line.split()[1])
                    called = False
                elif re.match(r"cob=(\(\d+\)) (.*)", line):
                    number, path = re.match(r"cob=(\(\d+\)) (.*)", line).groups()
                    names[number] = path
                elif called and re.match(r"[+\-*\d]", line):
                    called = False
    return total


ENTRIES = {"launch": ["cuLaunchKernel"], "malloc": ["cuMemAlloc_v2", "cuMemFree_v2"]}


def count(build, call, rounds):
    """Instructions for so many calls."""
    with tempfile.TemporaryDirectory(prefix="mi-") as work:
        for name in ("mps-control", "mps-server", "libmpsshim.so"):
            shutil.copy(os.path.join(build, name), work)
        env = dict(os.environ, MPSSHIM_PIPE_DIRECTORY=f"{work}/pipe", MPSSHIM_LOG_DIRECTORY=f"{work}/log",
                   MPSSHIM_CUDA_LIBRARY=os.path.join(os.path.abspath(build), "libsoftgpu.so"))
        control = os.path.join(work, "mps-control")
        subprocess.run([control, "-d"], env=env, check=True, stdin=subprocess.DEVNULL)
        try:
            program = [os.path.join(build, "queries"), "--count", call, "--rounds", str(rounds)]
            command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={work}/client.%p", "--log-file=/dev/null"]
            command += [f"--toggle-collect={entry}" for entry in ENTRIES[call]]
            subprocess.run([*command, *program], env=dict(env, LD_PRELOAD=f"{work}/libmpsshim.so"), check=True,
                           timeout=600)
        finally:
            subprocess.run([control], env=env, input="quit\n", text=True, check=False, timeout=60,
                           stdout=subprocess.DEVNULL)
        return instructions(work, "client.", CLIENT)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="target/release", help="folder with the binaries and libsoftgpu.so")
    parser.add_argument("--rounds", type=int, default=2000)
    arguments = parser.parse_args()
    if not shutil.which("valgrind"):
        sys.exit("valgrind is not installed")
    for call in ENTRIES:
        few = count(arguments.build, call, arguments.rounds)
        many = count(arguments.build, call, 3 * arguments.rounds)
        each = (many - few) / (2 * arguments.rounds)
        print(f"{call}_instructions={each:.1f}", flush=True)


if __name__ == "__main__":
    main()
