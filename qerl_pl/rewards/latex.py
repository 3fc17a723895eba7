"""Normalise an answer written in LaTeX, Unicode or words to one notation, by rewriting strings without parsing them."""

import re

from qerl_pl.rewards.answers import last_boxed
from qerl_pl.rewards.number_words import in_digits
from qerl_pl.rewards.numbers import DECORATION, ascii_digits
from qerl_pl.rewards.units import denies, names_unit

# Characters of formulas, each followed by the LaTeX that replaces it.
_CHARACTERS = """
\u03c0 \\pi \u221e \\infty \u2264 \\leq \u2265 \\geq \u2260 \\neq \u00d7 \\times \u00b7 \\cdot \u22c5 \\cdot \u00f7 /
\u00b0 ^\\circ \u00b1 \\pm \u222a \\cup \u2229 \\cap \u2208 \\in \u2205 \\emptyset \u211d \\mathbb{R} \u2124 \\mathbb{Z}
\u03b8 \\theta \u03b1 \\alpha \u03b2 \\beta \u2248 \\approx \u2212 - \u2013 - \u6216 or \u2228 or \u2227 and \u3001 ,
\u20ac \\$ \u00a3 \\$ \u00a5 \\$ \u20b9 \\$ \u20a9 \\$ \u5143 yuan \u5186 yen \u2018 ' \u2019 ' \u2032 '
\u201c " \u201d "
"""
_UNICODE = str.maketrans(
    {
        character: f" {name} " if name.isalpha() else f"{name} " if name[-1].isalpha() else name
        for character, name in (pair.split() for pair in re.findall(r"\S+ \S+", _CHARACTERS))
    }
)
SEPARATOR = r",|;|\bor\b|\band\b"  # regex: separators of the values of a list
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("\\text{", "}"), ("{", "}"))
_END = r"(?![A-Za-z])"  # matches at the end of a command's name
# Rewritings of LaTeX commands: names of commands, separated by bars, and what replaces each of them.
_NAMES = r"""
dfrac|tfrac|cfrac|sfrac|nicefrac \frac ; dbinom|tbinom \binom
le|leqslant|leqq \leq ; ge|geqslant|geqq \geq ; ne \neq ; lt < ; gt >
mid|vert|lvert|rvert | ; lbrace \{ ; rbrace \} ; langle|lparen ( ; rangle|rparen ) ; colon : ; varnothing \emptyset
bigcup \cup ; bigcap \cap ; ast \cdot ; pounds \$ ; cr \\ ; backslash \setminus ; overrightarrow \vec
simeq|cong \approx ; imath i ; lg \log_{10} ; degree ^\circ
textrm|textbf|textit|textsf|textnormal|texttt|mbox|hbox|mathrm|mathbf|mathit|mathsf|emph \text
"""
_COMMANDS = [
    (re.compile(rf"\\(?:{names}){_END}"), f"{command} " if command == "^\\circ" else command)
    for names, command in (pair.split() for pair in re.split(r";|\n", _NAMES.strip()))
]
# Rewritings of formulas without LaTeX: a name such as "sqrt" becomes a LaTeX command if no letter is next to it.
_PLAIN = [
    (re.compile(r"(?<![\\A-Za-z])(?:infinity|inf)(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"(?<![\\A-Za-z])(pi|theta)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<![\\A-Za-z])((?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln)(?=\s*[(^_]|\s+\d*[a-z]\b)"), r"\\\1"),
    (re.compile(r"(?<![\\A-Za-z])abs\(([^()]*)\)"), r"|\1|"),
    (re.compile(r"(?<![\w.)}^/])(\d+)/(\d+) (?=[a-z]\b|\\?(?:pi|sqrt)|\()"), r"\\frac{\1}{\2} "),
    (re.compile(r"(?<=[\w)])\*\*(-?\d+)"), r"^{\1}"),  # a power in Python
    (re.compile(r"(?<=[\w)])\*\*(?=\()"), "^"),
    (re.compile(r"\^-(\d+|[a-z])"), r"^{-\1}"),
    (re.compile(r"\\not\s*="), r"\\neq "),
    (re.compile(r"\+/-"), r"\\pm "),
    (re.compile(r"^([A-Za-z]) in (?=[(\[])"), r"\1 \\in "),
    (re.compile(r"(?<![\\A-Za-z])sqrt\s*(?=\{)"), r"\\sqrt"),
    (re.compile(r"<="), r"\\leq "),
    (re.compile(r">="), r"\\geq "),
    (re.compile(r"(?<=[)\]])\s*(?:U|union)\s*(?=[(\[])"), r"\\cup "),
    *[(re.compile(r"(?<![\\A-Za-z])sqrt\s*(?:\(([^()]*)\)|(\d+))"), r"\\sqrt{\1\2}")] * 3,  # for nested roots
]
_STYLE = re.compile(
    rf"\\(?:displaystyle|textstyle|limits|nolimits|[bB]igg?[lrm]?|left|right|middle|hfill|boldsymbol|angle|therefore){_END}\.?"
    rf"|{DECORATION.pattern}|\\(?:bf|it|rm|small|large|Large|huge){_END}|\\(?:(?:text)?color(?:box)?|hspace\*?|label)\{{[^{{}}]*\}}|\\!"
)
_SPACE = re.compile(rf"(?<!\\)\\[,;: ]|\\(?:quad|qquad|thinspace|enspace){_END}|~|\s+")
# Matches the words between a value and the end of the answer; ``units.names_unit`` tells whether they are its unit.
_WORDS = r"[A-Za-z][A-Za-z./' -]*?(?:\^\s*\{?-?[123]\}?)?"
_END_OF_VALUE = r"(?=\s*(?:$|[,;)\]]|\\text\{|\s(?:and|or)\s))"
_TRAILING = re.compile(rf"(?:(?<=[\d}})\]%])|(?<=pi))(?P<gap>\s*)(?P<words>{_WORDS}){_END_OF_VALUE}")
_SYMBOLS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{1,3}(?![A-Za-z])")  # letters of formulas
_UPRIGHT = re.compile(r"\\(?:text|math\w+|mbox)\{[^{}]*\}")
_POWER = r"(?:\^\s*(?:\{\s*(?:\\text\{\s*)?-?\d\s*\}{1,2}|-?\d))?"
_TEXT_UNIT = re.compile(
    rf"(?:(?<=[\d}})%.])|(?<=[A-Za-z])(?=\s*\\text\{{\s))\s*(?:(?:[/*]|\\cdot)\s*)?\\text\{{(?P<words>(?:[^{{}}]|\{{[^{{}}]*\}})*)\}}{_POWER}"
)
_DEGREES_IN_FUNCTION = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*\{?\d\}?)?\s*[({]?\s*)(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)"
)
_QUALIFIER = re.compile(r"[,;]?\s*(?:\\text\{\s*)?\(?\b(?:for all|where|since|because)\b.*$", re.DOTALL)
_ARROW = re.compile(r"\\(?:implies|Rightarrow|Longrightarrow)(?![A-Za-z])")
_SUFFIX = r"\s*(?:st|nd|rd|th)\s*"
_ORDINAL = re.compile(
    rf"(?<=\d)\s*\^?\s*(?:\{{\s*\\text\{{{_SUFFIX}\}}\s*\}}|(?:\\text)?\{{{_SUFFIX}\}}|{_SUFFIX})(?![A-Za-z])"
)
_OR_ASIDE = re.compile(r"(?<=\d)\s*\(\s*(?:or|and)\b\s*([^()]*)\)")  # 0.6 (or 60\%)
_ROW_SPACING = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|e[mx]|[cm]m|in)\s*\]")
_UNION = re.compile(r"\\\{(?:(?!\\\}|[|<>]).)*\\\}(?:\s*\\cup\s*\\\{(?:(?!\\\}|[|<>]).)*\\\})+")
_BASIS = re.compile(
    r"\s*([-+]?)\s*(\d+(?:/\d+)?|\\frac\{\d+\}\{\d+\})?\s*(?:\\(?:hat|vec|bar)\s*)?\{?\s*([ijk])\s*\}?\s*"
)
_NESTED = re.compile(r"^\[((?:\s*\[[^\[\]()]*\]\s*,?){2,})\]$")
_INTERVAL = re.compile(r"([\[\]])([^\[\]()]+[,;][^\[\]()]+)([\[\]])")  # French notation: ]1,2] is (1,2]
_PREFIX = re.compile(
    r"^(?:[A-Za-z][A-Za-z ,']{0,80}\b(?:is|are|equals|equal to)\b"
    r"|[A-Za-z][A-Za-z ]{2,40}(?=:)|(?:(?:so|thus|hence|therefore),? )?we (?:get|have|find|obtain)\b"
    r"|(?:(?:so|thus|hence|therefore|the|our|final|correct|answer|option|choice|exactly)\b[,: ]*)+)\s*:?\s*(?=\S)",
    re.IGNORECASE,
)
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,])")


def normalize(text: str, other: str = "") -> str:
    """Normalise the notation of an answer: remove math delimiters, style and spacing commands, units, currency and
    surrounding prose. Answers with the same result differ only in notation or units; answers with different results may
    still be equal. Words behind a value are removed only if they are its unit, and words before it only if they
    introduce it, as "the total is" does (module ``units``). A letter that is a variable in ``other``, the answer to
    compare with, is not removed as a unit."""
    text = unwrap(re.sub(r"(?<=[\s{])(['\"])([A-Za-z][A-Za-z ]*)\1", r"\2", commands(text)))  # quoted words
    text = re.sub(r"(?<!\\)\$|\\[()\[\]]|\*\*|`", " ", text).replace("\\$", "").replace("$", "")
    text = unwrap(text)
    text = re.sub(r"\\text\{\s*(and|or)\s*\}|\b(and|or)\b", r" \1\2 ", text)
    text = re.sub(r"(?<!\\)%|\\text\{\s*(?:\\?%|per\s?cent)\s*\}|\bper\s?cent\b", r"\\%", text)
    half = r"\s*([ap])\.?\s?m\b\.?\s*"
    half = rf"(?i)(?<=\d)\s*(?:\\text\{{{half}\}}|{half})"  # p.m., PM
    text = re.sub(half, lambda of_day: f" {(of_day[1] or of_day[2]).lower()}m ", text).replace(":00 ", " ")
    text = _DEGREES_IN_FUNCTION.sub(r"\1\\frac{\2\\pi}{180}", text)
    text = _ORDINAL.sub("", _QUALIFIER.sub(_closed, _ARROW.split(text)[-1]))
    text = re.sub(rf"^((?:\\text\{{)?)\s*(?:the )?(\d{{1,2}})\s+(?:of )?({_MONTHS})\b", r"\1\3 \2", text)
    text = re.sub(r"(?<=\d)\s*(?:\\text\{\s*to\s*\}|\bto\b)\s*(?=\d)", ":", text)
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:[CF]\b|\\text\{\s*[CF]\s*\})?", " ", text)
    text = re.sub(
        r"\^\s*(?:\{(?:\s*\\prime)+\s*\}|\\prime(?![A-Za-z]))", lambda marks: "'" * marks[0].count("prime"), text
    )
    text = re.sub(
        r"\^\s*(?:\{\s*(?:\\text\{\s*T\s*\}|\\top|\\intercal)\s*\}|\\top|\\intercal|\\text\{\s*T\s*\})", "^T", text
    )
    text = re.sub(r"(\\text\{[^{}]*)\}\s*\\text\{", r"\1 ", text)
    text = _OR_ASIDE.sub(r" or \1", _TEXT_UNIT.sub(_without_text_unit, text))
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    text = " ".join(text.split()).rstrip(" .,;:")
    text = unwrap(_PREFIX.sub(lambda prefix: prefix[0] if denies(prefix[0]) else "", text))
    text = text if "\\" in text else _said_once(in_digits(text))
    variables = {letter for run in _SYMBOLS.findall(_UPRIGHT.sub("", other)) for letter in run}
    text = _TRAILING.sub(lambda unit: _without_unit(unit, variables), text).strip().rstrip("\\")
    text = re.sub(r"^<([^<>]*,[^<>]*)>$", r"(\1)", text)
    text = re.sub(
        r"\\\{\s*\\\}|^no (?:real )?solutions?$|^(?:the )?empty set$", r"\\emptyset", text, flags=re.IGNORECASE
    )
    roots = re.sub(r"\\sqrt\[([^\[\]]*)\]", "\\\\sqrt\x02\\1\x03", text)  # brackets of roots are no intervals
    text = _INTERVAL.sub(_with_round_brackets, roots).replace("\x02", "[").replace("\x03", "]")
    text = re.sub(r"^\((\w+)\)_", r"\1_", text)
    text = re.sub(r"(?<=\))\s*\^\s*(?:T|\{\s*T\s*\})$", "", text)  # (1, 2)^T is a column
    text = _NESTED.sub(_matrix, text)
    if "pmatrix" in other and text and not _BASIS.sub("", text):
        text = _column(text, size=other.count("\\\\") + 1)
    if _UNION.fullmatch(text):
        text = re.sub(r"\\\}\s*\\cup\s*\\\{", ", ", text)
    text = re.sub(r"^(.*)\\neq\s*\\pm\s*([^,;]+)$", r"\1\\neq \2, \1\\neq -\2", text)
    text = re.sub(r"(?<=\})\s*-\s*(?=\\\{)", r"\\setminus ", text)  # of sets
    text = re.sub(r"^([a-z])\s*\\neq\s*([^,;]+)(?:[,;]|\band\b)\s*([^,;<>=\\]+)$", r"\1\\neq \2, \1\\neq \3", text)
    text = re.sub(r"\\overline\s*\{\s*([A-Z]{2})\s*\}", r"\1", text)  # a segment
    text = re.sub(r"(\w+)(?:\s*\\|\s)choose\s*(\w+)", r"\\binom{\1}{\2}", text)
    script = r"(?:\{(\w+)\}|(\d+|[a-z]))"
    text = re.sub(rf"\bC_{script}\s*\^{script}", r"\\binom{\1\2}{\3\4}", text)
    text = re.sub(r"\\log_\{?e\}?(?![A-Za-z])", r"\\ln ", text)
    text = re.sub(r"(?<=\})\s*(?=\\binom)", r" \\cdot ", text)  # math-verify reads only the first of two factors
    return join_thousands(_fractions(text)).strip()


def _closed(qualifier: re.Match[str]) -> str:
    """Return what replaces a qualifier, a clause such as ``because ...`` at the end of an answer. That is the empty
    string or, if the qualifier begins inside ``\\text`` as in ``\\text{No, because } 2<3``, the closing braces that its
    removal leaves missing."""
    before = qualifier.string[: qualifier.start()]
    return "}" * (before.count("{") - before.count("}"))


def _without_text_unit(unit: re.Match[str]) -> str:
    words = re.sub(r"^\s*\((.*)\)\s*$", r"\1", unit["words"])
    return " " if names_unit(words) and not re.fullmatch(r"\s*(?:[ap]m)?\s*", words) else unit[0]


def _without_unit(unit: re.Match[str], variables: set[str]) -> str:
    words = unit["words"].strip()
    one_letter = re.fullmatch(r"([A-Za-z])(?:\s*\^.*)?", words)
    is_variable = one_letter and (one_letter[1] in variables or not (unit["gap"] or "^" in words))
    return unit[0] if is_variable or re.fullmatch("[ap]m", words) or not names_unit(words) else ""


def _with_round_brackets(interval: re.Match[str]) -> str:
    opening, inside, closing = interval.groups()
    return f"{'[' if opening == '[' else '('}{inside}{']' if closing == ']' else ')'}"


def _column(text: str, size: int) -> str:
    """Rewrite a sum of unit vectors such as ``i-2j`` as a column vector of ``size`` entries."""
    entries = {name: f"{sign}{value or 1}" for sign, value, name in _BASIS.findall(text)}
    body = "\\\\".join(entries.get(name, "0") for name in "ijk"[:size])
    return f"\\begin{{pmatrix}}{body}\\end{{pmatrix}}"


def _matrix(nested: re.Match[str]) -> str:
    """Rewrite ``[[1,2],[3,4]]`` as a matrix."""
    rows = re.findall(r"[\[(]([^\[\]()]*)[\])]", nested[1])
    body = "\\\\".join(row.replace(",", "&") for row in rows)
    return f"\\begin{{pmatrix}}{body}\\end{{pmatrix}}"


def letters(text: str) -> str:
    """Reduce an answer to a form in which equal texts are equal answers: without white space, without braces around
    single characters in sub- and superscripts, and with words of four or more letters in lower case."""
    text = re.sub(r"[A-Za-z]{4,}", lambda word: word.group().lower(), text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    return re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)


def split_top(text: str, separator: str) -> list[str]:
    """Split a formula at those matches of the regex ``separator`` that are outside of all brackets and braces."""
    parts, depth, start = [], 0, 0
    tokens = re.compile(
        rf"(?P<open>\\\{{|[({{\[]|\\begin)|(?P<close>\\\}}|[)}}\]]|\\end)|(?P<separator>{separator})|\\?.", re.S
    )
    for token in tokens.finditer(text):
        if token["open"]:
            depth += 1
        elif token["close"]:
            depth = max(depth - 1, 0)
        elif token["separator"] and depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    return [part.strip() for part in (*parts, text[start:])]


def nesting(text: str) -> int:
    """Return the nesting depth of brackets and braces."""
    depth = most = 0
    for char in re.findall(r"[()\[\]{}]", text):
        depth = depth + 1 if char in "([{" else max(depth - 1, 0)
        most = max(most, depth)
    return most


def commands(text: str) -> str:
    """Replace commands of equal meaning by one of them, Unicode symbols by commands, and spacing by blanks."""
    if not text.isascii():
        text = re.sub("\u221a\\s*(\\w+|\\([^()]*\\))", r"\\sqrt{\1}", text.replace("\u221b", "\\sqrt[3]"))
        text = ascii_digits(text.translate(_UNICODE))
    text = re.sub(r"\\verb\*?([^A-Za-z\s*])(.*?)\1", r"\2", text)
    for pattern, command in _PLAIN:
        text = pattern.sub(command, text)
    text = _ROW_SPACING.sub(r"\\\\", text)
    if "matrix" not in text:  # badly escaped JSON doubles backslashes
        text = re.sub(r"\\\\(?=(?:d?frac|sqrt|text|pi|boxed|left|right|infty|cdot|times)\b)", r"\\", text)
    text = re.sub(r"\\rm\s*\{|\{\\rm\b", r"\\text{", text)
    text = re.sub(r"(?<=\d),\\!\s*(?=\d{3}(?!\d))", ",", text)
    text = _STYLE.sub("", text)
    # 0.1666... is 0.1\\overline{6}
    text = re.sub(r"(\.\d{0,12}?)(\d{1,12}?)\2{2,}(?:\\l?dots|\.{3})", r"\1\\overline{\2}", text)
    text = re.sub(r"\\mathbb\s+([A-Z])", r"\\mathbb{\1}", text)
    for pattern, command in _COMMANDS:
        text = pattern.sub(command.replace("\\", r"\\"), text)
    text = re.sub(r"\\text\{\s*((?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp)\s*\}", r"\\\1 ", text)
    text = re.sub(r"\\operatorname\*?\{\s*a((?:sin|cos|tan)\s*\})", r"\\operatorname{arc\1", text)
    text = re.sub(r"\\operatorname\*?\{\s*([A-Za-z]+)\s*\}", r"\\\1 ", text)
    text = re.sub(r"\\(?:wedge|land)(?![A-Za-z])", " and ", re.sub(r"\\(?:vee|lor)(?![A-Za-z])", " or ", text))
    text = re.sub(r"(?:\\text\s*)?\{\s*([,:])\s*\}", r"\1", text)
    text = re.sub(r"(?<=\d)\.(?=\s*/)|^[\s$]*\\approx(?![A-Za-z])", "", text)
    text = re.sub(r"\\begin\{[bB]?(?:small)?matrix\}|\\begin\{array\}\{[^{}]*\}", r"\\begin{pmatrix}", text)
    text = re.sub(r"\\end\{(?:[bB]?(?:small)?matrix|array)\}", r"\\end{pmatrix}", text)
    text = re.sub(r"\\begin\{(cases|aligned)\}(.*?)\\end\{\1\}", _rows, text, flags=re.DOTALL)
    return _SPACE.sub(" ", text).strip()


def _rows(environment: re.Match[str]) -> str:
    """Rewrite a system of equations (``cases`` or ``aligned``) as a list of its lines separated by commas."""
    return ", ".join(row.replace("&", " ").strip(" ,") for row in environment[2].split("\\\\") if row.strip())


def unwrap(text: str) -> str:
    """Remove delimiters, boxes, bold and quotes around the whole answer, and a full stop at its end."""
    while True:
        inner = text.strip().rstrip(".,;").strip('`" ')
        inner = inner.strip("' ") if inner.startswith("'") else inner  # a quote; f' ends in a prime
        cores = (_core(inner, start, end) for start, end in _DELIMITERS)
        inner = next((core for core in cores if core is not None), inner)
        box = last_boxed(inner)
        inner = inner if box is None else box
        if inner == text:
            return text
        text = inner


def _said_once(text: str) -> str:
    """Reduce a number that is repeated in words, such as ``5 (five)``, to its digits."""
    twice = re.fullmatch(r"(\d+)\s*\(([A-Za-z -]+)\)", text)
    return twice[1] if twice and in_digits(twice[2]) == twice[1] else text


def _core(text: str, start: str, end: str) -> str | None:
    """Return the text between two delimiters, or None if they do not enclose the whole of ``text``."""
    core = text[len(start) : len(text) - len(end)]
    if not (core and text.startswith(start) and text.endswith(end)):
        return None
    if not start.endswith("{"):
        return None if start in core else core
    depth = 0
    for brace in re.findall(r"\\.|[{}]", core):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return None
    return core if depth == 0 else None


def join_thousands(text: str) -> str:
    """Rewrite ``12,500`` and ``12 500`` as 12500, but not inside brackets: ``(1,200)`` is a pair."""
    text = _SPACED_THOUSANDS.sub(lambda match: match.group().replace(" ", ""), text)
    if not re.search(r"[(\[{]", text.replace("\\frac{", "")):
        text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    return text


def without_choice(text: str) -> str:
    """Remove a choice letter before a value: ``(C) 27`` is 27; ``(C)`` alone is kept."""
    return re.sub(r"^(?:\([A-K]\)|\([a-k]\)(?=\s)|[A-K][.:)])\s*(?=[^\s,])", "", text)


def _fractions(text: str) -> str:
    """Normalise, in a formula, decimals such as ``.5``, fractions and roots without braces, and mixed fractions."""
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    text = re.sub(r"\\(frac|binom)\s*(\d)\s*(\d)", r"\\\1{\2}{\3}", text)
    text = re.sub(r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\d|[a-z])", r"\\sqrt\1{\2}", text)
    text = re.sub(r"(?<![\w^}.\\])(\d+(?:\.\d+)?)\s*\((?!\s*\\?p?mod\b)(?=[^(),]*\))", r"\1\\cdot (", text)  # 6(7)
    text = re.sub(r"(?<=\d)\)\s*\((?=-?[\d.]+\))", r")\\cdot (", text)
    text = re.sub(r"(?<!\d)(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{?|\((?=\d+\)$))(\d+)[)}]?", _repeating, text)
    mixed = r"(?<![\w.}^])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}"
    text = re.sub(mixed, _improper, text)
    return re.sub(r"(?<![\w.}^/])(\d+) (\d+)/(\d+)(?![\w.])", _improper, text)


def _improper(mixed: re.Match[str]) -> str:
    """Rewrite a mixed number as a fraction: the whole number 3 and 1/2 is 7/2."""
    whole, top, bottom = map(int, mixed.groups())
    return f"\\frac{{{whole * bottom + top}}}{{{bottom}}}"


def _repeating(decimal: re.Match[str]) -> str:
    """Rewrite a repeating decimal as a fraction: ``0.1\\overline{6}`` is (16-1)/90."""
    whole, start, period = decimal.groups()
    numerator = int(whole + start + period) - int(f"0{whole}{start}")
    return f"\\frac{{{numerator}}}{{{'9' * len(period)}{'0' * len(start)}}}"
