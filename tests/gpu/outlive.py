#!/usr/bin/env python3
"""Faults and kills of the server beside clients that have nothing in flight: who is lost, and how long the others wait.

    tests/gpu/outlive.py --build target/release [--system mpsshim|nvidia] [--faults 20] [--kills 20] [--restarts 0] [--standby]
                         [--clients survivor,survivor,jax,cupy,torch] [--seconds 600]

Each client answers requests and checks what it computes; `survivor` also checks that memory, pinned memory, streams, events
and modules are what they were. A fault is another program's write to address 0x10, a kill is SIGKILL for the server. After
each, every client gets a request at once; the slowest answer is the pause. While `restart_server` replaces the server, the
clients get requests without a pause; the slowest answer is the pause. A client that is lost is started again.

Needs `survivor` in the build directory (cargo build --release -p mpsshim-tests --bin survivor), and for the other clients
PyTorch, CuPy or JAX. Prints a table as Markdown. Exit status 1 when a client of --expect was lost or an answer was wrong.
"""
import argparse
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benches" / "gpu"))
from systems import SYSTEM_TITLES, Failure, Processes, make_system, parse_pids, read_line  # noqa: E402

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
    """The server's end."""
    servers = parse_pids(system.command("get_server_list"))
    for pid in servers[-1:]:
        os.kill(pid, signal.SIGKILL)


def restart(system):
    """`restart_server` under clients that work all the time; what it says if it fails."""
    said = system.command(f"restart_server {parse_pids(system.command('get_server_list'))[-1]}").strip()
    return "" if said.isdigit() else said


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


def run(system, processes, options):
    """Rows of the table: what happened, how often, clients lost by name, pauses in seconds, wrong answers."""
    names = options.clients.split(",")
    clients = [Client(name, system, processes, options.build) for name in names]
    ask_all(clients)
    deadline = time.monotonic() + options.seconds
    rows = []
    kinds = (("fault of another program", options.faults, fault), ("kill -9 of the server", options.kills, kill),
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
            rows = run(system, processes, options)
            system.stop()
        finally:
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
