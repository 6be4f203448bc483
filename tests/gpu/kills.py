#!/usr/bin/env python3
"""Kills clients by the thousand in the middle of their work, beside clients that verify what they compute.

    tests/gpu/kills.py --build target/release [--system mpsshim|nvidia] [--count 10000] [--jobs 8] [--seconds 600]

Victims launch kernels of up to five milliseconds, copy, allocate, load and unload, JOBS at a time; each gets SIGKILL at
a random moment, one in eight before it has a context. VERIFIERS clients work beside them all the time. A victim that
has not begun after 15 s, or a verifier that has ended or whose rounds stop, is a wedge: the system is started anew and
the count goes on. Needs `killed` in the build directory (cargo build --release -p mpsshim-tests --bin killed).

Prints a table as Markdown. Exit status 1 when a result was wrong, a verifier failed, the system wedged, a verifier's
longest round was over --longest milliseconds, or the server's descriptors, mappings or device memory are not back to
what they were when the victims are gone.
"""
import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benches" / "gpu"))
from systems import SYSTEM_TITLES, Failure, Processes, make_system, read_line, show_log  # noqa: E402

VERIFIERS = 3
# After this without a first line from a victim, or an end from a verifier, the system is taken for wedged.
PATIENCE = 15
# Victims whose work warms the server up (its pools, its spare segments) before the count of what it holds begins.
WARM_UP = 512
# How often what the server holds is looked at while victims die.
LOTS = 8
# Driver and server keep some device memory for the next client: on an H100 2,000 and 4,000 victims left 14 to 36 MiB, no
# more than fewer did. More than this is taken for a leak, MiB.
MEMORY_SLACK = 64
# Likewise of descriptors and mappings.
SLACK = 16


class Wedged(Exception):
    """The system serves nobody any more; the message says who waited for what."""


def device_memory():
    """MiB in use on the first device, or None where nobody says."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                              capture_output=True, text=True, timeout=20)
        return int(done.stdout.splitlines()[0])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return None


def held(system):
    """What the system's servers hold: descriptors, mappings, and MiB of the device."""
    servers = system.servers()
    descriptors = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in servers)
    mappings = 0
    for pid in servers:
        with open(f"/proc/{pid}/maps") as maps:
            mappings += sum(1 for _ in maps)
    return {"descriptors": descriptors, "mappings": mappings, "device MiB": device_memory()}


class Victims:
    """Starts and kills victims from JOBS threads until so many are killed, time is over, or one does not begin."""

    def __init__(self, system, program, rounds, jobs, seed):
        self.system, self.program, self.rounds, self.jobs, self.seed = system, program, rounds, jobs, seed
        self.killed, self.failed, self.wedge = 0, [], None
        self.lock = threading.Lock()

    def one(self, number):
        choice = random.Random(self.seed * 1_000_003 + number)
        process = subprocess.Popen([self.program, "victim", str(number), str(self.rounds)], env=self.system.env(),
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        line = []
        reader = threading.Thread(target=lambda: line.append(process.stdout.readline()), daemon=True)
        reader.start()
        if choice.random() < 1 / 8:
            time.sleep(choice.uniform(0, 0.05))
        else:
            reader.join(PATIENCE)
            if reader.is_alive():
                self.wedge = f"victim {number} had not begun after {PATIENCE} s"
            elif line[0].strip() != "started":
                self.failed.append(f"victim {number}: {line[0].strip() or 'ended'}")
            else:
                time.sleep(choice.uniform(0, 0.06))
                if process.poll() is not None:
                    self.failed.append(f"victim {number} ended by itself: {process.stdout.read().strip()}")
        process.send_signal(signal.SIGKILL)
        process.wait()
        reader.join()
        process.stdout.close()

    def may_go_on(self, deadline):
        return self.wedge is None and len(self.failed) < 20 and time.monotonic() < deadline

    def work(self, first, count, deadline):
        numbers = iter(range(first, first + count))

        def run():
            while self.may_go_on(deadline):
                with self.lock:
                    number = next(numbers, None)
                if number is None:
                    return
                self.one(number)
                with self.lock:
                    self.killed += 1

        threads = [threading.Thread(target=run) for _ in range(self.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def settle(system, before):
    """What the system holds, once that is what it was or does not come down any more."""
    deadline = time.monotonic() + 20
    while True:
        after = held(system)
        within = all(after[name] is None or before[name] is None or after[name] <= before[name] + slack
                     for name, slack in (("descriptors", SLACK), ("mappings", SLACK), ("device MiB", MEMORY_SLACK)))
        if within or time.monotonic() > deadline:
            return after, within
        time.sleep(0.5)


def stretch(system, processes, program, rounds, options, first, count, deadline):
    """Victims from `first` on, until `count` are killed, time is over or the system has wedged; the findings."""
    found = {"killed": 0, "wedge": None, "failed": [], "verifiers": [], "before": None, "during": [], "after": None,
             "within": True}
    verifiers = [processes.start([program, "verifier"], system.env(), stdin=subprocess.PIPE) for _ in range(VERIFIERS)]
    try:
        for verifier in verifiers:
            if (line := read_line(verifier, PATIENCE)) != "started":
                raise Failure(f"a verifier did not begin: {line}")
        victims = Victims(system, program, rounds, options.jobs, options.seed)
        victims.work(first, min(WARM_UP, count // 4), deadline)
        if victims.wedge is None:
            # The warm-up's last victims may not be cleaned up yet.
            time.sleep(1)
            found["before"] = held(system)
            lot = -(-(count - victims.killed) // LOTS)
            while victims.killed < count and victims.may_go_on(deadline):
                victims.work(first + victims.killed, min(lot, count - victims.killed), deadline)
                found["during"].append(held(system))
        found.update(killed=victims.killed, wedge=victims.wedge, failed=victims.failed)
        if victims.wedge is None:
            found["after"], found["within"] = settle(system, found["before"])
        for verifier in verifiers:
            try:
                found["verifiers"].append(json.loads(processes.finish(verifier, PATIENCE, "").splitlines()[-1]))
            except (Failure, ValueError, IndexError) as failure:
                found["failed"].append(f"a verifier: {failure}")
                found["wedge"] = found["wedge"] or "a verifier's work had stopped"
    except Failure as failure:
        found["wedge"] = found["wedge"] or str(failure)
    finally:
        for verifier in verifiers:
            processes.end(verifier)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="target/release")
    parser.add_argument("--system", choices=("mpsshim", "nvidia", "direct"), default="mpsshim")
    parser.add_argument("--count", type=int, default=10_000, help="clients to kill")
    parser.add_argument("--jobs", type=int, default=8, help="victims at a time")
    parser.add_argument("--seconds", type=float, default=600, help="end after this time, whatever was reached")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="rounds of a victim's kernel in a millisecond; measured by default")
    parser.add_argument("--longest", type=float, default=100, help="what a verifier's round may take, ms")
    parser.add_argument("--out", help="write the findings there, as JSON")
    options = parser.parse_args()
    program = os.path.abspath(os.path.join(options.build, "killed"))
    processes, stretches = Processes(), []
    began = time.monotonic()
    deadline = began + options.seconds
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        rounds = options.rounds
        if rounds is None:
            native = make_system("native", processes, directory, options.build)
            rounds = int(processes.run([program, "measure"], native.env(), 60))
        done = number = 0
        while done < options.count and time.monotonic() < deadline:
            number += 1
            base = os.path.join(directory, str(number))
            os.makedirs(base)
            system = make_system(options.system, processes, base, options.build)
            try:
                system.start()
                found = stretch(system, processes, program, rounds, options, done, options.count - done, deadline)
                if found["wedge"] or found["failed"]:
                    show_log(system)
            except Failure as failure:
                found = {"killed": 0, "wedge": str(failure), "failed": [], "verifiers": [], "within": True}
            finally:
                system.stop()
                processes.end_all()
            stretches.append(found)
            done += found["killed"]
            if not found["wedge"] or found["failed"]:
                break
    took = time.monotonic() - began
    wedges = [found["wedge"] for found in stretches if found["wedge"]]
    failed = [line for found in stretches for line in found["failed"]]
    verifiers = [verifier for found in stretches for verifier in found["verifiers"]]
    wrong = sum(verifier["wrong"] for verifier in verifiers)
    longest = max((verifier["longest_ms"] for verifier in verifiers), default=0)
    rows = [
        ("clients killed", f"{done} of {options.count}, {options.jobs} at a time, in {took:.0f} s"),
        ("wedged, and was started anew", f"{len(wedges)} times" + "".join(f"; {wedge}" for wedge in wedges[:3])),
        ("victims and verifiers that failed", f"{len(failed)}" + "".join(f"; {line}" for line in failed[:3])),
        ("verifiers' rounds", f"{sum(verifier['rounds'] for verifier in verifiers)}, {wrong} wrong"),
        ("a round, p50 / p99.9 / longest, ms", " · ".join(
            f"{verifier['p50_ms']} / {verifier['p99_9_ms']} / {verifier['longest_ms']}" for verifier in verifiers)),
    ]
    for name in ("descriptors", "mappings", "device MiB"):
        lines = [[found["before"], *found["during"], found["after"]] for found in stretches if found.get("after")]
        rows.append((f"server's {name}, before, during and after",
                     " · ".join(" → ".join(str(look[name]) for look in line) for line in lines)))
    print(f"| {SYSTEM_TITLES[options.system]} | |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")
    if options.out:
        text = json.dumps({"options": vars(options), "seconds": took, "stretches": stretches}, indent=1)
        pathlib.Path(options.out).write_text(text + "\n")
    well = (not wedges and not failed and not wrong and verifiers and longest <= options.longest
            and all(found["within"] for found in stretches))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
