"""The code blocks of README.md and docs/*.md.

    blocks.py cpp ROOT OUT.cpp FIT.cpp   writes every C++ block into OUT.cpp, and README's program into FIT.cpp
    blocks.py list ROOT                  lists the shell blocks: file, line, first command

A C++ block with main() is a whole program and gets a namespace of its own. A block after the line
<!-- declarations --> stands at namespace scope. Every other block is statements, with the objects of context.hpp at
hand. A block is never skipped: one that cannot be compiled should not be in the documents.
"""
import pathlib
import re
import sys

FENCE = re.compile(r"^(?:<!-- (?P<kind>\w+) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def pages(root):
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def blocks(path, language):
    """(line of the block's text, kind, text) of each block in that language."""
    content = path.read_text()
    for match in FENCE.finditer(content):
        if match["language"] == language:
            yield content.count("\n", 0, match.start("text")) + 1, match["kind"] or "", match["text"]


def write_if_changed(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def write_cpp(root, out, fit):
    includes, body = [], []
    for page in pages(root):
        name = re.sub(r"\W", "_", page.stem)
        for line, kind, text in blocks(page, "cpp"):
            includes += re.findall(r"^#include .*$", text, re.MULTILINE)
            text = re.sub(r"^#include .*$", "", text, flags=re.MULTILINE)
            where = f'#line {line} "{page}"\n'
            if "int main(" in text:
                body.append(f"namespace program_{name}_{line} {{\n{where}{text}}}\n")
            elif kind == "declarations":
                body.append(f"namespace page_{name} {{\n{where}{text}}}\n")
            else:
                body.append(f"namespace page_{name} {{\nusing namespace context;\n"
                            f"void block_{line}(CONTEXT) {{\n{{\n{where}{text}}}\n}}\n}}\n")
    program = next(text for _, _, text in blocks(root / "README.md", "cpp") if "int main(" in text)
    write_if_changed(fit, program)
    write_if_changed(out, '#include "docs/context.hpp"\n' + "\n".join(sorted(set(includes))) + "\n" + "".join(body))


def main():
    command, root = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    if command == "cpp":
        write_cpp(root, pathlib.Path(sys.argv[3]), pathlib.Path(sys.argv[4]))
    elif command == "list":
        for page in pages(root):
            for line, _, text in blocks(page, "sh"):
                print(f"{page.relative_to(root)}:{line}: {text.splitlines()[0]}")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
