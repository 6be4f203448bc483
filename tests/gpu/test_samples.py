"""Tests of samples.py that need no GPU: python3 -m unittest discover tests/gpu"""

import contextlib
import io
import os
import shutil
import tempfile
import unittest

import samples

CONTROL = """#!/bin/sh
here=$(dirname "$0")
pid=$MPSSHIM_PIPE_DIRECTORY/mps-control.pid
case $1 in
-d) "$here/mps-server" 60 >/dev/null 2>&1 & echo $! >"$pid" ;;
get_server_list) cat "$pid" ;;
get_client_list) ;;
quit) kill "$(cat "$pid")" ;;
esac
"""


class Comparison(unittest.TestCase):
    def test_times_are_left_out_and_results_are_not(self):
        output = (
            "MatrixA(320,320), MatrixB(640,320)\n"
            "Performance= 4520.97 GFlop/s, Time= 0.029 msec, Size= 131072000 Ops\n"
            "Checking computed result for correctness: Result = PASS\n"
            "CPU executed 53671 iterations while waiting for GPU to finish\n"
            "kernel:\t\t0.13\n4 streams:\t1.09\n"
            "Measured time for sample = 0.051s\n"
            "h2d_pinned_gb_s=55.400\n"
        )
        self.assertEqual(
            samples.comparable(output),
            [
                "MatrixA(320,320), MatrixB(640,320)",
                "Checking computed result for correctness: Result = PASS",
                "h2d_pinned_gb_s=",
            ],
        )

    def test_differences_are_named(self):
        self.assertIsNone(samples.first_difference(["a"], ["a"]))
        self.assertEqual(samples.first_difference(["a", "b"], ["a", "c"]), "line 2: 'c' instead of 'b'")
        self.assertEqual(samples.first_difference(["a", "b"], ["a"]), "missing: 'b'")
        self.assertEqual(samples.first_difference([], ["x"]), "too much: 'x'")


class EndToEnd(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.directory)
        self.program("mps-control", CONTROL)
        self.program("libmpsshim.so", "")
        shutil.copy(shutil.which("sleep"), os.path.join(self.directory, "mps-server"))
        self.program("vectorAdd", "#!/bin/sh\necho Test PASSED\n")

    def program(self, name, text):
        path = os.path.join(self.directory, name)
        with open(path, "w") as file:
            file.write(text)
        os.chmod(path, 0o755)

    def check(self, *arguments):
        out, err = io.StringIO(), io.StringIO()
        arguments = ["--programs", self.directory, "--build", self.directory, "--timeout", "5", *arguments]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return samples.main(arguments), out.getvalue()

    def test_same_output_passes(self):
        status, out = self.check("--only", "vectorAdd")
        self.assertEqual(status, 0, out)
        self.assertIn("PASS  vectorAdd                  4 at once", out)

    def test_a_sample_that_fails_under_the_shim(self):
        self.program("asyncAPI", '#!/bin/sh\n[ -z "$LD_PRELOAD" ] || exit 7\necho Test PASSED\n')
        status, out = self.check()
        self.assertEqual(status, 1)
        self.assertIn("FAIL  asyncAPI                   alone exit status 7 instead of 0", out)
        self.assertIn("PASS  vectorAdd                  beside all others", out)
        self.assertIn("deviceQuery                left out", out)


if __name__ == "__main__":
    unittest.main()
