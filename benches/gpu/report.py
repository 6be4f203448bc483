"""What a run of run.py found: the medians, the table, and the files it writes."""

import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys

import measure
import systems
import table


UNMEASURED = "left out of round"


class Report:
    def __init__(self, names, measurements, about):
        self.systems = names
        self.measurements = table.in_table_order(measurements)
        self.about = about
        self.values = {}  # row key -> system -> list of values, one for each round
        self.refused = {}  # row key -> system -> why
        self.left_out = {}  # measurement -> why
        self.notes = []
        self.failures = []

    @classmethod
    def load(cls, path):
        """The report that `save` wrote. Older files have no measurements, refusals or what was left out."""
        with open(path) as file:
            data = json.load(file)
        values = data.pop("values")
        names = data.pop("systems", None)
        if names is None:
            names = [name for name in systems.SYSTEM_TITLES if any(name in found for found in values.values())]
        known = [name for name, known in table.MEASUREMENTS.items() if any(row.key in values for row in known.rows)]
        report = cls(names, data.pop("measurements", known), data)
        report.values = values
        for name in ("refused", "left_out", "notes", "failures"):
            setattr(report, name, data.pop(name, getattr(report, name)))
        return report

    def resume(self, about, names, measurements):
        """Goes on with these systems and measurements on the same machine; ValueError if it is another one."""
        for name in ("gpu", "driver", "cpus", "kernel"):
            if about[name] != self.about[name]:
                raise ValueError(f"it was made with {name} {self.about[name]}, and this is {about[name]}")
        every = dict.fromkeys([*self.systems, *names])
        self.systems = [name for name in dict.fromkeys([*systems.SYSTEM_TITLES, *every]) if name in every]
        self.measurements = table.in_table_order({*self.measurements, *measurements})
        if about["commit"] != self.about["commit"]:
            self.about["commit"] += f", then {about['commit']}"
        self.about["command"] += f", then {about['command']}"
        for name in measurements:
            self.left_out.pop(name, None)
        self.failures = [failure for failure in self.failures if not failure.startswith(UNMEASURED)]

    def has(self, system, measurement):
        """Whether a measurement has its values, or was refused."""
        key = table.MEASUREMENTS[measurement].rows[0].key
        return system in self.values.get(key, {}) or system in self.refused.get(key, {})

    def add(self, system, values):
        for key, value in values.items():
            self.values.setdefault(key, {}).setdefault(system, []).append(value)

    def refuse(self, system, measurement, why):
        for row in table.MEASUREMENTS[measurement].rows:
            self.refused.setdefault(row.key, {})[system] = str(why)

    def leave_out(self, measurement, why):
        print(f"{measurement}: left out, {why}", file=sys.stderr)
        self.left_out[measurement] = str(why)

    def note(self, text):
        print(text, file=sys.stderr)
        self.notes.append(text)

    def stop(self, round_number, measurements):
        """The time was over before these measurements of a round. Only what was never measured is a failure."""
        text = f"{UNMEASURED} {round_number}, the budget is spent: {', '.join(measurements)}"
        if round_number > 1:
            self.note(text)
        else:
            print(text, file=sys.stderr)
            self.failures.append(text)

    def fail(self, system, measurement, failure):
        text = f"{systems.title(system)}, {measurement}: {failure}"
        print(text, file=sys.stderr)
        self.failures.append(text)

    def median(self, key, system):
        values = self.values.get(key, {}).get(system)
        return statistics.median(values) if values else None

    def rows(self):
        """The rows with whether mpsshim reached what is asked."""
        for measurement in self.measurements:
            if measurement in self.left_out:
                continue
            for row in table.MEASUREMENTS[measurement].rows:
                refused = self.refused.get(row.key, {})
                yield row, row.reached(self.median, lambda system, refused=refused: system in refused)

    def cell(self, row, system):
        """The median, and the least and the greatest of the rounds where they differ."""
        values = self.values.get(row.key, {}).get(system)
        if not values:
            return "refused" if system in self.refused.get(row.key, {}) else "–"
        text = table.with_unit(row.number(statistics.median(values)), row.unit)
        least, greatest = row.number(min(values)), row.number(max(values))
        return text if least == greatest else f"{text} ({least}–{greatest})"

    def markdown(self):
        lines = ["| | " + " | ".join(systems.title(s) for s in self.systems) + " | to reach | |"]
        lines.append("|---|" + "---|" * (len(self.systems) + 2))
        for row, reached in self.rows():
            cells = " | ".join(self.cell(row, system) for system in self.systems)
            verdict = {True: "yes", False: "**no**", None: ""}[reached]
            lines.append(f"| {row.title} | {cells} | {row.target_text()} | {verdict} |")
        return "\n".join(lines)

    def cpu_table(self):
        """Processors in use, for the rows where they were counted; None where that is nowhere."""
        lines = ["| CPUs in use, clients and server | " + " | ".join(systems.title(s) for s in self.systems)]
        lines = [lines[0] + " |", "|---|" + "---|" * len(self.systems)]
        for row, _ in self.rows():
            found = [self.median(row.key + table.CPUS, system) for system in self.systems]
            if any(cpus is not None for cpus in found):
                cells = " | ".join("–" if cpus is None else f"{cpus:.1f}" for cpus in found)
                lines.append(f"| {row.title} | {cells} |")
        return "\n".join(lines) if len(lines) > 2 else None

    def document(self):
        text = f"# Native, NVIDIA MPS and mpsshim, {self.about['date']}\n\n{self.markdown()}\n\n"
        text += f"Medians of up to {self.about['repetitions']} rounds, all systems in turn within each round; in "
        text += "parentheses the least and the greatest.\n\n"
        if cpus := self.cpu_table():
            text += f"{cpus}\n\n"
        text += machine(self.about)
        if self.left_out:
            text += "\nLeft out:\n\n" + "".join(f"- {name}: {why}\n" for name, why in self.left_out.items())
        return text + remarks(self.notes, self.failures)

    def data(self):
        return self.about | {
            "systems": self.systems,
            "measurements": self.measurements,
            "values": self.values,
            "refused": self.refused,
            "left_out": self.left_out,
            "notes": self.notes,
            "failures": self.failures,
        }

    def save(self, directory):
        return save(directory, "gpu", self.about["date"], self.data(), self.document())


class ScenarioReport:
    """The values of scenarios, one for each system, the table and the files. Subclasses name the kind of the files,
    the scenarios with their rows, and the document."""

    KIND, SCENARIOS = "", {}
    title = staticmethod(systems.title)

    def __init__(self, names, scenarios, about):
        self.systems, self.scenarios, self.about = names, scenarios, about
        self.values = {}  # key -> system -> value; some keys have no row
        self.notes, self.failures = [], []

    def add(self, system, values):
        for key, value in values.items():
            self.values.setdefault(key, {})[system] = value

    def fail(self, system, scenario, problem):
        text = f"{self.title(system)}, {scenario}: {problem}"
        print(text, file=sys.stderr, flush=True)
        self.failures.append(text)

    def note(self, text):
        print(text, file=sys.stderr)
        self.notes.append(text)

    def cell(self, row, system):
        value = self.values.get(row.key, {}).get(system)
        return "–" if value is None else table.with_unit(row.number(value), row.unit).strip()

    def markdown(self):
        lines = ["| | " + " | ".join(map(self.title, self.systems)) + " |", "|---|" + "---|" * len(self.systems)]
        for scenario in (name for name in self.SCENARIOS if name in self.scenarios):
            for row in self.SCENARIOS[scenario][1]:
                cells = " | ".join(self.cell(row, system) for system in self.systems)
                lines.append(f"| {row.title} | {cells} |")
        return "\n".join(lines)

    def data(self):
        return self.about | {
            "systems": self.systems,
            "scenarios": self.scenarios,
            "values": self.values,
            "notes": self.notes,
            "failures": self.failures,
        }

    def document(self):
        raise NotImplementedError

    def save(self, directory):
        return save(directory, self.KIND, self.about["date"], self.data(), self.document())

    def conclude(self, directory, draw=None):
        """Writes the files, prints the table and what failed; the exit status. `draw`: makes a chart of the .json file and
        says where it is."""
        stem = self.save(directory)
        print(f"\n{self.markdown()}\n\nwritten to {stem}.md and .json")
        if draw:
            print(draw(stem + ".json"))
        if self.failures:
            print("\nwhat failed:\n" + "\n".join(self.failures))
        return 1 if self.failures else 0


def machine(about):
    """What a result was measured with, a line each."""
    names = ("command", "commit", "gpu", "driver", "cpus", "kernel")
    return "".join(f"- {name}: {about[name]}\n" for name in names)


def remarks(notes, failures):
    """Notes and failures at the end of a document."""
    text = "\n" + "".join(f"- {note}\n" for note in notes) if notes else ""
    if failures:
        text += "\nWhat failed:\n\n" + "".join(f"- {failure}\n" for failure in failures)
    return text


def save(directory, kind, date, data, document):
    """Writes the .json and the .md file of a result; their path without the suffix."""
    os.makedirs(directory, exist_ok=True)
    stem = os.path.join(directory, f"{kind}-" + date[:16].replace(":", "").replace(" ", "-"))
    for suffix, text in ((".json", json.dumps(data, indent=1) + "\n"), (".md", document)):
        # A run that is ended from outside leaves the last state, never half of one.
        with open(stem + suffix + ".new", "w") as file:
            file.write(text)
        os.replace(stem + suffix + ".new", stem + suffix)
    return stem


def about(arguments, repetitions, program="benches/gpu/run.py"):
    """When, with what and on what the numbers were made."""
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=os.path.dirname(os.path.abspath(__file__)),
            capture_output=True,
            text=True,
        ).stdout.strip()
    except OSError:
        commit = ""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join([program, *arguments]),
        "commit": commit or "unknown",
        "gpu": measure.nvidia_smi("name") or "unknown",
        "driver": measure.nvidia_smi("driver_version") or "unknown",
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "repetitions": repetitions,
    }
