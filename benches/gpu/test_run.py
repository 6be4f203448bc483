"""Tests of run.py that need no GPU: python3 -m unittest discover benches/gpu"""

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

import run
import systems

# A stand-in for the compiled microbench: the same modes and lines, made-up numbers.
MICROBENCH = """#!{python}
import os, sys
print("runtime_start_ms=50.5\\nfirst_kernel_ms=51.5", flush=True)
mode = sys.argv[1]
if os.environ.get("FAKE_FAIL") == mode:
    sys.exit("it broke")
if mode == "latency":
    for name in ("launch_burst_ns", "launch_steady_ns"): print(name + "=100.000")
    for name in ("launch_sync_p50_us", "launch_sync_p99_us", "h2d_4_bytes_p50_us", "d2h_4_bytes_p50_us",
                 "malloc_free_p50_us"): print(name + "=7.000")
elif mode == "bandwidth":
    for kind in ("pinned", "pageable"):
        for way in ("h2d", "d2h"): print(f"{{way}}_{{kind}}_gb_s=55.400")
elif mode in ("small", "empty"):
    print("ready=1", flush=True)
    float(sys.stdin.readline())
    print("late_ms=0.000\\nkernels_per_s=18500.0")
elif mode == "hold":
    print("ready=1", flush=True)
    for line in sys.stdin: print("used_mib=600.000", flush=True)
"""

NBODY = """#!/bin/sh
echo "> Compute 9.0 CUDA device: [NVIDIA H200]"
echo "14336 bodies, total time for 10000 iterations: 6760.250 ms"
"""

# A stand-in for mps-control: the "daemon" is a copy of sleep that is called mps-server.
CONTROL = """#!/bin/sh
here=$(dirname "$0")
pid=$MPSSHIM_PIPE_DIRECTORY/mps-control.pid
case $1 in
-d) "$here/mps-server" 60 >/dev/null 2>&1 & echo $! >"$pid"; echo $! >"$here/last" ;;
get_server_list) cat "$pid" ;;
get_client_list) echo 4711 ;;
quit) [ -e "$here/deaf" ] || kill "$(cat "$pid")" ;;
esac
"""


class Parsing(unittest.TestCase):
    def test_values(self):
        text = "warning: a=b\nruntime_start_ms=341.2\nused_mib=131072.000\n=3\nno line"
        self.assertEqual(run.parse_values(text), {"runtime_start_ms": 341.2, "used_mib": 131072.0, "": 3.0})

    def test_nbody(self):
        self.assertEqual(run.parse_nbody("x\n512000 bodies, total time for 10 iterations: 1722.625 ms\n"), 1722.625)
        with self.assertRaises(systems.Failure):
            run.parse_nbody("CUDA error")

    def test_stat_of_a_process_with_an_odd_name(self):
        text = "17 (a) b) S 1 2 3 4 5 6 7 8 9 10 120 30 0 0 20 0"
        self.assertEqual(systems.parse_stat(text), ("S", 150))

    def test_pids(self):
        self.assertEqual(systems.parse_pids("12\n345\n"), [12, 345])
        self.assertEqual(systems.parse_pids("Server 0 not found\n"), [0])
        self.assertEqual(systems.parse_pids(""), [])

    def test_own_cpu_time_is_counted(self):
        before = run.cpu_ms([os.getpid()])
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
        self.assertGreaterEqual(run.cpu_ms([os.getpid()]) - before, 50)


class Table(unittest.TestCase):
    def test_targets(self):
        row = run.Row("x", "x", "ms", 1, ("within", 1.01))
        self.assertTrue(row.reached(1722.6, 1739))
        self.assertFalse(row.reached(1722.6, 1740))
        self.assertIsNone(row.reached(None, 1740))
        self.assertEqual(row.target_text(), "within 1% of native")
        self.assertFalse(run.Row("x", "x", "/s", 0, ("at least", 310_000)).reached(None, 309_999))
        self.assertTrue(run.Row("x", "x", "ms", 0, ("at most", 60)).reached(None, 60))
        self.assertEqual(run.Row("x", "x", "/s", 0, ("at least", 310_000)).target_text(), "at least 310,000 /s")

    def test_keys_are_unique(self):
        keys = [row.key for rows in run.MEASUREMENTS.values() for row in rows]
        self.assertEqual(len(keys), len(set(keys)))

    def test_median_and_missing_values(self):
        report = run.Report(["native", "mpsshim"], ["nbody3"], {})
        for value in (7000, 6800, 6750):
            report.add("mpsshim", {"nbody3": value})
        last = report.markdown().splitlines()[-1]
        self.assertEqual(last.split("|")[2:6], [" – ", " 6,800 ms ", " at most 6,900 ms ", " yes "])


class Arguments(unittest.TestCase):
    def refused(self, *arguments):
        said = io.StringIO()
        with contextlib.redirect_stderr(said), self.assertRaises(SystemExit):
            run.parse_arguments(list(arguments))
        return said.getvalue()

    def test_defaults_and_choices(self):
        options = run.parse_arguments(["--microbench", sys.executable, "--only", "start,idle", "--quick"])
        self.assertEqual((options.only, options.repetitions), (["start", "idle"], 1))
        self.assertEqual(options.systems, ["native", "nvidia", "mpsshim", "direct"])

    def test_what_is_wrong_is_named(self):
        self.assertIn("'nbody9' is none of", self.refused("--microbench", sys.executable, "--only", "nbody9"))
        self.assertIn("no such program", self.refused("--microbench", "/nowhere/mb"))
        self.assertIn("give at least one of --microbench", self.refused())
        self.assertIn("at least 1", self.refused("--nbody", sys.executable, "--repetitions", "0"))


class EndToEnd(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.directory)
        self.program("microbench", MICROBENCH.format(python=sys.executable))
        self.program("nbody", NBODY)
        self.program("mps-control", CONTROL)
        self.program("libmpsshim.so", "")
        shutil.copy(shutil.which("sleep"), self.path("mps-server"))
        # The loader only warns about a preload that is no library; it must not reach the readings.
        self.addCleanup(os.environ.pop, "FAKE_FAIL", None)

    def path(self, name):
        return os.path.join(self.directory, name)

    def program(self, name, text):
        with open(self.path(name), "w") as file:
            file.write(text)
        os.chmod(self.path(name), os.stat(self.path(name)).st_mode | stat.S_IXUSR)

    def bench(self, *arguments):
        options = [
            "--build",
            self.directory,
            "--microbench",
            self.path("microbench"),
            "--results",
            self.path("results"),
        ]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run.main([*options, *arguments])
        return status, out.getvalue(), err.getvalue()

    def results(self):
        (path,) = [name for name in os.listdir(self.path("results")) if name.endswith(".json")]
        with open(os.path.join(self.path("results"), path)) as file:
            return json.load(file)

    def daemon_has_ended(self):
        with open(self.path("last")) as file:
            return systems.ended(int(file.read()))

    def test_every_measurement_on_two_systems(self):
        arguments = ["--systems", "native,mpsshim", "--nbody", self.path("nbody"), "--quick"]
        status, out, err = self.bench(*arguments)
        self.assertEqual(status, 1, err)
        data = self.results()
        self.assertEqual(data["failures"], [])
        self.assertEqual(data["values"]["small32"]["mpsshim"], [32 * 18500.0])
        self.assertEqual(data["values"]["nbody3"]["native"], [67602.5])
        self.assertEqual(data["values"]["idle"], {"mpsshim": [0.0]})
        self.assertEqual(data["values"]["start"]["mpsshim"], [50.5])
        self.assertIn("not reached: nbody 14336", out)
        self.assertTrue(self.daemon_has_ended())

    def test_without_nbody_its_rows_are_left_out(self):
        status, _, err = self.bench("--systems", "mpsshim", "--only", "nbody1,start", "--quick")
        self.assertEqual(status, 0, err)
        self.assertIn("nbody1: left out, no --nbody", err)

    def test_a_failed_measurement_is_reported_and_the_rest_goes_on(self):
        os.environ["FAKE_FAIL"] = "latency"
        status, _, err = self.bench("--systems", "mpsshim", "--only", "latency,start", "--quick")
        self.assertEqual(status, 1)
        self.assertIn("mpsshim, latency: microbench ended with 1: it broke", err)
        self.assertEqual(self.results()["values"]["start"]["mpsshim"], [50.5])
        self.assertTrue(self.daemon_has_ended())

    def test_a_daemon_that_ignores_quit_is_killed(self):
        self.program("deaf", "")
        self.bench("--systems", "mpsshim", "--only", "start", "--quick")
        self.assertTrue(self.daemon_has_ended())

    def test_a_system_that_is_not_there(self):
        os.remove(self.path("libmpsshim.so"))
        status, _, err = self.bench("--systems", "native,mpsshim", "--only", "start", "--quick")
        self.assertEqual(status, 1)
        self.assertIn("libmpsshim.so: cargo build --release", err)
        self.assertEqual(list(self.results()["values"]["start"]), ["native"])

    def test_no_client_of_the_server_means_no_numbers(self):
        self.program("mps-control", CONTROL.replace("echo 4711", "true"))
        status, _, err = self.bench("--systems", "mpsshim", "--only", "start", "--quick")
        self.assertEqual(status, 1)
        self.assertIn("no server knows it", err)
        self.assertTrue(self.daemon_has_ended())

    def test_a_spent_budget_is_said(self):
        status, _, err = self.bench("--systems", "native", "--only", "start", "--budget", "-1")
        self.assertEqual(status, 1)
        self.assertIn("the budget is spent", err)


if __name__ == "__main__":
    unittest.main()
