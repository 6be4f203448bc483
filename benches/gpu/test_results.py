"""Tests of readme.py and plot.py: python3 -m unittest discover benches/gpu"""

import contextlib
import io
import os
import tempfile
import unittest

import plot
import readme
import report as reports


def made_up():
    """A report with made-up numbers of two systems, three rounds each."""
    about = {"date": "2000-01-01 00:00 UTC", "command": "", "commit": "", "gpu": "G", "driver": "1", "cpus": 16}
    about |= {"kernel": "", "repetitions": 3}
    report = reports.Report(["native", "mpsshim"], ["small1", "small8", "bert1", "latency"], about)
    for more in (1, 2, 3):
        report.add("native", {"small1": 100 + more, "small8": 90 + more, "launch_sync": 8.0})
        report.add("mpsshim", {"small1": 99 + more, "small8": 700 + more, "launch_sync": 4.0, "bert1": 4.0})
    return report


class Readme(unittest.TestCase):
    def test_the_table_is_what_the_named_results_say(self):
        with open(os.path.join(readme.ROOT, "README.md")) as file:
            text = file.read()
        path = readme.named(text)
        self.assertIsNotNone(path, "the README names no result file: benches/gpu/readme.py FILE")
        said = f"benches/gpu/readme.py {path} was not run"
        self.assertEqual(readme.SECTION.search(text)[0], readme.section(path), said)

    def test_a_table_is_replaced_and_nothing_else(self):
        before = "a\n<!-- results:begin -->\nold\n<!-- results:end -->\nb\n"
        self.assertIsNone(readme.named(before))
        new = "<!-- results:begin docs/x.json -->\n\\1 new\n<!-- results:end -->"
        after = readme.replace(before, new)
        self.assertEqual(after, f"a\n{new}\nb\n")
        self.assertEqual(readme.named(after), "docs/x.json")
        with self.assertRaises(SystemExit):
            readme.replace("no table", new)

    def test_rows_that_were_not_measured_are_left_out(self):
        with tempfile.TemporaryDirectory() as directory:
            path = made_up().save(directory) + ".json"
            text = readme.section(path)
        self.assertIn("| one G, driver 1, 16 CPUs | default time-slicing | mpsshim |\n", text)
        self.assertIn("| 50 µs kernel + synchronize, 8 clients, total | 92/s | 702/s |\n", text)
        self.assertIn("| BERT-base fp16, batch 1, one client | – | 4/s |\n", text)
        self.assertNotIn("nbody", text)
        self.assertNotIn("![", text)

    def test_results_from_elsewhere_are_refused(self):
        with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit):
            readme.main(["/elsewhere/x.json"])
        self.assertIn("not within the project", said.getvalue())


class Plot(unittest.TestCase):
    def test_curves(self):
        report = made_up()
        self.assertEqual(plot.curve(report, "small{}", "mpsshim"), ([1, 8], [[100, 101, 102], [701, 702, 703]]))
        self.assertEqual(plot.curve(report, "bert{}", "native"), ([], []))

    def test_more_than_one_is_better_either_way(self):
        relative = plot.relative(made_up(), "mpsshim")
        self.assertEqual(relative["launch_sync"], 2)
        self.assertAlmostEqual(relative["small1"], 101 / 102)
        self.assertNotIn("bert1", relative)

    @unittest.skipIf(plot.missing(), "needs matplotlib")
    def test_the_same_results_give_the_same_files(self):
        def contents(path):
            with open(path) as file:
                return file.read()

        with tempfile.TemporaryDirectory() as directory:
            stem = made_up().save(directory)
            written = plot.draw(stem + ".json")
            self.assertEqual(written, [f"{stem}-small.svg", f"{stem}-single.svg"])
            first = [contents(path) for path in written]
            self.assertEqual([contents(path) for path in plot.draw(stem + ".json")], first)
        self.assertIn("50 µs kernel + synchronize", first[0])


if __name__ == "__main__":
    unittest.main()
