#!/usr/bin/env python3
"""Writes the README's table from what run.py found.

    benches/gpu/readme.py docs/results/gpu-2026-11-20-1134.json

Replaces what is between the lines `<!-- results:begin FILE -->` and `<!-- results:end -->`. test_results.py checks that
the table is what this makes of the file that is named there.
"""

import argparse
import os
import re
import sys

import report as reports
import systems
import table

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
SECTION = re.compile(r"<!-- results:begin ?(\S*) ?-->\n.*?<!-- results:end -->", re.DOTALL)

# What a reader of the README would ask first. Rows that were not measured with mpsshim are left out.
ROWS = (
    "nbody3",
    "small8",
    "small32",
    "small64",
    "empty8",
    "bert1",
    "bert4",
    "bert4x8",
    "bert8",
    "bert_memory_all",
    "train4",
    "launch_burst",
    "launch_sync",
    "malloc_free",
    "h2d_pageable",
    "request_alone",
    "request_beside",
    "start",
    "memory",
)
PLOTS = {"small": "Throughput of small kernels", "bert": "Throughput of BERT inference"}


def section(path):
    """The README's lines for a result file, whose path is relative to the project's root."""
    report = reports.Report.load(os.path.join(ROOT, path))
    about, stem = report.about, os.path.splitext(path)[0]
    names = ["default time-slicing" if name == "native" else systems.title(name) for name in report.systems]
    lines = [f"<!-- results:begin {path} -->"]
    lines.append(f"| one {about['gpu']}, driver {about['driver']}, {about['cpus']} CPUs | " + " | ".join(names) + " |")
    lines.append("|---|" + "---|" * len(names))
    for row in (table.ROWS[key] for key in ROWS):
        if report.median(row.key, "mpsshim") is not None:
            cells = " | ".join(report.cell(row, system, spread=False) for system in report.systems)
            lines.append(f"| {row.title} | {cells} |")
    lines.append("")
    for name, title in PLOTS.items():
        if os.path.exists(os.path.join(ROOT, f"{stem}-{name}.svg")):
            lines += [f"![{title}]({stem}-{name}.svg)", ""]
    rounds = "one round" if about["repetitions"] == 1 else f"medians of up to {about['repetitions']} rounds"
    lines.append(
        f"Measured on {about['date'][:10]} with `benches/gpu/run.py`, {rounds}; all rows, those where NVIDIA's is ahead "
        f"too: [{os.path.basename(stem)}]({stem}.md). Other days: [docs/results](docs/results/README.md)."
    )
    return "\n".join([*lines, "<!-- results:end -->"])


def named(text):
    """The result file that a README names, or None."""
    found = SECTION.search(text)
    return (found[1] or None) if found else None


def replace(text, new):
    if len(SECTION.findall(text)) != 1:
        raise SystemExit("the README needs one pair of lines <!-- results:begin --> and <!-- results:end -->")
    return SECTION.sub(lambda _: new, text)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("json", help="what run.py wrote, within the project")
    options = parser.parse_args(arguments)
    path = os.path.relpath(os.path.abspath(options.json), ROOT)
    if path.startswith(os.pardir):
        parser.error(f"{options.json} is not within the project: the README could not link to it")
    readme = os.path.join(ROOT, "README.md")
    with open(readme) as file:
        text = replace(file.read(), section(path))
    with open(readme, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
