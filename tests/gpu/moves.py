#!/usr/bin/env python3
"""Moves device memory of clients to host memory and back at random instants, and checks every byte of it.

    tests/gpu/moves.py --build target/release [--moves 200] [--kills 5] [--clients 4] [--seconds 300] [--seed 1]

The clients are `survivor` programs: each checks all that it has, changes it, and pauses for up to 20 ms. Meanwhile
`suspend_client` and `resume_client` are given for random clients, with oversubscription on, and the server is killed
--kills times; a client that has work in flight then may end with 806, and another one is started. A move is one order that
was carried out. Prints the number of moves, of refused orders by reason, of rounds and of clients that were lost; exit status
1 when a client found anything wrong.

Runs on softgpu too: MPSSHIM_CUDA_LIBRARY=target/debug/libsoftgpu.so tests/gpu/moves.py --build target/debug.
"""
import argparse
import collections
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benches" / "gpu"))
from systems import Failure, Processes, make_system, read_line  # noqa: E402

# A client answers within this time, also while a server is replaced.
PATIENCE = 120


class Client(threading.Thread):
    """A survivor that works until it is told to stop."""

    def __init__(self, system, processes, build, seed, sparse):
        super().__init__(daemon=True)
        self.random, self.stop = random.Random(seed), threading.Event()
        self.process = processes.start([os.path.join(build, "survivor")], system.env(), stdin=-1)
        if read_line(self.process, PATIENCE) != "started":
            raise Failure("a client did not begin")
        self.requests = ["round", f"sparse {sparse}"]
        self.rounds, self.wrong, self.is_lost = 0, None, False

    def run(self):
        try:
            while not self.stop.is_set():
                for request in self.requests:
                    self.process.stdin.write(request + "\n")
                    self.process.stdin.flush()
                    answer = read_line(self.process, PATIENCE)
                    if "RPC_FAILURE" in answer:
                        self.is_lost = True
                        return
                    if not answer.startswith(("ok ", "sparse")):
                        self.wrong = f"{request}: {answer}"
                        return
                self.rounds += 1
                time.sleep(self.random.random() * 0.02)
        except (Failure, OSError) as failure:
            self.wrong = str(failure)


def orders(system, clients, start, options, draw):
    """Gives orders until there have been enough moves. Moves by kind, refused orders by reason, kills, lost clients."""
    moves, refused, killed, lost = collections.Counter(), collections.Counter(), 0, []
    until = time.monotonic() + options.seconds
    while moves.total() < options.moves and time.monotonic() < until and not any(client.wrong for client in clients):
        if killed < options.kills and moves.total() >= (killed + 1) * options.moves / (options.kills + 1):
            for pid in system.servers()[-1:]:
                os.kill(pid, signal.SIGKILL)
            killed += 1
            time.sleep(draw.random() * 0.3)
        for number, client in enumerate(clients):
            if client.is_lost:
                lost.append(client)
                clients[number] = start(len(clients) + len(lost))
        command = draw.choice(["suspend_client", "suspend_client", "resume_client"])
        client = draw.choice(clients)
        try:
            server = str(system.servers()[-1])
            system.command(command, server, str(client.process.pid), "-t", "1", timeout=60)
            moves[command] += 1
        except IndexError:
            time.sleep(0.01)
        except Failure as refusal:
            refused[re.sub(r"\d+", "N", str(refusal))[-90:]] += 1
    return moves, refused, killed, lost


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="target/release")
    parser.add_argument("--moves", type=int, default=200)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--sparse", type=int, default=160 << 20, help="bytes of a block that is mostly zero (%(default)s)")
    parser.add_argument("--seconds", type=float, default=300, help="end after this time, whatever was reached")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ["MPSSHIM_OVERSUBSCRIPTION"] = "on"
    processes, build = Processes(), os.path.abspath(options.build)
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="moves-") as directory:
        system = make_system("mpsshim", processes, directory, options.build)
        try:
            system.start()

            def start(number):
                client = Client(system, processes, build, options.seed + number, options.sparse)
                client.start()
                return client

            clients = [start(number) for number in range(options.clients)]
            moves, refused, killed, lost = orders(system, clients, start, options, draw)
            clients += lost
            for client in clients:
                client.stop.set()
            for client in clients:
                client.join(PATIENCE)
                processes.end(client.process)
            log = system.log_tail(100_000)
            system.stop()
        finally:
            processes.end_all()
    wrong = [client.wrong for client in clients if client.wrong]
    print(f"{moves.total()} orders carried out ({moves['suspend_client']} out), {killed} kills of the server, "
          f"{len(lost)} clients lost, {sum(client.rounds for client in clients)} rounds, {len(wrong)} wrong")
    print(f"{log.count('are in host memory')} times memory went to host memory, {log.count('bytes of device memory are back')} back")
    for reason, count in refused.most_common():
        print(f"refused {count} times: {reason}")
    for text in wrong:
        print(f"wrong: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
