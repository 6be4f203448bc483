#!/usr/bin/env python3
"""Draws what run.py found, as SVG files beside each JSON file. Needs matplotlib (`pip install matplotlib`).

    benches/gpu/plot.py docs/results/gpu-2026-11-20-1134.json

STEM-small.svg and STEM-bert.svg have throughput against the number of clients, STEM-single.svg what one client gets
relative to native. A plot with nothing to show is not written. The same file and the same matplotlib give the same SVG.
"""

import argparse
import os
import statistics
import sys

import report as reports
import systems
import table

COLOURS = {"native": "#7f7f7f", "nvidia": "#76b900", "mpsshim": "#1f4e9c", "direct": "#d95f02"}
MARKERS = {"native": "o", "nvidia": "s", "mpsshim": "^", "direct": "D"}

# Plot -> title, label of the values, row key for a number of clients.
CURVES = {
    "small": ("50 µs kernel + synchronize", "kernels/s, total", "small{}"),
    "bert": ("BERT-base fp16, batch 1", "sequences/s, total", "bert{}"),
}
CLIENTS = (1, 2, 4, 8, 16, 32, 64)

# Rows of one client, with whether more is better.
SINGLE = {
    "launch_burst": False,
    "launch_steady": False,
    "launch_sync": False,
    "h2d_4": False,
    "d2h_4": False,
    "malloc_free": False,
    "h2d_pageable": True,
    "d2h_pageable": True,
    "h2d_pageable_1m": True,
    "d2h_pageable_1m": True,
    "small1": True,
    "empty1": True,
    "nbody1": False,
    "bert1": True,
    "train1": True,
    "start": False,
}


def missing():
    """Why nothing can be drawn here, or None."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return f"{os.path.basename(sys.executable)} has no matplotlib"
    return None


def curve(report, pattern, system):
    """Numbers of clients, and the values of each."""
    points = [(clients, report.values.get(pattern.format(clients), {}).get(system)) for clients in CLIENTS]
    points = [(clients, values) for clients, values in points if values]
    return [clients for clients, _ in points], [values for _, values in points]


def relative(report, system):
    """Row key -> how many times native's a system's median is; above 1 is better, whichever way the row counts."""
    found = {}
    for key, more_is_better in SINGLE.items():
        native, value = report.median(key, "native"), report.median(key, system)
        if native and value:
            found[key] = value / native if more_is_better else native / value
    return found


def host(report):
    return f"{report.about['gpu']}, driver {report.about['driver']}, {report.about['cpus']} CPUs, {report.about['date']}"


def draw_curves(pyplot, report, title, label, pattern):
    """A figure, or None when no system has a value for two numbers of clients."""
    found = {system: curve(report, pattern, system) for system in report.systems if system in COLOURS}
    if all(len(clients) < 2 for clients, _ in found.values()):
        return None
    figure, axes = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    every = sorted({number for clients, _ in found.values() for number in clients})
    for system, (clients, values) in found.items():
        if not clients:
            continue
        medians = [statistics.median(rounds) for rounds in values]
        spread = [[m - min(v) for m, v in zip(medians, values)], [max(v) - m for m, v in zip(medians, values)]]
        name = systems.title(system)
        axes.errorbar(
            clients, medians, spread, label=name, color=COLOURS[system], marker=MARKERS[system], markersize=5, capsize=3
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(every, [str(clients) for clients in every])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("clients")
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, loc="upper left")
    figure.suptitle(title, fontsize=11)
    axes.set_title(host(report), fontsize=7, color="#555555")
    return figure


def draw_single(pyplot, report):
    names = [system for system in report.systems if system != "native" and system in COLOURS]
    found = {system: relative(report, system) for system in names}
    keys = [key for key in SINGLE if any(key in values for values in found.values())]
    if not keys:
        return None
    figure, axes = pyplot.subplots(figsize=(7.2, 0.8 + 0.42 * len(keys)), layout="constrained")
    height = 0.8 / len(names)
    for number, system in enumerate(names):
        at = [place + (number - (len(names) - 1) / 2) * height for place in range(len(keys))]
        values = [found[system].get(key) for key in keys]
        lengths = [0 if value is None else value - 1 for value in values]
        bars = axes.barh(at, lengths, height, left=1, label=systems.title(system), color=COLOURS[system])
        axes.bar_label(bars, ["" if value is None else f"{value:.2f}" for value in values], padding=2, fontsize=6)
    axes.axvline(1, color=COLOURS["native"], linewidth=1)
    axes.set_xscale("log", base=2)
    values = [value for values in found.values() for value in values.values()]
    axes.set_xlim(min(0.5, *values) / 1.2, max(2, *values) * 1.5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(range(len(keys)), [table.ROWS[key].title for key in keys], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("times native; further right is better")
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
    figure.suptitle("One client", fontsize=11)
    axes.set_title(host(report), fontsize=7, color="#555555")
    return figure


def draw(path):
    """Draws one JSON file; the files written."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    report = reports.Report.load(path)
    stem, written = os.path.splitext(path)[0], []
    # Names within the file come from this salt, text stays text, and there is no date: nothing changes between runs.
    with pyplot.rc_context({"svg.hashsalt": "mpsshim", "svg.fonttype": "none", "font.family": "DejaVu Sans"}):
        figures = {name: draw_curves(pyplot, report, *about) for name, about in CURVES.items()}
        figures["single"] = draw_single(pyplot, report)
        for name, figure in figures.items():
            if figure is not None:
                written.append(f"{stem}-{name}.svg")
                figure.savefig(written[-1], metadata={"Date": None})
                pyplot.close(figure)
    return written


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("json", nargs="+", help="what run.py wrote")
    options = parser.parse_args(arguments)
    if reason := missing():
        parser.error(f"{reason}: pip install matplotlib")
    for path in options.json:
        print("\n".join(draw(path)) or f"{path}: nothing to draw")


if __name__ == "__main__":
    main(sys.argv[1:])
