"""The table of run.py: what is measured, in which order, and what mpsshim has to reach."""

import dataclasses

from systems import SYSTEM_TITLES


def with_unit(number, unit):
    return number + unit if unit.startswith("/") else f"{number} {unit}"


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound for mpsshim's value: a number, or so many times another value of the same run.

    Hosts differ, so a bound relative to a system (or to another row of mpsshim's own) holds on more of them.
    """

    kind: str  # "at most" or "at least"
    number: float
    system: str | None = None
    row: str | None = None

    def text(self, unit):
        if self.system is None and self.row is None:
            return f"{self.kind} {with_unit(f'{self.number:,g}', unit)}"
        if self.row is not None:
            base = "its own alone"
        else:
            base = SYSTEM_TITLES[self.system]
        if self.number == 1:
            return f"{self.kind} {base}"
        if self.kind == "at most" and 1 < self.number < 1.1:
            return f"within {round((self.number - 1) * 100)}% of {base}"
        return f"{self.kind} {self.number:g} times {base}"

    def reached(self, key, value):
        """True, False, or None when it cannot be told. `value(key, system)` gives a median or None."""
        ours, bound = value(key, "mpsshim"), self.number
        if self.system is not None or self.row is not None:
            base = value(self.row or key, self.system or "mpsshim")
            bound = None if base is None else base * self.number
        if ours is None or bound is None:
            return None
        return ours <= bound if self.kind == "at most" else ours >= bound


def at_most(number, system=None, row=None):
    return Target("at most", number, system, row)


def at_least(number, system=None, row=None):
    return Target("at least", number, system, row)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a value that a measurement yields, and what mpsshim has to reach."""

    key: str
    title: str
    unit: str
    digits: int
    targets: tuple = ()

    def target_text(self):
        return ", ".join(target.text(self.unit) for target in self.targets)

    def reached(self, value, refused=lambda system: False):
        """Whether all bounds are kept; None when that cannot be told.

        A bound that is relative to a system that refused the work is kept by doing it.
        """
        answers = []
        for target in self.targets:
            answer = target.reached(self.key, value)
            if answer is None and refused(target.system) and value(self.key, "mpsshim") is not None:
                answer = True
            answers.append(answer)
        if False in answers:
            return False
        return True if answers and None not in answers else None

    def number(self, value):
        return f"{value:,.{self.digits}f}"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What is run at once, and the rows that come of it."""

    # 1 is measured first in each round, 3 last: what a short budget leaves out.
    rank: int
    rows: tuple


def small(clients):
    """50 µs kernels with a wait after each. 32 clients of 8 blocks would fill the GPU, so many clients have 4."""
    blocks = ", 4 blocks" if clients >= 32 else ""
    people = "one client" if clients == 1 else f"{clients} clients, total"
    targets = [at_least(1, "nvidia")] + ([at_least(300_000)] if clients == 64 else [])
    return Row(f"small{clients}", f"50 µs kernel{blocks} + synchronize, {people}", "/s", 0, tuple(targets))


# Name -> measurement. The order is that of the table; the order of measuring is by rank.
MEASUREMENTS = {
    "latency": Measurement(
        1,
        (
            Row("launch_burst", "launch, client side, queue not full", "µs", 3, (at_most(0.15),)),
            Row("launch_steady", "launch, steady state", "µs", 2, (at_most(2.7),)),
            Row("launch_sync", "launch + synchronize, p50", "µs", 2, (at_most(7.2),)),
            Row("launch_sync_p99", "launch + synchronize, p99", "µs", 2, (at_most(10.5),)),
            Row("h2d_4", "4-byte copy to the device, p50", "µs", 2, (at_most(0.3),)),
            Row("d2h_4", "4-byte copy from the device, p50", "µs", 2, (at_most(6.5),)),
            Row("malloc_free", "malloc + free of 1 MiB, p50", "µs", 2, (at_most(0.3),)),
        ),
    ),
    "bandwidth": Measurement(
        1,
        (
            Row("h2d_pinned", "pinned copy, 256 MiB, to the device", "GB/s", 1, (at_least(55),)),
            Row("d2h_pinned", "pinned copy, 256 MiB, from the device", "GB/s", 1, (at_least(55),)),
            Row("h2d_pageable", "pageable copy, 256 MiB, to the device", "GB/s", 1, (at_least(20),)),
            Row("d2h_pageable", "pageable copy, 256 MiB, from the device", "GB/s", 1, (at_least(22),)),
            Row("h2d_pageable_1m", "pageable copy, 1 MiB, to the device", "GB/s", 1, (at_least(16),)),
            Row("d2h_pageable_1m", "pageable copy, 1 MiB, from the device", "GB/s", 1, (at_least(14),)),
        ),
    ),
    "small1": Measurement(2, (small(1),)),
    "small2": Measurement(3, (small(2),)),
    "small4": Measurement(3, (small(4),)),
    "small8": Measurement(1, (small(8),)),
    "small16": Measurement(2, (small(16),)),
    "small32": Measurement(1, (small(32),)),
    "small64": Measurement(2, (small(64),)),
    "empty1": Measurement(
        2, (Row("empty1", "empty kernels, 256 then synchronize, one client", "/s", 0, (at_least(400_000),)),)
    ),
    "empty4": Measurement(
        3, (Row("empty4", "empty kernels, 256 then synchronize, 4 clients, total", "/s", 0, (at_least(1_050_000),)),)
    ),
    "empty8": Measurement(
        1, (Row("empty8", "empty kernels, 256 then synchronize, 8 clients, total", "/s", 0, (at_least(1_100_000),)),)
    ),
    "short8": Measurement(
        2, (Row("short8", "5 µs kernels, 16 then synchronize, 8 clients, total", "/s", 0, (at_least(1_000_000),)),)
    ),
    "nbody1": Measurement(
        3, (Row("nbody1", "nbody 512000, 10 iterations, one copy", "ms", 1, (at_most(1.01, "native"),)),)
    ),
    "nbody3": Measurement(
        1, (Row("nbody3", "nbody 14336, 10000 iterations, three copies, each", "ms", 0, (at_most(6800),)),)
    ),
    "bert1": Measurement(1, (Row("bert1", "BERT-base fp16, batch 1, one client", "/s", 0, (at_least(425),)),)),
    "bert2": Measurement(3, (Row("bert2", "BERT-base fp16, batch 1, 2 clients, total", "/s", 0, (at_least(850),)),)),
    "bert4": Measurement(2, (Row("bert4", "BERT-base fp16, batch 1, 4 clients, total", "/s", 0, (at_least(1600),)),)),
    "bert8": Measurement(
        1,
        (
            Row("bert8", "BERT-base fp16, batch 1, 8 clients, total", "/s", 0, (at_least(2800),)),
            Row("bert_memory", "device memory of the eighth BERT client", "MiB", 0, (at_most(330),)),
            Row("bert_memory_all", "device memory of all eight", "MiB", 0, (at_most(3000),)),
        ),
    ),
    "bert4x8": Measurement(
        2, (Row("bert4x8", "BERT-base fp16, batch 8, 4 clients, total", "/s", 0, (at_least(10_900),)),)
    ),
    "train1": Measurement(
        2,
        (
            Row(
                "train1",
                "training a small convnet, one client, steps",
                "/s",
                0,
                (at_least(1, "native"), at_least(1, "nvidia")),
            ),
        ),
    ),
    "train4": Measurement(
        2,
        (
            Row(
                "train4",
                "training a small convnet, 4 clients, total",
                "/s",
                0,
                (at_least(1, "native"), at_least(1, "nvidia")),
            ),
        ),
    ),
    "request": Measurement(
        1,
        (
            Row("request_alone", "request of 1 ms of kernels, p99, alone", "ms", 3),
            Row("request_beside", "the same beside a flood of 5 ms kernels", "ms", 3, (at_most(1, "nvidia"),)),
            Row(
                "request_priority",
                "the same, the flood at CUDA_MPS_CLIENT_PRIORITY=1",
                "ms",
                3,
                (at_most(1.3, row="request_alone"),),
            ),
            Row("flood_alone", "5 ms kernels of the flood, alone", "/s", 0),
            Row("flood_beside", "5 ms kernels of the flood beside the requests", "/s", 0),
        ),
    ),
    "start": Measurement(
        1,
        (
            Row("start", "runtime start (cudaFree(0)) with a running server", "ms", 1, (at_most(60),)),
            Row("first_kernel", "first kernel done after", "ms", 1),
        ),
    ),
    "start_beside": Measurement(
        2, (Row("start_beside", "first kernel done beside a flood of 5 ms kernels, after", "ms", 1, (at_most(100),)),)
    ),
    "memory": Measurement(
        2, (Row("memory", "device memory for each further idle client", "MiB", 1, (at_most(5),)),)
    ),
    "idle": Measurement(
        3, (Row("idle", "CPU of idle daemon and server, one idle client", "ms/s", 1, (at_most(0),)),)
    ),
}

# A value beside a row's own: the processors that clients and server used meanwhile.
CPUS = "_cpus"

ROWS = {row.key: row for measurement in MEASUREMENTS.values() for row in measurement.rows}


def in_table_order(names):
    return [name for name in MEASUREMENTS if name in names]


def by_importance(names):
    return sorted(names, key=lambda name: MEASUREMENTS[name].rank)
