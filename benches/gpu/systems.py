"""The ways to run a CUDA program that are compared: on the bare driver, under NVIDIA MPS, through mpsshim.

Starts and ends their daemons and all client processes. Used by run.py beside it and by tests/gpu/samples.py.
"""

import contextlib
import glob
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

SYSTEM_TITLES = {"native": "native", "nvidia": "NVIDIA MPS", "mpsshim": "mpsshim", "direct": "mpsshim, direct"}
# What the name of mpsshim with options for its server begins with; they follow.
WITH_OPTIONS = "mpsshim "


def title(name):
    return SYSTEM_TITLES.get(name, name)


# --------------------------------------------------------------------------------------------------------------------
# Processes


class Failure(Exception):
    """A measurement or a system that did not work; the message goes into the report."""


class Missing(Failure):
    """A system that is not installed."""


class Refused(Failure):
    """A system does not take so many clients."""


def failure(text):
    """The failure that a program's last words tell of."""
    # CUDA error 808, by the names that the runtime and the driver give it.
    refused = any(name in text for name in ("MpsMaxClientsReached", "MPS_MAX_CLIENTS_REACHED"))
    return (Refused if refused else Failure)(text)


class Processes:
    """Starts processes, each in a process group of its own, and ends every one of them."""

    def __init__(self):
        self.started = []

    def start(self, command, env, stdin=subprocess.DEVNULL, cwd=None):
        process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def finish(self, process, timeout, text=None):
        """Waits for the process's end; what it printed. Anything but exit status 0 is a Failure."""
        name = os.path.basename(process.args[0])
        try:
            out, err = process.communicate(text, timeout=timeout)
        except subprocess.TimeoutExpired:
            self.end(process)
            raise Failure(f"{name} was still running after {timeout:.0f} s") from None
        if process.returncode != 0:
            last = (err.strip() or out.strip() or "no output").splitlines()[-1]
            raise failure(f"{name} ended with {process.returncode}: {last}")
        return out

    def run(self, command, env, timeout, text=None):
        stdin = subprocess.DEVNULL if text is None else subprocess.PIPE
        return self.finish(self.start(command, env, stdin), timeout, text)

    def end(self, process):
        if process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass
        if process in self.started:
            self.started.remove(process)

    def end_all(self):
        for process in list(self.started):
            self.end(process)


def read_line(process, timeout):
    """The next line of the process's output; a Failure if none comes in time.

    Processes.finish would miss what is read ahead here, so read up to a line after which the process waits for input.
    """
    line = []
    reader = threading.Thread(target=lambda: line.append(process.stdout.readline()), daemon=True)
    reader.start()
    reader.join(timeout)
    name = os.path.basename(process.args[0])
    if not line:
        raise Failure(f"{name} printed nothing for {timeout:.0f} s")
    if not line[0]:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            raise Failure(f"{name} closed its output and goes on") from None
        raise failure(f"{name} ended early with {process.returncode}: {process.stderr.read().strip()[-200:]}")
    return line[0].strip()


def read_until(process, wanted, timeout):
    """Reads lines up to one that begins with `wanted` and returns that one."""
    deadline = time.monotonic() + timeout
    while not (line := read_line(process, max(0.1, deadline - time.monotonic()))).startswith(wanted):
        pass
    return line


def ended(pid):
    """True when no such process runs (a zombie has ended too)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return parse_stat(stat.read())[0] == "Z"
    except OSError:
        return True


def end_pid(pid, names):
    """Kills a process that a daemon of ours left, if it still is one of `names`."""
    try:
        with open(f"/proc/{pid}/comm") as comm:
            # The kernel keeps 15 characters of a name.
            if comm.read().strip() in [name[:15] for name in names]:
                os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


def parse_stat(text):
    """State and CPU ticks (user and system) from /proc/PID/stat. The command's name may hold anything, even ')'."""
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


def parse_pids(text):
    return [int(line) for line in text.split() if line.isdigit()]


# --------------------------------------------------------------------------------------------------------------------
# Systems


class System:
    """Programs on the bare driver."""

    name = "native"
    most_clients = None  # How many clients it takes, where that is known.

    def __init__(self, processes, directory):
        self.processes = processes
        self.directory = directory

    def env(self):
        ours = ("LD_PRELOAD", "MPSSHIM_PIPE_DIRECTORY", "MPSSHIM_LOG_DIRECTORY", "MPSSHIM_DISABLE",
                "MPSSHIM_MODE")
        env = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("CUDA_MPS_")}
        # Nothing listens there: no program may join an MPS that happens to run on this machine.
        env["CUDA_MPS_PIPE_DIRECTORY"] = os.path.join(self.directory, "none")
        return env

    def start(self):
        pass

    def stop(self):
        pass

    def renew(self):
        """Has no server on the device, until the next client comes."""

    def pids(self):
        """Daemon and servers."""
        return []

    def check_used(self):
        """A Failure unless the clients that run now really go through this system."""


class Daemon(System):
    """What NVIDIA MPS and mpsshim have in common: a control command, a pipe directory with a pid file, servers."""

    control = ""
    server = ""
    variable_prefix = ""

    def __init__(self, processes, directory):
        super().__init__(processes, directory)
        self.pipe = os.path.join(directory, "pipe")
        self.log = os.path.join(directory, "log")
        self.known = set()  # Every process id of a daemon or server that was seen.
        self.running = False

    def directories(self):
        return {f"{self.variable_prefix}PIPE_DIRECTORY": self.pipe, f"{self.variable_prefix}LOG_DIRECTORY": self.log}

    def env(self):
        return super().env() | self.directories()

    def daemon_env(self):
        return self.env()

    def command(self, *words, timeout=10):
        raise NotImplementedError

    def start(self):
        if not shutil.which(self.control):
            raise Missing(f"there is no {self.control}")
        os.makedirs(self.pipe, exist_ok=True)
        os.makedirs(self.log, exist_ok=True)
        self.running = True
        # Not through a pipe: the daemon keeps its standard output.
        with open(os.path.join(self.directory, "daemon.out"), "w") as out:
            try:
                status = subprocess.run(
                    [self.control, "-d"],
                    env=self.daemon_env(),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    timeout=20,
                ).returncode
            except (OSError, subprocess.TimeoutExpired) as error:
                raise Failure(f"{self.control} -d: {error}") from None
        if status != 0:
            with open(out.name) as said:
                raise Failure(f"{self.control} -d ended with {status}: {said.read().strip()[-300:]}")
        deadline = time.monotonic() + 10
        while not self.daemon_pids():
            if time.monotonic() > deadline:
                raise Failure(f"{self.control} -d wrote no pid file in {self.pipe}")
            time.sleep(0.05)
        self.known.update(self.daemon_pids())

    def daemon_pids(self):
        pids = []
        for path in glob.glob(os.path.join(self.pipe, "*.pid")):
            with open(path) as file:
                pids += parse_pids(file.read())
        return pids

    def servers(self):
        """Process ids of the servers."""
        return parse_pids(self.command("get_server_list"))

    def kill_servers(self):
        for pid in self.servers():
            os.kill(pid, signal.SIGKILL)

    def pids(self):
        servers = self.servers()
        self.known.update(servers)
        return self.daemon_pids() + servers

    def check_used(self):
        servers = self.servers()
        self.known.update(servers)
        if not any(parse_pids(self.command("get_client_list", str(server))) for server in servers):
            raise Failure("the client runs, but no server knows it")

    def stop(self):
        if not self.running:
            return
        self.running = False
        try:
            self.known.update(self.daemon_pids())
            self.known.update(self.servers())
            self.command("quit", timeout=20)
        except Failure as failure:
            print(f"{self.name}: {failure}; killing it", file=sys.stderr)
        self.await_end(5)
        for pid in self.known:
            end_pid(pid, [os.path.basename(self.control), self.server])
        # A signal takes effect a moment later.
        self.await_end(30)

    def await_end(self, timeout):
        """Waits until every known process has ended, for `timeout` seconds at most."""
        deadline = time.monotonic() + timeout
        while not all(ended(pid) for pid in self.known) and time.monotonic() < deadline:
            time.sleep(0.02)

    def renew(self):
        self.stop()
        self.start()

    def log_tail(self, lines=15):
        text = ""
        for path in sorted(glob.glob(os.path.join(self.log, "*.log"))):
            with open(path, errors="replace") as file:
                text += f"--- {os.path.basename(path)}\n" + "".join(file.readlines()[-lines:])
        return text


class NvidiaMps(Daemon):
    name = "nvidia"
    control = "nvidia-cuda-mps-control"
    server = "nvidia-cuda-mps-server"
    variable_prefix = "CUDA_MPS_"
    most_clients = 60  # NVIDIA's documentation, for each device since Volta.

    def command(self, *words, timeout=10):
        return self.processes.run([self.control], self.env(), timeout, " ".join(words) + "\n")


class Mpsshim(Daemon):
    name = "mpsshim"
    server = "mps-server"
    variable_prefix = "MPSSHIM_"

    def __init__(self, processes, directory, build):
        super().__init__(processes, directory)
        self.build = os.path.abspath(build)
        self.control = os.path.join(self.build, "mps-control")
        self.library = os.path.join(self.build, "libmpsshim.so")

    def env(self):
        return super().env() | {"LD_PRELOAD": self.library}

    def daemon_env(self):
        env = self.env()
        del env["LD_PRELOAD"]
        return env

    def command(self, *words, timeout=10):
        return self.processes.run([self.control, *words], self.daemon_env(), timeout)

    def restart_servers(self):
        """Replaces one server after the other. Returns the command's answer for each server of which a program stayed."""
        said = {pid: self.command("restart_server", str(pid), timeout=120).strip() for pid in self.servers()}
        return {pid: text for pid, text in said.items() if not text.isdigit()}

    def start(self):
        if not os.path.exists(self.library):
            raise Failure(f"there is no {self.library}: cargo build --release")
        super().start()


class WithOptions(Mpsshim):
    """mpsshim whose server is given further options."""

    def __init__(self, processes, directory, build, name):
        super().__init__(processes, directory, build)
        self.name = name
        self.wrapper = os.path.join(directory, "server")

    def daemon_env(self):
        return super().daemon_env() | {"MPSSHIM_SERVER": self.wrapper}

    def start(self):
        server, options = os.path.join(self.build, self.server), self.name.removeprefix(WITH_OPTIONS)
        with open(self.wrapper, "w") as script:
            script.write(f'#!/bin/sh\nexec {shlex.quote(server)} "$@" {options}\n')
        os.chmod(self.wrapper, 0o755)
        super().start()


class Direct(Mpsshim):
    """mpsshim with programs that use contexts of their own, in turns."""

    name = "direct"

    def env(self):
        return super().env() | {"MPSSHIM_MODE": "direct"}


def make_system(name, processes, directory, build, own=None):
    """The system with this name. `own`: a subclass of Mpsshim that a benchmark has for it."""
    if name.startswith(WITH_OPTIONS):
        # The name may be too long for the path of a socket.
        return WithOptions(processes, tempfile.mkdtemp(dir=directory), build, name)
    directory = os.path.join(directory, name)
    os.makedirs(directory)
    if own or name in ("mpsshim", "direct"):
        kind = own or (Mpsshim if name == "mpsshim" else Direct)
        return kind(processes, directory, build)
    return NvidiaMps(processes, directory) if name == "nvidia" else System(processes, directory)


# What the programs in tests/gpu call the two modes, and the system of each.
MODES = {"proxy": "mpsshim", "direct": "direct"}


@contextlib.contextmanager
def running(mode, build, logs=None):
    """A daemon of mpsshim's in a folder of its own whose clients run in `mode`; native and its environment beside it.

    Gives (native, system). Both and all processes are ended, however the block ends. `logs`: a folder for the logs.
    """
    processes = Processes()
    with tempfile.TemporaryDirectory(prefix="mps-") as directory:
        native = make_system("native", processes, directory, build)
        system = make_system(MODES[mode], processes, directory, build)
        try:
            system.start()
            yield native, system
        finally:
            system.stop()
            if logs:
                keep_logs([system], logs)
            processes.end_all()


def give_up(system, failure, report, given):
    """Stops a system that did not start; one that is not there and was not asked for by name is left out."""
    if isinstance(failure, Missing) and not given:
        report.note(f"{title(system.name)} left out: {failure}")
        report.systems.remove(system.name)
    else:
        report.fail(system.name, "start", failure)
        show_log(system)
    system.stop()


def show_log(system):
    if isinstance(system, Daemon):
        print(system.log_tail(), file=sys.stderr)


def keep_logs(given, folder):
    """Copies the logs of each daemon and its servers to a folder, one folder below it for each system."""
    for system in given:
        if isinstance(system, Daemon) and os.path.isdir(system.log):
            shutil.copytree(system.log, os.path.join(folder, system.name), dirs_exist_ok=True)
