"""Tests of standstill.py that need no GPU: python3 -m unittest discover benches/gpu"""

import contextlib
import io
import json
import os
import shutil
import stat
import sys
import tempfile
import time
import unittest
import unittest.mock

import scenarios
import standstill
import systems
from test_run import CONTROL, NVIDIA_CONTROL

# A stand-in for the compiled program: the same modes and lines, made-up numbers.
PROGRAM = """#!{python} -IS
import os, sys, time
mode = sys.argv[1]
def say(**values):
    for name, value in values.items(): print(f"{{name}}={{value}}", flush=True)
def option(name, default=None):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default
if os.environ.get("FAKE_FAIL") == mode: sys.exit("it broke")
if mode in ("short", "long"):
    say(ready=1)
    for number, _ in enumerate(sys.stdin, 1):
        if mode == "short":
            say(rounds_per_s=100 / number, longest_ms=number, longest_at_s=time.monotonic(), p999_ms=0.5,
                wrong=os.environ.get("FAKE_WRONG", 0))
        else:
            say(kernels=2, seconds=1.0 * number, kernel_longest_ms=2000)
        say(window=number)
elif mode == "newcomer":
    began = int(option("--began")) / 1e9
    say(context_ms=50)
    if os.environ.get("FAKE_HANG"): time.sleep(100)
    if "--ms" in sys.argv: time.sleep(0.001)
    say(first_ms=200 if "--nonce" in sys.argv else 100, wrong=0, end_ms=300)
elif mode == "endless":
    say(ready=1)
    sys.stdin.read()
    say(seconds=1, told=1)
elif mode == "await":
    say(handle="00" * 64, ready=1)
    time.sleep(0.05)
    say(ended_at_ms=time.monotonic() * 1e3, seen=1)
    sys.stdin.read()
elif mode == "write":
    assert option("--handle") == "00" * 64
    say(written_ms=1)
"""


class Numbers(unittest.TestCase):
    def test_totals(self):
        stretches = [{"rounds_per_s": 100.0, "longest_ms": 3.0}, {"rounds_per_s": 50.0, "longest_ms": 9.0}]
        self.assertEqual(scenarios.total(stretches), 150)
        self.assertEqual(scenarios.longest(stretches), 9)
        self.assertEqual(scenarios.percent(30, 120), 25)
        self.assertEqual(scenarios.percent(30, 0), 0)
        # A client whose first kernel has not ended in the stretch has no time to count by.
        self.assertEqual(scenarios.kernel_rate([{"kernels": 6, "seconds": 3}, {"kernels": 0, "seconds": 0}]), 2)

    def test_newcomers_and_programs_are_the_same_for_every_system(self):
        plans = scenarios.newcomer_plans(20)
        self.assertEqual(plans, scenarios.newcomer_plans(20))
        self.assertEqual(sum(after is None for _, after in plans), 10)
        self.assertEqual(sum(never_seen for never_seen, after in plans if after is None), 5)
        for quick, count in ((True, 14), (False, 42)):
            programs = scenarios.batch_programs(quick)
            self.assertEqual(len(dict(programs)), len(programs))
            self.assertEqual(len(programs), count)

    def test_programs_that_take_too_long(self):
        nvidia = {"a": [1.0, 1.0], "b": [10.0, None], "c": [1.0]}
        self.assertEqual(standstill.over({"a": [4.9, 5.1], "b": [None, None], "c": [1, 99]}, nvidia), 2)
        self.assertIsNone(standstill.over({"a": [4.9, 5.1]}, {}))


class Table(unittest.TestCase):
    def test_cells(self):
        report = standstill.Report(["native", "mpsshim"], ["handshake", "batch"], {})
        report.add("mpsshim", {"handshake_seen": 1234.5, "batch_late": 0})
        report.compare({"nvidia": {"a": [1.0]}, "mpsshim": {"a": [6.0]}})
        table = report.markdown().splitlines()
        self.assertEqual(table[0], "| | native | mpsshim |")
        self.assertIn("| another process' first kernel ends a waiting one, image seen before | – | 1,234 ms |", table)
        self.assertIn("| programs that had not ended after 60 s | – | 0 |", table)
        self.assertIn("| programs over 3 times their time under NVIDIA MPS + 2 s | – | 1 |", table)

    def test_keys_are_unique(self):
        keys = [row.key for _, rows in standstill.SCENARIOS.values() for row in rows]
        self.assertEqual(len(keys), len(set(keys)))

    def test_every_scenario_is_there(self):
        for name in standstill.SCENARIOS:
            self.assertTrue(callable(getattr(scenarios.Scenarios, name)))


class EndToEnd(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.directory)
        for name, text in (
            ("standstill", PROGRAM.format(python=sys.executable)),
            ("mps-control", CONTROL),
            ("nvidia-cuda-mps-control", NVIDIA_CONTROL),
            ("libmpsshim.so", ""),
        ):
            with open(self.path(name), "w") as file:
                file.write(text)
            os.chmod(self.path(name), os.stat(self.path(name)).st_mode | stat.S_IXUSR)
        shutil.copy(shutil.which("sleep"), self.path("mps-server"))
        path = {"PATH": self.directory + os.pathsep + os.environ["PATH"]}
        environment = unittest.mock.patch.dict(os.environ, path)
        pause = lambda _, seconds: time.sleep(max(0, seconds) / 20)  # noqa: E731
        shorter = unittest.mock.patch.object(scenarios.Scenarios, "pause", pause)
        for patch in (environment, shorter):
            patch.start()
            self.addCleanup(patch.stop)

    def path(self, name):
        return os.path.join(self.directory, name)

    def measure(self, *arguments):
        options = ["--build", self.directory, "--program", self.path("standstill"), "--results", self.path("results")]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = standstill.main([*options, "--quick", "--seconds", "0.1", *arguments])
        (name,) = [name for name in os.listdir(self.path("results")) if name.endswith(".json")]
        with open(os.path.join(self.path("results"), name)) as file:
            return status, json.load(file), out.getvalue(), err.getvalue()

    def test_every_scenario_on_every_system(self):
        status, data, out, err = self.measure()
        self.assertEqual((status, data["failures"]), (0, []), err)
        for _, rows in standstill.SCENARIOS.values():
            for row in rows:
                expected = {"native", "nvidia", "mpsshim"} - ({"nvidia"} if row.key == "batch_over" else set())
                self.assertEqual(set(data["values"].get(row.key, ())), expected, row.key)
        values = {key: found["mpsshim"] for key, found in data["values"].items()}
        # The rates of four clients in their second and fourth stretch.
        self.assertEqual((values["beside_alone"], values["beside_percent"]), (200, 50))
        self.assertEqual((values["beside_longest_alone"], values["beside_longest"]), (2, 4))
        self.assertEqual((values["beside_ended"], values["beside_wrong"]), (100, 0))
        self.assertEqual((values["first_seen"], values["first_never_max"]), (100, 200))
        self.assertEqual((values["ninth_first"], values["ninth_rate"]), (200, 8))
        self.assertEqual(len(data["times"]["nvidia"]), 14)
        self.assertIn("| NVIDIA MPS |", out)

    def test_what_hangs_is_ended_and_reported(self):
        limits = unittest.mock.patch.object(scenarios.Scenarios, "limit", lambda _: time.monotonic() + 0.5)
        with limits, unittest.mock.patch.dict(os.environ, {"FAKE_HANG": "1"}):
            status, data, _, err = self.measure("--systems", "mpsshim", "--only", "ninth,handshake")
        self.assertEqual(status, 1)
        self.assertRegex(data["failures"][0], "mpsshim, ninth: standstill newcomer had not ended after 0.[5-9] s")
        self.assertNotIn("ninth_first", data["values"])
        self.assertIn("ninth_percent", data["values"])
        self.assertIn("handshake_seen", data["values"])
        with open(self.path("last")) as file:
            self.assertTrue(systems.ended(int(file.read())))

    def test_what_fails_and_what_is_wrong_is_reported(self):
        with unittest.mock.patch.dict(os.environ, {"FAKE_FAIL": "endless", "FAKE_WRONG": "1"}):
            status, data, _, _ = self.measure("--systems", "native", "--only", "endless")
        self.assertEqual(status, 1)
        failures = ["native, endless: standstill endless ended with 1: it broke"]
        failures.append("native, endless: 4 wrong results of clients of 50 µs kernels")
        self.assertEqual(data["failures"], failures)

    def test_a_spent_budget_is_said(self):
        status, data, _, _ = self.measure("--systems", "native", "--budget", "0.01", "--only", "handshake,batch")
        self.assertEqual(status, 1)
        self.assertEqual(data["failures"][-1], "the budget is spent, left out from native on: batch")


if __name__ == "__main__":
    unittest.main()
