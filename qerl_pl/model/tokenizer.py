"""Load the tokenizer of a base model, and check that it fits the model and that its chat template works."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from qerl_pl.common.clock import CLOCK, template_clock
from qerl_pl.model.files import Checkpoint
from qerl_pl.model.hub import hub_answers, is_hub_name

EMBEDDING = "model.embed_tokens.weight"
FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
OF_PROCESSOR = ("chat_template.json", "processor_config.json")
"""Files in which processors of vision-language models have the chat template, if the tokenizer's files have none."""
TEMPLATES = "chat_templates"
"""Folder with chat templates in files ``NAME.jinja``, from which this program reads them; transformers itself reads
only the folder ``additional_chat_templates``."""
UNUSED = "[PAD{}]"
"""Names that GGUF files give to ids above the last token, which exist because the embeddings are padded."""
RESERVED = ("messages", "add_generation_prompt", "tokenize", "tools", "documents", CLOCK)
"""Variables of a chat template that this program sets itself, so the user's template arguments must not have these
names."""
PROBE = "What is 17 + 25? Reply: x = 42, {y: [3.5]}"
"""Text that encoding and decoding must not change; it has the characters of typical problems and answers."""


def load_tokenizer(path: str | Path, config: Mapping) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder with the given config.json. Raises ValueError if files are missing
    (transformers would silently build another tokenizer), or the tokenizer encodes ordinary text to tokens for which
    the model has no embedding. Tokens that were added to a tokenizer may lack an embedding, such as Gemma 3 1B's token
    for images: the model cannot sample them, and prompts that contain them are refused."""
    folder = Path(path)
    if not any(all((folder / name).is_file() for name in names) for names in FILES):
        raise ValueError(
            f"{path} has no tokenizer ({' or '.join(' with '.join(names) for names in FILES)}); copy it from the "
            "model's original folder"
        )
    if (file := folder / "config.json").is_file():
        try:
            AutoConfig.from_pretrained(path, trust_remote_code=False)  # which AutoTokenizer reads, too
        except Exception as error:  # validators of configurations raise errors of their own
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{file} describes no model that transformers knows: {reason}") from error
    try:
        tokenizer = read_tokenizer(path)
    except Exception as error:  # the tokenizers library raises plain Exception for malformed files
        raise ValueError(f"{path}: the tokenizer cannot be read: {_first_line(error)}") from error
    tokens = set(tokenizer.get_vocab().values())
    stored = Checkpoint(folder) if any(folder.glob("*.safetensors")) else None
    if stored is None or EMBEDDING not in stored or stored.shape(EMBEDDING)[0] == config["vocab_size"]:
        tokens -= set(tokenizer.added_tokens_decoder)
    highest = max(tokens, default=-1)
    if highest >= config["vocab_size"]:
        raise ValueError(
            f"{path}: the tokenizer has token {highest} and config.json says vocab_size {config['vocab_size']}; they "
            "are not of one model"
        )
    return tokenizer


def read_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or by its name on the hub. If its files have no chat template, the tokenizer gets
    that of a vision-language model's processor (``OF_PROCESSOR``) or, if there is none either, all those in the
    subfolder ``TEMPLATES`` of its folder, by name. Raises ValueError if ``path`` is a file."""
    if Path(path).is_file():
        raise ValueError(
            f"{path} is a file; expected a checkpoint's folder or a model's name on the hub. From Python, "
            "qerl_pl.base.prepared.prepared_base makes a folder of a GGUF file (docs/library.md)"
        )
    # The hub is asked only for names of the form OWNER/MODEL, and only if it answers soon, because its client would
    # otherwise retry for a minute.
    local = Path(path).is_dir() or not (is_hub_name(str(path)) and hub_answers())
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=local)
    if not tokenizer.chat_template:
        named = {file.stem: file.read_text(encoding="utf-8") for file in sorted(Path(path, TEMPLATES).glob("*.jinja"))}
        tokenizer.chat_template = next(
            filter(None, (_template_in(path, name, local) for name in OF_PROCESSOR)), named or None
        )
    return tokenizer


def _template_in(path: str | Path, name: str, local: bool) -> Any:
    """Return the chat template in a processor's file, or several by name; None if there is none."""
    file = cached_file(path, name, local_files_only=local, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return None
    try:
        settings = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    template = settings.get("chat_template") if isinstance(settings, dict) else None
    if isinstance(template, list):  # as tokenizer_config.json may have several
        return {entry["name"]: entry["template"] for entry in template}
    return template


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template by which prompts are made: the tokenizer's only one, or the one named default. Raises
    ValueError if there is neither."""
    name, template = tokenizer.name_or_path, tokenizer.chat_template
    if not template:
        raise ValueError(
            f"the tokenizer {name} has no chat template (chat_template.jinja, chat_template.json, or chat_template in "
            "tokenizer_config.json); use an instruction-tuned model's, or save a template as chat_template.jinja in "
            "the model's folder"
        )
    if isinstance(template, Mapping) and len(template) == 1:
        return str(next(iter(template.values())))
    if isinstance(template, Mapping) and "default" not in template:
        names = ", ".join(sorted(map(str, template)))
        raise ValueError(
            f"the tokenizer {name} has the chat templates {names}, and none is named default; save the one that "
            "prompts are to be made with as chat_template.jinja in the model's folder"
        )
    return str(template["default"] if isinstance(template, Mapping) else template)


def reads_clock(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template may write the date of its call (``strftime_now``) into prompts."""
    return bool(tokenizer.chat_template) and CLOCK in template_of(tokenizer)


def tokens_without_embedding(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> dict[int, str]:
    """Return the added tokens, text by id, for which the model in the folder ``path`` has no embedding."""
    file = Path(path, "config.json")
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    added = tokenizer.added_tokens_decoder.items()
    return {} if size is None else {token: str(text) for token, text in added if token >= size}


def check_text_survives(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Raise ValueError if encoding and decoding the text ``PROBE`` changes more than its white space."""
    tokens = tokenizer(PROBE, add_special_tokens=False).input_ids
    back = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    if "".join(str(back).split()) != "".join(PROBE.split()):
        raise ValueError(
            f"{path}: the tokenizer ({len(tokenizer)} tokens) loses text: {PROBE!r} comes back as {str(back)[:80]!r}; "
            "copy the tokenizer's files from the model's original folder"
        )


def check_same_vocabulary(tokenizer: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *, base: str) -> None:
    """Raise ValueError unless every token of the policy's tokenizer has the same text and id in the teacher's
    tokenizer, which may have more tokens. ``base`` is the teacher's name for the message. Names such as [PAD151936],
    which a policy from a GGUF file has for ids that no token uses, are not compared."""
    known = teacher.get_vocab()
    tokens = ((index, token) for token, index in tokenizer.get_vocab().items() if token != UNUSED.format(index))
    other = sorted((index, token) for index, token in tokens if known.get(token) != index)
    if other:
        index, token = other[0]
        there = f"is number {known[token]}" if token in known else "does not exist"
        raise ValueError(
            f"model.teacher.base is {base}, whose tokenizer is another: token {index} of the policy is {token!r}, "
            f"which {there} there, and {len(other) - 1} more differ; expected a model of the policy's own series"
        )


def check_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    *,
    system_prompt: str | None = None,
    arguments: Mapping[str, Any] = {},
    date: str | None = None,
) -> None:
    """Check the tokenizer's chat template by applying it to one user message, after a system message if
    ``system_prompt`` is given; raise ValueError if it does not work.

    The template has to read all variables that the user gives it (``arguments``), and the ``date``, in ISO form, if one
    is given. A generation prompt, or a mark such as Mistral's ``[/INST]``, must follow the user's message, or the
    policy would continue this message.
    """
    name, template = tokenizer.name_or_path, template_of(tokenizer)
    if date is not None and not reads_clock(tokenizer):
        raise ValueError(f"data.date is {date!r}, and the chat template of {name} writes no date; leave it out")
    unknown = [key for key in arguments if key in RESERVED or not re.search(rf"\b{re.escape(key)}\b", template)]
    if unknown:
        raise ValueError(
            f"data.template_arguments has {unknown}, which the chat template of {name} does not read; leave them out"
        )
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    messages = [*system, {"role": "user", "content": PROBE}]
    try:
        asked, told = (
            render(tokenizer, messages, date=date, **{"add_generation_prompt": value, **arguments})
            for value in (True, False)
        )
    except Exception as error:  # a chat template is a program, which may raise any error of Jinja or Python
        with_system = "" if system_prompt is None else " with a system turn (data.system_prompt)"
        raise ValueError(
            f"the chat template of {name} fails{with_system}: {type(error).__name__}: {_first_line(error)}"
        ) from error
    if PROBE not in asked:
        raise ValueError(f"the chat template of {name} leaves out the question; it makes {asked[:80]!r} of {PROBE!r}")
    heard = system_prompt is None or system_prompt.strip() in asked
    if not heard and not _reads_system(tokenizer, date, arguments):
        raise ValueError(f"the chat template of {name} leaves out the system turn (data.system_prompt)")
    if asked == told and not _answers_directly(tokenizer, messages, asked, date=date, **arguments):
        raise ValueError(
            f"the chat template of {name} has no generation prompt: add_generation_prompt changes nothing, so the "
            "policy would go on with the user's turn"
        )


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], *, date: str | None, **variables: Any
) -> str:
    """Apply the chat template to messages. If the template reads the clock (``strftime_now``), it gets ``date`` or, if
    that is None, the current time."""
    if date is not None:
        variables = {**variables, CLOCK: template_clock(date)}
    chat, template = [*map(dict, messages)], template_of(tokenizer)
    return str(tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, **variables))


def _reads_system(tokenizer: PreTrainedTokenizerBase, date: str | None, arguments: Mapping[str, Any]) -> bool:
    """Test whether the chat template writes a system prompt into the text. The prompt of the test has no commands like
    ``/no_think``, which some templates (SmolLM3's) remove."""
    text = "Use few words."
    messages = [{"role": "system", "content": text}, {"role": "user", "content": PROBE}]
    return text in render(tokenizer, messages, date=date, add_generation_prompt=True, **arguments)


def _answers_directly(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], asked: str, **variables: Any
) -> bool:
    """Return whether the chat template puts the assistant's text right after the user's message, as Mistral's does
    after ``[/INST]``, so that it needs no generation prompt."""
    answer = "It is 42."
    try:
        whole = render(tokenizer, [*messages, {"role": "assistant", "content": answer}], **variables)
    except Exception:  # a chat template is a program, which may raise any error of Jinja or Python
        return False
    marked = not asked.rstrip().endswith(PROBE)  # else nothing says where the user's turn ends
    return marked and whole.startswith(asked) and whole[len(asked) :].lstrip().startswith(answer)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
