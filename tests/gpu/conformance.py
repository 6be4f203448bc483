#!/usr/bin/env python3
"""The conformance program's further sections: natively, against the recorded lines, and in a mode of mpsshim.

    tests/gpu/conformance.py --program conformance --build target/release [--record FOLDER] [SECTION...]

With --record the native lines of every section are written into FOLDER, to be compared and committed as
tests/fixtures/conformance/. Prints one row per section; exit status 1 when any differs.
"""
import argparse
import difflib
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benches", "gpu"))
import systems  # noqa: E402  The processes and the daemon are the benches'.

# What a section for two devices says where there is one: its recorded lines say nothing about this machine.
ONE_DEVICE = "there is one device"
FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "fixtures" / "conformance"


def run(command, env, timeout):
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
        return done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return 124, text, "timed out"


def difference(expected, found):
    lines = difflib.unified_diff(expected.splitlines(), found.splitlines(), lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--build", required=True, help="folder with libmpsshim.so, mps-control, mps-server")
    parser.add_argument("--mode", choices=systems.MODES, default="proxy", help="of the clients (%(default)s)")
    parser.add_argument("--record", help="folder for the native lines")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for each section")
    parser.add_argument("sections", nargs="*")
    options = parser.parse_args()
    listed = subprocess.run([options.program, "--list"], capture_output=True, text=True, check=True)
    sections = options.sections or listed.stdout.split()
    wrong = 0
    with systems.running(options.mode, options.build) as (bare, system):
        native_env, env = bare.env(), system.env()
        for section in sections:
            native = run([options.program, section], native_env, options.timeout)
            ours = run([options.program, section], env, options.timeout)
            lacks_devices = ONE_DEVICE in native[1].splitlines()
            if options.record and not lacks_devices:
                os.makedirs(options.record, exist_ok=True)
                pathlib.Path(options.record, f"{section}.expected").write_text(native[1])
            recorded = FIXTURES / f"{section}.expected"
            against = difference(recorded.read_text(), native[1]) if recorded.exists() else ["no fixture"]
            fixture = "differs" if against else "same"
            if lacks_devices:
                against, fixture = [], "for two devices"
            changed = difference(native[1], ours[1])
            same = native[0] == ours[0] and not changed
            wrong += (not same) or bool(against)
            print(f"{section:24} native rc {native[0]}, {len(native[1].splitlines())} lines;"
                  f" fixture {fixture}; {options.mode} {'same' if same else 'differs'}")
            for line in against[:40]:
                print(f"    fixture {line}")
            for line in changed[:40]:
                print(f"    {options.mode:7} {line}")
            for who, done in (("native", native), (options.mode, ours)):
                if done[0] != 0:
                    print(f"    {who} rc {done[0]}: {done[2].strip()[-600:]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
