#!/usr/bin/env python3
"""Each kind of object that outlives a server, through kills and restarts of the server.

    tests/gpu/kinds.py --build target/release [--ends 24] [--by both] [--only NAMES] [--without NAMES] [--copies 1]
                       [--seconds 300] [--standby] [--logs DIR]

For each kind there is a `survivor` program, which checks what it left and changes it; for memory and events that processes
share there are two programs, of which one writes or records and the other reads or waits. All work at the same time. Then the
server ends, in turn by SIGKILL and by `restart_server`: the programs are between two rounds, and portable. After that each must
find what it left. A program that does not is replaced by a new one.

Needs `survivor` in the build directory (cargo build --release -p mpsshim-tests --bin survivor). MPSSHIM_CUDA_LIBRARY may name
another driver. Prints a table as Markdown. Exit status 1 when a program was lost, wrong, or not portable between two rounds.
"""
import argparse
import collections
import functools
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benches" / "gpu"))
from systems import Failure, read_line, running  # noqa: E402
from wander import bonds_by_pid  # noqa: E402

# Seconds for one answer, with a pause for the next server.
PATIENCE = 60
# Most seconds from a round until a program is portable.
REST = 60
# What one program does in a round, by the kind of object.
KINDS = {
    "memory, streams, events, modules": ["round"],
    "graphs": ["replay"],
    "conditional nodes": ["loop"],
    "functions of graphs and streams": ["host"],
    "memory pools": ["pool"],
    "registered memory": ["register"],
    "retained handles": ["hold"],
    "arrays, textures, surfaces": ["texture"],
    "green contexts, resources": ["part"],
    "tables of addresses": ["table"],
    "variables": ["count", "count 1"],
    "variables without code": ["constant"],
    "recorded times": ["time"],
    "sparse memory": ["sparse 40000000"],
    "most of these": ["replay", "loop", "host", "pool", "register", "hold", "texture", "part", "table", "count", "constant",
                      "time"],
}


class Program:
    """A `survivor` that is asked line by line."""

    def __init__(self, system, build):
        self.process = system.processes.start([os.path.join(os.path.abspath(build), "survivor")], system.env(), stdin=subprocess.PIPE)
        if (line := read_line(self.process, PATIENCE)) != "started":
            raise Failure(f"a program did not begin: {line}")

    def ask(self, line):
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Failure(f"gone: {error}") from error
        answer = read_line(self.process, PATIENCE)
        if answer == "wrong" or answer.startswith("CUDA_ERROR"):
            raise Failure(f"{line}: {answer}")
        return answer

    def expect(self, line, answer):
        if (found := self.ask(line)) != answer:
            raise Failure(f"{line}: {found} instead of {answer}")


class Alone:
    """A program with one kind of object."""

    def __init__(self, name, commands, start):
        self.name, self.commands, self.programs = name, commands, [start()]

    def round(self):
        for command in self.commands:
            self.programs[0].ask(command)


class Pair:
    """Two programs that share an object: one makes it, the other opens it, and each changes it in turn."""

    def __init__(self, start):
        self.name, self.programs, self.value = self.NAME, [start(), start()], 0

    def change(self, write, read):
        for one, other in (self.programs, self.programs[::-1]):
            self.value += 1
            one.ask(f"{write} {self.value}")
            other.expect(read, str(self.value))


class Lent(Pair):
    """Memory with a handle for other processes (`cuIpcGetMemHandle`)."""

    NAME = "memory by handles"

    def __init__(self, start, _):
        super().__init__(start)
        self.programs[1].expect("open " + self.programs[0].ask("give"), "opened")

    def round(self):
        for program in self.programs if self.value else []:
            program.expect("read", str(self.value))
        self.change("write", "read")


class Exported(Pair):
    """Memory by descriptors (`cuMemExportToShareableHandle`)."""

    NAME = "memory by descriptors"

    def __init__(self, start, directory):
        super().__init__(start)
        path = os.path.join(directory, f"memory-{self.programs[0].process.pid}")
        self.programs[0].expect(f"export {path}", "exported")
        self.programs[1].expect(f"import {path}", "imported")

    def round(self):
        for program in self.programs if self.value else []:
            program.expect("show", str(self.value))
            program.expect("retain", "retained")
        self.change("fill", "show")


class Signals(Pair):
    """An event with a handle for other processes (`cuIpcGetEventHandle`)."""

    NAME = "events by handles"

    def __init__(self, start, _):
        super().__init__(start)
        self.programs[1].expect("listen " + self.programs[0].ask("signal"), "listens")

    def round(self):
        for one, other in (self.programs, self.programs[::-1]):
            one.expect("raise 1000", "raised")
            other.expect("hear", "heard")
            one.expect("hear", "heard")


PAIRS = (Lent, Exported, Signals)


class Row:
    """What came of one kind of object. `make` starts its programs."""

    def __init__(self, make):
        self.make, self.member = make, make()
        self.name, self.rounds, self.is_lost, self.longest = self.member.name, 0, False, 0.0
        self.failures, self.bonds = collections.Counter(), collections.Counter()

    def round(self):
        began = time.monotonic()
        try:
            self.member.round()
            self.rounds += 1
        except Failure as failure:
            print(f"{self.name}, round {self.rounds + 1}: {failure}", file=sys.stderr)
            self.failures[str(failure)] += 1
            self.is_lost = True
        self.longest = max(self.longest, time.monotonic() - began)


def round_of_all(rows, system):
    threads = [threading.Thread(target=row.round) for row in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row in rows:
        if row.is_lost:
            for program in row.member.programs:
                system.processes.end(program.process)
            row.member, row.is_lost = row.make(), False


def await_portable(system, rows):
    """Waits until all programs are portable, and notes what binds those that do not become so."""
    deadline = time.monotonic() + REST
    while True:
        bonds = bonds_by_pid(system)
        bound = [(row, bonds.get(program.process.pid, "no client")) for row in rows
                 for program in row.member.programs if bonds.get(program.process.pid, "no client")]
        if not bound:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for row, reason in bound:
        row.bonds[reason] += 1


def restart(system):
    """Replaces all servers. Returns how many had a program that stayed."""
    stayed = system.restart_servers()
    for pid, said in stayed.items():
        print(f"restart_server {pid}: {said}", file=sys.stderr)
    return len(stayed)


def is_chosen(name, options):
    only, without = (text.split(",") if text else [] for text in (options.only, options.without))
    return (not only or any(part in name for part in only)) and not any(part in name for part in without)


def start_rows(system, options):
    def start():
        return Program(system, options.build)
    makes = {name: functools.partial(Alone, name, commands, start) for name, commands in KINDS.items()}
    makes |= {pair.NAME: functools.partial(pair, start, system.directory) for pair in PAIRS}
    return [Row(make) for name, make in makes.items() if is_chosen(name, options) for _ in range(options.copies)]


def run(system, options):
    """Rows, the number of ends by kind, how many restarts left programs, and the slowest round behind each end, in seconds."""
    rows = start_rows(system, options)
    round_of_all(rows, system)
    turns = {"both": ["kill", "restart"], "kill": ["kill"], "restart": ["restart"], "none": ["none"]}[options.by]
    deadline, done, stayed, pauses = time.monotonic() + options.seconds, collections.Counter(), 0, []
    for at in range(options.ends):
        if time.monotonic() > deadline:
            break
        round_of_all(rows, system)
        await_portable(system, rows)
        for row in rows:
            row.longest = 0.0
        turn = turns[at % len(turns)]
        if turn == "kill":
            # All of them: programs with loops have servers of their own.
            system.kill_servers()
        elif turn == "restart":
            stayed += restart(system)
        done[turn] += 1
        round_of_all(rows, system)
        pauses.append(max(row.longest for row in rows))
        # A standby has to be ready.
        time.sleep(2 if options.standby else 0)
    for row in rows:
        for program in row.member.programs:
            system.processes.end(program.process)
    return rows, done, stayed, pauses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="target/release")
    parser.add_argument("--ends", type=int, default=24, help="of the server (%(default)s)")
    parser.add_argument("--by", choices=("both", "kill", "restart", "none"), default="both",
                        help="how servers end; none: only rounds (%(default)s)")
    parser.add_argument("--only", metavar="NAMES", help="kinds whose names have one of these parts, with commas between them")
    parser.add_argument("--without", metavar="NAMES", help="no kinds whose names have one of these parts")
    parser.add_argument("--copies", type=int, default=1, help="programs or pairs for each kind (%(default)s)")
    parser.add_argument("--seconds", type=float, default=300, help="no more ends after this time (%(default)g)")
    parser.add_argument("--standby", action="store_true", help="the server has a standby (MPSSHIM_STANDBY=1)")
    parser.add_argument("--logs", metavar="DIR", help="keep the daemon's and servers' logs here")
    options = parser.parse_args()
    names = [*KINDS, *(pair.NAME for pair in PAIRS)]
    if not any(is_chosen(name, options) for name in names):
        parser.error(f"no kind is chosen of: {'; '.join(names)}")
    if min(options.ends, options.copies) < 1 or options.seconds <= 0:
        parser.error("--ends, --copies and --seconds must be positive")
    if options.standby:
        os.environ["MPSSHIM_STANDBY"] = "1"
    os.environ["MPSSHIM_QUARANTINE"] = "off"
    with running("proxy", options.build, options.logs) as (_, system):
        rows, done, stayed, pauses = run(system, options)
    ends = ", ".join(f"{count} {name}" for name, count in done.items())
    print(f"Ends of the server: {ends}; restarts at which something stayed: {stayed}; slowest round behind an end:"
          f" median {1000 * statistics.median(pauses):.0f} ms, longest {1000 * max(pauses):.0f} ms\n")
    print("| kind | rounds | bound between two rounds | lost or wrong |")
    print("|---|---|---|---|")
    for row in rows:
        bonds, failures = (", ".join(f"{what}: {times}" for what, times in sorted(found.items())) or "0"
                           for found in (row.bonds, row.failures))
        print(f"| {row.name} | {row.rounds} | {bonds} | {failures} |")
    return 1 if stayed or any(row.failures or row.bonds for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
