"""The measurements of run.py: each runs on one system and gives values by row key."""

import contextlib
import os
import re
import shutil
import statistics
import subprocess
import time

import systems
import table


def parse_values(text):
    """name=value lines as a dictionary of numbers; other lines are skipped."""
    values = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        try:
            if equals:
                values[name.strip()] = float(value)
        except ValueError:
            pass
    return values


def read_values(process, last, timeout):
    """The values that a process prints up to the one called `last`."""
    lines = []
    while not (lines and lines[-1].startswith(f"{last}=")):
        lines.append(systems.read_line(process, timeout))
    return parse_values("\n".join(lines))


def parse_nbody(text):
    """The milliseconds that nbody's benchmark reports."""
    found = re.search(r"total time for \d+ iterations: ([\d.]+) ms", text)
    if not found:
        raise systems.Failure("nbody printed no total time")
    return float(found[1])


class Bench:
    """The measurements, each a method that runs on one system and returns row key -> value."""

    def __init__(self, processes, microbench, nbody, python, quick, reasons):
        self.processes = processes
        self.python = python
        self.microbench = microbench and os.path.abspath(microbench)
        self.nbody = nbody and os.path.abspath(nbody)
        self.quick = quick
        self.reasons = reasons  # Program -> why there is none.

    def possible(self, name):
        """Why a measurement cannot run here, or None."""
        if name.startswith("nbody"):
            return self.reasons.get("nbody")
        if name.startswith(("bert", "train")):
            return self.reasons.get("python")
        return self.reasons.get("microbench")

    def run(self, name, system):
        if name.startswith("small"):
            clients = int(name.removeprefix("small"))
            return self.kernels(name, system, clients, "small", "--blocks", "4" if clients >= 32 else "8")
        if name.startswith("empty"):
            return self.kernels(name, system, int(name.removeprefix("empty")), "empty", "--batch", "256")
        if name.startswith("short"):
            return self.kernels(name, system, int(name.removeprefix("short")), "small", "--us", "5", "--batch", "16")
        if name.startswith(("bert", "train")):
            return self.torch(name, system)
        return getattr(self, name)(system)

    def seconds(self, usual):
        return usual / 2 if self.quick else usual

    def micro(self, system, *arguments, timeout=60):
        return parse_values(self.processes.run([self.microbench, *arguments], system.env(), timeout))

    def hold(self, system):
        """An idle client that has its context."""
        process = self.processes.start([self.microbench, "hold"], system.env(), stdin=subprocess.PIPE)
        systems.read_until(process, "ready=", 30)
        return process

    def release(self, holders):
        try:
            for holder in holders:
                self.processes.finish(holder, 20, "")
        finally:
            for holder in holders:
                self.processes.end(holder)

    def nbody_run(self, system, copies, bodies, iterations):
        command = [self.nbody, "-benchmark", f"-numbodies={bodies}", f"-i={iterations}"]
        running = [self.processes.start(command, system.env()) for _ in range(copies)]
        try:
            return [parse_nbody(self.processes.finish(process, 90)) for process in running]
        finally:
            for process in running:
                self.processes.end(process)

    def nbody1(self, system):
        scale = 10 if self.quick else 1
        (took,) = self.nbody_run(system, 1, 512000, 10 // scale)
        return {"nbody1": took * scale}

    def nbody3(self, system):
        scale = 10 if self.quick else 1
        return {"nbody3": statistics.mean(self.nbody_run(system, 3, 14336, 10000 // scale)) * scale}

    def latency(self, system):
        values = self.micro(system, "latency")
        return {
            "launch_burst": values["launch_burst_ns"] / 1e3,
            "launch_steady": values["launch_steady_ns"] / 1e3,
            "launch_sync": values["launch_sync_p50_us"],
            "launch_sync_p99": values["launch_sync_p99_us"],
            "h2d_4": values["h2d_4_bytes_p50_us"],
            "d2h_4": values["d2h_4_bytes_p50_us"],
            "malloc_free": values["malloc_free_p50_us"],
        }

    def kernels(self, name, system, clients, mode, *arguments):
        """Kernels a second of clients that begin together, added up."""
        seconds = self.seconds(2)
        command = [self.microbench, mode, "--wait", "--seconds", f"{seconds:g}", *arguments]
        rate, cpus, _ = self.together(system, clients, command, seconds, "kernels_per_s")
        return {name: rate, name + table.CPUS: cpus}

    def torch(self, name, system):
        """Sequences or training steps a second of PyTorch clients that begin together, added up; the median of three
        stretches, since their start takes longer than those."""
        workload, clients, batch = re.fullmatch(r"(bert|train)(\d+)(?:x(\d+))?", name).groups()
        seconds = self.seconds(4)
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_client.py")
        command = [self.python, program, workload, "--wait", "--seconds", f"{seconds:g}", "--batch", batch or "1"]
        rate, cpus, memory = self.together(
            system, int(clients), command, seconds, "per_s", stretches=3, memory=name == "bert8"
        )
        values = {name: rate, name + table.CPUS: cpus}
        if len(memory) > 1:
            values |= {"bert_memory": memory[-1] - memory[-2], "bert_memory_all": memory[-1] - memory[0]}
        return values

    def together(self, system, clients, command, seconds, key, stretches=1, memory=False):
        """What clients that begin together print as `key`, added up; the processors that they and the servers use
        meanwhile; with `memory` what the device has in use before the clients, without the last one and with it. With
        several stretches clients begin again together, and the median is returned."""
        running, used, found = [], [], []
        patience = 60 if command[0] == self.microbench else 120

        def start(count):
            new = [self.processes.start(command, system.env(), stdin=subprocess.PIPE) for _ in range(count)]
            running.extend(new)
            deadline = time.monotonic() + patience
            for process in new:
                systems.read_until(process, "ready=", max(1, deadline - time.monotonic()))

        try:
            if memory:
                system.renew()  # A server's own memory is counted too.
                for count in (0, clients - 1, 1):
                    start(count)
                    used.append(self.device_memory(None))
            else:
                start(clients)
            pids = system.pids()
            for stretch in range(stretches):
                begin = time.time() + 0.2 + 0.005 * clients
                for process in running:
                    process.stdin.write(f"{begin}\n")
                    process.stdin.flush()
                time.sleep(max(0, begin - time.time()))
                before = cpu_ms(pids)
                time.sleep(seconds)
                server = (cpu_ms(pids) - before) / 1e3 / seconds
                if stretch + 1 < stretches:
                    results = [read_values(process, key, 60) for process in running]
                else:
                    results = [parse_values(self.processes.finish(process, 60)) for process in running]
                late = max(result["late_ms"] for result in results)
                if late > 100:
                    raise systems.Failure(f"a client began {late:.0f} ms late")
                rate = sum(result[key] for result in results)
                found.append((rate, sum(result["cpus"] for result in results) + server))
        except systems.Failure as failure:
            if system.most_clients is not None and clients > system.most_clients:
                raise systems.Refused(f"takes {system.most_clients} clients; {failure}") from None
            raise
        finally:
            self.dismiss(running)
        rate, cpus = sorted(found)[len(found) // 2]
        return rate, cpus, used

    def dismiss(self, clients):
        """Ends clients that may still wait for their beginning: by the end of their input, so that they leave a server
        in good order, and by force only if that does not help."""
        for client in clients:
            if client.poll() is None:
                with contextlib.suppress(OSError, ValueError):
                    client.stdin.close()
        deadline = time.monotonic() + 10
        for client in clients:
            with contextlib.suppress(subprocess.TimeoutExpired):
                client.wait(max(0, deadline - time.monotonic()))
            self.processes.end(client)

    @contextlib.contextmanager
    def flood(self, system, **env):
        """A client that keeps the GPU busy with 5 ms kernels meanwhile; afterwards the list has its kernels a second."""
        command = [self.microbench, "flood", "--us", "5000"]
        process = self.processes.start(command, system.env() | env, stdin=subprocess.PIPE)
        rate = []
        try:
            systems.read_until(process, "ready=", 30)
            yield rate
            rate.append(parse_values(self.processes.finish(process, 30, ""))["kernels_per_s"])
        finally:
            self.processes.end(process)

    def request(self, system):
        seconds = self.seconds(5)
        options = ("--us", "50", "--batch", "20", "--blocks", "4", "--think-us", "3000", "--seconds", f"{seconds:g}")
        values = {}

        def note(name):
            pids = system.pids()
            before, began = cpu_ms(pids), time.monotonic()
            found = self.micro(system, "request", *options)
            server = (cpu_ms(pids) - before) / 1e3 / (time.monotonic() - began)
            values[name] = found["request_p99_us"] / 1e3
            values[name + "_p50"] = found["request_p50_us"] / 1e3
            values[name + table.CPUS] = found["cpus"] + server

        holder = self.hold(system)  # So that the server whose CPU is counted stays.
        try:
            note("request_alone")
            with self.flood(system) as alone:
                time.sleep(self.seconds(1))
            with self.flood(system) as beside:
                note("request_beside")
            with self.flood(system, CUDA_MPS_CLIENT_PRIORITY="1"):
                note("request_priority")
        finally:
            self.release([holder])
        return values | {"flood_alone": alone[0], "flood_beside": beside[0]}

    def start(self, system):
        holder = self.hold(system)
        try:
            system.check_used()
            results = [self.micro(system, "start") for _ in range(3 if self.quick else 5)]
        finally:
            self.release([holder])
        return {
            "start": statistics.median(result["runtime_start_ms"] for result in results),
            "first_kernel": statistics.median(result["first_kernel_ms"] for result in results),
        }

    def start_beside(self, system):
        with self.flood(system):
            system.check_used()
            results = [self.micro(system, "start") for _ in range(3 if self.quick else 5)]
        return {"start_beside": statistics.median(result["first_kernel_ms"] for result in results)}

    def memory(self, system):
        more = 4
        holders = [self.hold(system)]
        try:
            before = self.device_memory(holders[0])
            holders += [self.hold(system) for _ in range(more)]
            after = self.device_memory(holders[0])
        finally:
            self.release(holders)
        return {"memory": (after - before) / more}

    def device_memory(self, holder):
        """MiB in use on the first device: from nvidia-smi, or as a client sees it where there is none."""
        if shutil.which("nvidia-smi"):
            text = nvidia_smi("memory.used")
            if text and text.split()[0].isdigit():
                return float(text.split()[0])
        if holder is None:
            raise systems.Failure("there is no nvidia-smi to ask")
        holder.stdin.write("?\n")
        holder.stdin.flush()
        return parse_values(systems.read_until(holder, "used_mib=", 10))["used_mib"]

    def bandwidth(self, system):
        ways = ("h2d", "d2h")
        large = self.micro(system, "bandwidth")
        values = {f"{way}_{kind}": large[f"{way}_{kind}_gb_s"] for way in ways for kind in ("pinned", "pageable")}
        small = self.micro(system, "bandwidth", "--bytes", str(1 << 20))
        return values | {f"{way}_pageable_1m": small[f"{way}_pageable_gb_s"] for way in ways}

    def idle(self, system):
        holder = self.hold(system)
        try:
            pids = system.pids()
            if not pids:
                return {}
            time.sleep(1)  # What the client's start left to do is not idling.
            seconds = 2 if self.quick else 4
            before = cpu_ms(pids)
            time.sleep(seconds)
            return {"idle": (cpu_ms(pids) - before) / seconds}
        finally:
            self.release([holder])


def cpu_ms(pids):
    """Milliseconds of CPU that the processes have used so far."""
    ticks = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                ticks += systems.parse_stat(stat.read())[1]
        except OSError:
            raise systems.Failure(f"process {pid} has ended") from None
    return ticks * 1000 / os.sysconf("SC_CLK_TCK")


def nvidia_smi(field):
    """One field of the first GPU, or None."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
