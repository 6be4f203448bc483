"""The scenarios of standstill.py: programs beside programs with long kernels, on one system at a time."""

import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import threading
import time

import systems
from systems import Failure

# Until a client that is not a newcomer must be ready, s.
START = 20
# What a client has to end by itself once it was told to, s: two kernels of the longest.
END = 8
# A program of the batch, s.
PROGRAM = 60


class Client:
    """A running standstill program; what it prints is collected as it comes."""

    def __init__(self, processes, system, program, *arguments):
        self.processes = processes
        self.name = f"standstill {arguments[0]}"
        self.values = {}  # The last text of each name.
        self.stretches = []  # The numbers of each stretch.
        self.asked = 0
        self.changed = threading.Condition()
        self.closed = False
        self.began = time.monotonic_ns()
        self.process = processes.start(
            [program, *arguments, "--began", str(self.began)], system.env(), stdin=subprocess.PIPE
        )
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        stretch = {}
        for line in self.process.stdout:
            name, _, value = line.strip().partition("=")
            with self.changed:
                self.values[name] = value
                with contextlib.suppress(ValueError):
                    stretch[name] = float(value)
                if name == "window":
                    self.stretches.append(stretch)
                    stretch = {}
                self.changed.notify_all()
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def wait_until(self, condition, what, deadline):
        with self.changed:
            self.changed.wait_for(lambda: condition() or self.closed, max(0, deadline - time.monotonic()))
            if condition():
                return
            closed = self.closed
        if closed:
            self.end(deadline)
            raise Failure(f"{self.name} ended without {what}")
        raise Failure(f"{self.name}: no {what} after {(time.monotonic_ns() - self.began) / 1e9:.1f} s")

    def wait(self, name, deadline):
        """The text that the program prints under this name."""
        self.wait_until(lambda: name in self.values, name, deadline)
        return self.values[name]

    def number(self, name):
        """The number that was printed under this name, or None."""
        return float(self.values[name]) if name in self.values else None

    def ask(self):
        """Ends a stretch."""
        self.asked += 1
        self.send("\n")

    def answer(self, deadline):
        """What was done in the stretch that the last `ask` ended."""
        wanted = self.asked
        self.wait_until(lambda: len(self.stretches) >= wanted, "report", deadline)
        return self.stretches[wanted - 1]

    def send(self, text):
        # A program that has ended says why elsewhere.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(text)
            self.process.stdin.flush()

    def close_input(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self, deadline):
        """Waits for the program's end; a Failure if that does not come in time or is not a good one."""
        self.close_input()
        try:
            self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            raise Failure(f"{self.name} had not ended after {(time.monotonic_ns() - self.began) / 1e9:.1f} s") from None
        self.reader.join()
        said = "" if self.process.stderr.closed else self.process.stderr.read().strip()
        self.processes.end(self.process)
        if self.process.returncode != 0:
            last = said.splitlines()[-1] if said else "no output"
            raise systems.failure(f"{self.name} ended with {self.process.returncode}: {last}")

    def kill(self):
        """Ends the program now."""
        if self.process in self.processes.started:
            self.process.kill()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                # The driver does not let go of it; nobody waits for it any more.
                self.processes.started.remove(self.process)
                raise Failure(f"{self.name}, process {self.process.pid}, does not end even when killed") from None
            self.reader.join()
            self.close_input()
            self.processes.end(self.process)


class Scenarios:
    """The scenarios, each a method that runs on one system: it fills `values` and says in `problems` what went wrong.

    A Failure ends a scenario; what it had measured by then stays.
    """

    def __init__(self, processes, program, seconds, quick):
        self.processes, self.program, self.seconds, self.quick = processes, os.path.abspath(program), seconds, quick
        # Of no earlier run either.
        self.nonces = itertools.count(time.time_ns() << 3)
        self.times = {}  # System -> program of the batch -> its times in the two passes; None where it did not end.
        self.clients = []

    def run(self, name, system, deadline):
        """The values, and what went wrong."""
        self.system, self.deadline, self.values, self.problems, self.clients = system, deadline, {}, [], []
        self.wrong = 0  # Results of the clients of short kernels.
        try:
            getattr(self, name)()
            self.end_clients()
        except (Failure, OSError) as failure:
            self.problems.append(str(failure))
        except KeyError as error:
            self.problems.append(f"a client did not print {error}")
        if self.wrong:
            self.problems.append(f"{self.wrong:.0f} wrong results of clients of 50 µs kernels")
        for client in self.clients:
            try:
                client.kill()
            except Failure as failure:
                self.problems.append(str(failure))
        return self.values, self.problems

    def end_clients(self):
        for client in self.clients:
            client.close_input()
        deadline = time.monotonic() + END
        for client in self.clients:
            if client.process in self.processes.started:
                try:
                    client.end(deadline)
                except Failure as failure:
                    self.problems.append(str(failure))

    def nonce(self):
        return f"{next(self.nonces) % (1 << 64):016x}"

    def start(self, *arguments):
        client = Client(self.processes, self.system, self.program, *arguments)
        self.clients.append(client)
        return client

    def begin(self, count, *arguments):
        """So many clients that are ready."""
        clients = [self.start(*arguments) for _ in range(count)]
        deadline = min(time.monotonic() + START, self.deadline)
        for client in clients:
            client.wait("ready", deadline)
        return clients

    def shorts(self, count):
        return self.begin(count, "short", "--us", "50", "--windows")

    def pause(self, seconds):
        time.sleep(max(0, min(seconds, self.deadline - time.monotonic())))

    def limit(self):
        """Until a newcomer must have ended."""
        return min(time.monotonic() + (15 if self.quick else 30), self.deadline)

    def stretch(self, clients, work):
        """What the clients did while `work` went on."""
        before = self.reports(clients)
        work()
        found = self.reports(clients)
        self.wrong += sum(stretch["wrong"] for stretch in before + found)
        return found

    def reports(self, clients):
        """What each client did since it was last asked; the round or kernel that goes on counts too."""
        for client in clients:
            client.ask()
        deadline = min(time.monotonic() + START, self.deadline + END)
        return [client.answer(deadline) for client in clients]

    def newcomer(self, limit, nonce=None, *arguments):
        """A newcomer that works and ends; the client. A problem if it does not, or has wrong results."""
        client = self.start("newcomer", *(["--nonce", nonce] if nonce else []), *arguments)
        try:
            client.end(limit)
        except Failure as failure:
            self.problems.append(str(failure))
        if client.number("wrong"):
            self.problems.append(f"{client.name} has {client.number('wrong'):.0f} wrong results")
        return client

    # -----------------------------------------------------------------------------------------------------------------

    def beside(self):
        (long,) = self.begin(1, "long", "--ms", "2000", "--blocks", "4", "--windows")
        shorts = self.shorts(4)
        alone = self.stretch(shorts, lambda: self.pause(self.seconds))
        self.values["beside_alone"] = total(alone)
        self.values["beside_longest_alone"] = longest(alone)
        long.ask()
        with_newcomers = self.stretch(shorts, self.come_and_go)
        at = max(with_newcomers, key=lambda stretch: stretch["longest_ms"])["longest_at_s"]
        self.values["beside_longest_at"] = at - self.came
        self.values["beside_newcomers"] = total(with_newcomers)
        self.values["beside_percent"] = percent(total(with_newcomers), total(alone))
        self.values["beside_longest"] = longest(with_newcomers)
        self.values["beside_p999"] = max(stretch["p999_ms"] for stretch in with_newcomers)
        self.values["beside_wrong"] = self.wrong
        self.values["beside_kernel"] = self.reports([long])[0]["kernel_longest_ms"]

    def come_and_go(self):
        """20 newcomers, two at a time; half of them are killed at some moment of their first second."""
        plans = newcomer_plans(20)
        ended = []
        began = self.came = time.monotonic()

        def one(plan):
            never_seen, killed_after = plan
            nonce = self.nonce() if never_seen else None
            arguments = ("--kernels", "5", "--ms", "2")
            if killed_after is None:
                client = self.newcomer(self.limit(), nonce, *arguments)
                if client.process.returncode == 0:
                    ended.append(client)
            else:
                client = self.start("newcomer", *(["--nonce", nonce] if nonce else []), *arguments)
                self.pause(killed_after)
                client.kill()

        self.in_parallel(plans, 2, one)
        wanted = sum(killed_after is None for _, killed_after in plans)
        self.values["beside_ended"] = percent(len(ended), wanted)
        self.values["beside_took"] = time.monotonic() - began

    def in_parallel(self, jobs, at_a_time, work):
        """`work` on all jobs, until the scenario's time is over; whether all were begun."""
        remaining = iter(jobs)
        lock = threading.Lock()
        left_out = []

        def worker():
            while True:
                with lock:
                    job = next(remaining, None)
                    if job is None:
                        return
                    if time.monotonic() > self.deadline:
                        left_out.append(job)
                        continue
                try:
                    work(job)
                except Failure as failure:
                    self.problems.append(str(failure))

        threads = [threading.Thread(target=worker, daemon=True) for _ in range(at_a_time)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if left_out:
            self.problems.append(f"time was over before {len(left_out)} of {len(jobs)} had been started")
        return not left_out

    def first(self):
        self.newcomer(self.limit())  # Now its image has been seen.
        self.begin(1, "long", "--ms", "2000", "--blocks", "4", "--windows")
        firsts, ends = {"seen": [], "never": []}, {"seen": [], "never": []}
        for _ in range(3 if self.quick else 7):
            for kind in firsts:
                if time.monotonic() > self.deadline:
                    continue
                client = self.newcomer(self.limit(), self.nonce() if kind == "never" else None)
                # The limit counts as the time of one that was ended by it.
                lived = (time.monotonic_ns() - client.began) / 1e6
                if client.process.returncode in (0, -signal.SIGKILL):
                    firsts[kind].append(client.number("first_ms") or lived)
                    ends[kind].append(client.number("end_ms") or lived)
        for kind in firsts:
            if firsts[kind]:
                self.values[f"first_{kind}"] = statistics.median(firsts[kind])
                self.values[f"first_{kind}_max"] = max(firsts[kind])
                self.values[f"first_{kind}_end"] = statistics.median(ends[kind])

    def ninth(self):
        eight = self.begin(8, "long", "--ms", "1000", "--blocks", "8", "--windows")
        self.reports(eight)
        self.pause(self.seconds)
        without = self.reports(eight)
        began = time.monotonic()
        ninth = self.newcomer(self.limit(), self.nonce())
        self.pause(self.seconds - (time.monotonic() - began))
        beside = self.reports(eight)
        self.put("ninth_first", ninth.number("first_ms"))
        self.put("ninth_end", ninth.number("end_ms"))
        self.values["ninth_rate"] = kernel_rate(without)
        self.values["ninth_percent"] = percent(kernel_rate(beside), kernel_rate(without))
        self.values["ninth_kernel"] = max(found["kernel_longest_ms"] for found in beside)

    def put(self, key, value):
        if value is not None:
            self.values[key] = value

    def endless(self):
        shorts = self.shorts(2)
        alone = self.stretch(shorts, lambda: self.pause(self.seconds / 2))
        self.values["endless_alone"] = total(alone)
        until = str(max(5, round(self.deadline - time.monotonic() + 10)))
        (endless,) = self.begin(1, "endless", "--blocks", "4", "--seconds", until)
        beside = self.stretch(shorts, lambda: self.pause(self.seconds / 2))
        self.values["endless_percent"] = percent(total(beside), total(alone))
        self.values["endless_longest"] = longest(beside)
        newcomer = None

        def come():
            nonlocal newcomer
            newcomer = self.start("newcomer", "--nonce", self.nonce())
            with contextlib.suppress(Failure):
                newcomer.wait("end_ms", self.limit())

        meanwhile = self.stretch(shorts, come)
        self.values["endless_longest_newcomer"] = longest(meanwhile)
        self.put("endless_first", newcomer.number("first_ms"))
        self.put("endless_end", newcomer.number("end_ms"))
        stuck = newcomer.number("end_ms") is None
        endless.end(time.monotonic() + END)
        if not endless.number("told"):
            self.problems.append("the endless kernel ended by itself")
        newcomer.end(time.monotonic() + END)
        if stuck:
            self.problems.append("the newcomer ended only when the endless kernel had ended")
        if newcomer.number("wrong"):
            self.problems.append("the newcomer had wrong results")

    def handshake(self):
        found = {"seen": [], "never": []}
        for _ in range(1 if self.quick else 3):
            for kind in found:
                if time.monotonic() > self.deadline:
                    continue
                (waiting,) = self.begin(1, "await")
                handle = waiting.wait("handle", self.deadline)
                nonce = ["--nonce", self.nonce()] if kind == "never" else []
                writer = self.start("write", "--handle", handle, *nonce)
                waiting.wait("seen", time.monotonic() + 25)
                if waiting.number("seen"):
                    found[kind].append(waiting.number("ended_at_ms") - writer.began / 1e6)
                else:
                    which = "seen before" if kind == "seen" else "never seen"
                    self.problems.append(f"the waiting kernel saw nothing in 20 s; the other's image was {which}")
                writer.end(time.monotonic() + END)
                waiting.end(time.monotonic() + END)
        for kind, times in found.items():
            if times:
                self.values[f"handshake_{kind}"] = statistics.median(times)

    def batch(self):
        programs = {name: [*arguments, "--nonce", self.nonce()] for name, arguments in batch_programs(self.quick)}
        times = self.times[self.system.name] = {name: [] for name in programs}
        bad, late = [], []

        def one(name):
            client = self.start("newcomer", *programs[name])
            client.name = name
            limit = min(client.began / 1e9 + PROGRAM, self.deadline)
            try:
                client.end(limit)
            except Failure as failure:
                (late if time.monotonic() > limit else bad).append(name)
                self.problems.append(str(failure))
                times[name].append(None)
                return
            times[name].append((time.monotonic_ns() - client.began) / 1e9)
            if client.number("wrong"):
                bad.append(name)
                self.problems.append(f"{name} has {client.number('wrong'):.0f} wrong results")

        choice = random.Random(2)
        for key in ("batch_first", "batch_second"):
            order = list(programs)
            choice.shuffle(order)
            began = time.monotonic()
            if self.in_parallel(order, 8, one):
                self.values[key] = time.monotonic() - began
        self.values["batch_late"] = len(late)
        self.values["batch_wrong"] = len(bad)


def total(stretches):
    return sum(stretch["rounds_per_s"] for stretch in stretches)


def longest(stretches):
    return max(stretch["longest_ms"] for stretch in stretches)


def kernel_rate(stretches):
    return sum(stretch["kernels"] / stretch["seconds"] for stretch in stretches if stretch["seconds"])


def percent(part, whole):
    return 100 * part / whole if whole else 0.0


def newcomer_plans(count):
    """For each newcomer whether its image is new, and after how many seconds it is killed or None; always the same."""
    choice = random.Random(1)
    killed = [choice.uniform(0, 1) if number % 4 >= 2 else None for number in range(count)]
    return [(number % 2 == 1, after) for number, after in enumerate(killed)]


def batch_programs(quick):
    """Name and options of each program of the batch."""
    programs = []
    for copy in range(1 if quick else 3):
        for ms, kernels in ((100, 5), (1000, 2), (5000, 1)):
            for blocks, width in ((4, "few blocks"), (0, "full waves")):
                name = f"{kernels} kernels of {ms / 1000:g} s, {width}, {copy}"
                programs.append((name, ["--ms", str(ms), "--kernels", str(kernels), "--blocks", str(blocks)]))
        for number in range(8):
            name = f"20 kernels of 1 ms, {8 * copy + number}"
            programs.append((name, ["--ms", "1", "--kernels", "20", "--blocks", "4"]))
    return programs
