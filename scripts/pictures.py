#!/usr/bin/env python3
"""Draws docs/images/top.svg and trace.svg from a run: two n-body simulations of different size share a device.

    scripts/pictures.py [--build DIR] [--driver LIBCUDA] [--out DIR]

DIR has the programs (target/release); LIBCUDA is the driver, softgpu's in DIR unless given.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import tempfile
import time
from html import escape

FONT = 'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'
COLOURS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#9d755d"]
GREY = "#bab0ac"
# Milliseconds of the trace that are drawn, and how many of them before both programs have work.
WINDOW_MS, LEAD_MS = 250, 30


def run(build, driver):
    """The table of top and the events of a trace."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        env = dict(os.environ, MPSSHIM_PIPE_DIRECTORY=folder, MPSSHIM_LOG_DIRECTORY=f"{folder}/logs",
                   MPSSHIM_CUDA_LIBRARY=str(driver))

        def control(*words):
            return subprocess.run([build / "mps-control", *words], env=env, check=True, text=True,
                                  capture_output=True).stdout

        control("-d")
        programs = []
        trace = pathlib.Path(folder, "trace.json")
        control("trace", "start", str(trace))
        try:
            for bodies in (512, 256):
                command = [build / "mps-run", build / "nbody", "-benchmark", f"-numbodies={bodies}", "-i=1000000"]
                programs.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
            time.sleep(2)
            control("trace", "stop")
            table = control("top", "--once", "--interval", "2")
            return table, json.loads(trace.read_text())
        finally:
            for program in programs:
                program.kill()
                program.wait()
            control("quit", "-t", "0")


def svg(width, height, parts, title):
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" {FONT} font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff" stroke="#d0d7de"/>',
        *parts, "</svg>", ""])


def draw_top(table):
    lines = table.rstrip("\n").split("\n")
    width = max(map(len, lines)) * 7.3 + 24
    parts = []
    for row, line in enumerate(lines):
        weight = ' font-weight="bold"' if row == 1 else ""
        parts.append(f'<text x="12" y="{22 + row * 18}" xml:space="preserve" fill="#1f2328"{weight}>{escape(line)}</text>')
    return svg(round(width), 18 * len(lines) + 14, parts, "mps-control top")


def draw_trace(events):
    names = {}
    for event in events:
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
            key = (event["pid"], event["tid"] if event["name"] == "thread_name" else None)
            names[key] = event["args"]["name"]
    slices = [event for event in events if event["ph"] == "X"]
    first = {}
    for event in slices:
        if event["cat"] == "kernel":
            first.setdefault(event["pid"], event["ts"])
    start = max(first.values()) - LEAD_MS * 1000
    end = start + WINDOW_MS * 1000
    shown = [event for event in slices if event["ts"] < end and event["ts"] + event["dur"] > start]
    tracks = sorted({(event["pid"], event["tid"]) for event in shown})
    left, right, row = 190, 1000, 22
    scale = (right - left) / (end - start)
    kernels = sorted({re.sub(r" ×\d+", "", event["name"]) for event in shown if event["cat"] == "kernel"})
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(kernels)}
    parts, y, last = [], 8, None
    for pid, tid in tracks:
        if pid != last:
            y += 18
            parts.append(f'<text x="12" y="{y}" font-weight="bold" fill="#1f2328">{escape(names[(pid, None)])}</text>')
            last = pid
            y += 6
        parts.append(f'<text x="24" y="{y + 15}" fill="#57606a">{escape(names[(pid, tid)])}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{right - left}" height="{row - 4}" fill="#f6f8fa"/>')
        drawn = None
        for event in shown:
            if (event["pid"], event["tid"]) != (pid, tid):
                continue
            x = left + max(event["ts"] - start, 0) * scale
            width = max(left + min(event["ts"] + event["dur"] - start, end - start) * scale - x, 0.6)
            name = re.sub(r" ×\d+", "", event["name"])
            colour = colours.get(name, GREY)
            # What would lie on one another is drawn once.
            if width < 1 and drawn == (round(x), colour):
                continue
            drawn = (round(x), colour)
            hint = f'{event["name"]}, {event["dur"] / 1000:.3f} ms'
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{row - 4}" fill="{colour}" '
                         f'stroke="#ffffff" stroke-width="0.5"><title>{escape(hint)}</title></rect>')
            if width > 7 * len(event["name"]):
                parts.append(f'<text x="{x + 3:.1f}" y="{y + 13}" font-size="10" fill="#ffffff">{escape(event["name"])}</text>')
        y += row
    for tick in range(0, WINDOW_MS + 1, WINDOW_MS // 10):
        x = left + tick * 1000 * scale
        parts.append(f'<text x="{x:.0f}" y="{y + 14}" font-size="10" text-anchor="middle" fill="#57606a">{tick} ms</text>')
    return svg(right + 24, y + 24, parts, "mps-control trace")


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=pathlib.Path, default=root / "target/release")
    parser.add_argument("--driver", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=root / "docs/images")
    options = parser.parse_args()
    build = options.build.resolve()
    table, events = run(build, options.driver or build / "libsoftgpu.so")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "top.svg").write_text(draw_top(table))
    (options.out / "trace.svg").write_text(draw_trace(events))


if __name__ == "__main__":
    main()
