#!/usr/bin/env python3
"""n-body of two users on one GPU: native, NVIDIA MPS, and mpsshim with each value of --users, one after the other.

    benches/gpu/users.py --build target/release [--nbody ./nbody] [--bodies 14336] [--iterations 6000] [--systems NAME,...]

Each user (ids 65533 and 65534) starts one program; both are started at the same time. Prints as Markdown, for each system,
when the first and the second program had ended, the time that each says it took for its iterations, and the device memory
in use while both were there or the first one ran. Needs root, `setpriv`, `nvidia-smi` and the build's libmpsshim.so,
mps-control, mps-server and nbody.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time

import measure
import systems
from systems import Failure, Missing

USERS = (65533, 65534)
PROGRAMS = ("libmpsshim.so", "mps-control", "mps-server")
# A program waits for the other user's where users are served one after the other.
PATIENCE = 300


def of_users(users):
    """mpsshim whose daemon serves users in this way."""
    class OfUsers(systems.Mpsshim):
        def daemon_env(self):
            return super().daemon_env() | {"MPSSHIM_USERS": users}
    return OfUsers


class Weighted(of_users("apart")):
    """mpsshim with a server for each user, the first of which has three times the share of the second."""

    def start(self):
        super().start()
        self.command("set_user_weight", str(USERS[0]), "300")


SYSTEMS = {
    "native": ("without MPS", None),
    "nvidia": ("NVIDIA MPS", None),
    "serial": ("mpsshim, `--users serial`", of_users("serial")),
    "apart": ("mpsshim, `--users apart`", of_users("apart")),
    "weighted": ("mpsshim, `--users apart`, weights 300 and 100", Weighted),
    "together": ("mpsshim, `--users together`", of_users("together")),
}


def used_memory():
    """Device memory in use, MiB."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0])


def measure_system(system, processes, nbody, options):
    command = [nbody, "-benchmark", f"-numbodies={options.bodies}", f"-i={options.iterations}"]

    def start(user):
        prefix = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return processes.start([*prefix, *command], system.env())
    before = used_memory()
    began = time.monotonic()
    running = [start(user) for user in USERS]
    most, ends = 0, {}
    while len(ends) < len(running):
        for process in running:
            if process.poll() is not None and process not in ends:
                ends[process] = time.monotonic() - began
        most = max(most, used_memory())
        if time.monotonic() - began > PATIENCE:
            raise Failure(f"a program was still running after {PATIENCE} s")
    took = [measure.parse_nbody(processes.finish(process, 10)) for process in running]
    return sorted(ends.values()), took, most - before


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="target/release", help="folder with the build (%(default)s)")
    parser.add_argument("--nbody", help="an nbody binary (default: the one in BUILD)")
    parser.add_argument("--bodies", type=int, default=14336)
    parser.add_argument("--iterations", type=int, default=6000)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="from %(default)s")
    options = parser.parse_args()
    names = options.systems.split(",")
    if unknown := [name for name in names if name not in SYSTEMS]:
        parser.error(f"--systems: unknown: {', '.join(unknown)}")
    if os.geteuid() != 0:
        parser.error("it starts programs as other users: run it as root")
    nbody = options.nbody or os.path.join(options.build, "nbody")
    failed = False
    print(f"n-body with {options.bodies} bodies, {options.iterations} iterations, of two users\n")
    print("| | first ends | second ends | iterations | device memory |")
    print("|---|---|---|---|---|")
    processes = systems.Processes()
    with tempfile.TemporaryDirectory(prefix="users-") as directory:
        # Other users must be able to read and execute them.
        os.chmod(directory, 0o755)
        build = os.path.join(directory, "build")
        os.makedirs(build)
        for path in [*(os.path.join(options.build, name) for name in PROGRAMS), nbody]:
            shutil.copy(path, build)
        program = os.path.join(build, os.path.basename(nbody))
        for name in names:
            title, own = SYSTEMS[name]
            system = systems.make_system(name, processes, directory, build, own)
            try:
                system.start()
                (first, second), took, memory = measure_system(system, processes, program, options)
                times = ", ".join(f"{each / 1e3:.2f} s" for each in took)
                print(f"| {title} | {first:.2f} s | {second:.2f} s | {times} | {memory:,} MiB |", flush=True)
            except Missing as missing:
                print(f"{name} left out: {missing}", file=sys.stderr)
            except Failure as failure:
                failed = True
                print(f"{name}: {failure}", file=sys.stderr)
            finally:
                system.stop()
                processes.end_all()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
