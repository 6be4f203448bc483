"""Tests of transcript.py that need no GPU."""

import os
import pathlib
import tempfile
import unittest

import transcript

# Answers every command but one; `-d` starts nothing.
CONTROL = """#!/bin/sh
[ "$1" = -d ] && { mkdir -p "$MPSSHIM_LOG_DIRECTORY"; echo '[t Control 1] Accepting' > "$MPSSHIM_LOG_DIRECTORY/control.log"; exit 0; }
while read -r line; do
    case "$line" in
        "device_query --csv") echo Default; echo "0,0000:00.06.00,GPU-11112222-3333-4444-5555-666677778888,Fake,N/A" ;;
        get_default_client_priority) echo 0 ;;
    esac
done
"""


class Transcript(unittest.TestCase):
    def test_steps(self):
        text = "# why\n> ask\nanswer\nmore\n\n@server 5\nlog a.log some text\n> quiet\n"
        self.assertEqual(
            transcript.steps(text),
            [
                ("command", "ask", ["answer", "more"]),
                ("do", ["server", "5"], []),
                ("log", ("a.log", "some text"), []),
                ("command", "quiet", []),
            ],
        )

    def test_the_transcript_is_understood(self):
        steps = transcript.steps(transcript.TRANSCRIPT.read_text())
        self.assertGreater(sum(kind == "command" for kind, *_ in steps), 70)
        for kind, what, _ in steps:
            if kind == "do":
                self.assertIn(what[0], ("server", "client", "end"))

    def test_lines_fit(self):
        self.assertTrue(transcript.fits("a {*} c", "a   b b  c"))
        self.assertTrue(transcript.fits("{*}end", "the end"))
        self.assertFalse(transcript.fits("a {*} c", "a b d"))
        self.assertFalse(transcript.fits("50.0", "50x0"))

    def test_a_run(self):
        with tempfile.TemporaryDirectory() as folder:
            control = pathlib.Path(folder, "control")
            control.write_text(CONTROL)
            control.chmod(0o755)
            system = transcript.System("mpsshim", str(control), "MPSSHIM_", os.path.join(folder, "run"))
            text = "> get_default_client_priority\n0\n> get_server_list\n7\nlog control.log Accepting\nlog control.log Else\n"
            answers, logs = transcript.run(system, transcript.steps(text), ["true"])
        self.assertEqual([well for *_, well in answers], [True, False])
        self.assertEqual([found for *_, found in logs], [True, False])
        self.assertEqual(system.names["bus"], "00:06.0")


if __name__ == "__main__":
    unittest.main()
