"""Reads C++ as far as the list of errors needs it: tokens, brackets, functions with their parameters and variables."""

import re
from bisect import bisect_right
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/)
  | (?P<directive>^[ \t]*\#(?:[^\n\\]|\\.|\\\n)*)
  | (?P<raw>(?:u8|[uUL])?R"(?P<fence>[^()\\\s]*)\((?P<body>.*?)\)(?P=fence)")
  | (?P<text>(?:u8|[uUL])?"(?:[^"\\\n]|\\.)*")
  | (?P<char>(?:u8|[uUL])?'(?:[^'\\\n]|\\.)+')
  | (?P<number>\.?\d(?:[\w.]|'\w|[eEpP][+-])*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<sign>::|->|<<|<=|>=|==|!=|&&|\|\||\+=|-=|\+\+|--|\.\.\.|.)
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\", "'": "'", "r": "\r", "0": "\0"}
CLOSING = {"(": ")", "{": "}", "[": "]"}
CONTROL = {"if", "for", "while", "switch", "catch"}


class Unreadable(Exception):
    """Sources of whose errors a list would lack something."""


@dataclass
class Token:
    kind: str  # text, char, number, name or sign
    text: str  # of a string its value; of all else as written
    line: int


@dataclass
class Function:
    """A function or lambda: its name, the names of its parameters and the tokens of its body."""

    name: str
    parameters: list
    begin: int
    end: int
    parameters_begin: int = None
    initialisers: dict = field(default_factory=dict)  # of a constructor: member to the range of its value

    @property
    def first(self):
        return self.begin if self.parameters_begin is None else self.parameters_begin


class Source:
    """The tokens of a file, and where its brackets close."""

    def __init__(self, path, text):
        self.path = path
        self.tokens = []
        line = 1
        for match in TOKEN.finditer(text):
            kind = match.lastgroup if match.lastgroup not in ("fence", "body") else "raw"
            written = match.group(0)
            if kind == "raw":
                self.add("text", match.group("body"), line)
            elif kind == "text":
                value = re.sub(
                    r"\\(.)", lambda m: ESCAPES.get(m.group(1), m.group(0)), written[written.index('"') + 1 : -1]
                )
                self.add("text", value, line)
            elif kind not in ("space", "directive"):
                self.add(kind, written, line)
            elif kind == "directive" and re.search(r"\bthrow\b", written):
                raise Unreadable(f"{path}:{line}: an error in a macro cannot be listed; throw it in a function")
            line += written.count("\n")
        self.close = {}
        self.open = {}
        stack = []
        for at, token in enumerate(self.tokens):
            if token.kind != "sign":
                continue
            if token.text in CLOSING:
                stack.append(at)
            elif stack and token.text == CLOSING[self.tokens[stack[-1]].text]:
                self.open[at] = stack.pop()
                self.close[self.open[at]] = at
        self.functions = sorted(self.find_functions(), key=lambda one: one.first)
        self.firsts = [one.first for one in self.functions]

    def add(self, kind, text, line):
        # Adjacent literals are one.
        if kind == "text" and self.tokens and self.tokens[-1].kind == "text":
            self.tokens[-1].text += text
        else:
            self.tokens.append(Token(kind, text, line))

    def is_sign(self, at, *texts):
        return 0 <= at < len(self.tokens) and self.tokens[at].kind == "sign" and self.tokens[at].text in texts

    def is_name(self, at, *texts):
        return (
            0 <= at < len(self.tokens)
            and self.tokens[at].kind == "name"
            and (not texts or self.tokens[at].text in texts)
        )

    def find_functions(self):
        for begin, end in self.close.items():
            if not self.is_sign(begin, "{"):
                continue
            head = self.head_of(begin)
            if head:
                name, parameters_begin, initialisers = head
                yield Function(name, self.parameters(parameters_begin), begin, end, parameters_begin, initialisers)

    def head_of(self, brace):
        """The name, the bracket of the parameters and the initialisers of the function whose body begins at `brace`."""
        at = brace - 1
        initialisers = {}
        steps = 0
        while at > 0 and steps < 60:
            steps += 1
            if self.is_sign(at, ")", "}") and self.is_name(self.open.get(at, 0) - 1):
                before = self.open[at] - 1
                if self.is_sign(before - 1, ",", ":") and self.is_sign(before - 2, ")", "}"):
                    # An initialiser of a member; go on to the left.
                    initialisers[self.tokens[before].text] = (self.open[at] + 1, at)
                    at = before - 2
                    continue
                if self.tokens[before].text == "catch" and self.is_sign(before - 1, "}"):
                    return (
                        self.head_of(self.open[before - 1]) if self.is_name(self.open[before - 1] - 1, "try") else None
                    )
                if self.is_sign(at, "}") or self.tokens[before].text in CONTROL:
                    return None
                if self.tokens[before].text in ("noexcept", "decltype", "requires"):
                    at = before - 1
                    continue
                return self.tokens[before].text, self.open[at], initialisers
            if self.is_sign(at, ")"):
                opening = self.open.get(at, 0)
                if self.is_sign(opening - 1, "]"):
                    return self.lambda_name(self.open[opening - 1]), opening, {}
                if self.is_name(opening - 2, "operator") or self.is_name(opening - 3, "operator"):
                    return "operator", opening, {}
                return None
            if self.is_sign(at, "]") and at == brace - 1:
                return self.lambda_name(self.open[at]), None, {}
            if self.tokens[at].kind == "name" or self.is_sign(at, "->", "::", "<", ">", "*", "&", "&&", ","):
                at -= 1
                continue
            return None
        return None

    def lambda_name(self, bracket):
        return self.tokens[bracket - 2].text if self.is_sign(bracket - 1, "=") else ""

    def parameters(self, bracket):
        if bracket is None:
            return []
        names = []
        for begin, end in self.arguments(bracket):
            for at in range(begin, end):
                if self.is_sign(at, "="):
                    end = at
                    break
            last = self.tokens[end - 1] if end > begin else None
            names.append(last.text if last is not None and last.kind == "name" and end - begin > 1 else "")
        return names

    def defaults(self, bracket):
        """The ranges of the parameters' default arguments by the parameters' numbers."""
        found = {}
        if bracket is None:
            return found
        for number, (begin, end) in enumerate(self.arguments(bracket)):
            for at in range(begin, end):
                if self.is_sign(at, "="):
                    found[number] = (at + 1, end)
                    break
        return found

    def arguments(self, bracket):
        """The ranges between the commas of a bracket."""
        return self.split(bracket + 1, self.close[bracket], ",")

    def split(self, begin, end, sign):
        parts = []
        start = at = begin
        angles = 0
        while at < end:
            if self.is_sign(at, *CLOSING):
                at = self.close[at]
            elif self.is_sign(at, "<") and sign == "," and self.looks_like_template(at, end):
                angles += 1
            elif self.is_sign(at, ">") and angles > 0:
                angles -= 1
            elif self.is_sign(at, sign) and angles == 0:
                parts.append((start, at))
                start = at + 1
            at += 1
        if start < end or parts:
            parts.append((start, end))
        return parts

    def looks_like_template(self, at, end):
        """True if `<` begins template arguments: only names and signs of types up to a `>`."""
        depth = 0
        while at < end:
            if self.is_sign(at, "<"):
                depth += 1
            elif self.is_sign(at, ">"):
                depth -= 1
                if depth == 0:
                    return True
            elif self.is_sign(at, "("):
                at = self.close[at]
            elif not (self.tokens[at].kind in ("name", "number") or self.is_sign(at, "::", ",", "*", "&", "...")):
                return False
            at += 1
        return False

    def functions_at(self, at):
        """The functions and lambdas around a token, the innermost first."""
        return [one for one in reversed(self.functions[: bisect_right(self.firsts, at)]) if one.first < at < one.end]
