#!/usr/bin/env python3
"""Compares the shim's cuGetProcAddress with the genuine driver's, on a machine that has one.

    scripts/gpu/procaddress.py --shim target/release/libmpsshim.so [--driver /path/to/libcuda.so.1]

For every row of api/driver-api.csv: the version of the row, the one before it, 13000 and 99999, each with the flags
0, 1 and 2, through cuGetProcAddress_v2 and through the older cuGetProcAddress; also names, flags and arguments that
are not valid. Return code, status and the symbol that the answer is the address of must agree. Prints how many were
checked and the first differences; exit status 1 if there are any.

The shim answers from its table here, as it does beside a daemon: the child that asks it is told of a genuine driver
that does not exist. The genuine driver is asked before and after cuInit.
"""

import argparse
import csv
import ctypes
import json
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
CSV = os.path.join(HERE, "..", "..", "api", "driver-api.csv")
NEWEST = 13000
TOO_NEW = 99999
SHOWN = 40
# Left by a call that does not write.
UNTOUCHED_POINTER = 0x5A5A5A5A
UNTOUCHED_STATUS = 0x5A


def rows():
    with open(CSV, newline="") as file:
        return list(csv.DictReader(file))


def queries():
    """(name or None, give a place for the pointer, version, flags), each once."""
    found = {}
    for row in rows():
        since = int(row["since_cuda_version"] or 2000)
        for version in (since, since - 10, NEWEST, TOO_NEW):
            for flags in (0, 1, 2):
                found[(row["entry_point"], True, version, flags)] = None
    symbols = sorted({row["legacy_symbol"] for row in rows()} - {row["entry_point"] for row in rows()})
    for name in ["", "cu", "cuNoSuchCall", "malloc", "cuMemcpyHtoD_v2_ptds"] + symbols[:20]:
        for version in (NEWEST, TOO_NEW):
            for flags in (0, 2):
                found[(name, True, version, flags)] = None
    for flags in (3, 4, 1 << 32):
        found[("cuMemcpyHtoD", True, NEWEST, flags)] = None
        found[("cuNoSuchCall", True, NEWEST, flags)] = None
    for version in (-1, 0, 1, NEWEST + 10, NEWEST + 1000):
        found[("cuMemcpyHtoD", True, version, 0)] = None
        found[("cuNoSuchCall", True, version, 0)] = None
    return list(found)


def ask(library, initialise):
    """The answers of a driver library: for each query and function [code, status, symbols of the address]."""
    driver = ctypes.CDLL(library)
    if initialise and driver.cuInit(0) != 0:
        sys.exit("cuInit failed")
    owners = {}
    for row in rows():
        for symbol in (row["legacy_symbol"], row["per_thread_symbol"]):
            if symbol != "-" and hasattr(driver, symbol):
                address = ctypes.cast(getattr(driver, symbol), ctypes.c_void_p).value
                owners.setdefault(address, set()).add(symbol)

    def one(function, name, place, version, flags, with_status):
        pointer = ctypes.c_void_p(UNTOUCHED_POINTER)
        status = ctypes.c_int(UNTOUCHED_STATUS)
        arguments = [
            None if name is None else ctypes.c_char_p(name.encode()),
            ctypes.byref(pointer) if place else None,
            ctypes.c_int(version),
            ctypes.c_uint64(flags),
        ]
        code = function(*arguments, *([ctypes.byref(status)] if with_status else []))
        if pointer.value is None:
            symbols = ["NULL"]
        elif pointer.value == UNTOUCHED_POINTER:
            symbols = ["untouched"]
        else:
            symbols = sorted(owners.get(pointer.value, ["unexported"]))
        return [code, "untouched" if status.value == UNTOUCHED_STATUS else status.value, symbols]

    return [
        [one(driver.cuGetProcAddress_v2, *query, True), one(driver.cuGetProcAddress, *query, False)]
        for query in queries()
    ]


def ask_in_child(library, initialise, **environment):
    """`ask` in a process of its own, with these variables set and the shim's others gone."""
    clean = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD" and not key.startswith("MPSSHIM_")}
    command = [sys.executable, os.path.abspath(__file__), "--ask", library] + (["--init"] if initialise else [])
    done = subprocess.run(command, env={**clean, **environment}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def differences(left, right):
    """(query, function, answer, answer) where code, status or symbol differ. Symbols agree if they share a name."""
    for query, one, other in zip(queries(), left, right):
        for function, a, b in zip(("cuGetProcAddress_v2", "cuGetProcAddress"), one, other):
            if a[:2] != b[:2] or not set(a[2]) & set(b[2]):
                yield query, function, a, b


def show(label, left_name, left, right_name, right):
    found = list(differences(left, right))
    print(f"{label}: {2 * len(left)} checked, {len(found)} differ")
    kinds = {}
    for (name, _, version, flags), function, a, b in found:
        kinds.setdefault((function, *map(str, a[:2]), *map(str, b[:2])), []).append(f"{name}@{version}/{flags}")
    for (function, *answers), names in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        print(f"  {len(names)} of {function}: code {answers[0]} status {answers[1]} in {left_name}, "
              f"code {answers[2]} status {answers[3]} in {right_name}, such as {', '.join(names[:3])}")
    for (name, place, version, flags), function, a, b in found[:SHOWN]:
        print(f"  {function}({name!r}, {'&pfn' if place else 'NULL'}, {version}, {flags}): "
              f"{left_name} {a}, {right_name} {b}")
    return not found


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--shim", help="libmpsshim.so")
    arguments.add_argument("--driver", default="libcuda.so.1", help="the genuine driver (default: the loader's)")
    arguments.add_argument("--save", help="write the genuine driver's answers to this file, as JSON")
    arguments.add_argument("--ask", help=argparse.SUPPRESS)
    arguments.add_argument("--init", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.ask:
        json.dump(ask(options.ask, options.init), sys.stdout)
        return
    if not options.shim:
        arguments.error("--shim is needed")
    shim = os.path.abspath(options.shim)
    early = ask_in_child(options.driver, False)
    late = ask_in_child(options.driver, True)
    if options.save:
        with open(options.save, "w") as file:
            json.dump([[*query, *answer] for query, answer in zip(queries(), late)], file, indent=0)
    table = ask_in_child("libcuda.so.1", False, LD_PRELOAD=shim, MPSSHIM_CUDA_LIBRARY="/nonexistent")
    same = show("genuine driver before and after cuInit", "before", early, "after", late)
    same &= show("shim", "genuine", late, "shim", table)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
