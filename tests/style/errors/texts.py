"""The texts and exit codes that expressions of the sources can have, as far as they can be seen there."""

import re
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

from cpp import Source, Unreadable

EXIT_CODES = {
    "done": 0,
    "user_error": 1,
    "usage": 64,
    "data": 65,
    "missing_package": 69,
    "retry": 75,
    "stopped": 85,
    "interrupted": 130,
}
MARK, UNMARK = "\ue000", "\ue001"  # around the name of a placeholder

NUMBERS = "int long unsigned short size_t ptrdiff_t int32_t int64_t uint32_t uint64_t pid_t uid_t hsize_t double float rep".split()
NUMBER_CALLS = ("size", "count", "min", "max", "clamp", "round", "lround", "llround")
TEXT_CALLS = (
    "dump", "what", "what_without_backtrace", "substr", "c_str", "data", "type_name", "get_name", "toString", "top_of",
    "zip_strerror", "zip_error_strerror", "str", "counted", "formatted", "string",
)  # fmt: skip
TEXTS = ("string", "string_view", "path", "char")
MOST_ALTERNATIVES = 12
MOST_LEVELS = 6


def placeholder(name=""):
    return MARK + name + UNMARK


def has_words(text):
    """True if a text says something besides placeholders."""
    return len(re.findall(r"[A-Za-z]", re.sub(MARK + ".*?" + UNMARK, "", text))) >= 3


def shown(text):
    """A text with its placeholders as the reader sees them; neighbouring ones are one."""
    text = re.sub(MARK + "(.*?)" + UNMARK, lambda m: m.group(1) or "…", text)
    return re.sub(r"…( ?…)+", "…", text)


@dataclass(frozen=True)
class Range:
    """Tokens of a file, and what the parameters around them stand for."""

    source: Source
    begin: int
    end: int
    bound: tuple = ()  # of (function's begin, parameter, Range or None)

    def binding(self, function, name):
        for begin, parameter, value in self.bound:
            if begin == (self.source.path, function.begin) and parameter == name:
                return value
        return False


class Texts:
    """Reads the sources and evaluates their expressions."""

    def __init__(self, sources):
        self.sources = {path: Source(path, text) for path, text in sources.items()}
        self.unbound = []  # the functions whose parameters stand in the texts that were evaluated last
        self.find_classes()
        self.find_constants()
        self.find_functions()
        self.find_kinds()

    # What the sources declare

    def find_classes(self):
        bases = {}
        for source in self.sources.values():
            for at in range(len(source.tokens)):
                if not source.is_name(at, "class", "struct") or not source.is_name(at + 1):
                    continue
                colon = at + 2 + source.is_name(at + 2, "final")
                if not source.is_sign(colon, ":"):
                    continue
                base = colon + 1 + source.is_name(colon + 1, "public")
                while source.is_sign(base + 1, "::"):
                    base += 2
                bases[source.tokens[at + 1].text] = source.tokens[base].text
        self.error_classes = {"Error"}
        while True:
            more = {name for name, base in bases.items() if base in self.error_classes} - self.error_classes
            if not more:
                break
            self.error_classes |= more

    def find_constants(self):
        """Constants of namespaces by their names, where a name has one value."""
        self.constants = {}
        twice = set()
        for source in self.sources.values():
            for at in range(1, len(source.tokens)):
                if source.is_sign(at, "=") and source.tokens[at + 1].kind == "text" and source.is_sign(at + 2, ";"):
                    name = at - 1 - 2 * source.is_sign(at - 1, "]")
                    if source.functions_at(at) or not source.is_name(name):
                        continue
                    name = source.tokens[name].text
                    twice |= {name} & self.constants.keys()
                    self.constants[name] = Range(source, at + 1, at + 2)
        for name in twice:
            del self.constants[name]

    def find_functions(self):
        self.functions = {}
        for source in self.sources.values():
            for function in source.functions:
                self.functions.setdefault(function.name, []).append((source, function))
        # Names followed by a bracket: calls, declarations and definitions.
        self.calls = {}
        for source in self.sources.values():
            for at in range(len(source.tokens) - 1):
                if source.is_name(at) and source.is_sign(at + 1, "(", "{"):
                    self.calls.setdefault(source.tokens[at].text, []).append((source, at))

    def find_kinds(self):
        """Of each file, what names are declared as: name to (its place, is in a container, is a number)."""
        self.kinds = {}
        for source in self.sources.values():
            kinds = self.kinds[source.path] = {}
            for at in range(1, len(source.tokens)):
                before = at - 1
                while source.is_sign(before, "&", "*", ">", "&&") or source.is_name(before, "const"):
                    before -= 1
                if source.is_name(at) and source.is_name(before, *NUMBERS, *TEXTS):
                    inside = any(source.is_sign(one, ">") for one in range(before, at))
                    is_number = source.tokens[before].text in NUMBERS or source.is_name(before - 1, "unsigned")
                    kind = at, inside, is_number
                    kinds.setdefault(source.tokens[at].text, []).append(kind)

    def kind_of(self, source, name, at, inside):
        """True if a name is declared as a number, False for a text, None if nothing is known or it is both."""
        own = self.kinds[source.path].get(name, [])
        header = self.kinds.get(source.path.replace(".cpp", ".hpp"), {}).get(name, [])
        near = [one for one in own if one[0] < at]
        everywhere = [one for kinds in self.kinds.values() for one in kinds.get(name, [])]
        is_member = source.is_sign(at - 1, ".", "->")
        for kinds in (header, near, own, everywhere) if is_member else (near, own, header, everywhere):
            kinds = [one for one in kinds if one[1] == inside][-1 if kinds is not everywhere else 0 :]
            if kinds:
                found = {one[2] for one in kinds}
                return found.pop() if len(found) == 1 else False if inside else None
        return False if inside else None

    # Texts

    def texts(self, value, level=0):
        """What an expression can be: its alternatives, with placeholders for what only a run knows."""
        source, begin, end = value.source, value.begin, value.end
        if begin >= end:
            return [""]
        if level > MOST_LEVELS:
            return [placeholder()]
        question = self.top_level(source, begin, end, "?")
        if question is not None:
            colon = self.matching_colon(source, question, end)
            if source.is_sign(question - 2, "==") and source.tokens[question - 1].text == "1":
                return self.texts(Range(source, colon + 1, end, value.bound), level)  # the plural
            return self.limited(
                self.texts(Range(source, question + 1, colon, value.bound), level)
                + self.texts(Range(source, colon + 1, end, value.bound), level)
            )
        terms = source.split(begin, end, "+")
        if len(terms) > 1:
            alternatives = [self.texts(Range(source, *term, value.bound), level) for term in terms]
            return self.combined(alternatives)
        return self.limited(self.term(value, level))

    def combined(self, alternatives):
        """Every choice of one text from each list; where these are too many, a placeholder for long lists."""
        while prod(len(texts) for texts in alternatives) > MOST_ALTERNATIVES:
            longest = max(range(len(alternatives)), key=lambda number: len(alternatives[number]))
            alternatives[longest] = [self.common(alternatives[longest])]
        return list(dict.fromkeys("".join(parts) for parts in product(*alternatives)))

    def limited(self, texts):
        texts = list(dict.fromkeys(texts))
        return texts if len(texts) <= MOST_ALTERNATIVES else [self.common(texts)]

    @staticmethod
    def common(texts):
        """One text with a placeholder between what all of them begin and end with."""
        first = min(texts, key=len)
        begin = 0
        while begin < len(first) and len({text[begin] for text in texts}) == 1:
            begin += 1
        end = 0
        while end < len(first) - begin and len({text[-1 - end] for text in texts}) == 1:
            end += 1
        return first[:begin] + placeholder() + (first[-end:] if end else "")

    @staticmethod
    def top_level(source, begin, end, *signs):
        at = begin
        while at < end:
            if source.is_sign(at, "(", "{", "["):
                at = source.close[at]
            elif source.is_sign(at, *signs):
                return at
            at += 1
        return None

    @staticmethod
    def matching_colon(source, question, end):
        depth = 0
        at = question
        while at < end:
            if source.is_sign(at, "(", "{", "["):
                at = source.close[at]
            elif source.is_sign(at, "?"):
                depth += 1
            elif source.is_sign(at, ":"):
                depth -= 1
                if depth == 0:
                    return at
            at += 1
        raise Unreadable(f"{source.path}:{source.tokens[question].line}: a condition without its other value")

    def term(self, value, level):
        source, begin, end, bound = value.source, value.begin, value.end, value.bound
        first = source.tokens[begin]
        if source.is_sign(begin, "*", "&") and end - begin > 1:
            return self.texts(Range(source, begin + 1, end, bound), level)
        if end - begin == 2 and source.is_sign(begin, "{"):
            return [""]
        if end - begin > 1 and all(self.is_literal(token) for token in source.tokens[begin:end]):
            parts = [token.text if token.kind == "text" else placeholder("PATH") for token in source.tokens[begin:end]]
            return ["".join(parts)]
        if end - begin == 1:
            if first.kind == "text":
                return [first.text]
            if first.kind == "char":
                return [first.text[1:-1].replace("\\", "")]
            if first.kind == "number":
                return [first.text]
            if first.text == "nullptr":
                return [""]
            if first.kind == "name":
                return self.variable(value, first.text, begin, level)
        if source.is_sign(begin, "(") and source.close[begin] == end - 1:
            return self.texts(Range(source, begin + 1, end - 1, bound), level + 1)
        # std::string(x), std::string_view(x), std::move(x) and x.c_str() are x.
        opening = source.open.get(end - 1)
        if opening is not None and opening > begin and source.is_sign(opening, "(", "{"):
            callee = "".join(token.text for token in source.tokens[begin:opening])
            if callee in ("std::string", "std::string_view", "std::move", "printable", "detail::printable"):
                return self.texts(Range(source, opening + 1, end - 1, bound), level + 1)
            if callee == "c10::str":
                alternatives = [self.texts(Range(source, *one, bound), level + 1) for one in source.arguments(opening)]
                return self.combined(alternatives)
            if re.fullmatch(r"(muster::)?(detail::)?str", callee):
                return self.combined([self.piece(Range(source, *one, bound), level) for one in source.arguments(opening)])
            if re.fullmatch(r"(muster::)?(detail::)?formatted", callee):
                return self.formatted(Range(source, begin, end, bound), opening, level)
            if re.fullmatch(r"\w+\.(c_str|str|data)", callee):
                return self.texts(Range(source, begin, begin + 1, bound), level + 1)
            if re.fullmatch(r"(\w+::)*\w+", callee):
                found = self.result_of(value, callee.split("::")[-1], opening, level)
                if found:
                    return found
        found = self.member(value, level)
        if found:
            return found
        if end - begin == 3 and source.is_sign(begin + 1, "::") and source.is_name(begin + 2):
            return self.texts(Range(source, begin + 2, end, bound), level + 1)
        return [self.name_for(source, begin, end)]

    def formatted(self, value, opening, level):
        """The texts of formatted("%d rows of %s", n, path): N for whole numbers, the texts of other texts."""
        source = value.source
        format_, *arguments = source.arguments(opening)
        alternatives = []
        for text in self.texts(Range(source, *format_, value.bound), level + 1):
            values = iter(arguments)
            parts = re.split(r"%([-+ 0#]*[\d.*]*(?:hh|h|ll|l|z)?[a-zA-Z%])", text)
            for number in range(1, len(parts), 2):
                kind = parts[number][-1]
                argument = None if kind == "%" else next(values, None)
                if kind == "s" and argument:
                    parts[number] = self.texts(Range(source, *argument, value.bound), level + 1)
                else:
                    parts[number] = ["%" if kind == "%" else placeholder("N" if kind in "dux" else "")]
            alternatives += self.combined([part if isinstance(part, list) else [part] for part in parts])
        return self.limited(alternatives)

    def piece(self, value, level):
        """The texts of an argument of str(); N for a number."""
        kind = self.is_number(value.source, value.begin, value.end)
        found = [] if kind else self.texts(value, level)
        if value.end - value.begin == 1 and found == [placeholder()]:
            found = [placeholder(self.NAMES.get(value.source.tokens[value.begin].text, ""))]
        return [placeholder("N")] if kind or (kind is None and found == [placeholder()]) else found

    def is_number(self, source, begin, end, level=0):
        """Whether an expression is a number, as its signs, calls and the declarations of its names say; else None."""
        tokens = source.tokens
        question = self.top_level(source, begin, end, "?")
        if question is not None:
            colon = self.matching_colon(source, question, end)
            kinds = [self.is_number(source, *one, level) for one in ((question + 1, colon), (colon + 1, end))]
            return False if False in kinds else True if True in kinds else None
        if level > MOST_LEVELS or "text" in (tokens[begin].kind, tokens[end - 1].kind):
            return False
        if "number" in (tokens[begin].kind, tokens[end - 1].kind) or self.top_level(source, begin + 1, end, *"-/%*"):
            return True
        if source.is_sign(end - 1, ")") and source.is_sign(source.open[end - 1] - 1, ">"):
            # static_cast<int>(x), x.get<double>()
            at = source.open[end - 1] - 2
            return tokens[at].text in NUMBERS or source.is_name(at - 1, "unsigned")
        inside = source.is_sign(begin, "*")
        while end > begin and source.is_sign(end - 1, ")", "]", "}"):
            inside |= source.is_sign(end - 1, "]")
            end = source.open[end - 1]
        while source.is_name(end - 1, "front", "back", "at", "value") and source.is_sign(end - 2, ".", "->"):
            end, inside = end - 2, True
            while end > begin and source.is_sign(end - 1, ")", "]"):
                end = source.open[end - 1]
        if end <= begin or not source.is_name(end - 1):
            return None
        name = tokens[end - 1].text
        if name in NUMBER_CALLS or name in TEXT_CALLS or (name == "first" and source.is_sign(end - 2, ".", "->")):
            return name in NUMBER_CALLS
        for function in source.functions_at(end - 1) if end - 1 == begin or source.is_sign(begin, "*") else ():
            value = self.initialiser(source, function, name, end - 1)
            kind = self.is_number(source, *value, level + 1) if value else None
            if value and tokens[value[0] - 3].text in NUMBERS:
                return True
            if value and source.is_sign(begin, "*"):  # of an iterator nothing is known
                found = {one[2] for kinds in self.kinds.values() for one in kinds.get(name, [])}
                return bool(kind) or found == {True}
            if kind is not None:
                return kind
        return self.kind_of(source, name, end - 1, inside)

    @staticmethod
    def is_literal(token):
        return token.kind == "text" or (token.kind == "name" and token.text.startswith("MUSTER_"))

    def member(self, value, level):
        """The texts of x.fact, which `{.fact = …}` gives, or of x.error(), which is given to error_."""
        source, begin, end = value.source, value.begin, value.end
        last = end - 3 if source.is_sign(end - 1, ")") and source.is_sign(end - 2, "(") else end - 1
        if last < begin + 2 or not source.is_name(last) or not source.is_sign(last - 1, ".", "->"):
            return None
        name = source.tokens[last].text
        if name not in ("fact", "remedy", "error"):
            return None
        found = []
        folder = Path(source.path).parent
        for where in self.sources.values():
            if Path(where.path).parent != folder:
                continue
            for at in range(2, len(where.tokens) - 1):
                is_given = where.is_name(at, name) and where.is_sign(at - 1, ".") and where.is_sign(at - 2, "{", ",")
                is_set = last != end - 1 and where.is_name(at, name + "_") and where.functions_at(at)
                if (is_given or is_set) and where.is_sign(at + 1, "="):
                    found += self.texts(Range(where, at + 2, self.end_of_value(where, at + 2)), level + 1)
        return [text for text in found if has_words(text)]

    def variable(self, value, name, at, level):
        """The texts of a variable: a parameter's argument, or what it is initialised with."""
        source = value.source
        if name == "MUSTER_VERSION":
            return [placeholder("VERSION")]
        for function in source.functions_at(at):
            if name in function.parameters:
                argument = value.binding(function, name)
                if argument is False:
                    self.unbound.append((source, function))
                    return [self.name_for(source, at, at + 1)]
                if argument is None:
                    return [""]
                return self.texts(Range(argument.source, argument.begin, argument.end, value.bound), level + 1)
            begin = self.initialiser(source, function, name, at)
            if begin:
                return self.texts(Range(source, *begin, value.bound), level + 1)
            built = self.built(value, function, name, at, level)
            if built:
                return built
        # A member that a constructor of the file sets, or that has a default.
        values = [
            Range(source, *one.initialisers[name], value.bound) for one in source.functions if name in one.initialisers
        ]
        if not values:
            inside = [
                (begin + 2, self.end_of_statement(source, begin))
                for begin in range(len(source.tokens) - 2)
                if source.is_name(begin, name) and source.is_sign(begin + 1, "=") and not source.functions_at(begin)
            ]
            values = [Range(source, *one, value.bound) for one in inside[:1]]
        if not values:
            array = [
                (begin + 4, self.end_of_statement(source, begin))
                for begin in range(len(source.tokens) - 4)
                if source.is_name(begin, name)
                and source.is_sign(begin + 1, "[")
                and source.is_sign(begin + 2, "]")
                and source.is_sign(begin + 3, "=")
            ]
            values = [Range(source, *one, value.bound) for one in array[:1]]
        if not values and name.endswith("_"):
            values = [
                Range(source, begin + 2, self.end_of_statement(source, begin))
                for begin in range(1, len(source.tokens) - 2)
                if source.is_name(begin, name) and source.is_sign(begin + 1, "=") and source.functions_at(begin)
            ]
        if values:
            found = [text for one in values for text in self.texts(one, level + 1) if text]
            if all(has_words(text) for text in found):
                return found
        if name in self.constants:
            return self.texts(self.constants[name], level + 1)
        return [self.name_for(source, at, at + 1)]

    @staticmethod
    def end_of_statement(source, at):
        while not source.is_sign(at, ";", ")"):
            at = source.close[at] + 1 if source.is_sign(at, "(", "{", "[") else at + 1
        return at

    def end_of_value(self, source, at):
        while not source.is_sign(at, ";", ",", ")", "}"):
            at = source.close[at] + 1 if source.is_sign(at, "(", "{", "[") else at + 1
        return at

    def built(self, value, function, name, before, level):
        """The texts of a variable that is declared without a value: what is assigned to it, written to it or added."""
        source = value.source
        begun, added = [], []
        for at in range(function.begin, before):
            if not source.is_name(at, name) or source.is_sign(at - 1, ".", "->", "::"):
                continue
            if source.is_sign(at + 1, "=", "+="):
                texts = self.texts(Range(source, at + 2, self.end_of_statement(source, at), value.bound), level + 1)
                (begun if source.is_sign(at + 1, "=") else added).append(texts)
            elif source.is_sign(at + 1, "<<"):
                pieces = source.split(at + 2, self.end_of_statement(source, at), "<<")
                begun.append(["".join(self.texts(Range(source, *one, value.bound), level + 1)[0] for one in pieces)])
        begun = [text for texts in begun for text in texts if text]
        if not any(has_words(text) for text in begun):
            return None
        if added:
            rest = placeholder() if len(added) > 1 else ""
            begun = [text + more + rest for text in begun for more in added[0]]
        return self.limited(begun)

    def initialiser(self, source, function, name, before):
        """The range of the value that a local variable begins with; None if it is changed later."""
        for at in range(before - 1, function.begin, -1):
            if not source.is_name(at, name) or source.is_sign(at - 1, ".", "->", "::"):
                continue
            if source.is_sign(at + 1, "+="):
                return None
            declared = source.is_name(at - 1) or source.is_sign(at - 1, "&", "*", ">", ",")
            if not declared or source.is_name(at - 1, "return", "else", "throw"):
                continue
            if source.is_sign(at + 1, "="):
                return at + 2, self.end_of_value(source, at)
            if source.is_sign(at + 1, "[") and source.is_sign(at + 3, "="):
                return at + 4, self.end_of_statement(source, at)
            if source.is_sign(at + 1, "(", "{") and source.is_name(at - 1, "string", "string_view", "span"):
                return at + 2, source.close[at + 1]
        return None

    def result_of(self, value, name, opening, level):
        """The texts that a function returns, if its only statement is a return."""
        source = value.source
        if source.is_sign(opening - 2, "::") and source.is_name(opening - 3, "std"):
            return None  # a function of the standard library
        candidates = [one for one in self.functions.get(name, []) if one[0] is source] or self.functions.get(name, [])
        arguments = source.arguments(opening)
        fitting = [(where, function) for where, function in candidates if len(function.parameters) >= len(arguments)]
        if not fitting or len(fitting) > 3 or (len(fitting) > 1 and source.path == fitting[0][0].path):
            return None
        found = []
        for where, function in fitting:
            bound = self.bind(where, function, value, opening)
            for at in range(function.begin, function.end):
                if where.is_name(at, "return") and where.functions_at(at)[0] is function:
                    found += self.texts(Range(where, at + 1, self.end_of_statement(where, at), bound), level + 1)
        found = [text for text in found if text and text != placeholder("nullopt")]
        return self.limited(found) if found and all(has_words(text) for text in found) else None

    def bind(self, where, function, call, opening):
        arguments = call.source.arguments(opening)
        defaults = self.defaults_of(where, function)
        bound = list(call.bound)
        for number, parameter in enumerate(function.parameters):
            if number < len(arguments):
                argument = Range(call.source, *arguments[number], call.bound)
            elif number in defaults:
                argument = defaults[number]
            else:
                argument = None
            bound.insert(0, ((where.path, function.begin), parameter, argument))
        return tuple(bound)

    def defaults_of(self, source, function):
        """The default arguments of a function by their numbers. Those of a definition stand in its declaration."""
        found = {
            number: Range(source, *default, ()) for number, default in source.defaults(function.parameters_begin).items()
        }
        header = self.sources.get(source.path.replace(".cpp", ".hpp"))
        if header is None or header is source:
            return found
        for at in range(len(header.tokens) - 1):
            if header.is_name(at, function.name) and header.is_sign(at + 1, "("):
                if header.parameters(at + 1) == function.parameters:
                    for number, default in header.defaults(at + 1).items():
                        found.setdefault(number, Range(header, *default, ()))
        return found

    # Placeholders that say more than "…", by the name of the variable.
    NAMES = {
        "path": "PATH", "path_": "PATH", "shown": "PATH", "shown_": "PATH", "target": "PATH", "from": "PATH",
        "file": "FILE", "out": "FILE", "folder": "FOLDER", "folder_": "FOLDER", "directory": "FOLDER", "run": "RUN",
        "name": "NAME", "name_": "NAME", "key": "KEY", "option": "OPTION", "option_": "OPTION", "setting": "SETTING",
        "metric": "METRIC", "metric_": "METRIC", "program": "PROGRAM", "command": "COMMAND", "host": "HOST",
    }  # fmt: skip

    def name_for(self, source, begin, end):
        names = [token.text for token in source.tokens[begin:end] if token.kind == "name"]
        if names and names[-1] == "nullopt":
            return ""
        if ("to_string" in names and "std" in names) or any(
            source.is_name(at, "str") and source.is_sign(at + 1, "(") and not source.is_sign(at - 1, ".", "->")
            for at in range(begin, end)
        ):
            return placeholder("N")
        if {"json_text", "json_text_lossy"} & set(names):  # a value of any kind
            return placeholder("")
        if {"strerror", "message", "reason", "reason_of", "why"} & set(names) or any(
            source.is_sign(at - 1, ".", "->") and source.is_name(at, "what") for at in range(begin, end)
        ):
            return placeholder("REASON")
        while len(names) > 1 and names[-1] in ("string", "c_str", "str", "get", "filename", "parent_path"):
            names.pop()
        return placeholder(self.NAMES.get(names[-1], "") if names else "")

    def codes(self, value, level=0):
        """The exit codes that an expression can be."""
        source = value.source
        found = []
        question = self.top_level(source, value.begin, value.end, "?")
        if question is not None:
            colon = self.matching_colon(source, question, value.end)
            for one in ((question + 1, colon), (colon + 1, value.end)):
                found += self.codes(Range(source, *one, value.bound), level)
            return found
        for at in range(value.begin, value.end):
            if source.is_name(at, "ExitCode") and source.is_sign(at + 1, "::"):
                found.append(EXIT_CODES[source.tokens[at + 2].text])
        if found or level > MOST_LEVELS:
            return found
        for at in range(value.begin, value.end):
            if not source.is_name(at) or source.is_sign(at - 1, "."):
                continue
            name = source.tokens[at].text
            if source.is_sign(at + 1, "("):
                for where, function in self.functions.get(name, [])[:1]:
                    found += self.codes(Range(where, function.begin, function.end), level + 1)
                continue
            for function in source.functions_at(at):
                if name in function.parameters:
                    argument = value.binding(function, name)
                    if argument:
                        found += self.codes(
                            Range(argument.source, argument.begin, argument.end, value.bound), level + 1
                        )
                    else:
                        found += self.codes_of_parameter(source, function, name, level + 1)
                    break
                begin = self.initialiser(source, function, name, at)
                if begin:
                    found += self.codes(Range(source, *begin, value.bound), level + 1)
                    break
        return found

    def codes_of_parameter(self, source, function, name, level):
        number = function.parameters.index(name)
        found = []
        default = self.defaults_of(source, function).get(number)
        if default:
            found += self.codes(default, level + 1)
        for where, _, opening in self.calls_of(source, function):
            arguments = where.arguments(opening)
            if number < len(arguments):
                found += self.codes(Range(where, *arguments[number]), level + 1)
        return found
