"""Stop strings, such as ``</answer>``: end a completion at the token that completes one, like an end token."""

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, StoppingCriteria


@cache
# returns Any, because vLLM's type for tokenizers has more attributes than transformers'
def tokenizer_of(base: str) -> Any:
    """Load a checkpoint folder's tokenizer, cached, as loading a large one takes half a second."""
    return AutoTokenizer.from_pretrained(base, trust_remote_code=False)


def check_stop(stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for stop strings that cannot work: empty or repeated ones, the end-of-sequence token, strings
    that the tokenizer's tokens cannot produce, and strings that contain another stop string, which would always end the
    completion first."""
    for text in stop:
        if not text:
            raise ValueError("data.stop has an empty string, which would end every completion at its first token")
        if other := next((each for each in stop if each != text and each in text), None):
            raise ValueError(
                f"data.stop has {text!r}, which contains {other!r}, so it never ends a completion: remove it"
            )
        if text == tokenizer.eos_token:
            raise ValueError(f"data.stop has {text!r}, the tokenizer's end token, which ends every completion already")
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if text not in str(tokenizer.decode(ids, skip_special_tokens=False)):
            raise ValueError(f"data.stop has {text!r}, which the tokens of {tokenizer.name_or_path} cannot write")
    if len(set(stop)) < len(stop):
        raise ValueError(f"data.stop has a string twice: {list(stop)}")


class StopStrings(StoppingCriteria):
    """Stopping criterion for transformers' ``generate`` that ends a row when its completion, special tokens included,
    contains one of the strings in ``stop``. ``prompts`` are the token ids of each row's prompt, without padding."""

    def __init__(
        self, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]]
    ) -> None:
        self._stop, self._tokenizer = tuple(stop), cast(Tokenizer, tokenizer.backend_tokenizer)
        self._streams = [DecodeStream(ids=list(prompt), skip_special_tokens=False) for prompt in prompts]
        self._tails = [""] * len(prompts)
        # number of characters at the end of a text that are kept, because later tokens may complete them to a stop
        # string
        self._kept = max(map(len, stop)) - 1
        self._num_tokens = 0
        self.lengths: list[int | None] = [None] * len(prompts)
        """Tokens of each row's completion up to the end of its first stop string; None: it has none so far."""

    def __call__(self, input_ids: Tensor, scores: object, **_: Any) -> Any:
        """Return for each of B rows whether its completion so far contains a stop string, [B] bool. transformers calls
        this after each sampled token. ``input_ids`` [B, S] int64 has prompt and completion of each row, one token more
        than in the previous call."""
        self._num_tokens += 1
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if self.lengths[row] is not None:
                continue
            text = self._tails[row] + self._text_of(row, token)
            if any(each in text for each in self._stop):
                self.lengths[row] = self._num_tokens
            self._tails[row] = text[max(0, len(text) - self._kept) :]
        return torch.tensor([length is not None for length in self.lengths], device=input_ids.device)

    def _text_of(self, row: int, token: int) -> str:
        """Return the text that a token adds to a row's completion. If its bytes are no valid UTF-8, decoding all tokens
        again could give another text for earlier ones, and ``DecodeStream`` raises an error; then, as in vLLM, a new
        stream begins with this token, and the text so far stays as it is."""
        try:
            text = self._streams[row].step(self._tokenizer, token)
        except Exception as error:  # the tokenizers library has no type of its own for it
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            self._streams[row] = DecodeStream(skip_special_tokens=False)
            text = self._streams[row].step(self._tokenizer, token)
        return text or ""
