#!/usr/bin/env python3
"""Random programs on a GPU: natively, through mpsshim, and while their server is killed and replaced.

    tests/gpu/wander.py --build target/release [--programs 6] [--steps 400] [--kills 50] [--restarts 20] [--seconds 600]
                        [--seed 1] [--bound] [--standby] [--replay] [--logs DIR]

`wander` makes valid calls of the driver API that follow from a seed, and compares memory, addresses and attributes with a model
of its own. First as many seeds as there are programs run natively, then the same through mpsshim, of which each must print the
same. Then the programs walk at the same time, a random number of steps in each round, with pauses. A kill comes either while all
programs are between two rounds and portable, when none may be lost, or at a random instant; a restart comes at a random instant.
A program that is lost is replaced by one with the next seed.

Needs `wander` in the build directory (cargo build --release -p mpsshim-tests --bin wander). MPSSHIM_CUDA_LIBRARY may name another
driver. Prints a table as Markdown. Exit status 1 when anything was wrong, or a program was lost between two rounds or by a restart;
these are printed with their seeds and steps: `wander --seed S --steps N` makes the same calls.
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
from systems import Failure, Processes, keep_logs, make_system, read_line  # noqa: E402

# Seconds for one round, with a pause for the next server.
PATIENCE = 60
LOST = "CUDA_ERROR_MPS_RPC_FAILURE (806)"


class Row:
    """What came of one kind of event."""

    def __init__(self, name, may_lose):
        self.name, self.may_lose = name, may_lose
        self.times, self.lost_at_rest, self.lost_in_flight, self.wrong = 0, 0, 0, 0


class Program:
    """A program that walks when it is asked."""

    def __init__(self, system, processes, options, seed):
        self.seed, self.steps, self.answer = seed, 0, "ok"
        command = [os.path.join(os.path.abspath(options.build), "wander"), "--seed", str(seed)]
        env = system.env() | ({"MPSSHIM_REPLAY": "kernels"} if options.replay else {})
        self.process = processes.start(command + ["--bound"] * options.bound, env, stdin=subprocess.PIPE)
        if (line := read_line(self.process, PATIENCE)) != "started":
            raise Failure(f"seed {seed} did not begin: {line}")

    def walk(self, steps):
        if not self.is_well():
            return
        self.steps += steps
        try:
            self.process.stdin.write(f"walk {steps}\n")
            self.process.stdin.flush()
            self.answer = read_line(self.process, PATIENCE)
        except (Failure, OSError) as failure:
            self.answer = f"gone: {failure}"

    def is_well(self):
        return self.answer.startswith("ok")


def run_to_end(system, processes, options, seed):
    """The last line of a program without commands."""
    command = [os.path.join(os.path.abspath(options.build), "wander"), "--seed", str(seed), "--steps", str(options.steps)]
    process = processes.start(command + ["--bound"] * options.bound, system.env())
    try:
        out, err = process.communicate(timeout=PATIENCE + options.steps)
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        processes.end(process)
    return (out.strip() or err.strip() or f"status {process.returncode}").splitlines()[-1]


def run_seeds(name, native, system, processes, options):
    """All seeds, one after the other; with `native`, the lines that each must print."""
    row, lines = Row(name, False), []
    for at in range(options.programs):
        seed = options.seed + at
        line = run_to_end(system, processes, options, seed)
        lines.append(line)
        row.times += 1
        if not line.startswith("ok") or native and native[at] != line:
            row.wrong += 1
            print(f"{name}: seed {seed}: {line}" + (f", natively: {native[at]}" if native else ""), file=sys.stderr)
    return row, lines


def walk_all(programs, chance, options, event):
    """All walk at the same time; the event comes meanwhile."""
    threads = [threading.Thread(target=one.walk, args=(chance.randint(1, options.most),)) for one in programs]
    for thread in threads:
        thread.start()
    event()
    for thread in threads:
        thread.join()


def bonds_by_pid(system):
    """What binds each client to its server; empty for a portable one."""
    clients = json.loads(system.command("--format=json", "ps") or "[]")
    return {client["pid"]: client["bound_by"] if client["portable"] == 0 else "" for client in clients}


def await_portable(system, programs, seconds):
    """Waits until the programs are portable; those that are."""
    deadline = time.monotonic() + seconds
    while True:
        bonds = bonds_by_pid(system)
        bound = [one for one in programs if bonds.get(one.process.pid, "no client")]
        if not bound:
            return set(programs)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for one in bound:
        print(f"at rest, seed {one.seed}, step {one.steps}: bound by {bonds.get(one.process.pid)}", file=sys.stderr)
    return set(programs) - set(bound)


def kill(system):
    for pid in system.servers()[-1:]:
        os.kill(pid, signal.SIGKILL)


def restart(system):
    said = system.command("restart_server", str(system.servers()[-1]), timeout=120).strip()
    if not said.splitlines()[0].isdigit():
        print(f"restart_server: {said}", file=sys.stderr)


def settle(row, programs, at_rest, replace):
    """Counts the programs that did not go on, and replaces them."""
    row.times += 1
    for at, one in enumerate(programs):
        if one.is_well():
            continue
        if not one.answer.endswith(LOST):
            row.wrong += 1
        elif one in at_rest:
            row.lost_at_rest += 1
        else:
            row.lost_in_flight += 1
        print(f"{row.name} {row.times}: seed {one.seed}, up to step {one.steps}, {'at rest' if one in at_rest else 'in flight'}: "
              f"{one.answer[:300]}", file=sys.stderr)
        programs[at] = replace(one)


def drill(system, processes, options):
    """Rows for kills at rest, kills at any instant and restarts."""
    chance = random.Random(options.seed)
    seeds = iter(range(options.seed, sys.maxsize))
    programs = [Program(system, processes, options, next(seeds)) for _ in range(options.programs)]
    rows = {"rest": Row("kill, all portable", False), "kill": Row("kill at any instant", True), "restart": Row("restart_server", False)}
    turns = ["rest", "kill"] * (options.kills // 2) + ["restart"] * options.restarts
    chance.shuffle(turns)
    deadline, steps = time.monotonic() + options.seconds, 0

    def replace(one):
        processes.end(one.process)
        return Program(system, processes, options, next(seeds))
    for turn in turns:
        if time.monotonic() > deadline:
            break
        before = sum(one.steps for one in programs)
        at_rest = set()
        if turn == "rest":
            walk_all(programs, chance, options, lambda: None)
            settle(Row("between events", False), programs, set(), replace)
            at_rest = await_portable(system, programs, 10)
            kill(system)
            walk_all(programs, chance, options, lambda: None)
        else:
            pause, act = chance.uniform(0, 0.3), kill if turn == "kill" else restart
            walk_all(programs, chance, options, lambda: (time.sleep(pause), act(system)))
            # A session may be lost behind its last answer.
            walk_all(programs, chance, options, lambda: None)
        steps += max(0, sum(one.steps for one in programs) - before)
        settle(rows[turn], programs, at_rest, replace)
    print(f"{steps} steps under events", file=sys.stderr)
    for one in programs:
        processes.end(one.process)
    return list(rows.values())


def is_failed(row):
    return row.wrong or row.lost_at_rest or row.lost_in_flight and not row.may_lose


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="target/release")
    parser.add_argument("--programs", type=int, default=6, help="at a time, and seeds that run alone (%(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="of each program that runs alone (%(default)s)")
    parser.add_argument("--most", type=int, default=60, help="steps of a round under events, at most (%(default)s)")
    parser.add_argument("--kills", type=int, default=50, help="half of them at rest (%(default)s)")
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600, help="no more events after this time")
    parser.add_argument("--seed", type=int, default=1, help="the first program's, and that of the instants (%(default)s)")
    parser.add_argument("--bound", action="store_true", help="with objects that bind a session to its server")
    parser.add_argument("--standby", action="store_true", help="the server has a standby (MPSSHIM_STANDBY=1)")
    parser.add_argument("--replay", action="store_true", help="kernels may run again (MPSSHIM_REPLAY=kernels)")
    parser.add_argument("--logs", metavar="DIR", help="keep the daemon's and servers' logs here")
    options = parser.parse_args()
    if options.standby:
        os.environ["MPSSHIM_STANDBY"] = "1"
    os.environ["MPSSHIM_QUARANTINE"] = "off"
    processes = Processes()
    with tempfile.TemporaryDirectory(prefix="wander-") as directory:
        native = make_system("native", processes, directory, options.build)
        system = make_system("mpsshim", processes, directory, options.build)
        try:
            row, lines = run_seeds("natively", None, native, processes, options)
            system.start()
            rows = [row, run_seeds("mpsshim, one at a time", lines, system, processes, options)[0]]
            rows += drill(system, processes, options)
            system.stop()
        finally:
            if options.logs:
                keep_logs([system], options.logs)
            processes.end_all()
    print(f"{options.programs} programs at a time, up to {options.most} steps a round; alone {options.steps} steps\n")
    print("| | times | lost between rounds | lost in flight | wrong |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(f"| {row.name} | {row.times} | {row.lost_at_rest} | {row.lost_in_flight} | {row.wrong} |")
    return 1 if any(map(is_failed, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
