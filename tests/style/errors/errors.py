"""The list of every error that the code makes, read from its sources.

An error is made where an Error (or a class derived from it) is constructed: `throw Error(CODE, DOING, FACT, REMEDY)`. A
text that comes from a parameter, as in `refuse(fact)`, is looked up at each call of that function. A throw that this
cannot read ends with an exception, so that the list stays complete.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from cpp import Source, Unreadable
from texts import MARK, MOST_LEVELS, UNMARK, Range, Texts, has_words, shown

FOLDERS = ("src", "include", "apps")
# Exceptions that say nothing: the message was printed before, is the system's, or is read by nobody.
SILENT = {
    "std::bad_alloc",
    "std::system_error",
    "CLI::RuntimeError",
    "Interrupted",
    "Unwanted",
    "TrainingEndedByCallback",
    "session::TrainingEndedByCallback",
}
# Exceptions of the standard library in examples: code 1, and the text alone.
PLAIN = {"std::runtime_error", "std::invalid_argument"}
# What a caller turns into an Error, which says more.
TURNED_INTO = {  # number of the argument that says what is wrong, exit code, doing, text before the fact, remedy
    "BadPickle": (0, 65, "reading FILE", "", "Save the state dict alone: torch.save(model.state_dict(), FILE)"),
    "Invalid": (0, 65, "reading PATH/manifest.json", "", "Use another checkpoint"),
    "InvalidOption": (
        1,
        65,
        "reading RUN/params.json",
        MARK + "KEY" + UNMARK + " ",
        "Correct it, or remove it: started with its --name, the run then goes on from its newest checkpoint",
    ),
    "check_value": (
        1,
        64,
        "reading the command line",
        f'{MARK}OPTION{UNMARK}: "{MARK}VALUE{UNMARK}" is ',
        "PROGRAM --help lists the flags",
    ),
}
# main() of the tool prints a text with `fail(code, text)`.
PRINTS = ("apps/muster/command_line.cpp", "fail")
# Functions that return an Error of another rank.
RETURN_ERRORS = {"root_cause", "remote_cause"}

MOST_FACTS = 6


@dataclass(frozen=True)
class ListedError:
    path: str
    line: int
    last_line: int
    function: str
    codes: tuple
    doings: tuple
    facts: tuple
    remedies: tuple

    @property
    def message(self):
        doing = shown(" / ".join(dict.fromkeys(self.doings)))
        fact = shown(" / ".join(dict.fromkeys(self.facts)))
        return f"{doing}: {fact}" if doing else fact


@dataclass(frozen=True)
class Construction:
    source: Source
    at: int
    opening: int
    name: str


class Reader(Texts):
    """Finds the errors: read() returns them."""

    @classmethod
    def of_project(cls, root):
        files = [path for folder in FOLDERS for path in sorted((Path(root) / folder).rglob("*"))]
        return cls(
            {
                str(path.relative_to(root)): path.read_text(encoding="utf-8")
                for path in files
                if path.suffix in (".cpp", ".hpp", ".inl")
            }
        )

    def constructions(self):
        """Where an error is made: source, first token, last token, name of the class, its arguments' bracket."""
        for source in self.sources.values():
            for at in range(len(source.tokens) - 1):
                token = source.tokens[at]
                if token.kind != "name":
                    continue
                name = token.text
                if source.is_sign(at - 1, "::") and source.tokens[at - 2].text == "std":
                    name = source.tokens[at - 2].text + "::" + name
                if token.text in self.error_classes or token.text in TURNED_INTO or name in PLAIN:
                    if source.is_name(at - 1, "class", "struct", "explicit", "Validator"):
                        continue
                    opening = at + 1 + (source.is_name(at + 1) and source.is_sign(at + 2, "(", "{"))
                    if source.is_sign(opening, "(", "{"):
                        yield source, at, token.text if name not in PLAIN else name, opening
                elif token.text == "return" and source.is_sign(at + 1, "{") and source.is_name(at + 2, "ExitCode"):
                    yield source, at, "Error", at + 1
                elif (source.path, token.text) == PRINTS and source.is_sign(at + 3, "::"):
                    yield source, at, "Error", at + 1

    def is_declaration(self, source, name, opening):
        """True for `Error(ExitCode code, …)` and `Error(const Error&)`."""
        if source.is_name(opening + 1, "ExitCode") and source.is_name(opening + 2):
            return True
        if source.is_sign(source.close[opening] + 1, "{", ":") or source.is_name(source.close[opening] + 1, "const"):
            return True
        return source.is_name(opening + 1, "const", "int", "std") and any(
            source.is_name(at, "const", "int", "string") and (source.is_name(at + 1) or source.is_sign(at + 1, "&"))
            for at in range(opening + 1, source.close[opening])
        )

    def read(self):
        """All errors in the order of the files."""
        self.errors = {}
        self.problems = []
        self.made_at = set()  # (path, token)
        self.made_in = set()  # names of functions
        for source, at, name, opening in self.constructions():
            if name == "TrainingEndedByCallback":
                continue  # no error: a callback has ended the training
            owner = self.constructor_at(source, at, name, opening)
            before = at - 2 if source.is_sign(at - 1, "::") else at
            is_plain_base = name in PLAIN and source.is_sign(before - 1, ":")
            if not owner and (source.is_name(before - 1, "public") or self.is_base(source, before) or is_plain_base):
                continue  # the base of another class
            if owner and owner.name in TURNED_INTO:
                continue
            if not owner and name in self.error_classes and self.is_declaration(source, name, opening):
                continue
            around = [owner] if owner else source.functions_at(at)
            self.made_at.add((source.path, at))
            self.made_in |= {one.name for one in around}
            self.add(Construction(source, at, opening, name), source, at, source.close[opening], around, (), 0)
        self.check_throws()
        if self.problems:
            raise Unreadable("\n".join(self.problems))
        return sorted(self.errors.values(), key=lambda one: (one.path, one.line))

    @staticmethod
    def is_base(source, at):
        named = at - 2 - source.is_name(at - 2, "final")
        return source.is_sign(at - 1, ":") and source.is_name(named) and source.is_name(named - 1, "class", "struct")

    @staticmethod
    def constructor_at(source, at, name, opening):
        """The constructor that initialises its base at a token."""
        for one in source.functions:
            if one.initialisers.get(name, (0, 0))[0] == opening + 1:
                return one
        return None

    def add(self, made, source, begin, end, around, bound, level):
        """Adds the error of a construction; where its fact is a parameter, an error for each call of that function."""
        ranges = [Range(made.source, *one, bound) for one in made.source.arguments(made.opening)]
        self.unbound = []
        if made.name in PLAIN:
            codes, doings, facts, remedies = [1], [""], self.texts(ranges[0]), [""]
        elif made.name in TURNED_INTO:
            number, code, doing, before, remedy = TURNED_INTO[made.name]
            facts = [before + text for text in self.texts(ranges[number])]
            own = made.name == "BadPickle" and len(ranges) == 2
            codes, doings, remedies = [code], [doing], self.texts(ranges[1]) if own else [remedy]
        elif len(ranges) in (3, 4):
            facts = self.texts(ranges[2])
            unbound = list(self.unbound)
            codes, doings = self.codes(ranges[0]), self.texts(ranges[1])
            remedies = self.remedies(ranges[3]) if len(ranges) == 4 else [""]
            self.unbound = unbound
        elif len(ranges) in (1, 2):
            # A copy, or an error on which the ranks have agreed: its text was made elsewhere.
            codes, doings, facts, remedies = self.codes(ranges[0]), [""], self.texts(ranges[-1]), [""]
            if not codes or not any(has_words(fact) for fact in facts):
                return
        else:
            return self.unreadable(made.source, made.at, "an error with more than four arguments")
        if not all(has_words(fact) for fact in facts) and self.unbound and level < MOST_LEVELS:
            function_source, function = self.unbound[0]
            calls = list(self.calls_of(function_source, function))
            if not calls:
                return self.unreadable(made.source, made.at, f"no call of {function.name}() was found")
            for where, at, opening in calls:
                more = self.bind(function_source, function, Range(where, at, at, bound), opening)
                self.add(made, where, at, where.close[opening], where.functions_at(at), more, level + 1)
            return
        if codes == [0]:
            return  # no error: a callback has ended the training
        if not codes:
            return self.unreadable(source, begin, "an error whose exit code was not found")
        facts = [fact for fact in facts if fact] or facts
        if len(facts) > MOST_FACTS:
            facts = [self.common(facts)]
        if made.name in TURNED_INTO and not any(has_words(fact) for fact in facts):
            return
        error = ListedError(
            source.path, source.tokens[begin].line, source.tokens[end].line,
            around[0].name if around else "", tuple(sorted(set(codes))), tuple(doings), tuple(facts), tuple(remedies),
        )  # fmt: skip
        self.errors.setdefault((error.path, error.line, error.message), error)

    def remedies(self, value):
        """What a remedy can be; where it is a parameter of the function around, what the calls of that one give."""
        self.unbound = []
        found = self.texts(value)
        if any(has_words(text) or not text for text in found) or not self.unbound:
            return found
        source, function = self.unbound[0]
        given = []
        for where, at, opening in self.calls_of(source, function):
            bound = self.bind(source, function, Range(where, at, at, value.bound), opening)
            given += self.texts(Range(value.source, value.begin, value.end, bound))
        return [text for text in self.limited(given) if has_words(text)] or found

    def unreadable(self, source, at, what):
        self.problems.append(f"{source.path}:{source.tokens[at].line}: {what}")

    def calls_of(self, source, function):
        """The calls of a function that makes errors: file, first token, bracket."""
        is_lambda = source.is_sign(function.first - 1, "]")
        outer = source.functions_at(function.first)
        header = source.path.replace(".cpp", ".hpp")
        public = "include/muster/" + Path(header).name
        is_shared = source.path.endswith(".hpp") or any(
            self.is_declared(self.sources[path], function.name) for path in (header, public) if path in self.sources
        )
        is_private = header in self.sources and self.is_private(self.sources[header], function)
        for where, at in self.calls.get(function.name, []):
            opening = at + 1
            if where is source and opening == function.parameters_begin:
                continue
            if where is not source and (is_lambda or not is_shared):
                continue
            if is_private and where.path not in (source.path, header):
                continue
            if is_lambda and not (outer and outer[0].begin < at < outer[0].end):
                continue
            if where.is_name(at - 1) and not where.is_name(at - 1, "return", "throw", "else", "do"):
                if not (where.tokens[at - 1].text == function.name or function.name in self.error_classes):
                    continue  # a declaration
            after = where.close[opening] + 1
            if where.is_sign(after, "{", "->") or where.is_name(after, "const", "noexcept"):
                continue  # a definition
            number = len(where.arguments(opening))
            defaults = self.defaults_of(source, function)
            if not len(function.parameters) - len(defaults) <= number <= len(function.parameters):
                continue
            if function.begin < at < function.end and where is source:
                continue
            own = [
                one
                for one in where.functions
                if one is not function and one.name == function.name and not is_lambda
                and number <= len(one.parameters) and not one.begin < at < one.end
            ]  # fmt: skip
            if where is not source and own:
                continue
            yield where, at, opening

    def is_declared(self, header, name):
        return any(
            header.is_name(at, name)
            and header.is_sign(at + 1, "(")
            and (header.is_name(at - 1) or header.is_sign(at - 1, "&", "*", ">"))
            for at in range(1, len(header.tokens) - 1)
        )

    @staticmethod
    def is_private(header, function):
        """True for a private function of a class in the header."""
        for at in range(1, len(header.tokens) - 1):
            if not header.is_name(at, function.name) or not header.is_sign(at + 1, "("):
                continue
            if header.parameters(at + 1) != function.parameters:
                continue
            while at > 0 and not header.is_sign(at, "{"):
                if header.is_name(at, "private", "protected", "public") and header.is_sign(at + 1, ":"):
                    return header.tokens[at].text == "private"
                at = header.open.get(at, at) - 1
        return False

    def check_throws(self):
        """Raises an error for a `throw` whose exception is not in the list."""
        for source in self.sources.values():
            for at in range(len(source.tokens) - 1):
                if not source.is_name(at, "throw") or source.is_sign(at + 1, ";"):
                    continue
                end = self.end_of_statement(source, at)
                if any((source.path, inner) in self.made_at for inner in range(at, end)):
                    continue
                words = [token.text for token in source.tokens[at + 1 : end]]
                text = re.sub(r"^\w+\?Error\((\w+)\.code\(\),std::string\(\1\.what\(\)\)\):", "", "".join(words))
                if re.fullmatch(r"\*?(\w+(\.|->|::)?)+(\(\))?", text) and not text.endswith("()"):
                    continue  # an error that was made elsewhere
                if any(text.startswith(one + sign) for one in SILENT for sign in "({"):
                    continue
                callee = re.match(r"\*?(?:\w+::)*(\w+)[({]", text)
                if callee and callee.group(1) in self.made_in | self.error_classes | RETURN_ERRORS:
                    continue
                self.unreadable(source, at, f'what "throw {text}" says was not found')
