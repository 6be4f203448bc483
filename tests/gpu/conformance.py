#!/usr/bin/env python3
"""The conformance program's further sections: natively, against the recorded lines, and through the proxy.

    tests/gpu/conformance.py --program conformance --build target/release [--record FOLDER] [SECTION...]

With --record the native lines of every section are written into FOLDER, to be compared and committed as
tests/fixtures/conformance/. Prints one row per section; exit status 1 when any differs.
"""
import argparse, difflib, os, pathlib, subprocess, sys, tempfile

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
    parser.add_argument("--record", help="folder for the native lines")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for each section")
    parser.add_argument("sections", nargs="*")
    options = parser.parse_args()
    build = pathlib.Path(options.build).resolve()
    native_env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    listed = subprocess.run([options.program, "--list"], capture_output=True, text=True, check=True)
    sections = options.sections or listed.stdout.split()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        place = dict(native_env, MPSSHIM_PIPE_DIRECTORY=f"{folder}/pipe", MPSSHIM_LOG_DIRECTORY=f"{folder}/log")
        subprocess.run([build / "mps-control", "-d"], env=place, check=True)
        proxy_env = dict(place, LD_PRELOAD=str(build / "libmpsshim.so"))
        try:
            for section in sections:
                native = run([options.program, section], native_env, options.timeout)
                proxied = run([options.program, section], proxy_env, options.timeout)
                if options.record:
                    os.makedirs(options.record, exist_ok=True)
                    pathlib.Path(options.record, f"{section}.expected").write_text(native[1])
                recorded = FIXTURES / f"{section}.expected"
                against = difference(recorded.read_text(), native[1]) if recorded.exists() else ["no fixture"]
                changed = difference(native[1], proxied[1])
                same = native[0] == proxied[0] and not changed
                wrong += (not same) or bool(against)
                print(f"{section:24} native rc {native[0]}, {len(native[1].splitlines())} lines;"
                      f" fixture {'same' if not against else 'differs'}; proxy {'same' if same else 'differs'}")
                for line in against[:40]:
                    print(f"    fixture {line}")
                for line in changed[:40]:
                    print(f"    proxy   {line}")
                for who, done in (("native", native), ("proxy", proxied)):
                    if done[0] != 0:
                        print(f"    {who} rc {done[0]}: {done[2].strip()[-600:]}")
        finally:
            subprocess.run([build / "mps-control", "quit", "-t", "0"], env=place, check=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
