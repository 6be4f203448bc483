"""Tests of readme.py and plot.py: python3 -m unittest discover benches/gpu"""

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
    def test_the_table_says_what_the_results_say(self):
        with open(os.path.join(readme.ROOT, "README.md"), encoding="utf-8") as file:
            self.assertEqual(readme.problems(file.read()), [])

    def test_what_is_wrong_is_said(self):
        def said(*rows):
            lines = ["| | GPU, date, program | NVIDIA MPS | mpsshim |", "|---|---|---|---|", *rows]
            text = "\n".join(["a", "<!-- results:begin -->", *lines, "<!-- results:end -->", "b", ""])
            return readme.problems(text, directory)

        with tempfile.TemporaryDirectory() as directory:
            os.makedirs(os.path.join(directory, "docs/results"))
            with open(os.path.join(directory, "docs/results/x.md"), "w", encoding="utf-8") as file:
                rows = "| x | refused | 4.50 ms (4–5); 5.0 ms |\n| y | – | 6/s |\n"
                file.write(f"# 2000-01-01\n\n{rows}\n- gpu: NVIDIA G\n")
            title = "[x](docs/results/x.md)"
            right = f"| {title} | G, 2000-01-01, `x.py` | refused | 4.50 ms; 5.0 ms |"
            self.assertEqual(said(right, f"| {title} | the same | – | 6/s |"), [])
            self.assertEqual(len(said(*[right] * 12)), 0)
            self.assertEqual(said(*[right] * 13), ["13 rows, and not 1 to 12"])
            for old, new, problem in (
                ("5.0", "5.1", f"{title}: no line of its file has refused, 4.50 ms; 5.1 ms"),
                ("01-01", "01-02", f"{title}: its file is not of G, 2000-01-02"),
                ("x.md", "y.md", "[x](docs/results/y.md): links no file in docs/results"),
            ):
                self.assertEqual(said(right.replace(old, new)), [problem])
            self.assertEqual(said(), ["0 rows, and not 1 to 12"])
        self.assertIn("one pair of lines", readme.problems("no table")[0])


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
