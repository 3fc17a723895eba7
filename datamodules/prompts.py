"""Lightning data module that turns the problems of a source into tokenised chat prompts for training and evaluation."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from transformers import PreTrainedTokenizerBase

from datamodules.decontaminate import hold_out, without_shared
from datamodules.loader import EvaluationLoader, TrainLoader, drawn_order, numbered
from datamodules.messages import chat_of, chat_text, check_template, find_special_tokens
from datamodules.sources import PromptSource, check_problems
from qerl_pl.common import ranks
from qerl_pl.common.checks import require_at_least
from qerl_pl.common.clock import today
from qerl_pl.common.phases import phase
from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.types import Problem, Prompt
from qerl_pl.model.stop import check_stop
from qerl_pl.model.tokenizer import (
    check_chat_template,
    read_tokenizer,
    reads_clock,
    template_of,
    tokens_without_embedding,
)

PROBLEMS = "the training problems (a data file, or the main branch of a data set on the hub)"
IN_ANY_ORDER = "the training problems in any order"
IN_OTHER_ORDER = "only the order of the training problems (does data.source read a set, or files in no fixed order?)"


@dataclass(eq=False)
class PromptDataModule(LightningDataModule):
    """Serves ``list[Prompt]``: shuffled and endless in training, once and in order in validation, test and prediction.

    A prompt that is too long is dropped and counted. It is never truncated, because it would lose its question or its
    instructions. A prompt is also dropped and counted if its problem has text that the tokenizer reads as a special
    token, for example as the end of the user's turn. A training problem whose question is also that of one of the
    source's validation problems is removed and counted. With ``held_out``, ``fit`` and ``validate`` validate on
    held-out training problems, and only ``test`` and ``predict`` use the source's validation problems, because a
    checkpoint that was chosen by its score on some problems looks better on these problems than it is.

    Args:
        source: source of the training and validation problems.
        tokenizer: folder or hub name of the policy's tokenizer; it must have a chat template.
        batch_size: training prompts per rollout (P), over all ranks.
        max_prompt_tokens: longest prompt in tokens, including the chat template.
        max_dropped_share: share of the prompts that may be dropped for their length, and share that may be dropped for
            special tokens; if more would be dropped, the run does not start.
        system_prompt: text of a system turn for problems without one; null adds none.
        question_template: text of the user turn; ``{question}`` is replaced by the question, other braces stay.
        template_arguments: further variables of the chat template, e.g. ``{enable_thinking: false}``; a variable that
            the template does not read is refused.
        date: date, in ISO form, that the chat template writes into prompts if it reads the clock (``strftime_now``);
            null takes today's. The command line keeps the date of a run's first start, so that a resumed run and
            evaluations of its checkpoints have the same prompts on any day and in any time zone and locale.
        stop: strings that end a completion in training and evaluation, e.g. ``["</answer>"]``, in addition to the
            model's end tokens; the string is part of the completion, which counts as finished. A string that can never
            end a completion is refused.
        show_prompt: number of training prompts, and of validation prompts, to print as the policy gets them, special
            tokens included, with the stop strings.
        held_out: number of training problems that are held out for validation; 0: the source's validation problems are
            used. They are chosen by a hash of the question, so they are the same in every run. Training problems that
            share 13 consecutive words with a held-out one are removed.
        val_limit: only this many of the source's validation problems, and of the held-out ones, are used, the first
            ones; null uses all. No training problem is removed or kept because of this limit.
        val_batch_size: prompts per validation batch on each rank.
        seed: seed of the order of training prompts.

    Attributes:
        num_dropped: number of prompts dropped for their length, by "train", "validation" and "held-out".
        num_with_special_tokens: number of problems dropped because the tokenizer reads some of their text as special
            tokens, by the same names.
        num_shared: number of training problems removed because a validation problem of the source has their question.

    Raises:
        ValueError: in ``setup``, if there is no data or no chat template, or too many prompts would be dropped.
    """

    source: PromptSource
    tokenizer: str
    batch_size: int = 32
    max_prompt_tokens: int = 256
    max_dropped_share: float = 0.01
    system_prompt: str | None = None
    question_template: str = "{question}"
    template_arguments: dict[str, Any] | None = None
    date: str | None = None
    stop: tuple[str, ...] = ()
    show_prompt: int = 0
    held_out: int = 0
    val_limit: int | None = None
    val_batch_size: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        check_template(self.question_template)
        if not 0 <= self.max_dropped_share <= 1:
            raise ValueError(f"data.max_dropped_share is {self.max_dropped_share}; expected 0 to 1")
        require_at_least(1, section="data.", batch_size=self.batch_size, val_batch_size=self.val_batch_size)
        require_at_least(0, section="data.", show_prompt=self.show_prompt, held_out=self.held_out)
        require_at_least(1, section="data.", val_limit=self.val_limit, hint=", or null for all")
        self.stop = tuple(self.stop)
        self._arguments = self.template_arguments or {}
        self.num_dropped: dict[str, int] = {}
        self.num_with_special_tokens: dict[str, int] = {}
        self.num_shared = 0
        self._train: list[Prompt] = []
        self._validation: list[Prompt] = []
        self._held_out: list[Prompt] = []
        self._inputs: dict[str, str] = {}
        self._columns: dict[str, str] = {}
        self._saved: dict[str, Any] = {}

    @phase("reading problems and making prompts")
    def setup(self, stage: str) -> None:
        """Read and tokenise the problems that a stage (such as "fit") needs. A second call does nothing."""
        reads_train = stage == "fit" or (stage == "validate" and self.held_out > 0)
        if self._validation and (self._train or not reads_train):
            return
        tokenizer = read_tokenizer(self.tokenizer)
        check_chat_template(tokenizer, system_prompt=self.system_prompt, arguments=self._arguments, date=self.date)
        if reads_clock(tokenizer):
            self.date = ranks.gather_values(self.date or today())[0]  # clocks of several machines may differ
            rank_zero_info(
                f"data: the chat template writes the date into prompts; in this run it is {self.date} on every day "
                "(data.date)"
            )
        check_stop(self.stop, tokenizer)
        if self.show_prompt and self.stop:
            rank_zero_info(f"data: completions also end at {', '.join(map(repr, self.stop))}")
        name = type(self.source).__name__
        validation = check_problems(self.source.validation(), name)
        self._validation = self._prompts(tokenizer, self._limited(validation, "validation"), "validation")
        if reads_train:
            train = check_problems(self.source.train(), name)
            settings = [self.system_prompt, self.question_template, self._arguments]
            self._inputs, self._columns = _digests(tokenizer, settings, train), _column_digests(train)
            train, self.num_shared = without_shared(train, validation)
            if self.num_shared and not train:
                raise ValueError(f"all {self.num_shared} training problems are also in validation")
            if self.num_shared:
                rank_zero_info(f"data: removed {self.num_shared} training problems that are also in validation")
            train, held_out = hold_out(train, self.held_out)
            if self.held_out:
                self._held_out = self._prompts(tokenizer, self._limited(held_out, "held-out"), "held-out")
            self._train = self._prompts(tokenizer, train, "train")

    @property
    def num_train_prompts(self) -> int:
        """Number of prompts of the training set."""
        return len(self._train)

    def some_train_prompts(self, num: int = 32) -> list[Prompt]:
        """Return the first prompts of the training set in the source's order, at most ``num``."""
        return self._train[:num]

    def train_dataloader(self) -> TrainLoader:
        """Create the endless loader of this rank's training batches. If this start resumes a run whose problems had
        other values in a column, which rewards may read, warn."""
        before = self._saved.get("columns", self._columns)  # checkpoints of earlier versions have none
        columns = sorted({name for name, _ in before.items() ^ self._columns.items()})
        if columns:
            rank_zero_warn(
                "this start changes the data: the training problems of the checkpoint had other values in "
                f"{', '.join(columns)}; rewards may read them"
            )
        return TrainLoader(self._train, self.batch_size, seed=self.seed, hint=self._hint(), **self._rank())

    def state_dict(self) -> dict[str, Any]:
        """Return digests of everything that prompts are made of (template, tokenizer, settings, problems) and of each
        column of the training problems. If the chat template writes the date, the date is returned, too."""
        return {"inputs": dict(self._inputs), "columns": dict(self._columns)} | (
            {} if self.date is None else {"date": self.date}
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the checkpoint's digests and date. If the prompts of the resumed run differ from the checkpoint's, the
        training loader's error says which of these changed."""
        self._saved = dict(state_dict)

    def _hint(self) -> str:
        """Return why the prompts differ from the checkpoint's: changed inputs, or the date; empty if unknown."""
        before = self._saved.get("inputs") or {}
        differ = [name for name, digest in self._inputs.items() if before.get(name, digest) != digest]
        if PROBLEMS in differ and IN_ANY_ORDER not in differ:
            differ[differ.index(PROBLEMS)] = IN_OTHER_ORDER
        changed = "".join(f"{name} changed; " for name in differ if name != IN_ANY_ORDER)
        date = self._saved.get("date")
        if changed or self.date is None or date == self.date:
            return changed
        if date is None:
            return (
                f"the chat template writes the date, here {self.date}, and the checkpoint has no date: set "
                "data.date to the day of the run's first start; "
            )
        return f"the chat template writes the date: the checkpoint's is {date}, data.date is {self.date}; "

    def more_prompts(self, rollout_index: int, batch: Sequence[Prompt]) -> Iterator[Prompt]:
        """Iterate over the training prompts that are in no rank's ``batch``, for example to replace prompts whose
        completions all earned the same reward. Every rank must call this method, because it gathers the batches; all
        get the same prompts. Their order depends only on the seed and the rollout index, and taking them does not
        change the epoch's batches."""
        served = list(chain.from_iterable(ranks.gather_values(tuple(batch))))
        taken = {(prompt.tokens, prompt.answer) for prompt in served}
        order = drawn_order(len(self._train), derive_seed(self.seed, "refill", rollout_index))
        others = (self._train[row] for row in order)
        return numbered((prompt for prompt in others if (prompt.tokens, prompt.answer) not in taken), served)

    def val_dataloader(self) -> EvaluationLoader:
        """Create the loader of this rank's share of the held-out prompts or, without any, of the validation prompts."""
        return EvaluationLoader(
            self._held_out if self.held_out else self._validation, self.val_batch_size, **self._rank()
        )

    def test_dataloader(self) -> EvaluationLoader:
        """Create the loader of this rank's share of the source's validation prompts, e.g. those of a benchmark."""
        return EvaluationLoader(self._validation, self.val_batch_size, **self._rank())

    def predict_dataloader(self) -> EvaluationLoader:
        """Create the loader of this rank's share of the source's validation prompts."""
        return self.test_dataloader()

    def _rank(self) -> dict[str, int]:
        return {"rank": self.trainer.global_rank, "num_ranks": self.trainer.world_size} if self.trainer else {}

    def _limited(self, problems: Sequence[Problem], side: str) -> Sequence[Problem]:
        if self.val_limit is not None and self.val_limit < len(problems):
            rank_zero_info(
                f"data: of {len(problems)} {side} problems only the first {self.val_limit} are used (data.val_limit)"
            )
        return problems[: self.val_limit]

    def _prompts(self, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], side: str) -> list[Prompt]:
        if not problems:
            raise ValueError(
                f"{type(self.source).__name__} gives no {side} problems; give it more rows, or another share of them"
            )
        problems = self._without_special_tokens(tokenizer, problems, side)
        settings = {"system_prompt": self.system_prompt, "question_template": self.question_template}
        chats = [chat_of(problem, **settings) for problem in problems]
        texts = [chat_text(tokenizer, chat, self._arguments, date=self.date) for chat in chats]
        rows = tokenizer(texts, add_special_tokens=False).input_ids  # the texts have the special tokens
        unknown = tokens_without_embedding(tokenizer, self.tokenizer)
        for row, problem in zip(rows, problems, strict=True) if unknown else ():
            token = min(unknown.keys() & set(row), default=None)
            if token is not None:
                raise ValueError(
                    f"the {side} prompt of {problem.question[:60]!r} holds token {token}, {unknown[token]!r}, for "
                    "which the model has no embedding; take it out of the problem or of the chat template"
                )
        check_lengths(
            [len(row) for row in rows], side, limit=self.max_prompt_tokens, max_dropped_share=self.max_dropped_share
        )
        prompts = [
            Prompt(
                tuple(row),
                problem.answer,
                text=text,
                messages=tuple(chat),
                row=problem.row,
                conversational=bool(problem.messages),
            )
            for row, problem, text, chat in zip(rows, problems, texts, chats, strict=True)
            if len(row) <= self.max_prompt_tokens
        ]
        self.num_dropped[side] = len(rows) - len(prompts)
        rank_zero_info(
            f"data: {len(prompts)} {side} prompts; dropped {self.num_dropped[side]} of more than "
            f"{self.max_prompt_tokens} tokens"
        )
        for prompt in prompts[: self.show_prompt]:
            shown = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in prompt.text)
            rank_zero_info(f"data: a {side} prompt of {len(prompt.tokens)} tokens, answer {prompt.answer!r}:\n{shown}")
        return prompts

    def _without_special_tokens(
        self, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], side: str
    ) -> list[Problem]:
        marked = find_special_tokens(tokenizer, problems)
        self.num_with_special_tokens[side] = len(marked)
        if marked:
            index, token = next(iter(marked.items()))
            example = f"{token!r} in {problems[index].question[:80]!r}"
            if len(marked) > min(int(self.max_dropped_share * len(problems)), len(problems) - 1):
                raise ValueError(
                    f"{len(marked)} of {len(problems)} {side} problems have text that the tokenizer reads as special "
                    f"tokens, e.g. {example}; remove it from the data, or raise data.max_dropped_share "
                    f"({self.max_dropped_share}) to drop these problems"
                )
            rank_zero_info(
                f"data: dropped {len(marked)} of {len(problems)} {side} problems that have text of special tokens, "
                f"e.g. {example}"
            )
        return [problem for index, problem in enumerate(problems) if index not in marked]


def _digests(
    tokenizer: PreTrainedTokenizerBase, settings: Sequence[Any], problems: Sequence[Problem]
) -> dict[str, str]:
    """Return digests of everything that training prompts are made of: template, tokenizer, settings and problems. The
    keys of the dict are the names of these parts in error messages."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    tokens = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    parts = [_digest(repr((problem.question, problem.answer, problem.messages))) for problem in problems]
    return {
        "the chat template": _digest(template_of(tokenizer)),
        "the tokenizer": _digest(tokens),
        "data.system_prompt, question_template or template_arguments": _digest(repr(settings)),
        PROBLEMS: _digest(" ".join(parts)),
        IN_ANY_ORDER: _digest(" ".join(sorted(parts))),
    }


def _column_digests(problems: Sequence[Problem]) -> dict[str, str]:
    """Return a digest of the values of each column in all problems, by the column's name. A value that is not of one
    of JSON's types is represented by its ``str``, without the address in memory that this may end with."""
    names = dict.fromkeys(name for problem in problems for name in problem.row)
    values = {name: [problem.row.get(name) for problem in problems] for name in names}
    return {
        str(name): _digest(json.dumps(column, skipkeys=True, default=lambda value: str(value).partition(" at 0x")[0]))
        for name, column in values.items()
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def check_lengths(lengths: Sequence[int], side: str, *, limit: int, max_dropped_share: float) -> None:
    """Check how many prompts are too long and would be dropped. ``lengths`` are the prompts' numbers of tokens, and
    ``side``, such as "train", names the prompts. Raises ValueError if a share of more than ``max_dropped_share``, or
    all, have more than ``limit`` tokens; the message says which limit would suffice."""
    num_long = sum(length > limit for length in lengths)
    may_drop = min(int(max_dropped_share * len(lengths)), len(lengths) - 1)
    if num_long > may_drop:
        enough = sorted(lengths, reverse=True)[may_drop]
        raise ValueError(
            f"{num_long} of {len(lengths)} {side} prompts ({num_long / len(lengths):.1%}) have more than "
            f"data.max_prompt_tokens={limit} tokens, and data.max_dropped_share={max_dropped_share} lets {may_drop} be "
            f"dropped; set data.max_prompt_tokens to {enough} or more (the longest prompt has {max(lengths)}), or "
            "raise data.max_dropped_share"
        )
