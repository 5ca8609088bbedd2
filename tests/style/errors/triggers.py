"""Which errors a test triggers.

A test that compares an error's text triggers it; so some literal of the tests is part of that text. Errors that tests
trigger without comparing the text are in the list `triggered`, which `run covered BUILD write` makes of a build for
coverage whose tests have run. Errors that no test can trigger are in the list `untriggered`, each with the reason.
"""

import json
import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

from cpp import Source
from errors import Reader
from texts import MARK, UNMARK, shown

LEAST_LETTERS = 8  # a shorter literal says nothing about an error
HERE = Path(__file__).parent
BEGIN_OF_TRIGGERED = """\
# Errors that tests trigger without comparing a text that is theirs alone: FILE | WHAT IS WRONG [| TEST].
# tests/style/errors/run covered BUILD write makes this list and keeps the lines that name a test. Between two such runs
# add lines by hand.
"""


def key_of(error):
    """How the lists name an error: its file and what is wrong."""
    text = shown(error.facts[0]).replace(" | ", " ¦ ").strip()
    if text in ("…", "REASON"):
        text = error.message
    return f"{error.path} | {text}"


def read_list(name):
    """The entries of a list, with their reasons: lines `file | fact` or `file | fact | reason`."""
    entries = {}
    path = HERE / name
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line and not line.startswith("#"):
            parts = line.split(" | ")
            entries[" | ".join(parts[:2])] = parts[2] if len(parts) > 2 else ""
    return entries


def plain(text):
    return re.sub(r"[\\\"'`]", "", text).strip()


def literals(tests):
    """The literals of the tests' sources."""
    found = set()
    for path in sorted(tests.rglob("*")):
        if not path.is_file() or HERE in path.parents or path.suffix in (".h5", ".gz", ".png"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path.suffix in (".cpp", ".hpp"):
            pieces = [token.text for token in Source(str(path), text).tokens if token.kind == "text"]
        else:
            quoted = [match.group(1) or match.group(2) or match.group(3) or "" for match in re.finditer(
                r"\"((?:[^\"\\\n]|\\.)*)\"|'([^'\n]*)'|(grep [^|;]*)", text)]  # fmt: skip
            # Regular expressions of CMake and grep: what is literal in them.
            pieces = [piece for one in quoted for piece in re.split(r"\.[*+]|\[[^\]]*\][*+]?|\$\{?\w+\}?", one)]
        found |= {plain(piece) for piece in pieces}
    return {one for one in found if len(one) >= LEAST_LETTERS}


def compared(errors, tests):
    """The keys of the errors whose texts tests compare: a literal is part of the text of that error alone."""
    texts = {}
    for error in errors:
        remedies = "".join(". " + remedy for remedy in error.remedies)
        whole = [*error.facts, *(f"{doing}: {fact}{remedies}" for doing in error.doings for fact in error.facts)]
        pieces = {plain(piece) for text in whole for piece in re.split(MARK + ".*?" + UNMARK, text)}
        texts.setdefault(key_of(error), set()).update(piece for piece in pieces if len(piece) >= LEAST_LETTERS)
    keys_of_piece = defaultdict(set)
    for key, pieces in texts.items():
        for piece in pieces:
            keys_of_piece[piece].add(key)
    found = set()
    for literal in literals(tests):
        pieces = [piece for piece in keys_of_piece if literal in piece]
        if not pieces:  # a literal with more than one piece: the longest tells most
            pieces = sorted((piece for piece in keys_of_piece if piece in literal), key=len)[-1:]
        keys = set().union(*(keys_of_piece[piece] for piece in pieces))
        found |= keys if len(keys) == 1 else set()
    return found


def check(errors, tests):
    """What is wrong with the lists; nothing if each error is triggered by a test or named as one that cannot be."""
    known = {key_of(error) for error in errors}
    with_text = compared(errors, tests)
    triggered, untriggered = read_list("triggered"), read_list("untriggered")
    for key in sorted(known - with_text - triggered.keys() - untriggered.keys()):
        yield (
            f"no test compares the text of this error: {key}\n"
            "  Compare it in a test; where others say the same, add it to tests/style/errors/triggered. If no test can\n"
            "  trigger it, add it with the reason to tests/style/errors/untriggered."
        )
    for name, entries in (("triggered", triggered), ("untriggered", untriggered)):
        for key in sorted(entries.keys() - known):
            yield f"tests/style/errors/{name} names an error that is not there any more: {key}"
    for key in sorted(triggered.keys() & untriggered.keys()):
        yield f"both lists name this error: {key}"
    for key, reason in untriggered.items():
        if not reason:
            yield f"tests/style/errors/untriggered does not say why: {key}"


class Coverage:
    """What the tests of a build have run: counts of lines, and of branches without those to handlers of exceptions."""

    def __init__(self, build):
        cache = (build / "CMakeCache.txt").read_text(encoding="utf-8")
        self.root = Path(re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache, re.MULTILINE).group(1))
        self.lines = defaultdict(int)
        self.branches = defaultdict(list)
        with tempfile.TemporaryDirectory() as folder:
            for data in sorted(build.rglob("*.gcda")):
                command = ["gcov", "--branch-probabilities", "--json-format", "--stdout", str(data)]
                out = subprocess.run(command, cwd=folder, capture_output=True, check=False).stdout
                for line in out.splitlines():
                    if line.startswith(b"{"):
                        self.add(json.loads(line))

    def add(self, report):
        for file in report["files"]:
            path = Path(report["current_working_directory"], file["file"]).resolve()
            if not path.is_relative_to(self.root):
                continue
            name = str(path.relative_to(self.root))
            for line in file["lines"]:
                place = name, line["line_number"]
                self.lines[place] += line["count"]
                taken = [branch["count"] > 0 for branch in line["branches"] if not branch["throw"]]
                if taken:
                    self.branches[place].append(sum(taken) / len(taken))

    def has_run(self, error):
        """True if the error has been made. On the line of its condition, the branches tell."""
        text = (self.root / error.path).read_text(encoding="utf-8").splitlines()[error.line - 1].strip()
        is_alone = re.match(r"throw\b|return\b|\w+\(|\w+\.\w+\(", text) and not text.startswith("if")
        if error.line == error.last_line and not is_alone:
            return max(self.branches[error.path, error.line], default=0) > 0.6
        return any(self.lines[error.path, line] > 0 for line in range(error.line, error.last_line + 1))


def compare_with_coverage(errors, tests, build, write):
    """Says where the lists differ from what the tests have run; writes `triggered` if asked to."""
    coverage = Coverage(build)
    with_text = compared(errors, tests)
    ran, known = set(), {}
    for error in errors:
        known.setdefault(key_of(error), []).append(error)
    for error in Reader.of_project(coverage.root).read():  # of that build's own sources, whose lines may be others
        if coverage.has_run(error):
            ran.add(key_of(error))
    untriggered = read_list("untriggered")
    # Lines with the name of a test stay: gcov does not see what a killed process or optimised code has done.
    named = {key: test for key, test in read_list("triggered").items() if test and key in known}
    for key in sorted(known.keys() - ran - with_text - untriggered.keys() - named.keys()):
        yield f"no test has triggered this error: {key} (line {known[key][0].line})"
    for key in sorted(ran & untriggered.keys()):
        yield f"a test has triggered this error, which `untriggered` names: {key}"
    if write:
        lines = {key: key for key in (ran & known.keys()) - with_text - untriggered.keys()}
        lines |= {key: f"{key} | {test}" for key, test in named.items()}
        text = BEGIN_OF_TRIGGERED + "".join(line + "\n" for line in sorted(lines.values()))
        (HERE / "triggered").write_text(text, encoding="utf-8")
