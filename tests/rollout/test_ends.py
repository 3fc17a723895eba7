"""An engine reports for each completion whether it is finished or was cut at the limit. A report that does not agree
with the completion's tokens stops the run."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from qerl_pl.common.checks import CheckFailed
from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.decode import check_ends

WORDS = {f"w{token}": token for token in range(20)}
WRITER = Tokenizer(models.WordLevel(WORDS, unk_token="w0"))
WRITER.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=WRITER, eos_token="w7")
MOST = 4


def check(
    tokens: tuple[int, ...], *, finished: bool, stop: tuple[str, ...] = (), ends: tuple[int, ...] = (7, 9)
) -> None:
    """Check a group of a completion that ends correctly and the given one."""
    healthy = Completion((7,), (0.0,), True)
    group = [healthy, Completion(tokens, (0.0,) * len(tokens), finished)]
    sampling = Sampling(num_completions=2, max_tokens=MOST, stop=stop)
    prompts = [Prompt((3, 7), "")]
    check_ends([group], prompts, sampling, end_tokens=ends, tokenizer=TOKENIZER, engine="Engine")


@pytest.mark.parametrize(
    ("tokens", "finished", "stop"),
    [
        ((1, 7), True, ()),
        ((9,), True, ()),
        ((1, 2, 3, 7), True, ()),
        ((1, 2, 3, 4), False, ()),
        ((1, 12), True, ("w12",)),
        ((1, 1, 2), True, ("w1w2",)),
        ((2, 1, 1, 7), True, ("w1w2",)),
        ((1, 2, 3, 4), False, ("w12",)),
    ],
)
def test_right_ends_pass(tokens, finished, stop):
    check(tokens, finished=finished, stop=stop)


@pytest.mark.parametrize(
    ("tokens", "finished", "stop", "message"),
    [
        ((1, 2), True, (), "last token 2 is no end token .one of 7, 9. and completes no stop string"),
        ((1, 2, 3, 4), True, (), "last token 4 is no end token"),
        ((1, 2), True, ("w12",), "completes no stop string"),
        ((1, 2), False, (), "2 tokens as not finished; expected 4 tokens"),
        ((1, 2, 3, 7), False, (), "so it is finished"),
        ((1, 7), False, (), "so it is finished"),
        ((1, 2, 3, 12), False, ("w12",), "so it is finished"),
        ((1, 7, 2, 3), False, (), "goes on after the end token 7 in place 2"),
        ((7, 7), True, (), "goes on after the end token 7 in place 1"),
        ((12, 1, 7), True, ("w12",), "goes on after a stop string in place 1"),
    ],
)
def test_wrong_ends_stop_the_run_and_are_named(tokens, finished, stop, message):
    with pytest.raises(CheckFailed, match=f"Engine returned completion 1 of prompt 0.*{message}"):
        check(tokens, finished=finished, stop=stop)


def test_without_end_tokens_only_the_limit_ends_a_completion():
    with pytest.raises(CheckFailed, match=r"no end token .*there is none"):
        check((7, 1), finished=True, ends=())


def test_stop_strings_are_found_after_bytes_that_are_no_character():
    """A smiley of four byte tokens is a character until the next byte token, which begins another one and is followed
    by a word: then all five bytes are shown as replacement characters."""
    words = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"word": 256, "stop": 257, "<unk>": 258}
    writer = Tokenizer(models.BPE(words, [], byte_fallback=True, unk_token="<unk>"))
    writer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=writer)
    group = [Completion((*"😀".encode(), 0xF0, 256, *end), (), True) for end in ((257,), (256, 257))]
    sampling = Sampling(num_completions=2, max_tokens=9, stop=("stop",))
    check_ends([group], [Prompt((256,), "")], sampling, end_tokens=(), tokenizer=tokenizer, engine="Engine")
