#!/usr/bin/env python3
"""Faults and kills of the server beside clients that have nothing in flight: who is lost, and how long the others wait.

    tests/gpu/outlive.py --build target/release [--system mpsshim|nvidia] [--faults 20] [--kills 20] [--restarts 0] [--standby]
                         [--clients survivor,survivor,jax,cupy,torch] [--drill] [--seconds 600]

Each client answers requests and checks what it computes; `survivor` also checks that memory, pinned memory, streams, events
and modules are what they were. A fault is another program's write to address 0x10, a kill is SIGKILL for all servers. After
each, every client gets a request at once; the slowest answer is the pause. While `restart_server` replaces one server after the
other, the clients get requests without a pause; the slowest answer is the pause. A client that is lost is started again.

With --drill each client makes rounds by itself, with 0 to 0.4 s of thought between them, and what happens does so at random
instants; a client that is lost was either between two rounds at that instant, or in one. The pause is that of the slowest
round then, beyond the client's own longest round until then. What binds clients between rounds is sampled first.

Needs `survivor` in the build directory (cargo build --release -p mpsshim-tests --bin survivor), and for the other clients
PyTorch, CuPy or JAX. Prints a table as Markdown. Exit status 1 when a client of --expect was lost or an answer was wrong.
"""
import argparse
import concurrent.futures
import csv
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benches" / "gpu"))
from systems import SYSTEM_TITLES, Failure, Processes, keep_logs, make_system, read_line  # noqa: E402

# A client that has not answered after this is lost.
PATIENCE = 30
# A framework may take this long to start.
START = 90


class Client:
    """A program that answers requests."""

    def __init__(self, name, system, processes, build):
        self.name = name
        own = [os.path.join(os.path.abspath(build), "survivor")]
        python = [sys.executable, str(pathlib.Path(__file__).with_name("outlive_clients.py")), name]
        self.request = "replay" if name == "graphs" else "round"
        is_own = name in ("survivor", "graphs")
        self.process = processes.start(own if is_own else python, system.env(), stdin=subprocess.PIPE)
        if (line := read_line(self.process, START)) != "started":
            raise Failure(f"{name} did not begin: {line}")

    def ask(self, line=None):
        """The answer, and after how many seconds."""
        began = time.monotonic()
        try:
            self.process.stdin.write((line or self.request) + "\n")
            self.process.stdin.flush()
            answer = read_line(self.process, PATIENCE)
            return answer.replace("replayed", "ok", 1), time.monotonic() - began
        except (Failure, OSError) as failure:
            return f"gone: {failure}", time.monotonic() - began


def fault(system, processes, build, _):
    """A program that faults."""
    faulty = Client("survivor", system, processes, build)
    faulty.ask("stray")
    processes.end(faulty.process)


def kill(system, *_):
    """The end of all servers: a client with loops may have a server of its own."""
    system.kill_servers()


def restart(system):
    """`restart_server` for each server under clients that work all the time; what it says where it fails."""
    return "; ".join(system.restart_servers().values())


def ask_without_pause(clients, act):
    """The slowest or the first wrong answer of each client while something happens, and what came of that."""
    over, slowest = threading.Event(), {}

    def work(client):
        while not over.is_set():
            answer, took = client.ask()
            if client not in slowest or took > slowest[client][1]:
                slowest[client] = (answer, took)
            if not answer.startswith("ok"):
                slowest[client] = (answer, took)
                return
    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    try:
        said = act()
        time.sleep(0.3)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    return slowest, said


def ask_all(clients):
    """The answers of all, asked at once."""
    answers = {}

    def ask(client):
        answers[client] = client.ask()
    threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


class Rounds:
    """A client that makes rounds by itself, with pauses of random length."""

    def __init__(self, client, seed, thought):
        self.client, self.thought, self.random = client, thought, random.Random(seed)
        self.begun, self.done, self.usual, self.slowest, self.answer = 0, 0, 0.0, 0.0, "ok"
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def work(self):
        while not self.over.wait(self.random.uniform(0, self.thought)):
            self.begun += 1
            answer, took = self.client.ask()
            self.slowest = max(self.slowest, took)
            if not answer.startswith("ok"):
                self.answer = answer
                return
            self.done += 1

    def is_idle_since(self, begun):
        """Whether it has been between two rounds since it had begun this many."""
        return self.done == begun == self.begun

    def end(self):
        self.over.set()
        self.thread.join()


def start(system, processes, options, names):
    """Clients of these names, started at the same time."""
    with concurrent.futures.ThreadPoolExecutor(max(1, len(names))) as pool:
        return list(pool.map(lambda name: Client(name, system, processes, options.build), names))


def start_all(system, processes, options):
    clients = start(system, processes, options, options.clients.split(","))
    ask_all(clients)
    return clients


def await_rounds(rounds, begun, seconds):
    """Waits until each client has made a round that it began after it had begun this many, or is lost."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        waits = [one.done <= before for one, before in zip(rounds, begun) if one.answer.startswith("ok")]
        if not any(waits):
            return
        time.sleep(0.02)


def look_at_bonds(system, rounds, seconds):
    """What binds clients between two rounds, sampled for so long: the part of the samples for each reason."""
    found, samples = {one: {} for one in rounds}, {one: 0 for one in rounds}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        begun = {one: one.begun for one in rounds}
        rows = csv.DictReader(system.command("ps", "--format", "csv").splitlines())
        bonds = {int(row["pid"]): row["bound_by"] for row in rows}
        for one in rounds:
            if not one.is_idle_since(begun[one]) or one.client.process.pid not in bonds:
                continue
            samples[one] += 1
            reason = bonds[one.client.process.pid]
            found[one][reason] = found[one].get(reason, 0) + 1
        time.sleep(0.02)
    print("\nBetween two rounds, bound by:\n")
    for one in rounds:
        reasons = [f"{reason} {100 * count / samples[one]:.0f} %" for reason, count in found[one].items() if reason]
        print(f"- {one.client.name}, {samples[one]} samples: {'; '.join(reasons) or 'nothing'}")
    print(flush=True)


def drill(system, processes, options):
    """Rows of the table: each kind of event at random instants."""
    rounds = [Rounds(client, at, options.thought) for at, client in enumerate(start_all(system, processes, options))]
    time.sleep(1)
    if options.system == "mpsshim":
        look_at_bonds(system, rounds, 5)
    chance = random.Random(options.seed)
    deadline = time.monotonic() + options.seconds
    counts = {"fault of another program": options.faults, "kill -9 of all servers": options.kills,
              "restart_server under load": options.restarts}
    # In turn, so that each kind has its share if the time is short.
    turns = [what for at in range(max(counts.values())) for what, count in counts.items() if at < count]
    found = {what: [0, {}, [], []] for what in counts}
    try:
        for what in turns:
            if time.monotonic() >= deadline:
                break
            _, lost, pauses, wrong = found[what]
            faulty = None
            if what.startswith("fault"):
                faulty = Client("survivor", system, processes, options.build)
                faulty.ask()
            time.sleep(options.peace + chance.uniform(1, 2))
            for one in rounds:
                one.usual, one.slowest = max(one.usual, one.slowest), 0.0
            servers = system.servers()
            begun = [one.begun for one in rounds]
            said = ""
            if faulty:
                faulty.ask("stray")
            elif what.startswith("kill"):
                for pid in servers:
                    os.kill(pid, signal.SIGKILL)
            was_idle = [one.is_idle_since(before) for one, before in zip(rounds, begun)]
            if faulty:
                processes.end(faulty.process)
            elif what.startswith("restart"):
                said = restart(system)
            if said:
                print(f"{what} {found[what][0] + 1}: {said}", file=sys.stderr)
                lost["not moved"] = lost.get("not moved", 0) + 1
            found[what][0] += 1
            after = [one.begun for one in rounds]
            await_rounds(rounds, after, options.thought + PATIENCE)
            survived = [one.slowest - one.usual for one in rounds if one.answer.startswith("ok")]
            if survived:
                pauses.append(max(0.0, *survived))
            # A round that waited for the next server is not a usual one.
            for one in rounds:
                one.slowest = 0.0
            gone = [at for at, one in enumerate(rounds) if not one.answer.startswith("ok")]
            for at in gone:
                one = rounds[at]
                when = "between rounds" if was_idle[at] else "in a round"
                if one.answer.startswith("wrong"):
                    wrong.append(f"{one.client.name}: {one.answer}")
                print(f"{what} {found[what][0]}: {one.client.name}, {when}: {one.answer[:160]}", file=sys.stderr)
                lost[f"{one.client.name} {when}"] = lost.get(f"{one.client.name} {when}", 0) + 1
                one.end()
                processes.end(one.client.process)
            for at, client in zip(gone, start(system, processes, options, [rounds[at].client.name for at in gone])):
                rounds[at] = Rounds(client, len(rounds) + sum(row[0] for row in found.values()), options.thought)
    finally:
        for one in rounds:
            one.end()
            processes.end(one.client.process)
    return [(what, *row) for what, row in found.items()]


def run(system, processes, options):
    """Rows of the table: what happened, how often, clients lost by name, pauses in seconds, wrong answers."""
    clients = start_all(system, processes, options)
    deadline = time.monotonic() + options.seconds
    rows = []
    kinds = (("fault of another program", options.faults, fault), ("kill -9 of all servers", options.kills, kill),
             ("restart_server under load", options.restarts, None))
    for what, count, happen in kinds:
        done, lost, pauses, wrong = 0, {}, [], []
        while done < count and time.monotonic() < deadline:
            if happen:
                happen(system, processes, options.build, None)
                answers = ask_all(clients)
            else:
                answers, said = ask_without_pause(clients, lambda: restart(system))
                if said:
                    lost["refused"] = lost.get("refused", 0) + 1
                    print(f"{what} {done + 1}: {said}", file=sys.stderr)
            done += 1
            survived = [took for answer, took in answers.values() if answer.startswith("ok")]
            if survived:
                pauses.append(max(survived))
            for client, (answer, _) in answers.items():
                if answer.startswith("ok"):
                    continue
                if answer.startswith("wrong"):
                    wrong.append(f"{client.name}: {answer}")
                print(f"{what} {done}: {client.name}: {answer[:160]}", file=sys.stderr)
                lost[client.name] = lost.get(client.name, 0) + 1
                processes.end(client.process)
                for attempt in (1, 2, 3):
                    try:
                        clients[clients.index(client)] = Client(client.name, system, processes, options.build)
                        break
                    except Failure:
                        if attempt == 3:
                            raise
                        time.sleep(2)
            time.sleep(0.2)
            ask_all(clients)
            # A framework's threads go on for a moment; a standby has to be ready.
            time.sleep(1.5 if options.standby else 0.2)
        rows.append((what, done, lost, pauses, wrong))
    for client in clients:
        processes.end(client.process)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="target/release")
    parser.add_argument("--system", choices=("mpsshim", "nvidia"), default="mpsshim")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--standby", action="store_true", help="the server has a standby (MPSSHIM_STANDBY=1)")
    parser.add_argument("--clients", default="survivor,survivor,jax,cupy,torch")
    parser.add_argument("--expect", default="survivor", help="clients none of which may be lost, by name")
    parser.add_argument("--drill", action="store_true", help="rounds with pauses, and events at random instants")
    parser.add_argument("--logs", metavar="DIR", help="keep the daemon's and servers' logs here")
    parser.add_argument("--thought", type=float, default=0.4, help="longest pause between two rounds, s (%(default)g)")
    parser.add_argument("--peace", type=float, default=0.0,
                        help="least time between two events of a drill beyond 1 s: a standby loads images, s (%(default)g)")
    parser.add_argument("--seed", type=int, default=1, help="of the instants (%(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="end after this time, whatever was reached")
    options = parser.parse_args()
    if options.standby:
        os.environ["MPSSHIM_STANDBY"] = "1"
    processes = Processes()
    # The program that faults is the clients' own: it has to be among them each time.
    os.environ["MPSSHIM_QUARANTINE"] = "off"
    with tempfile.TemporaryDirectory(prefix="outlive-") as directory:
        system = make_system(options.system, processes, directory, options.build)
        try:
            system.start()
            rows = (drill if options.drill else run)(system, processes, options)
            system.stop()
        finally:
            if options.logs:
                keep_logs([system], options.logs)
            processes.end_all()
    count = len(options.clients.split(","))
    print(f"{SYSTEM_TITLES[options.system]}, beside {options.clients}\n")
    print("| | times | clients lost, of " + str(count) + " each time | pause of the slowest, median | longest | wrong |")
    print("|---|---|---|---|---|---|")
    failed = False
    for what, done, lost, pauses, wrong in rows:
        names = ", ".join(f"{name} {times}" for name, times in sorted(lost.items())) or "none"
        pause = [f"{1000 * number:.0f} ms" for number in (statistics.median(pauses), max(pauses))] if pauses else ["–", "–"]
        print(f"| {what} | {done} | {names} | {pause[0]} | {pause[1]} | {len(wrong)} |")
        failed |= bool(wrong) or any(name in lost for name in options.expect.split(","))
    return 1 if failed and options.system == "mpsshim" else 0


if __name__ == "__main__":
    sys.exit(main())
