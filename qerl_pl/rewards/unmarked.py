"""Find the answer in a completion without a marker, and the end of the model's turn, in linear time."""

import re
from itertools import islice

from qerl_pl.rewards.answers import Marker, joined, marked_answer
from qerl_pl.rewards.thoughts import thoughts_of

_TAIL = 3000  # characters at the end of a completion that are searched for an unmarked answer
_ROLE = r"(?:user|human|system|developer|assistant|tool|observation|environment)"
_END_OF_TURN = re.compile(
    r"(?=<[|\uff5c/\w]|\[[/IE])(?:"
    # Matches a special token written with bars, such as <|im_end|>, that names the end of a text or turn, or the role
    # of another turn.
    "(?i:<[|\uff5c](?:im_end|endof(?:text|prompt)|end|return|call|(?:[a-z]{1,20}_)??eo[smt](?:_id)?"
    r"|end[_\u2581]of[_\u2581](?:text|turn|role|sentence|utterance|message)(?:_token)?"
    rf"|(?:[a-z]{{1,20}}_)??{_ROLE}(?:_end)?)[|\uff5c]>)"
    r"(?!\s{0,4}<\|start\|>assistant)"  # after such an end, the turn goes on in another channel of the Harmony format
    r"|</s>|<eos>|<eot>|<turn\|>|<end_of_(?:turn|utterance)>|\[/?INST\]|\[EOS\]"
    rf"|<\|(?:im_start|start_header_id|start_of_role|turn|start)\|?>(?={_ROLE})(?!(?<=<\|start\|>)assistant)"
    r"|<start_of_turn>(?:user|model))"
)
_NEXT_QUESTION = re.compile(
    r"^[#*_ \t]*(?:(?:Q|Question|Problem|Exercise|Human|User|Instruction)[ \t]*:"
    r"|(?:Question|Problem|Exercise)(?:[ \t]+#?\d+\b|[*_ \t]*$)"
    r"|(?:Next|New|Another|Second)[ \t]+(?i:question|problem|exercise)\b)",
    re.MULTILINE,
)
_STATED = re.compile(
    r"\b(?:answer(?:\s+to\s+[^.:\n]{1,40}?)?|correct (?:option|choice))"
    r"(?:\s+(?:is|are|would be|will be|should be|must be)\b(?:\s+(?:indeed|thus|therefore)\b)?"
    r"|\s*\**\s*[:=]|[ \t]*\**[ \t]*\n)"
    r"[\s:*]*(?:(?:\\\[|\$\$)\s*)?(?=(\\begin\{(?s:.*?)\\end\{\w+\}|\S[^\n]*))"
    r"|\b(?:option|choice)[ (*]{1,4}(?=([A-K])[ )*]{1,4}is\s+(?:the\s+)?(?:correct|right|answer))",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\.\s+(?=[A-Z])|\.\W*$")
_REASON = re.compile(r",\s+(?:because|since|as|which)\b.*|(?<=\S)\s+\((?!or\b)[a-z]+ [^()]*\)$", re.IGNORECASE)
# Matches text between math delimiters, or bold text that is not a heading.
_MATH = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)"
    # As in Pandoc's Markdown, a closing $ has no blank before it and no digit after it, so the "$5 and $" of two prices
    # is no formula.
    r"|(?P<money>(?<=\d)\$(?=[\s,.;)])|(?<!\\)\$(?=(?:<<[^<>]*>>)?[-.\d])(?!(?:\\.|[^$\\\n])*[^\s$\\]\$(?!\d)))"
    r"|(?<!\\)\$((?:\\.|[^$\\\n])+)\$"
    r"|\*\*([^*$\\\n]+)(?<!:)\*\*(?!:|[ \t]*\n\s*\S)",
    re.DOTALL,
)
# Matches the text after the name of a quantity that gives its value: "$x$ is 9", "$AB$ equals 5 cm", "$f$ is even."
_VALUE = re.compile(r"\s*(?:is|are|equals|must be|=)\s+(?:equal to\s+)?((?=[-+\u2212$]?[.\d])[^\n]+|[a-z]+\.?$)")
_MAX_WORDS = 3  # bold text with more words of at least three letters is a sentence and no answer
_MAX_QUESTIONS = 4  # limit on further questions ("Question: ...") that are examined; bounds the time
_ALONE = re.compile(r"[^\s:]+(?: [^\s:]+)?|[^A-Za-z:]*(?:[A-Za-z]{1,2}[^A-Za-z:]+)*[A-Za-z]{0,2}")


def after_thoughts(text: str) -> str:
    """Return the text after the last tag that closes thoughts; empty if the text ends within thoughts."""
    end, are_open = thoughts_of(text)
    return "" if are_open else text[end:]


def own_turn(text: str, marker: Marker, *, stated: bool) -> str:
    """Return the part of a completion up to the end of the model's turn. The turn ends at a special token such as
    ``<|im_end|>``, or at a further question ("Question: ...") after an answer. An answer is a text marked by
    ``marker``, such as "hash" for ``####``, or, if ``stated`` is True, a sentence such as "the answer is 5"."""
    if tags := [*_END_OF_TURN.finditer(text)]:
        end = next((tag for tag in tags if text[: tag.start()].strip()), None)
        text = _END_OF_TURN.sub("", text[: end.start()] if end else text)
    thoughts, are_open = thoughts_of(text)
    if are_open and not thoughts:
        return text
    for question in islice(_NEXT_QUESTION.finditer(text, thoughts), _MAX_QUESTIONS):
        before = text[thoughts : question.start()]  # an answer within the thoughts does not count
        if marked_answer(before, marker) or (stated and stated_answer(before)):
            return text[: question.start()]
    return text


def final_part(text: str) -> str:
    """Return the last ``_TAIL`` characters of the text after the thoughts; the empty string if thoughts were opened and
    never closed."""
    end, are_open = thoughts_of(text)
    return "" if are_open and not end else text[end:][-_TAIL:]


def stated_answer(text: str) -> str | None:
    """Return the answer that follows the last "answer is", "answer:" or heading "Answer", up to the end of the sentence
    or to a reason ("because ..."); None if there is none."""
    answers = [stated or option for stated, option in _STATED.findall(final_part(text))]
    if not answers:
        return None
    return _REASON.sub("", _SENTENCE_END.split(answers[-1], maxsplit=1)[0].strip(" *\t")) or None


def last_math(text: str) -> str | None:
    """Return the last formula between math delimiters or short text in bold; None if there is none. If the last such
    texts are separated only by ``,``, ``and`` or ``or``, they are returned as one text. If the last one is a name that
    is followed by its value, as in "$x$ is 9", the value is returned."""
    text = final_part(text)
    spans = []
    for match in _MATH.finditer(text):
        content = next(filter(None, match.groups())).strip()
        if match["money"]:
            spans.clear()  # an amount of money makes expressions before it no answers
        elif content and not (match[6] and len(re.findall("[A-Za-z]{3,}", content)) > _MAX_WORDS):
            spans.append((match.start(), match.end(), content))
    if not spans:
        return None
    value = _VALUE.match(text.rstrip(), spans[-1][1])
    if value and "=" not in spans[-1][2] and re.match(r"\\?[A-Za-z]", spans[-1][2]):
        return _SENTENCE_END.split(value[1], maxsplit=1)[0].strip()
    return joined(text, spans)


def answer_alone(text: str) -> str | None:
    """Return the text if it is a single line that contains only an answer, e.g. ``(D)``, ``x^2 + 2x`` or ``June 20``;
    else None."""
    text = text.strip()
    return text if len(text) <= 80 and not re.search(r"\n|\\boxed", text) and _ALONE.fullmatch(text) else None
