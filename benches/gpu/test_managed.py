"""Tests of managed.py that need no GPU: python3 -m unittest discover benches/gpu"""

import contextlib
import io
import json
import os
import shutil
import stat
import sys
import tempfile
import unittest
import unittest.mock

import managed
from test_run import CONTROL, NVIDIA_CONTROL

# A stand-in for the compiled program: the same modes and lines, made-up numbers.
PROGRAM = """#!{python} -IS
import os, sys
mode = sys.argv[1]
def say(**values):
    for name, value in values.items(): print(f"{{name}}={{value}}", flush=True)
if os.environ.get("FAKE_FAIL") == mode: sys.exit("it broke")
if mode in ("kernels", "turns"): say(seconds=0.5)
if mode == "initialise": say(write_s=1, kernel_s=2, sum_s=3)
if mode == "heat":
    assert sys.argv[4] == "4" and os.path.isdir(os.path.dirname(sys.argv[2]))
    say(steps_per_s=100 + int(sys.argv[3]))
if mode == "flood":
    say(ready=1)
    sys.stdin.read()
    say(kernels_per_s=dict(plain=7, managed=5)[sys.argv[2]])
if mode == "neighbour": say(rounds_per_s=9, p99_ms=1)
if mode == "calls": say(launch_wait_us=6, malloc_free_us=0.25)
if mode == "passes": say(gb_per_s=4, limit=os.environ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8G")
say(wrong=os.environ.get("FAKE_WRONG", 0))
"""


class EndToEnd(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.directory)
        for name, text in (
            ("program", PROGRAM.format(python=sys.executable)),
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
        environment.start()
        self.addCleanup(environment.stop)

    def path(self, name):
        return os.path.join(self.directory, name)

    def measure(self, *arguments):
        options = ["--build", self.directory, "--program", self.path("program"), "--results", self.path("results")]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = managed.main([*options, *arguments])
        (name,) = [name for name in os.listdir(self.path("results")) if name.endswith(".json")]
        with open(os.path.join(self.path("results"), name)) as file:
            return status, json.load(file), out.getvalue(), err.getvalue()

    def test_every_scenario_on_every_system(self):
        status, data, out, err = self.measure("--quick", "--limit")
        self.assertEqual((status, data["failures"]), (0, []), err)
        for _, rows in managed.SCENARIOS.values():
            for row in rows:
                expected = {"mpsshim"} if row.key == "limit_rate" else {"native", "nvidia", "mpsshim"}
                self.assertEqual(set(data["values"].get(row.key, ())), expected, row.key)
        values = {key: found["mpsshim"] for key, found in data["values"].items()}
        self.assertEqual((values["kernels_s"], values["turns_s"]), (2.5, 2.5))
        self.assertEqual((values["heat_steps"], values["beside_managed_kernels"]), (100, 5))
        self.assertEqual((values["calls_malloc"], values["limit_rate"]), (0.25, 4))
        self.assertIn("| NVIDIA MPS |", out)

    def test_rounds_and_the_usual_scenarios(self):
        status, data, _, err = self.measure("--systems", "native", "--repetitions", "2")
        self.assertEqual(status, 0, err)
        self.assertEqual(data["rounds"]["kernels_s"]["native"], [0.5, 0.5])
        self.assertNotIn("limit_rate", data["values"])

    def test_what_fails_is_reported(self):
        with unittest.mock.patch.dict(os.environ, {"FAKE_FAIL": "turns"}):
            status, data, _, _ = self.measure("--quick", "--systems", "mpsshim", "--only", "turns,calls")
        self.assertEqual(status, 1)
        self.assertEqual(data["failures"], ["mpsshim, turns: program ended with 1: it broke"])
        self.assertIn("calls_launch", data["values"])

    def test_what_is_wrong_is_reported(self):
        with unittest.mock.patch.dict(os.environ, {"FAKE_WRONG": "3"}):
            status, data, _, _ = self.measure("--quick", "--systems", "native", "--only", "heat")
        self.assertEqual((status, data["failures"]), (1, ["native, heat: heat: 3 words are wrong"]))

    def test_a_spent_budget_is_said(self):
        status, data, _, _ = self.measure("--quick", "--systems", "native", "--budget", "0.0001")
        self.assertEqual(status, 1)
        self.assertRegex(data["failures"][-1], "left out of round 1, the budget is spent: .*calls")


class Table(unittest.TestCase):
    def test_keys_are_unique_and_every_scenario_is_there(self):
        keys = [row.key for _, rows in managed.SCENARIOS.values() for row in rows]
        self.assertEqual(len(keys), len(set(keys)))
        for name in managed.SCENARIOS:
            self.assertTrue(callable(getattr(managed.Scenarios, name)))


if __name__ == "__main__":
    unittest.main()
