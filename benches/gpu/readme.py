#!/usr/bin/env python3
"""Checks that the README's table of results says what the results files say.

    benches/gpu/readme.py

The table is between the lines `<!-- results:begin -->` and `<!-- results:end -->`. Each row links the file that it is
from and names the GPU and the date of that file, or says `the same`; a line of that file has all of the row's numbers.
"""

import os
import re
import sys

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
SECTION = re.compile(r"<!-- results:begin -->\n(.*?)<!-- results:end -->", re.DOTALL)
TITLE = re.compile(r"\[.+\]\((docs/results/[\w.-]+\.md)\)")
# On one screen.
MOST_ROWS = 12


def cells(line):
    """The cells of a row of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def problems_of_row(row, where, text):
    """What a row says that its file, with this text, does not say."""
    title, (gpu, date), numbers = row[0], where, row[2:]
    if gpu not in text or date not in text:
        yield f"{title}: its file is not of {gpu}, {date}"
    numbers = [number for number in numbers if number != "–"]
    parts = [part.split(" ")[0] for number in numbers for part in number.split("; ")]
    if not parts or not any(all(part in line for part in parts) for line in text.splitlines()):
        yield f"{title}: no line of its file has {', '.join(numbers)}"


def problems(readme, root=ROOT):
    """What is wrong with the README's table: a list of lines."""
    found = SECTION.findall(readme)
    if len(found) != 1:
        return ["the README needs one pair of lines <!-- results:begin --> and <!-- results:end -->"]
    rows = [cells(line) for line in found[0].splitlines() if line.startswith("|")][2:]
    wrong = [] if 0 < len(rows) <= MOST_ROWS else [f"{len(rows)} rows, and not 1 to {MOST_ROWS}"]
    where = None
    for row in rows:
        link = TITLE.fullmatch(row[0])
        path = os.path.join(root, link[1]) if link else ""
        if not os.path.isfile(path):
            wrong.append(f"{row[0]}: links no file in docs/results")
            continue
        if row[1] != "the same":
            where = row[1].split(", ")[:2]
        with open(path, encoding="utf-8") as file:
            wrong += problems_of_row(row, where, file.read())
    return wrong


def main():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        wrong = problems(file.read())
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
