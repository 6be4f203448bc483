"""Tests of limits.py that need no GPU."""
import unittest

import limits


class LimitsTest(unittest.TestCase):
    def test_rate(self):
        text = "number of bodies = 4096\n4096 bodies, total time for 20 iterations: 500.000 ms\n"
        self.assertEqual(limits.rate(text), 40)
        with self.assertRaises(limits.Failure):
            limits.rate("CUDA_ERROR_OUT_OF_MEMORY")

    def test_ratio(self):
        self.assertTrue(limits.ratio_within([10, 10.2, 9.9], [1, 1, 1], 0.05))
        self.assertFalse(limits.ratio_within([10, 12, 10], [1, 1, 1], 0.05))
        self.assertTrue(limits.ratio_within([1, 3.1], [1, 3], 0.1))


if __name__ == "__main__":
    unittest.main()
