"""Tests of queueing.py that need no GPU: python3 -m unittest discover benches/gpu"""

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

import plot
import queueing
import systems
from test_run import CONTROL, NVIDIA_CONTROL

# A stand-in for the compiled program and for a Python with PyTorch: made-up numbers, worse from the second stretch on.
PROGRAM = """#!{python} -IS
import os, sys, time
role = sys.argv[1].rpartition("/")[2]
with open(os.path.dirname(os.path.abspath(sys.argv[0])) + "/pids", "a") as file: print(os.getpid(), file=file)
if os.environ.get("FAKE_SILENT") == role: time.sleep(100)
print("ready=1", flush=True)
for number, line in enumerate(sys.stdin, 1):
    start, seconds = map(float, line.split())
    assert start > time.time() - 5 and seconds > 0
    if os.environ.get("FAKE_HANG") == role: time.sleep(100)
    if os.environ.get("FAKE_FAIL") == role: sys.exit("it broke")
    if os.environ.get("FAKE_DUMB") == role: print("warning: nothing to say", flush=True); continue
    if role in ("flood", "steady"):
        print(f"kernels=9 kernels_per_s={{20 / number}} rate={{20 / number}} late_ms=0.0", flush=True)
    elif role == "copies":
        print(f"gb_per_s={{50 / number}} late_ms=0.0", flush=True)
    elif role == "queueing_train.py":
        print(f"steps_per_s={{8 / number}} late_ms=0.0", flush=True)
    else:
        late = os.environ.get("FAKE_LATE", 0)
        print(f"count=2 mean_ms={{2 * number}} p50_ms={{number}} p99_ms={{3 * number}} late_ms={{late}}", flush=True)
if os.environ.get("FAKE_STAY") == role: time.sleep(100)
"""

# mps-control of a version that has the command, and of one that has not.
WITH_FIFO = CONTROL.replace("esac", 'set_scheduling) echo "$2" >>"$here/scheduling" ;;\nesac')
WITHOUT_FIFO = CONTROL.replace("esac", "set_scheduling) echo 'Unknown command \"set_scheduling\"' >&2; exit 1 ;;\nesac")


class Numbers(unittest.TestCase):
    def test_lines(self):
        line = "kernels=25 kernels_per_s=25.000 rate=24.8930 late_ms=0.0"
        expected = {"kernels": 25, "kernels_per_s": 25, "rate": 24.893, "late_ms": 0}
        self.assertEqual(queueing.parse_line(line), expected)
        self.assertEqual(queueing.parse_line("role=flood rate=2 and more"), {"rate": 2})
        self.assertEqual(queueing.parse_line(""), {})

    def test_parts_of_the_device(self):
        self.assertAlmostEqual(queueing.part(10_000, 1, 100), 100)
        self.assertAlmostEqual(queueing.part(1.25, 40, 10_000), 50)

    def test_ratios(self):
        self.assertEqual(queueing.percent(30, 120), 25)
        self.assertIsNone(queueing.percent(30, 0))
        self.assertEqual(queueing.times(30, 20), 1.5)
        self.assertIsNone(queueing.times(30, 0))
        self.assertEqual(queueing.known({"a": None, "b": 0}), {"b": 0})

    def test_requests_that_are_due(self):
        # The first at once, the last before the end.
        self.assertEqual((queueing.due(1, 50), queueing.due(0.99, 50), queueing.due(0.01, 50)), (20, 20, 1))

    def test_latencies_have_the_key_of_their_row(self):
        values = {"mean_ms": 1.0, "p99_ms": 2.0}
        self.assertEqual(queueing.latency("alone", values, "mean", "p99"), {"alone_mean": 1.0, "alone_p99": 2.0})


def report(names=("native", "nvidia", "mpsshim", "fifo"), scenarios=("parts", "three-8x10")):
    about = {name: name.upper() for name in ("command", "commit", "gpu", "driver", "cpus", "kernel")}
    return queueing.Report(list(names), list(scenarios), about | {"date": "2026-11-26 09:00 UTC"})


class Table(unittest.TestCase):
    def test_text(self):
        made = report()
        made.add("mpsshim", {"three-8x10_mean": 1.234, "three-8x10_p99": 1234.5, "three-8x10_keeps": 98.76})
        made.add("nvidia", {"parts_short": 50.04})
        table = made.markdown().splitlines()
        self.assertEqual(table[:2], ["| | native | NVIDIA MPS | mpsshim | mpsshim, fifo |", "|---|---|---|---|---|"])
        beside = "| 16 blocks × 1 ms beside three programs of 8 waves × 10 ms, mean | – | – | 1.23 ms | – |"
        # In the order of the scenarios, not of --only.
        self.assertEqual(table[2], beside)
        self.assertEqual(table[3], "| the same, p99 | – | – | 1,234.50 ms | – |")
        self.assertEqual(table[4], "| the long work keeps | – | – | 98.8 % | – |")
        self.assertIn(": its part of the device | – | 50.0 % | – | – |", table[5])
        self.assertEqual(len(table), 7)

    def test_document_names_command_machine_and_driver(self):
        made = report()
        with contextlib.redirect_stderr(io.StringIO()):
            made.note("a note")
            made.fail("fifo", "words", "it broke")
        text = made.document()
        self.assertTrue(text.startswith("# Short work beside long work, 2026-11-26 09:00 UTC\n\n| |"))
        for line in ("- command: COMMAND\n", "- gpu: GPU\n", "- driver: DRIVER\n", "- a note\n"):
            self.assertIn(line, text)
        self.assertTrue(text.endswith("What failed:\n\n- mpsshim, fifo, words: it broke\n"))

    def test_keys_are_unique_and_every_scenario_is_there(self):
        keys = [row.key for _, rows in queueing.SCENARIOS.values() for row in rows]
        self.assertEqual(len(keys), len(set(keys)))
        for name in queueing.SCENARIOS:
            self.assertTrue(name in queueing.BESIDE or callable(getattr(queueing.Scenarios, name)))

    def test_bars(self):
        made = report()
        made.add("native", {"alone_p99": 1.0, "words_p99": 3.0})
        self.assertEqual(queueing.bars(made), ([], []))
        made.add("fifo", {"bert_p99": 4.0, "bert_p50": 3.0})
        made.add("nvidia", {"alone_p99": 1.0})
        self.assertEqual(queueing.bars(made), (["nvidia", "fifo"], ["alone_p99", "bert_p99"]))

    def test_a_saved_report_is_read_again(self):
        with tempfile.TemporaryDirectory() as directory:
            made = report()
            made.add("nvidia", {"alone_p99": 1.5})
            with contextlib.redirect_stderr(io.StringIO()):
                made.note("a note")
            path = made.save(directory) + ".json"
            self.assertEqual(os.path.basename(path), "queueing-2026-11-26-0900.json")
            self.assertEqual(queueing.Report.load(path).data(), made.data())

    @unittest.skipIf(plot.missing(), "no matplotlib")
    def test_chart(self):
        with tempfile.TemporaryDirectory() as directory:
            made, path = report(), os.path.join(directory, "chart.svg")
            self.assertFalse(queueing.draw(made, path))
            made.add("nvidia", {"alone_p99": 1.5, "three-8x10_p99": 150})
            made.add("mpsshim", {"three-8x10_p99": 12.5})
            self.assertTrue(queueing.draw(made, path))
            with open(path) as file:
                text = file.read()
            for expected in ("NVIDIA MPS", ">mpsshim<", "beside three programs of 8 waves × 10 ms", ">12.5<"):
                self.assertIn(expected, text)


class Arguments(unittest.TestCase):
    def refused(self, *arguments):
        err = io.StringIO()
        with contextlib.redirect_stderr(err), self.assertRaises(SystemExit) as stopped:
            queueing.parse_arguments(arguments)
        self.assertEqual(stopped.exception.code, 2)
        return err.getvalue()

    def test_what_is_unknown_is_refused(self):
        self.assertIn("unrecognized arguments: --slow", self.refused("--slow"))
        self.assertIn("'four-8x10' is none of alone,", self.refused("--only", "four-8x10"))
        self.assertIn("'direct' is none of native, nvidia, mpsshim, fifo", self.refused("--systems", "direct"))
        self.assertIn("--queueing /none: no such program", self.refused("--queueing", "/none"))
        self.assertIn("--seconds: at least 0.1", self.refused("--seconds", "0.01"))

    def test_defaults(self):
        usual, quick = queueing.parse_arguments([]), queueing.parse_arguments(["--quick"])
        self.assertEqual((usual.seconds, usual.budget, usual.given), (4, 1200, False))
        self.assertEqual((quick.seconds, quick.budget, quick.only), (1, 330, list(queueing.SCENARIOS)))


class EndToEnd(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.directory)
        program = PROGRAM.format(python=sys.executable)
        self.program("queueing", program)
        self.program("python", program)
        self.program("mps-control", WITH_FIFO)
        self.program("nvidia-cuda-mps-control", NVIDIA_CONTROL)
        self.program("libmpsshim.so", "")
        shutil.copy(shutil.which("sleep"), self.path("mps-server"))
        path = {"PATH": self.directory + os.pathsep + os.environ["PATH"]}
        for patch in (
            unittest.mock.patch.dict(os.environ, path),
            unittest.mock.patch.multiple(queueing, READY=5, REPORT=5, END=2),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def path(self, name):
        return os.path.join(self.directory, name)

    def program(self, name, text):
        with open(self.path(name), "w") as file:
            file.write(text)
        os.chmod(self.path(name), os.stat(self.path(name)).st_mode | stat.S_IXUSR)

    def measure(self, *arguments, **environment):
        options = ["--build", self.directory, "--queueing", self.path("queueing"), "--python", self.path("python")]
        options += ["--results", self.path("results"), "--seconds", "0.1"]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with unittest.mock.patch.dict(os.environ, environment):
                status = queueing.main([*options, *arguments])
        (name,) = [name for name in os.listdir(self.path("results")) if name.endswith(".json")]
        with open(os.path.join(self.path("results"), name)) as file:
            return status, json.load(file), out.getvalue() + err.getvalue()

    def assert_all_ended(self):
        with open(self.path("pids")) as file:
            self.assertTrue(all(systems.ended(int(pid)) for pid in file))

    def test_every_scenario_on_every_system(self):
        status, data, said = self.measure()
        self.assertEqual((status, data["failures"], data["notes"]), (0, [], []), said)
        for _, rows in queueing.SCENARIOS.values():
            for row in rows:
                self.assertEqual(set(data["values"].get(row.key, ())), set(queueing.NAMES), row.key)
        values = {key: found["fifo"] for key, found in data["values"].items()}
        # Requests make their first stretch beside the floods' second.
        self.assertEqual((values["alone_mean"], values["three-8x10_mean"], values["three-8x10_p99"]), (2, 2, 3))
        self.assertEqual((values["three-8x10_rate_without"], values["three-8x10_keeps"]), (60, 50))
        self.assertEqual((values["words_rate"], values["words_keeps"], values["words_p99"]), (150, 50, 6))
        self.assertEqual((values["bert_p50_times"], values["bert_train"], values["bert_keeps"]), (2, 8, 50))
        self.assertEqual((values["mixed_10_times"], values["mixed_made"], values["mixed_keeps"]), (2, 100, 50))
        self.assertAlmostEqual(values["parts_short"], 0.2)
        self.assertAlmostEqual(values["parts_long"], 800)
        with open(self.path("scheduling")) as file:
            self.assertEqual(file.read(), "fifo\n")
        self.assertIn("| mpsshim, fifo |", said)
        self.assert_all_ended()

    def test_a_daemon_without_the_command_leaves_fifo_out(self):
        self.program("mps-control", WITHOUT_FIFO)
        status, data, _ = self.measure("--systems", "mpsshim,fifo", "--only", "alone")
        self.assertEqual((status, data["systems"], data["failures"]), (0, ["mpsshim"], []))
        self.assertEqual(data["notes"], ["mpsshim, fifo left out: its daemon has no command set_scheduling"])

    def test_without_pytorch_bert_is_left_out(self):
        made = report(scenarios=["alone", "bert"])
        options = queueing.parse_arguments(["--only", "alone,bert"])
        without = unittest.mock.patch.object(queueing.importlib.util, "find_spec", lambda name: None)
        with without, contextlib.redirect_stderr(io.StringIO()):
            queueing.find_python(options, made)
        self.assertEqual((options.only, made.scenarios), (["alone"], ["alone"]))
        self.assertRegex(made.notes[0], "bert left out: no --python, and .* has no torch")

    def test_a_client_that_says_nothing_is_killed_and_reported(self):
        with unittest.mock.patch.object(queueing, "READY", 0.5):
            status, data, _ = self.measure("--systems", "native", "--only", "parts,alone", FAKE_SILENT="steady")
        self.assertEqual(status, 1)
        self.assertEqual(len(data["failures"]), 1)
        self.assertRegex(
            data["failures"][0], r"native, parts: queueing steady, process \d+, no start: queueing printed nothing"
        )
        self.assertNotIn("parts_short", data["values"])
        self.assertIn("alone_p99", data["values"])
        self.assert_all_ended()

    def test_a_client_that_hangs_is_killed_and_the_server_renewed(self):
        with unittest.mock.patch.object(queueing, "REPORT", 0.5):
            status, data, _ = self.measure("--systems", "fifo", "--only", "parts,alone", FAKE_HANG="steady")
        self.assertEqual(status, 1)
        self.assertRegex(data["failures"][0], r"mpsshim, fifo, parts: queueing steady, process \d+, no result: ")
        self.assertIn("alone_p99", data["values"])
        # The new daemon is told too.
        with open(self.path("scheduling")) as file:
            self.assertEqual(file.read(), "fifo\nfifo\n")
        self.assert_all_ended()

    def test_a_client_that_does_not_end_is_killed(self):
        with unittest.mock.patch.object(queueing, "END", 0.3):
            status, data, _ = self.measure("--systems", "native", "--only", "parts", FAKE_STAY="steady")
        self.assertEqual(status, 1)
        self.assertRegex(data["failures"][0], r"queueing steady, process \d+, did not end in 0.3 s, killed")
        self.assertIn("parts_short", data["values"])
        self.assert_all_ended()

    def test_what_fails_or_is_wrong_is_reported(self):
        _, data, _ = self.measure("--systems", "native", "--only", "words", FAKE_FAIL="copies")
        self.assertRegex(data["failures"][0], "native, words: queueing copies, .* ended early with 1: it broke")
        _, data, _ = self.measure("--systems", "native", "--only", "words", FAKE_DUMB="copies")
        self.assertEqual(data["failures"], ["native, words: queueing copies printed no gb_per_s"])
        _, data, _ = self.measure("--systems", "native", "--only", "one-8x10", FAKE_LATE="80", FAKE_FAIL="none")
        self.assertEqual(data["failures"], ["native, one-8x10: queueing ask began 80 ms late"])
        self.assertIn("one-8x10_p99", data["values"])

    def test_a_spent_budget_is_said(self):
        status, data, _ = self.measure("--systems", "native", "--budget", "0.01", "--only", "alone,words")
        self.assertEqual(status, 1)
        self.assertEqual(data["failures"][-1], "the budget is spent, left out from native on: words")


if __name__ == "__main__":
    unittest.main()
