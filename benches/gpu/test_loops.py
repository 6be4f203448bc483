"""Tests of loops.py. python3 -m unittest discover -s benches/gpu"""

import subprocess
import sys
import unittest

import loops


class Table(unittest.TestCase):
    def test_programs_of_one_kind_count_together(self):
        runs = [([100.0, 120.0], 1024), ([120.0, 140.0], 3072)]
        self.assertEqual(loops.cell(["jax-scan"] * 2, runs), "240 (2.0 GiB)")

    def test_programs_that_differ_have_a_rate_each(self):
        self.assertEqual(loops.cell(["jax-scan", "products"], [([1500.0, 3.0], 512)]), "1,500 + 3 (0.5 GiB)")

    def test_what_failed_has_no_value(self):
        rows = {"one": ["jax-scan"]}
        lines = list(loops.table(rows, ["native", "turns"], {("one", "turns"): [([2.0], 1024)]}))
        self.assertEqual(lines[-1], "| one | – | 2 (1.0 GiB) |")


class Arguments(unittest.TestCase):
    def refuses(self, *arguments):
        program = subprocess.run([sys.executable, loops.__file__, *arguments], capture_output=True, text=True, check=False)
        self.assertEqual(program.returncode, 2)
        return program.stderr

    def test_wrong_ones_are_refused(self):
        self.assertIn("known are native, nvidia, mpsshim, turns", self.refuses("--systems", "native,mps"))
        self.assertIn("numbers with commas", self.refuses("--counts", "1,x"))
        self.assertIn("must be positive", self.refuses("--counts", "0"))
        self.assertIn("must be positive", self.refuses("--seconds", "0"))


if __name__ == "__main__":
    unittest.main()
