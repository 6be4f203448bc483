#!/usr/bin/env python3
"""What clients get under limits, through mpsshim and under NVIDIA MPS side by side.

    tests/gpu/limits.py --build target/release [--python PYTHON] [--systems nvidia,mpsshim] [--markdown FILE]

Needs `limited` and `nbody` in the build directory (cargo build --release -p mpsshim-tests -p mpsshim-examples). Prints
a table; exit status 1 when a share is not as it should be: three clients at 33 percent within 5 percent of each other
and each within 10 percent of what it gets under NVIDIA MPS, a quarter beside three quarters 1:3 within 10 percent,
kernels of graphs within the client's part too, every way to allocate refused at the limit.
"""
import argparse
import os
import pathlib
import re
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benches" / "gpu"))
from systems import SYSTEM_TITLES, Failure, Processes, make_system, show_log  # noqa: E402

THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
BODIES = 409600
TORCH = """
import torch
held = []
try:
    while True:
        held.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError:
    print("out of memory after", len(held) * 64, "MiB")
held = None
torch.cuda.empty_cache()
a = torch.ones(1024, 1024, device="cuda")
print("goes on", (a @ a).sum().item() == 1024 ** 3)
print("total", torch.cuda.get_device_properties(0).total_memory >> 20)
"""


def rate(text):
    """Steps a second from what nbody prints."""
    found = re.search(r"total time for (\d+) iterations: ([\d.]+) ms", text)
    if not found:
        raise Failure(f"nbody printed no time: {text.strip()[-200:]}")
    return int(found[1]) / float(found[2]) * 1000


def ratio_within(values, expected, tolerance):
    """Whether values are to each other as expected, each within a share of it."""
    unit = sum(values) / sum(expected)
    return all(abs(value / unit / share - 1) <= tolerance for value, share in zip(values, expected))


class Limits:
    def __init__(self, system, processes, build, python):
        self.system, self.processes, self.build, self.python = system, processes, build, python
        self.rows, self.wrong = {}, []

    def start(self, program, *arguments, **environment):
        return self.processes.start([os.path.join(self.build, program), *arguments], self.system.env() | environment)

    def run(self, program, *arguments, **environment):
        return self.processes.finish(self.start(program, *arguments, **environment), 60)

    def note(self, row, value, well=True):
        self.rows[row] = value if well else f"{value} (wrong)"
        if not well:
            self.wrong.append(f"{self.system.name}: {row}: {value}")

    def rates(self, *clients):
        """Steps a second of clients at a time: percentage and steps of each."""
        nbody = ["-benchmark", f"-numbodies={BODIES}"]
        running = [self.start("nbody", *nbody, f"-i={steps}", **{THREADS: str(percent)}) for percent, steps in clients]
        return [rate(self.processes.finish(process, 100)) for process in running]

    def measure(self):
        for percent in (100, 75, 50, 33, 25, 10, 1):
            shown = self.run("limited", "show", **{THREADS: str(percent)})
            self.note(f"multiprocessors at {percent} %", re.search(r"multiprocessors (\d+)", shown)[1])
        used = self.run("limited", "where", **{THREADS: "33"}).split("\n")
        counts = [int(line.split()[-1]) for line in used if line]
        shown = int(self.rows["multiprocessors at 33 %"])
        self.note("used at 33 %: launched, captured, by hand", counts, all(0 < count <= shown for count in counts))
        self.alone = self.rates((33, 20))[0]
        self.note("n-body alone at 33 %, steps/s", f"{self.alone:.2f}")
        three = self.rates((33, 20), (33, 20), (33, 20))
        self.three = three
        text = " ".join(f"{value:.2f}" for value in three)
        self.note("n-body three at 33 %, steps/s", text, ratio_within(three, [1, 1, 1], 0.05))
        quarter, most = self.rates((25, 10), (75, 30))
        text = f"{quarter:.2f} {most:.2f} (1:{most / quarter:.2f})"
        self.note("n-body at 25 % and 75 %, steps/s", text, abs(most / quarter / 3 - 1) <= 0.1)
        for line in self.run("limited", "show", **{MEMORY: "0=2G"}).splitlines():
            name, value = line.rsplit(" ", 1)
            if not name.startswith("multi"):
                self.note(f"2 GiB: {name}, MiB", value)
        for line in self.run("limited", "allocate", str(64 << 20), **{MEMORY: "0=2G"}).splitlines():
            way, came = line.split(": ", 1)
            limited = "then CUDA_ERROR_OUT_OF_MEMORY" in came and int(came.split()[0]) <= 32
            # What has no room on the device is host memory.
            limited = limited or way == "cuMemAllocManaged"
            self.note(f"2 GiB in pieces of 64 MiB: {way}", came, limited or way.startswith("used"))
        if self.python:
            process = self.processes.start([self.python, "-c", TORCH], self.system.env() | {MEMORY: "0=2G"})
            said = " · ".join(self.processes.finish(process, 120).strip().splitlines())
            self.note("2 GiB: PyTorch", said, "out of memory" in said and "goes on True" in said)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="target/release")
    parser.add_argument("--python", help="a Python with PyTorch")
    parser.add_argument("--systems", default="nvidia,mpsshim")
    parser.add_argument("--markdown", help="write the table there too")
    options = parser.parse_args()
    processes, done = Processes(), {}
    with tempfile.TemporaryDirectory(prefix="limits-") as directory:
        for name in options.systems.split(","):
            system = make_system(name, processes, directory, options.build)
            limits = Limits(system, processes, options.build, options.python)
            try:
                system.start()
                limits.measure()
            except Failure as failure:
                limits.wrong.append(f"{name}: {failure}")
                show_log(system)
            finally:
                system.stop()
                processes.end_all()
            done[name] = limits
    if {"nvidia", "mpsshim"} <= done.keys() and all(hasattr(limits, "three") for limits in done.values()):
        theirs = sum(done["nvidia"].three) / 3
        for ours in done["mpsshim"].three:
            if abs(ours / theirs - 1) > 0.1:
                done["mpsshim"].wrong.append(f"a third gets {ours:.2f}, under NVIDIA MPS {theirs:.2f}")
    rows = [row for limits in done.values() for row in limits.rows]
    lines = ["| | " + " | ".join(SYSTEM_TITLES[name] for name in done) + " |", "|---" * (len(done) + 1) + "|"]
    for row in dict.fromkeys(rows):
        cells = [str(limits.rows.get(row, "")) for limits in done.values()]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    print("\n".join(lines))
    if options.markdown:
        pathlib.Path(options.markdown).write_text("\n".join(lines) + "\n")
    wrong = [line for limits in done.values() for line in limits.wrong]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if any(line for name, limits in done.items() if name == "mpsshim" for line in limits.wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
