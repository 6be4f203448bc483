"""Tests of programs.py, frameworks.py and conformance.py that need no GPU."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import conformance
import frameworks
import programs

HERE = pathlib.Path(__file__).resolve().parent

# A daemon that has ended already: no process has this number.
CONTROL = """#!/bin/sh
[ "$1" != -d ] || echo 4194304 >"$MPSSHIM_PIPE_DIRECTORY/mps-control.pid"
"""


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


class Comparisons(unittest.TestCase):
    def test_times_and_addresses_do_not_count(self):
        a = "at 0x7f12 took 1.25 ms\nresult 17\nElapsed time 3\n"
        b = "at 0x80ab took 9.5 ms\nresult 17\nElapsed time 4\n"
        self.assertIsNone(programs.difference(a, b))
        self.assertIn("18", programs.difference(a, b.replace("17", "18")))

    def test_numbers_may_differ_by_the_tolerance_only(self):
        native = {"code": 0, "out": "loss: 1.000\nname: same\n"}
        self.assertIsNone(frameworks.compare(native, {"code": 0, "out": "loss: 1.001\nname: same\n"}, 2e-3))
        self.assertIn("loss", frameworks.compare(native, {"code": 0, "out": "loss: 1.1\nname: same\n"}, 2e-3))
        self.assertIn("name", frameworks.compare(native, {"code": 0, "out": "loss: 1.0\nname: other\n"}, 2e-3))
        self.assertIn("missing", frameworks.compare(native, {"code": 0, "out": "loss: 1.0\n"}, 2e-3))
        self.assertIn("status", frameworks.compare(native, {"code": 1, "out": native["out"]}, 2e-3))

    def test_a_changed_line_is_shown(self):
        self.assertEqual(conformance.difference("a\nb\n", "a\nc\n"), ["-b", "+c"])
        self.assertEqual(conformance.difference("a\n", "a\n"), [])


class Programs(unittest.TestCase):
    def run_on(self, body, *options):
        """Runs programs.py over one program that does `body`; a shell stands for the binary."""
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            build, samples = folder / "build", folder / "samples"
            build.mkdir()
            samples.mkdir()
            executable(build / "mps-control", CONTROL)
            (build / "libmpsshim.so").write_bytes(b"")
            executable(samples / "sample", body)
            script = (
                "import sys; sys.path.insert(0, sys.argv.pop(1)); import programs;"
                "programs.is_program = lambda path: path.name == 'sample'; sys.exit(programs.main())"
            )
            command = [sys.executable, "-c", script, HERE, "--programs", samples, "--build", build, *options]
            return subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, LC_ALL="C"))

    def test_a_program_that_passes_both_ways(self):
        done = self.run_on("#!/bin/sh\necho fine\n")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("1 programs, 1 pass natively, 1 of these in proxy mode", done.stdout)

    def test_a_program_that_fails_only_behind_the_shim(self):
        done = self.run_on('#!/bin/sh\n[ -z "$LD_PRELOAD" ] || { echo broken >&2; exit 3; }\n')
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, "FAIL sample .*pass .*status 3 .*broken")

    def test_the_mode_is_asked_for(self):
        done = self.run_on('#!/bin/sh\n[ "$MPSSHIM_MODE" != direct ] || exit 4\n', "--mode", "direct")
        self.assertRegex(done.stdout, "FAIL sample .*pass .*status 4")
        self.assertIn("0 of these in direct mode", done.stdout)

    def test_what_fails_natively_is_no_failure_of_the_proxy(self):
        done = self.run_on("#!/bin/sh\nexit 2\n")
        self.assertEqual(done.returncode, 0)
        self.assertIn("waived", done.stdout)


if __name__ == "__main__":
    unittest.main()
