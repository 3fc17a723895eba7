"""Use a GGUF file (of llama.cpp or Ollama) as the base model of a run: dequantise it once into a checkpoint folder in
the cache."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import transformers
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from qerl_pl.base.cache import made_once
from qerl_pl.common.files import allow_reading, write_whole
from qerl_pl.common.packages import not_installed
from qerl_pl.common.phases import phase
from qerl_pl.model.files import read_json
from qerl_pl.quant.families import check_family
from qerl_pl.quant.output import new_folder

if TYPE_CHECKING:
    from gguf import GGUFReader

MAGIC = b"GGUF"
RECORD = "gguf.json"
"""Name of a JSON file in a checkpoint folder that was made from a GGUF file, and in copies of that folder. It has the
GGUF file's name, its average bits per weight, and the share of weights stored in each GGUF type."""
VERSION = 2  # version of this conversion, part of the key under which its result is cached
BYTES_PER_WEIGHT = 6
"""Peak bytes of host memory per weight of the model that the conversion of a GGUF file takes: 2 for the whole model in
bfloat16, plus 4 for the fp32 copy of one tensor, which may have most of the weights."""
SAME_MATRIX = 0.2
"""Limit on |E - H| / |H| for the embeddings E and the output head H of a GGUF file. Below it, both are taken for one
tied matrix, stored at two precisions: rounding to 2 bits per weight causes about this difference, while two different
matrices differ by more than 1."""
ROPE_TENSOR, ROPE_TYPE = "rope_freqs.weight", ".rope.scaling.type"
"""Tensor name and metadata key by which a GGUF file says that the model scales its rotary positions, as Llama 3.1 and
models with YaRN do."""
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>")
"""Tokens that end a turn or a text. A GGUF file names only one end token, although a model may have several. Not listed
is </s>: it ends the texts of models whose files name it, and is an HTML tag in the vocabularies of Qwen and Gemma."""
SPLIT = "tokenizer.ggml.pre"
"""Metadata key with the name of the rule by which text is split before bytes are merged to tokens."""
DIGITS_APART = ("smollm", "refact", "starcoder")
"""Names of rules that split text as GPT-2's tokenizer does, but make each digit a part of its own."""
AS_GPT2 = ("gpt-2", "olmo")
"""Names of rules that split text as GPT-2's tokenizer does."""
_CONVERTING = threading.Lock()  # held while ``gguf.GGUFReader`` is replaced
BLOCK = re.compile(r"blk\.(\d+)\.")
"""Beginning of the names of a decoder block's tensors in GGUF files, with the block's index."""
VISION = ("v.", "mm.")
"""Beginnings of the names of a vision model's tensors in GGUF files."""
NOT_READ = {
    "phi3": ("attention.sliding_window", "sliding_window"),
    "qwen3": ("attention.key_length", "head_dim"),
    "qwen3_moe": ("expert_feed_forward_length", "moe_intermediate_size"),
}
"""Metadata of a GGUF file that transformers does not read, by ``model_type``: the metadata key without the
architecture's name, and the key of config.json for which transformers takes a default value."""


def is_gguf(base: str | Path) -> bool:
    """Return whether ``base`` is a GGUF file, by its suffix or by its first four bytes, because Ollama's files have no
    suffix."""
    path = Path(base)
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def gguf_folder(file: str | Path) -> Path:
    """Return the checkpoint folder in the cache that holds a GGUF file's model in bfloat16, with its tokenizer and chat
    template; create the folder if it does not exist. Logs the bits per weight of the file."""
    path = Path(file)
    _check(path)

    def make(output: Path) -> None:
        with phase(f"dequantising {path.name}"):
            _dequantize(path, output)

    folder = made_once(path, path.stem, {"from": "gguf", "version": VERSION}, make)
    _say_once(f"{path} is read from {folder}: {described(folder)}")
    return folder


@functools.cache
def _say_once(text: str) -> None:
    rank_zero_info(text)


def described(folder: Path) -> str | None:
    """Describe in one sentence the precision from which a folder's weights were dequantised; None if the folder was not
    made from a GGUF file."""
    if not (folder / RECORD).is_file():
        return None
    record = read_json(folder / RECORD)
    types = ", ".join(f"{share:.0%} {name}" for name, share in record["share_by_type"].items() if share > 0.005)
    return f"weights of {record['bits_per_weight']:.2f} bits on average ({types}), dequantised to bfloat16"


def _check(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"model.base: there is no file {path}")
    with path.open("rb") as file:
        if (start := file.read(len(MAGIC))) != MAGIC:
            raise ValueError(f"model.base: {path} starts with {start!r}; expected a GGUF file, which starts with GGUF")
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ValueError(f"model.base: {path} is a GGUF file, and {not_installed('gguf')}") from error


def _dequantize(path: Path, output: Path) -> None:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # numpy's, about a map beyond the file's end
        raise ValueError(f"model.base: {path} cannot be read; it is cut short or damaged ({error})") from error
    _check_contents(reader, path)
    weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
    needed, free = BYTES_PER_WEIGHT * weights, psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"model.base: dequantising {path} needs {needed / 2**30:.1f} GiB of host memory, {free / 2**30:.1f} GiB "
            "are free; use the model's 16-bit checkpoint"
        )
    rank_zero_info(f"{path} is dequantised once, into {output}")
    with new_folder(output) as folder, _read_once(reader, path):
        try:
            _convert(reader, path, folder)
        except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300].replace(f"{folder}", "its model") or type(error).__name__
            raise ValueError(f"model.base: {path}: {reason}") from error


@contextmanager
def _read_once(reader: GGUFReader, path: Path) -> Iterator[None]:
    """Within this context, make ``gguf.GGUFReader`` return ``reader`` for the file ``path``. transformers opens it for
    the configuration, the tokenizer and the weights, and reading a vocabulary of 150,000 tokens takes seconds each
    time. Other threads that convert a file wait."""
    import gguf

    with _CONVERTING:
        original = gguf.GGUFReader
        gguf.GGUFReader = lambda file, *args: reader if Path(file) == path.absolute() else original(file, *args)
        try:
            yield
        finally:
            gguf.GGUFReader = original


def _convert(reader: GGUFReader, path: Path, folder: Path) -> None:
    where: dict[str, str] = {"pretrained_model_name_or_path": str(path.parent.absolute()), "gguf_file": path.name}
    config = _completed(AutoConfig.from_pretrained(**where), reader)
    config.save_pretrained(folder)
    check_family(folder)
    tokenizer = _splitting(AutoTokenizer.from_pretrained(**where), reader, path)
    # Without ``dequantize=True``, transformers from 5.18 on keeps the weights packed where it has a kernel for them;
    # older releases always unpack.
    packing = getattr(transformers, "GgufConfig", None)
    unpack = {} if packing is None else {"quantization_config": packing(dequantize=True)}
    options = {"config": config, "dtype": torch.bfloat16, "output_loading_info": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(**where, **unpack, **options)
    read, loading = loaded
    _check_all_read(read, loading["missing_keys"], reader)
    model = _unquantized(read)
    known, fields = tokenizer.get_vocab(), reader.fields
    named = [fields[key].contents() for key in END_KEYS if key in fields]
    ends = sorted({*named, *(known[token] for token in ENDS if token in known)})
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        allow_reading(file)
    tokenizer.save_pretrained(folder)
    write_whole(folder / RECORD, json.dumps(_record(reader, path), indent=1) + "\n")


def _check_contents(reader: GGUFReader, path: Path) -> None:
    """Raise ValueError if a GGUF file is one of several parts, is cut short, or scales its rotary positions: a scaling
    that transformers would silently ignore."""
    parts = reader.fields.get("split.count")
    if parts is not None and (count := int(parts.contents())) > 1:
        raise ValueError(
            f"model.base: {path} is one of {count} parts; join them (llama-gguf-split --merge FIRST_PART WHOLE.gguf)"
        )
    end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors), default=0)
    if end == 0 or end > path.stat().st_size:
        raise ValueError(
            f"model.base: {path} has {path.stat().st_size} bytes and its tensors end at {end}: it is cut short"
        )
    scaled = [tensor.name for tensor in reader.tensors if tensor.name == ROPE_TENSOR]
    scaled += [name for name in reader.fields if ROPE_TYPE in name and reader.fields[name].contents() != "none"]
    if scaled:
        raise ValueError(
            f"model.base: {path} scales its rotary positions ({scaled[0]}), which transformers does not read from GGUF "
            "files; use the model's safetensors checkpoint"
        )


def _splitting(tokenizer: Any, reader: GGUFReader, path: Path) -> Any:
    """Make a tokenizer split text by the rule that its GGUF file names, if transformers, which has read the file, took
    GPT-2's rule instead; changes ``tokenizer`` and returns it. Warns if the rule is unknown."""
    rule = reader.fields[SPLIT].contents() if SPLIT in reader.fields else "default"  # as llama.cpp calls it
    backend = tokenizer.backend_tokenizer
    if rule in AS_GPT2 or not isinstance(backend.pre_tokenizer, ByteLevel):
        return tokenizer
    if rule in DIGITS_APART:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    else:
        rank_zero_warn(
            f"model.base: {path} splits text by the rule {rule!r}, which transformers does not know: it splits text as "
            "GPT-2 does, so some texts have other tokens than in llama.cpp; use the model's safetensors checkpoint"
        )
    return tokenizer


def _completed(config: PretrainedConfig, reader: GGUFReader) -> PretrainedConfig:
    """Set the values in ``NOT_READ``, which transformers left at a default in the configuration of a GGUF file's model;
    changes ``config`` and returns it."""
    if config.model_type in NOT_READ:
        key, name = NOT_READ[config.model_type]
        field = reader.fields.get(f"{reader.fields['general.architecture'].contents()}.{key}")
        if field is not None:
            setattr(config, name, int(field.contents()) or None)  # 0 means that there is no window
    return config


def _check_all_read(model: PreTrainedModel, missing: Collection[str], reader: GGUFReader) -> None:
    """Raise ValueError if transformers found no weights in a GGUF file for parameters of the model, whose names are
    ``missing``, and gave them random values; or if the file has weights that the model lacks, such as biases or factors
    of rotary positions. Weights of a vision model, which files of Ollama may contain, and of blocks for multi-token
    prediction after the model's last block are not counted: the model need not have them."""
    wrong = ""
    if missing:
        wrong = f"it has no weights for {min(missing)}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
    else:
        blocks = range(model.config.num_hidden_layers)
        stored = sum(int(tensor.n_elements) for tensor in reader.tensors if _is_of_text_model(tensor.name, blocks))
        used = sum({tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}.values())
        if stored != used:
            wrong = f"it has {stored} weights, of which a {model.config.model_type} model has {used}"
    if wrong:
        raise ValueError(
            f"transformers does not read this file as its model: {wrong}; use the model's safetensors checkpoint"
        )


def _is_of_text_model(tensor: str, blocks: range) -> bool:
    """Return whether a tensor of a GGUF file belongs to the language model with the given blocks, by its name."""
    block = BLOCK.match(tensor)
    return not tensor.startswith(VISION) and (block is None or int(block[1]) in blocks)


def _unquantized(read: PreTrainedModel) -> PreTrainedModel:
    """Return a model that transformers can save as a bfloat16 checkpoint, with the weights of ``read``, which
    ``from_pretrained`` has read from a GGUF file. Embeddings and output head become one tied matrix if they differ only
    by rounding (``SAME_MATRIX``)."""
    config, weights = read.config, dict(read.state_dict())
    vars(config).pop("quantization_config", None)  # set by some releases
    embeddings, head = weights["model.embed_tokens.weight"].float(), weights["lm_head.weight"].float()
    if not config.tie_word_embeddings and embeddings.shape == head.shape:
        config.tie_word_embeddings = bool((embeddings - head).norm() < SAME_MATRIX * head.norm())
        if config.tie_word_embeddings:  # files store the head at the higher precision
            weights["model.embed_tokens.weight"] = weights["lm_head.weight"]
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    left = model.load_state_dict(weights, assign=True, strict=False)
    assert not left.unexpected_keys, left
    assert set(left.missing_keys) <= {"lm_head.weight"}, left
    model.tie_weights()
    return model


def _record(reader: GGUFReader, path: Path) -> dict[str, object]:
    weights: Counter[str] = Counter()
    for tensor in reader.tensors:
        weights[tensor.tensor_type.name] += int(tensor.n_elements)
    total = sum(weights.values())
    bits = 8 * sum(int(tensor.n_bytes) for tensor in reader.tensors) / total
    shares = {name: count / total for name, count in weights.most_common()}
    return {"file": path.name, "bits_per_weight": bits, "share_by_type": shares}
