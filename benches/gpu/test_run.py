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
import unittest.mock

import measure
import report as reports
import run
import systems
import table

# A stand-in for the compiled microbench: the same modes and lines, made-up numbers.
MICROBENCH = """#!{python} -IS
import os, sys
print("runtime_start_ms=50.5\\nfirst_kernel_ms=51.5", flush=True)
mode = sys.argv[1]
if os.environ.get("FAKE_REFUSAL") == mode and "/nvidia/" in os.environ["CUDA_MPS_PIPE_DIRECTORY"]:
    sys.exit("microbench: line 330: cudaFree(nullptr): cudaErrorMpsMaxClientsReached")
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
    if not (line := sys.stdin.readline()): sys.exit()
    float(line)
    print("late_ms=0.000\\nkernels_per_s=18500.0\\ncpus=0.500")
elif mode == "request":
    print("requests=900\\nrequest_p50_us=980.0\\nrequest_p99_us=1100.0\\ncpus=0.250")
elif mode == "flood":
    print("ready=1", flush=True)
    sys.stdin.read()
    print("kernels_per_s=" + ("100.0" if os.environ.get("CUDA_MPS_CLIENT_PRIORITY") == "1" else "190.0"))
elif mode == "hold":
    print("ready=1", flush=True)
    for line in sys.stdin: print("used_mib=600.000", flush=True)
"""

# A stand-in for a Python with PyTorch that runs torch_client.py: each stretch has another rate.
TORCH = """#!{python} -IS
import sys
print("ready=1", flush=True)
for line, rate in zip(sys.stdin, (10, 30, 20)):
    float(line)
    print(f"cpus=1.000\\nlate_ms=0.0\\nvalue=0.5\\nper_s={{rate}}", flush=True)
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


# A stand-in for nvcc, too old for -arch=native: "compiles" the stand-in above.
NVCC = """#!/bin/sh
here=$(dirname "$0")
echo "$*" >>"$here/nvcc-calls"
case "$*" in *native*) echo "nvcc fatal: no such architecture" >&2; exit 1 ;; esac
while [ $# -gt 1 ]; do shift; done
cp "$here/compiled" "$1"
"""

# NVIDIA's control command takes its commands from its input.
NVIDIA_CONTROL = """#!/bin/sh
here=$(dirname "$0")
pid=$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid
if [ "$1" = -d ]; then "$here/mps-server" 60 >/dev/null 2>&1 & echo $! >"$pid"; exit; fi
read command
case $command in
get_server_list) cat "$pid" ;;
get_client_list*) echo 4711 ;;
quit) kill "$(cat "$pid")" ;;
esac
"""


class Parsing(unittest.TestCase):
    def test_values(self):
        text = "warning: a=b\nruntime_start_ms=341.2\nused_mib=131072.000\n=3\nno line"
        self.assertEqual(measure.parse_values(text), {"runtime_start_ms": 341.2, "used_mib": 131072.0, "": 3.0})

    def test_nbody(self):
        self.assertEqual(measure.parse_nbody("x\n512000 bodies, total time for 10 iterations: 1722.625 ms\n"), 1722.625)
        with self.assertRaises(systems.Failure):
            measure.parse_nbody("CUDA error")

    def test_stat_of_a_process_with_an_odd_name(self):
        text = "17 (a) b) S 1 2 3 4 5 6 7 8 9 10 120 30 0 0 20 0"
        self.assertEqual(systems.parse_stat(text), ("S", 150))

    def test_pids(self):
        self.assertEqual(systems.parse_pids("12\n345\n"), [12, 345])
        self.assertEqual(systems.parse_pids("Server 0 not found\n"), [0])
        self.assertEqual(systems.parse_pids(""), [])

    def test_own_cpu_time_is_counted(self):
        before = measure.cpu_ms([os.getpid()])
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
        self.assertGreaterEqual(measure.cpu_ms([os.getpid()]) - before, 50)


def values(**medians):
    """Medians for Row.reached: system -> value of the row "x", or "SYSTEM_ROW"."""
    return lambda key, system: medians.get(system if key == "x" else f"{system}_{key}")


class Table(unittest.TestCase):
    def row(self, *targets):
        return table.Row("x", "x", "ms", 1, targets)

    def test_a_number_to_reach(self):
        row = self.row(table.at_least(310_000))
        self.assertFalse(row.reached(values(mpsshim=309_999)))
        self.assertTrue(self.row(table.at_most(60)).reached(values(mpsshim=60)))
        self.assertIsNone(row.reached(values(native=310_000)))
        self.assertIsNone(self.row().reached(values(mpsshim=1)))
        self.assertEqual(row.target_text(), "at least 310,000 ms")

    def test_a_bound_relative_to_a_system(self):
        row = self.row(table.at_most(1.01, "native"))
        self.assertTrue(row.reached(values(native=1722.6, mpsshim=1739)))
        self.assertFalse(row.reached(values(native=1722.6, mpsshim=1740)))
        self.assertIsNone(row.reached(values(mpsshim=1740)))
        self.assertEqual(row.target_text(), "within 1% of native")

    def test_a_bound_relative_to_another_row(self):
        row = self.row(table.at_most(1.3, row="alone"))
        self.assertTrue(row.reached(values(mpsshim=1.3, mpsshim_alone=1.0)))
        self.assertFalse(row.reached(values(mpsshim=1.4, mpsshim_alone=1.0)))
        self.assertEqual(row.target_text(), "at most 1.3 times its own alone")

    def test_all_bounds_count(self):
        row = self.row(table.at_least(1, "nvidia"), table.at_least(300))
        self.assertTrue(row.reached(values(nvidia=300, mpsshim=301)))
        self.assertFalse(row.reached(values(nvidia=302, mpsshim=301)))
        self.assertFalse(row.reached(values(mpsshim=299)))
        self.assertIsNone(row.reached(values(mpsshim=301)))
        refused = lambda system: system == "nvidia"  # noqa: E731
        self.assertTrue(row.reached(values(mpsshim=301), refused))
        self.assertIsNone(row.reached(values(), refused))

    def test_keys_are_unique_and_bounds_name_rows(self):
        rows = [row for measurement in table.MEASUREMENTS.values() for row in measurement.rows]
        self.assertEqual(len(rows), len(table.ROWS))
        for row in rows:
            for target in row.targets:
                self.assertIn(target.row or row.key, table.ROWS)
                self.assertIn(target.system or "native", systems.SYSTEM_TITLES)

    def test_the_important_come_first(self):
        names = table.by_importance(table.MEASUREMENTS)
        self.assertEqual(names[0], "latency")
        self.assertEqual(sorted(names), sorted(table.MEASUREMENTS))
        ranks = [table.MEASUREMENTS[name].rank for name in names]
        self.assertEqual(ranks, sorted(ranks))
        self.assertEqual(table.in_table_order(names), list(table.MEASUREMENTS))

    def test_median_spread_and_missing_values(self):
        report = reports.Report(["native", "mpsshim"], ["nbody3"], {})
        for value in (7000, 6850, 6750):
            report.add("mpsshim", {"nbody3": value})
        last = report.markdown().splitlines()[-1]
        self.assertEqual(
            last.split("|")[2:6], [" – ", " 6,850 ms (6,750–7,000) ", " at most 6,800 ms ", " **no** "]
        )

    def test_processors_in_use(self):
        report = reports.Report(["native", "mpsshim"], ["small1", "idle"], {})
        self.assertIsNone(report.cpu_table())
        report.add("mpsshim", {"small1": 19_500, "small1_cpus": 2.25})
        self.assertEqual(len(report.cpu_table().splitlines()), 3)
        self.assertIn("| – | 2.2 |", report.cpu_table())

    def test_a_saved_report_is_the_same_when_loaded(self):
        report = reports.Report(["native", "nvidia", "mpsshim"], ["small64", "nbody1"], reports.about([], 2))
        report.add("mpsshim", {"small64": 300_001})
        report.refuse("nvidia", "small64", "takes 60 clients")
        with contextlib.redirect_stderr(io.StringIO()):
            report.leave_out("nbody1", "no --nbody")
            report.fail("native", "small64", "it broke")
        with tempfile.TemporaryDirectory() as directory:
            loaded = reports.Report.load(report.save(directory) + ".json")
        self.assertEqual(loaded.document(), report.document())
        self.assertIn("| – | refused | 300,001/s | at least NVIDIA MPS, at least 300,000/s | yes |", report.markdown())

    def test_every_older_result_loads(self):
        directory = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "results")
        for name in os.listdir(directory):
            if name.startswith("gpu-") and name.endswith(".json"):
                report = reports.Report.load(os.path.join(directory, name))
                self.assertGreater(len(report.markdown().splitlines()), 2, name)


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
        self.assertIn("at least 1", self.refused("--nbody", sys.executable, "--repetitions", "0"))
        self.assertIn("begin with --", self.refused("--microbench", sys.executable, "--server-options", "launch-run"))


class EndToEnd(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.directory)
        self.program("microbench", MICROBENCH.format(python=sys.executable))
        self.program("sample", NBODY)
        self.program("mps-control", CONTROL)
        self.program("libmpsshim.so", "")
        shutil.copy(shutil.which("sleep"), self.path("mps-server"))
        # The loader only warns about a preload that is no library; it must not reach the readings.
        self.addCleanup(os.environ.pop, "FAKE_FAIL", None)
        shorter = unittest.mock.patch.object(measure.Bench, "seconds", lambda self, usual: 0.05)
        shorter.start()
        self.addCleanup(shorter.stop)
        self.addCleanup(os.environ.pop, "FAKE_REFUSAL", None)

    def path(self, name):
        return os.path.join(self.directory, name)

    def program(self, name, text):
        with open(self.path(name), "w") as file:
            file.write(text)
        os.chmod(self.path(name), os.stat(self.path(name)).st_mode | stat.S_IXUSR)

    def nvidia(self):
        """Puts NVIDIA's control command on the path."""
        self.program("nvidia-cuda-mps-control", NVIDIA_CONTROL)
        path = os.environ["PATH"]
        os.environ["PATH"] = self.directory + os.pathsep + path
        self.addCleanup(os.environ.__setitem__, "PATH", path)

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

    def results_file(self):
        (path,) = [name for name in os.listdir(self.path("results")) if name.endswith(".json")]
        return os.path.join(self.path("results"), path)

    def results(self):
        with open(self.results_file()) as file:
            return json.load(file)

    def daemon_has_ended(self):
        with open(self.path("last")) as file:
            return systems.ended(int(file.read()))

    def test_every_measurement_on_two_systems(self):
        arguments = ["--systems", "native,mpsshim", "--nbody", self.path("sample"), "--quick"]
        status, out, err = self.bench(*arguments)
        self.assertEqual(status, 1, err)
        data = self.results()
        self.assertEqual(data["failures"], [])
        self.assertEqual(data["values"]["small32"]["mpsshim"], [32 * 18500.0])
        self.assertEqual(data["values"]["small64"]["mpsshim"], [64 * 18500.0])
        self.assertEqual(data["values"]["nbody3"]["native"], [67602.5])
        self.assertEqual(data["values"]["empty4_cpus"], {"native": [2.0], "mpsshim": [2.0]})
        self.assertEqual(data["values"]["request_beside"]["mpsshim"], [1.1])
        self.assertEqual(data["values"]["flood_beside"]["mpsshim"], [190.0])
        self.assertEqual(data["values"]["start_beside"]["native"], [51.5])
        self.assertIn("train4", data["left_out"])
        self.assertEqual(data["values"]["idle"], {"mpsshim": [0.0]})
        self.assertEqual(data["values"]["start"]["mpsshim"], [50.5])
        self.assertIn("; nbody 14336", out)
        self.assertTrue(self.daemon_has_ended())

    def test_a_server_is_given_options(self):
        os.remove(self.path("mps-server"))
        shutil.copy(shutil.which("sleep"), self.path("sleeper"))
        server = '#!/bin/sh\nhere=$(dirname "$0")\necho "$*" >>"$here/given"\nexec "$here/sleeper" 60\n'
        self.program("mps-server", server)
        self.program("mps-control", CONTROL.replace('"$here/mps-server"', '"${MPSSHIM_SERVER:-$here/mps-server}"'))
        options = ["--server-options=--launch-run 1", "--server-options=--lock-spin-us 0"]
        status, out, err = self.bench("--systems", "mpsshim", "--only", "small2", "--quick", *options)
        self.assertEqual(status, 0, err)
        names = ["mpsshim", "mpsshim --launch-run 1", "mpsshim --lock-spin-us 0"]
        data = self.results()
        self.assertEqual((data["systems"], data["failures"]), (names, []))
        self.assertEqual(data["values"]["small2"], {name: [37000.0] for name in names})
        self.assertIn(f"| | {' | '.join(names)} | to reach", out)
        with open(self.path("given")) as file:
            self.assertEqual(file.read().splitlines(), ["60", "60 --launch-run 1", "60 --lock-spin-us 0"])
        # What a file has may be unknown where it is read again.
        report = reports.Report.load(self.results_file())
        self.assertIn("| mpsshim --launch-run 1 |", report.markdown())

    def test_pytorch_clients_work_for_three_stretches(self):
        self.program("torch", TORCH.format(python=sys.executable))
        arguments = ["--systems", "native", "--python", self.path("torch"), "--only", "bert2,train1", "--quick"]
        _, _, err = self.bench(*arguments)
        data = self.results()
        self.assertEqual(data["failures"], [], err)
        self.assertEqual(data["values"]["bert2"]["native"], [40.0])
        self.assertEqual(data["values"]["bert2_cpus"]["native"], [2.0])
        self.assertEqual(data["values"]["train1"]["native"], [20.0])

    def test_without_nbody_its_rows_are_left_out(self):
        status, _, err = self.bench("--systems", "mpsshim", "--only", "nbody1,start", "--quick")
        self.assertEqual(status, 0, err)
        self.assertIn("nbody1: left out, no --nbody, and no ", err)

    def test_what_is_built_is_found(self):
        """The way without arguments: microbench is compiled, nbody and NVIDIA's are left out when missing."""
        self.program("nvcc", NVCC)
        os.rename(self.path("microbench"), self.path("compiled"))
        os.environ["PATH"] = self.directory + os.pathsep + os.environ["PATH"]
        self.addCleanup(os.environ.__setitem__, "PATH", os.environ["PATH"].partition(os.pathsep)[2])
        arguments = ["--build", self.directory, "--results", self.path("results"), "--quick", "--only", "start,nbody1"]
        for _ in range(2):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = run.main(arguments)
            self.assertEqual(status, 0, err.getvalue())
        data = self.results()
        self.assertEqual(data["values"]["start"], {"native": [50.5], "mpsshim": [50.5], "direct": [50.5]})
        self.assertEqual(data["systems"], ["native", "mpsshim", "direct"])
        self.assertEqual(data["notes"], ["NVIDIA MPS left out: there is no nvidia-cuda-mps-control"])
        self.assertEqual(data["failures"], [])
        with open(self.path("nvcc-calls")) as file:
            calls = file.read().splitlines()
        # Refused the first time, as by a compiler that does not know `native`; then done, and not again.
        self.assertEqual(["native" in call for call in calls], [True, False])

    def test_nothing_to_measure_with_is_said(self):
        os.remove(self.path("microbench"))
        self.program("nvcc", "#!/bin/sh\necho 'no host compiler' >&2\nexit 1\n")
        arguments = ["--build", self.directory, "--results", self.path("results"), "--only", "start"]
        with unittest.mock.patch.object(run, "nvcc", lambda: self.path("nvcc")):
            with contextlib.redirect_stderr(io.StringIO()) as err:
                self.assertEqual(run.main(arguments), 2)
        self.assertIn("nvcc ended with 1: no host compiler", err.getvalue())
        self.assertFalse(os.path.exists(self.path("results")))

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

    def test_a_refusal_is_no_failure(self):
        self.nvidia()
        os.environ["FAKE_REFUSAL"] = "small"
        arguments = ["--systems", "nvidia,mpsshim", "--only", "small64", "--quick", "--repetitions", "2"]
        status, out, err = self.bench(*arguments)
        self.assertEqual((status, self.results()["failures"]), (0, []), err)
        self.assertEqual(out.count("small64 refused"), 1)
        self.assertIn("| refused | 1,184,000/s |", out)
        self.assertIn("takes 60 clients", self.results()["refused"]["small64"]["nvidia"])

    def test_clients_that_wait_for_their_beginning_end_when_one_fails(self):
        os.environ["FAKE_FAIL"] = "empty"
        status, _, err = self.bench("--systems", "native", "--only", "empty4", "--quick")
        self.assertEqual(status, 1)
        self.assertIn("native, empty4: microbench ended early with 1: it broke", err)

    def test_what_was_measured_before_the_budget_was_spent_stays(self):
        arguments = ["--systems", "native", "--only", "start", "--repetitions", "200", "--budget", "0.5"]
        status, _, err = self.bench(*arguments)
        self.assertIn("the budget is spent", err)
        data = self.results()
        self.assertLess(len(data["values"]["start"]["native"]), 200)
        self.assertEqual((status, data["failures"], len(data["notes"])), (0, [], 1), err)

    def test_a_spent_budget_is_said(self):
        status, _, err = self.bench("--systems", "native", "--only", "start", "--budget", "-1")
        self.assertEqual(status, 1)
        self.assertIn("the budget is spent", err)

    def test_what_is_lacking_is_measured_later(self):
        self.bench("--systems", "native,mpsshim", "--only", "start", "--quick")
        (file,) = [name for name in os.listdir(self.path("results")) if name.endswith(".json")]
        before = self.results()
        before["values"]["start"]["native"] = [1.0]
        before["date"] = "2000-01-01 00:00 UTC"
        os.remove(os.path.join(self.path("results"), file))
        earlier = self.path("earlier.json")
        with open(earlier, "w") as out:
            json.dump(before, out)
        arguments = ["--systems", "native,mpsshim", "--only", "small1,start", "--resume", earlier]
        status, _, err = self.bench(*arguments)
        data = self.results()
        self.assertEqual(data["date"], before["date"])
        self.assertEqual(data["measurements"], ["small1", "start"])
        self.assertEqual(data["values"]["start"]["native"], [1.0])
        self.assertEqual(data["values"]["small1"]["mpsshim"], [18500.0])
        self.assertIn("--quick, then benches/gpu/run.py", data["command"])

        before["gpu"] = "another one"
        with open(earlier, "w") as out:
            json.dump(before, out)
        status, _, err = self.bench(*arguments)
        self.assertEqual(status, 2)
        self.assertIn("it was made with gpu another one", err)


if __name__ == "__main__":
    unittest.main()
