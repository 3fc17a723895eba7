"""Read what the text of a completion around its answer (in a box, after "####" or "the answer is") says about this
answer: that it is wrong, a bound or a supposition, one of several values, or a part of another value."""

import re

from qerl_pl.rewards.numbers import exact_number
from qerl_pl.rewards.units import unit_of

_BEFORE, _BEHIND = 120, 300  # numbers of characters in front of and behind an answer that are read
_NUMBER = r"-?(?:\d[\d,./]*\d|\d)"
_NOISE = re.compile(r"\\[()\[\] ,;!]|(?<!\\)\$|[*\"~{}\u201c\u201d]|\\(?:q?quad|text|mathrm|mbox)(?![A-Za-z])")
_FALSE = (
    r"(?:wrong|incorrect|false|untrue|invalid|impossible|mistaken|absurd|erroneous|inaccurate|nonsense|flawed|off by)"
)
_NOT_TRUE = (
    rf"(?:{_FALSE}|not (?:an? )?(?:true|right|correct|valid|the case|possible)|ruled out|excluded|rejected"
    r"|an? (?:\w+ )?(?:mistake|misprint|slip|typo|error|lie|trap|myth))"
)
# Matches a claim that a denial governs ("that the answer is"), with at most seven words.
_CLAUSE = r"\b(?:\s+(?!(?:but|so|then|hence|thus|because|since)\b)[A-Za-z=]+){0,7}"
# Matches text that denies the answer behind it, with at most four words in between ("is not the value of"), or that
# calls a claim false, unproven or a supposition ("it is wrong that the answer is").
_DENIED_BEFORE = re.compile(
    r"(?i)(?:(?:\b(?:not|never|cannot|except|excluding|without|wrong|incorrect|false|reject(?:s|ed)?|discard|rules? out"
    r"|exclude|disregard|ignore|wrongly|mistakenly|nowhere|ruled out|eliminate|differ(?:s|ent)? from|instead of"
    r"|(?:any|no|every)thing but|all but)|n't)\b(?:\s+(?!(?:but|only|just|so|then|hence|thus|therefore|because|since"
    r"|and|we|it|is|are|was|were|get|find|gives?)\b)[A-Za-z]+){0,4}|\\neq?|\\not\s*=|\u2260"
    rf"|(?<!or )\b{_FALSE}\s*:|(?<!not )(?<!n't )\b{_NOT_TRUE} (?:that|(?<!possible )to [a-z]+"
    rf"|for(?=[^.,;]* (?:be|equal)\b)){_CLAUSE}|(?:\b(?:not|never|cannot|no|nobody|nothing|whether)\b|n't\b)"
    r"(?:\s+(?!hard|difficult|doubt|surpris|wonder|coincid|obvious|clear|trivial|immediate|question|secret|so\b|but\b"
    rf"|{_FALSE})[A-Za-z]+){{0,5}}? (?:that|think|believe|say|whether){_CLAUSE}"
    rf"|\b(?:an?|the|one) (?:\w+ )?{_FALSE} (?:answer|value|result|solution|guess|estimate|choice) (?:is|was|\w+ be)\b"
    r"|\b(?:no|nobody|none)\b(?: \w+){0,3} (?:should|would)(?: [a-z]+){1,2}"
    r"|(?<!no )(?<!a )(?<!without )\bdoubt(?: [a-z]+){0,4}"
    r"|(?:^|[.!?]\s|\n)\s*(?:suppos\w+|assum\w+|try(?:ing)?|imagine|only (?:for|if|when|in))\b"
    r"(?:(?!\b(?:gives?|yields?|we (?:get|find))\b)[^,.:;!?\n]){0,60})"
    r"[\s(\[]*$"
)
# Matches text that makes the answer behind it a bound or a part of a calculation. In a condition, a bound is an answer:
# "f is increasing if x is greater than 5".
_PART_BEFORE = re.compile(
    r"(?i)(?:(?<!no more )(?<!no less )(?<!no fewer )\bthan|(?<!\\)\b(?:exceeds|contradicts|twice|half(?: of)?"
    r"|nor|triple|double(?: the)?|minus|plus|times|answer is at (?:least|most)"
    r"|(?:digits?|divisors?|factors?|multiples?) of"
    r"|the (?:negative|opposite|reciprocal|inverse|square|cube|\w+ root|logarithm|complement) of"
    r"|(?:closest|nearest) to)"
    rf"|\b(?:between|(?:any|some)where from) {_NUMBER} (?:and|to)) $"
)
_CONDITION = re.compile(r"\b(?:if|when\w*|where|for|provided)\b[^.,;]*$", re.IGNORECASE)
_OTHER_CASE = re.compile(rf"[,;.] (?:\w+ )?(?:if|for|when)\b[^.\n]{{0,40}}(?:\bis|\bget|\bgives?|=) {_NUMBER}", re.I)
# Matches text that makes the answer before it a question, a bound, a part of a calculation or one of two cases.
_PART_BEHIND = re.compile(
    r"(?i)[\s)\]]*(?:\?|would\b|or (?:so|more|less|fewer|higher|greater)\b|up to an?\b"
    r"|,? ?(?:(?:or )?(?:maybe|perhaps)|or is)\b(?![^.\n]*\\boxed)|does(?: not|n't)\b"
    r"|but (?:at|no|not) (?:most|more|less)\b|squared\b|cubed\b|factorial\b|(?:minus|plus|(?:divided|multiplied) by)\b"
    rf"|(?:times|x|(?:less|more|fewer) than) {_NUMBER}|unless\b|[^.\n]{{0,60}}(?<!since )(?<!because )\botherwise\b"
    rf"|(?:if|when|for)\b[^.\n]{{0,60}}?\b(?:and|but|or) {_NUMBER} (?:if|when|for|from)\b)"
)
_IS = r"(?:(?:is|was|would be|seems|turns out to be|must be|can(?:not|'t)? be|isn't)\s+|(?<=\w)'s\s+)"
# Matches what a text behind a wrong answer says of it, or of who found it.
_ERRS = re.compile(
    rf"(?i)^(?:[\s,]*(?:and|but|which|that|it)\b)*\s*{_IS}(?:extraneous|not (?:the|my|our|it|what))\b"
    rf"|{_IS}(?:also |\w+ly )?{_NOT_TRUE}\b(?!\s+(?:to|that|for)\b)"
    r"|(?:can(?:not|'t) be|isn't|wasn't) (?:the|right|correct|true|it)\b"
    r"|(?:^|but|yet)[\s(,-]*(?:wrong|incorrect)\b(?! \w{3,}s\b)"  # "5 wrong answers" is a number of them
    r"|(?:does not|doesn't|did not|didn't|cannot|can't) (?:work|hold|fit|satisfy|match)\b"
    r"|^(?:,? (?:which|but|it))? *fails\b"
    r"|(?<!n't )(?<!not )\b(?:forgets?|forgot|mis(?:read|counts?|counted)|over(?:counts?|looks?)|neglects?"
    r"|double[- ]counts?|too (?:large|small|big|high|low|many|few)(?! to)|violates?|contradict\w*|no (?:solution|such)"
    r"|neither (?:is|was|of|works))\b"
)
_SENTENCE_END = re.compile(r"(?<=[.!?;:\u2014])\s+|\n+")
_REASON = re.compile(r"\b(?:because|since|as|although|though)\b|[,(] (?:not|where)\b")
_CONTRAST = re.compile(r"\b(?:but|yet|though|although|however|unfortunately)\b,? ?|(?:it|s?he|they) \w+n't\b", re.I)
_POINTS_BACK = re.compile(r"(?:it(?! would be| may| might)|th(?:is|at|ese|ose)|I)\b", re.I)
_SUBJECT = re.compile(r"(?:\w+,? )?(?:it|this|that|I|we|s?he|they)\b", re.I)
# Matches answers that deny, and sentences behind them that repeat the denial of the question: "No, it is not possible".
_DENIAL = re.compile(rf"(?i)\W*(?:\\text\w*\W*)?(?:no|not|none|never|{_FALSE})\b")
_OF_THE_QUESTION = re.compile(rf"[\s,:(-]*(?:it|this|that|the (?!answer\b)\w+) ?{_IS}", re.IGNORECASE)
# Matches words of a claim that may be another's, may be uncertain, or holds for another case.
_WEAK = re.compile(
    r"(?i)\b(?:would have|might|tempt\w*|guess\w*|perhaps|maybe|claims?|says?|said|writes?|wrote|thinks?"
    r"|thought|believes?|students?|at (?:least|most)|naive\w*|at first|initially)\b[^.!?\n]*$"
)
_CORRECTION = re.compile(
    r"(?i)(?:(?:no,? |but )?(?:hmm+|wait|oops|oh|actually|correction|sorry|hold on|on second thought|scratch|edit)|no,"
    r"|let me re\w+|I made|I take)(?!\w)"
)
# Matches a number that is stated as the answer in words, and further numbers that a text adds to an answer.
_STATED = re.compile(
    r"(?i)(?:\b(?:answer|(?:correct|right|true|actual) \w+)(?: is| should be|:)"
    rf"|\b(?:it|th(?:is|at)|which) should (?:be|have been)) ({_NUMBER})"
)
_MORE = re.compile(
    rf"(?i)(?:, {_NUMBER})*,? (?:and|or) (?:[a-z]\s*=\s*)?{_NUMBER}(?=\s*$|\.\s|\.$)"
    rf"|[^.\n]{{0,20}}?\b(?:and|or|but|though) (?:[a-z]\s*=\s*)?{_NUMBER},? "
    r"(?:works?|fits|as well|too|(?:is|are) (?:also|just as|equally|an?|another))\b"
)
_SCALE = re.compile(
    r" ?(?:(?:(?:dozen|gross|hundred|thousand|[mbtr]+illion)s?|(?:halve|third|fourth|fifth|eighth)s)(?![\w-])"
    r"|and (?:a|one) (?:half|third|quarter)\b)"
)
# The first alternative matches "feet 4 inches".
_AMOUNTS = re.compile(r"[A-Za-z]+(?:,? (?:and )?\d+ [A-Za-z ]+)?(?! *[\w/])|[A-Za-z /^]+")
# What ends the part of a formula around a box, and what in this part gives the box another value.
_VALUE = r"(?:boxed|pi|sqrt|[cdt]?frac|cdot|times|div|circ|log|ln|sin|cos|tan)(?![A-Za-z])"
_PART_END = re.compile(rf"[=<>,;&_%$\n]|\\(?!{_VALUE})(?:[A-Za-z]+|.)|(?<![\\A-Za-z])[A-Za-z]{{2,}}")
_OPERATOR_BEFORE = re.compile(
    r"(?:(?<!-)-|\d|(?<![A-Za-z])[A-Za-z]|[\w)}]\s*[+*/]\s*|\}\s*:\s*|\^\s*\{?|\\(?:cdot|times|div|log|ln|sin|cos|tan)\s*"
    r"|\\(?:sqrt(?:\[\d+\])?|[cdt]?frac(?:\s*\{(?:[^{}]|\{[^{}]*\})*\})?)\s*\{\s*)$"
)
_OPERATOR_BEHIND = re.compile(
    rf"\d|\s*(?:\^\s*\{{?\s*(?:-?\d|\\|[a-z]\b)|:\s*\\boxed|\\(?!boxed){_VALUE})"
    r"|(?:!|[A-Za-z]\b|\s*[-+*/]\s*[\d\\])(?=[^$=\n]*(?:\$|\\[)\]]))"
)
_FILLED_IN = re.compile(r"(?<![\w^.+*/-])[\d.]+\s*=[^=]*$")  # "15 = 3 times [box]"
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{([^{}]*)\}")


def is_denied(text: str, start: int, end: int, answer: str) -> bool:
    """Tell whether the text around ``answer``, at ``text[start:end]``, denies it or takes it back, or makes it a bound,
    a supposition, one of several cases or a part of a calculation."""
    before, behind = _plain(text[max(0, start - _BEFORE) : start] + " "), _behind(text, end)
    is_part = _OTHER_CASE.match(behind) if _CONDITION.search(before) else _PART_BEFORE.search(before)
    if is_part or _DENIED_BEFORE.search(before) or _PART_BEHIND.match(behind):
        return True
    return is_withdrawn(before, text[end:], answer)


def is_withdrawn(before: str, behind: str, answer: str) -> bool:
    """Tell whether the text behind an answer takes the answer back: by a contrast ("but it ..."), by calling it wrong
    or naming an error ("this double counts"), or by a correction ("wait, ...") that does not lead to the same answer.
    Of a long text, only the beginning and the end are read."""
    behind = behind if len(behind) <= 2 * _BEHIND else f"{behind[:_BEHIND]}\n{behind[-_BEHIND:]}"
    own, *later = _SENTENCE_END.split(_plain(behind))
    following = next(filter(re.compile(r"\w").search, later), "")
    weak = _WEAK.search(before)
    contrasts = [*_CONTRAST.finditer(own), *filter(None, [_CONTRAST.match(following)])]
    if any(weak or _POINTS_BACK.match(contrast.string, contrast.end()) for contrast in contrasts):
        return True
    about = [own, following if _SUBJECT.match(following) else ""]
    if _DENIAL.match(answer):
        about = [sentence for sentence in about if not _OF_THE_QUESTION.match(sentence)]
    if any(_ERRS.search(_REASON.split(sentence)[0]) for sentence in about) or (weak and _ERRS.search(own)):
        return True
    again = rf"(?<![\d.]){re.escape(answer[:_BEHIND])}[^\d]*$|\b(?:yes|indeed|confirm\w*)\b"
    corrections = [place for place, sentence in enumerate(later) if _CORRECTION.match(sentence)]
    return bool(corrections) and not re.search(again, " ".join(later[corrections[0] :]), re.IGNORECASE)


def stated_anew(text: str, end: int, answer: str) -> str | None:
    """Return the number that the text from ``end`` on states as the answer, if it differs from the number ``answer``
    before it; else None."""
    stated = _STATED.search(_behind(text, end))
    known = exact_number(answer) if stated else None
    return stated[1] if known and stated and exact_number(stated[1]) != known else None


def in_context(text: str, start: int, end: int, content: str) -> str:
    """Return the content of the box ``text[start:end]`` with what changes its value: the formula around it, as in
    ``\\boxed{9}\\pi``, or units and amounts behind it ("5 dozen"). In "3 times [box] = 15" the text around the box does
    not change the content."""
    before, right = text[max(0, start - _BEFORE) : start], text[end : end + _BEFORE]
    left = _PART_END.split(before)[-1]
    changes, stop = _OPERATOR_BEFORE.search(left) or _OPERATOR_BEHIND.match(right), _PART_END.search(right)
    if changes and "=" not in content and not (stop and stop[0] == "=") and not _FILLED_IN.search(before):
        left, right = (_BOX.sub(r"\1", side) for side in (left, right[: stop.start()] if stop else right))
        touches = re.search(r"[\w)}]\s*$", left) or re.match(r"\s*\d", right)
        bare = re.fullmatch(r"[\d.,]+|[A-Za-z]", content) and not touches
        return f"{left}{content if bare else f'({content})'}{right}".strip(" .")
    behind = _behind(text, end)
    more = _MORE.match(behind)
    values = re.findall(_NUMBER, more[0]) if more else []
    if values and exact_number(content) != exact_number(values[-1]):
        return ", ".join([content, *values])
    scale, amount = _SCALE.match(behind), _AMOUNTS.match(behind.strip())
    words = re.split(r",? (?:and )?\d+ ", amount[0].strip()) if amount else []
    units = [unit_of(part) for part in words]
    same = units and units[0] and all(unit and unit.per(units[0]) for unit in units)
    return f"{content} {scale[0].strip() if scale else amount[0] if amount and same else ''}".strip()


def _behind(text: str, end: int) -> str:
    """Return the first ``_BEHIND`` characters of the text behind an answer, without a word or number that this limit
    cuts."""
    behind = text[end : end + _BEHIND]
    return _plain(behind if len(text) <= end + _BEHIND else re.sub(r"\S*$", "", behind))


def _plain(text: str) -> str:
    """Remove delimiters of formulas, Markdown and quotes from a text."""
    return re.sub(r"[ \t]+(?=[,.;:!?)])", "", re.sub(r"[ \t]+", " ", _NOISE.sub(" ", text)))
