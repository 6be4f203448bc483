#!/usr/bin/env python3
"""Calls every driver entry point with NULL, 0 and wrong handles, in situations that programs get into, and compares.

    tests/gpu/sweep.py run --build target/release [-o FOLDER]     natively and through mpsshim, then compare
    tests/gpu/sweep.py record [--driver libcuda.so.1] -o FILE     on whatever the loader finds, or on this library
    tests/gpu/sweep.py compare NATIVE OURS [--differences FILE]   two records

A record has a line for each situation and symbol, `situation symbol case=code …`. Cases: `valid` (device 0, live
objects and names, pointers to zeroed memory, small integers), `null:N` (argument N is NULL), `zero:N`, `odd:N`, `zeroed:N` (the
handle or device address N is 0, 0x1234, a pointer to zeroed memory), with `all` for N, and `nothing` (every pointer
NULL and every handle 0). Codes: a CUresult, with `/code` if cuCtxSynchronize gives an error after a success, or if the
process does not exit as it should after a call in an exit handler; `signal:N`; `hang`; `missing`: the driver does not
export the symbol; `setup:symbol=code`: the situation could not be made; `failed:what`: the
sweep's own process went wrong. Lines `situation TYPE made=code` say whether an
object could be made, `situation context` whether the driver has one current and the primary one active, and its flags
(after the code and a colon). Lines that begin with # say what was not called and why.

A process makes its next call only after one that changed nothing: an error about arguments or the answer of a query.
--alone gives each call a process of its own; `run` does that with whatever differs before it counts.

Differences: code for code, except that any error will do where the driver ends the process, hangs or lacks the symbol.
Known ones are listed in sweep.differences, which explains its format. Exit status 1 when others are found.
"""
import argparse
import collections
import fnmatch
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benches", "gpu"))
import sweep_calls  # noqa: E402
import sweep_declarations  # noqa: E402
import systems  # noqa: E402  The processes and the daemon are the benches'.

DIFFERENCES = pathlib.Path(__file__).with_name("sweep.differences")
# Calls given to a worker at a time.
UNIT = 24

Key = collections.namedtuple("Key", "situation symbol case")


# --------------------------------------------------------------------------------------------------------------------
# Recording


def keys_of(called, situations):
    return [Key(situation, symbol, case) for situation in situations for symbol, arguments in called.items()
            for case in sweep_calls.cases(arguments, situation)]


def units_of(keys, called, size):
    """Calls to be made in turn: those of one situation that need the same objects, so that none is made in vain."""
    alike = collections.defaultdict(list)
    for key in keys:
        arguments = called[key.symbol]
        types = frozenset(filter(sweep_calls.MADE.get, map(sweep_calls.type_of, arguments)))
        alike[key.situation, types].append(key)
    return [group[i:i + size] for group in alike.values() for i in range(0, len(group), size)]


class Recorder:
    """Workers with one driver in one environment."""

    def __init__(self, library, env, jobs):
        self.library, self.env, self.jobs = library, env, jobs
        self.results, self.failures = {}, []

    def record(self, units, called):
        """{key: code}, with what was found before the calls."""
        self.results = {}
        waiting = queue.SimpleQueue()
        for unit in units:
            waiting.put(unit)
        threads = [threading.Thread(target=self.feed, args=(waiting, called)) for _ in range(min(self.jobs, len(units)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise systems.Failure(self.failures[0])
        return self.results

    def feed(self, waiting, called):
        command = [sys.executable, os.path.abspath(__file__), "work", self.library]
        with subprocess.Popen(command, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
            while not self.failures:
                try:
                    unit = waiting.get_nowait()
                except queue.Empty:
                    break
                situation = unit[0].situation
                calls = [(key.symbol, called[key.symbol], key.case) for key in unit]
                try:
                    print(json.dumps([situation, calls]), file=worker.stdin, flush=True)
                    answer = worker.stdout.readline()
                except BrokenPipeError:
                    answer = ""
                if not answer:
                    self.failures.append(f"a worker ended in {situation}, {unit[0].symbol} to {unit[-1].symbol}")
                    break
                codes, facts = json.loads(answer)
                self.results.update(zip(unit, codes))
                self.results.update({Key(situation, name, what): value for name, what, value in facts})
            worker.stdin.close()


def write(path, results, notes):
    lines = collections.defaultdict(list)
    for key, code in results.items():
        lines[key.situation, key.symbol].append(f"{key.case}={code}")
    text = [f"# {note}" for note in notes]
    text += sorted(" ".join([*names, *sorted(found)]) for names, found in lines.items())
    pathlib.Path(path).write_text("\n".join(text) + "\n")


def read(path):
    results = {}
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        situation, symbol, *found = line.split()
        for each in found:
            # A code may have a `=` of its own.
            case, equals, code = each.partition("=")
            if not equals:
                raise ValueError(f"{path}:{number}: {each} is no case=code")
            results[Key(situation, symbol, case)] = code
    return results


# --------------------------------------------------------------------------------------------------------------------
# Comparing

# One entry of the list of differences. All but `reason` and `line` are patterns of fnmatch.
Known = collections.namedtuple("Known", "situation symbol case native ours reason line")


def read_differences(text):
    known = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            fields = line.split(maxsplit=5)
            if len(fields) < 6:
                raise ValueError(f"line {number} of the differences has no reason: {line}")
            known.append(Known(*fields, number))
    return known


def is_for(known, key):
    return all(fnmatch.fnmatchcase(text, pattern) for text, pattern in zip(key, known[:3]))


def explains(known, key, native, ours):
    return is_for(known, key) and fnmatch.fnmatchcase(native, known.native) and fnmatch.fnmatchcase(ours, known.ours)


def is_error(code):
    return code.isdigit() and code != "0"


def as_good(native, ours):
    """Whether a program can live with `ours` where the driver says `native`."""
    no_answer = native in ("hang", sweep_calls.MISSING) or native.startswith("signal:")
    return ours == native and native != "hang" and not native.startswith("signal:") or no_answer and is_error(ours)


def compare(native, ours, known):
    """(keys that differ and are not listed, entries of the list that nothing matched though their calls were made)."""
    differing, used = [], set()
    for key in sorted(native.keys() | ours.keys()):
        found = native.get(key, "absent"), ours.get(key, "absent")
        if as_good(*found):
            continue
        reasons = {entry for entry in known if explains(entry, key, *found)}
        used |= reasons
        if not reasons:
            differing.append(key)
    made = native.keys() | ours.keys()
    return differing, [entry for entry in known if entry not in used and any(is_for(entry, key) for key in made)]


def report(native, ours, known):
    """Prints what differs; the exit status."""
    differing, stale = compare(native, ours, known)
    together = collections.defaultdict(list)
    for key in differing:
        found = native.get(key, "absent"), ours.get(key, "absent")
        together[key.symbol, found].append(f"{key.situation} {key.case}")
    for (symbol, (theirs, own)), where in together.items():
        print(f"{symbol}: native {theirs}, ours {own}: {', '.join(where)}")
    for entry in stale:
        print(f"listed in line {entry.line}, but no longer so: {' '.join(entry[:5])}")
    print(f"{len(native)} calls natively, {len(ours)} here; {len(differing)} differ that are not listed")
    return 1 if differing else 0


# --------------------------------------------------------------------------------------------------------------------
# Commands


def called_by(options):
    """(entry points, notes for the record)."""
    files = options.declarations or sweep_declarations.sources()
    if not files:
        raise systems.Failure("no declarations: neither a CUDA toolkit nor cudarc's source is here; --declarations FILE")
    called, left_out = sweep_declarations.entry_points(files, options.all_versions)
    notes = [f"not called: {symbol}: {reason}" for symbol, reason in sorted(left_out.items())]
    only = {symbol: arguments for symbol, arguments in called.items()
            if any(fnmatch.fnmatchcase(symbol, name) for name in options.only)}
    return only, notes


def record(options):
    called, notes = called_by(options)
    units = units_of(keys_of(called, options.situation), called, 1 if options.alone else UNIT)
    results = Recorder(options.driver or "libcuda.so.1", os.environ.copy(), options.jobs).record(units, called)
    write(options.output, results, notes)
    return 0


def run(options):
    called, notes = called_by(options)
    known = read_differences(options.differences.read_text())
    keys = keys_of(called, options.situation)
    units = units_of(keys, called, 1 if options.alone else UNIT)
    if options.driver:
        os.environ["MPSSHIM_CUDA_LIBRARY"] = os.path.abspath(options.driver)
    with systems.running(options.mode, options.build) as (bare, system):
        natively = Recorder(options.driver or "libcuda.so.1", bare.env(), options.jobs)
        through = Recorder("libcuda.so.1", system.env(), options.jobs)
        records = []
        servers = set()
        for name, recorder in (("natively", natively), (options.mode, through)):
            began = time.monotonic()
            records.append(recorder.record(units, called))
            print(f"{name}: {len(records[-1])} calls in {time.monotonic() - began:.0f} s")
            servers.add(tuple(system.command("get_server_list").split()))
        native, ours = records
        again = [key for key in compare(native, ours, known)[0] if key in set(keys)]
        if again and not options.alone:
            began = time.monotonic()
            for results, recorder in ((native, natively), (ours, through)):
                results.update(recorder.record(units_of(again, called, 1), called))
            print(f"{len(again)} calls again, each alone, in {time.monotonic() - began:.0f} s")
            servers.add(tuple(system.command("get_server_list").split()))
        if options.output:
            os.makedirs(options.output, exist_ok=True)
            write(os.path.join(options.output, "native"), native, notes)
            write(os.path.join(options.output, options.mode), ours, notes)
        status = report(native, ours, known)
        if len(servers - {()}) > 1:
            print(f"servers came and went: {sorted(servers)}")
            systems.show_log(system)
            status = 1
    return status


def compare_files(options):
    return report(read(options.native), read(options.ours), read_differences(options.differences.read_text()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    calling = argparse.ArgumentParser(add_help=False)
    calling.add_argument("--driver", help="its path (default: the loader's libcuda.so.1)")
    calling.add_argument("-j", "--jobs", type=int, default=os.cpu_count(), help="processes at a time (%(default)s)")
    calling.add_argument("--alone", action="store_true", help="one process for each call")
    calling.add_argument("--all-versions", action="store_true", help="older versions of entry points too")
    calling.add_argument("--only", action="append", metavar="PATTERN", help="symbols to call (default: all)")
    calling.add_argument("--situation", action="append", choices=sweep_calls.SITUATIONS, help="(default: all)")
    calling.add_argument("--declarations", action="append", metavar="FILE",
                         help="a C header of CUDA, or cudarc's src/driver/sys/mod.rs (default: those that are here)")
    listed = argparse.ArgumentParser(add_help=False)
    listed.add_argument("--differences", type=pathlib.Path, default=DIFFERENCES, help="the list (%(default)s)")

    command = commands.add_parser("run", parents=[calling, listed], help="natively and through mpsshim, and compare")
    command.add_argument("--build", required=True, help="folder with libmpsshim.so, mps-control, mps-server")
    command.add_argument("--mode", choices=systems.MODES, default="proxy", help="of the clients (%(default)s)")
    command.add_argument("-o", "--output", help="folder for both records")
    command.set_defaults(run=run)
    command = commands.add_parser("record", parents=[calling], help="one record")
    command.add_argument("-o", "--output", required=True, help="file")
    command.set_defaults(run=record)
    command = commands.add_parser("compare", parents=[listed], help="two records")
    command.add_argument("native")
    command.add_argument("ours")
    command.set_defaults(run=compare_files)
    command = commands.add_parser("work", help="a worker of the others")
    command.add_argument("library")
    command.set_defaults(run=lambda options: sweep_calls.work(options.library))

    options = parser.parse_args()
    if "only" in options:
        options.only = options.only or ["*"]
        options.situation = options.situation or list(sweep_calls.SITUATIONS)
    try:
        return options.run(options)
    except (systems.Failure, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
