"""What the shared libraries export: muster's API, and of its internals what the libraries need of each other.

symbols.py ROOT ARCHIVE LIBRARY…    ARCHIVE: the same object files as a static library
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(sys.argv[1])
ARCHIVE, *LIBRARIES = sys.argv[2:]


def symbols(file, *options):
    """Pairs of a kind, as nm prints it, and a demangled name without the compiler's additions."""
    listing = subprocess.run(["nm", "-C", *options, file], check=True, capture_output=True, text=True).stdout
    for line in listing.splitlines():
        if found := re.match(r"[0-9a-f ]{16} (\w) (.*)", line):
            yield found[1], found[2].replace("[abi:cxx11]", "")


def names_in(symbol):
    """The identifiers of a symbol's qualified name: muster, detail, File, close."""
    symbol = re.sub(r"^.* (for|to) (?=muster::)", "", symbol)
    return re.match(r"[\w:~]*", symbol)[0].replace("~", "").split("::")


def marked(macro, folder):
    """The names of the classes and functions that the headers of `folder` mark, with the header."""
    for header in sorted((ROOT / folder).rglob("*.hpp")):
        for line in header.read_text().splitlines():
            found = re.search(rf"(?:class|struct) {macro} (\w+)|{macro} [^(]*?(\w+)\(", line)
            if found and not line.startswith("#define"):
                yield found[1] or found[2], header.relative_to(ROOT)


exported, undefined = set(), set()
problems = []
for library in LIBRARIES:
    name = pathlib.Path(library).name
    undefined |= {symbol for _, symbol in symbols(library, "-D", "--undefined-only")}
    own = {symbol for _, symbol in symbols(library, "-D", "--defined-only")}
    exported |= own
    for symbol in sorted(own):
        if names_in(symbol)[0] != "muster":
            problems.append(f"{name} exports {symbol}, which is not muster's own: correct src/exports.map.")
    print(f"{name} exports {len(own)} symbols.")

api = list(marked("MUSTER_API", "include/muster"))
internal = list(marked("MUSTER_INTERNAL_API", "src"))
marked_names = {name for name, _ in api + internal}
for symbol in sorted(exported):
    names = names_in(symbol)
    if names[:2] == ["muster", "detail"] and not marked_names & set(names):
        problems.append(f"{symbol} is exported without a mark: no header has MUSTER_API or MUSTER_INTERNAL_API for it.")

for kind, symbol in symbols(ARCHIVE, "--defined-only"):
    names = names_in(symbol)
    if kind in "TBDR" and names[0] == "muster" and names[1:2] != ["detail"] and symbol not in exported:
        problems.append(f"{symbol} is not exported: mark its class, or the function, with MUSTER_API.")

exported_names = {name for symbol in exported for name in names_in(symbol)}
for name, header in api:
    if name not in exported_names:
        problems.append(f"{header}: {name} has MUSTER_API, and no library exports it: define it, or remove the mark.")

used_names = {name for symbol in exported & undefined for name in names_in(symbol)}
# The extension module for Python is not built everywhere, so that its sources say what it uses.
for source in (ROOT / "src/python").glob("*.cpp"):
    used_names |= set(re.findall(r"\w+", source.read_text()))
for name, header in internal:
    if name not in used_names:
        problems.append(f"{header}: {name} has MUSTER_INTERNAL_API, and no other library uses it: remove the mark.")

for problem in problems:
    print(problem)
sys.exit(1 if problems else 0)
