"""GGUF files as bases of policies. The tests write them with the package gguf from a small checkpoint, and check what
the product reads."""

import json
import struct
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from qerl_pl.__main__ import main as command
from qerl_pl.base.folder import base_folder, check_base
from qerl_pl.base.gguf import described, gguf_folder, is_gguf
from qerl_pl.base.prepared import prepared_base
from qerl_pl.memory.shape import planned_shape
from qerl_pl.model.quantization import Quantization
from qerl_pl.quant.loading import load_base
from tests.quant.conftest import make_checkpoint

gguf = pytest.importorskip("gguf", reason="python -m pip install 'qerl-pl[gguf]'")
__all__ = ["make_checkpoint"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def write_gguf(
    model: Path,
    path: Path,
    *,
    head: torch.Tensor | None = None,
    architecture: str = "qwen2",
    metadata: Mapping[str, str | int] = {},
    split: str = "qwen2",
    without: str = "",
    tensors: Mapping[str, np.ndarray] = {},
) -> Path:
    """Write a checkpoint as a GGUF file, with matrices in Q8_0 and everything else in fp32. Without ``head`` the file
    has no output matrix, like files of models with tied embeddings. ``metadata`` adds to or replaces the file's
    metadata, ``split`` names the rule by which text is split, ``tensors`` adds tensors, and ``without`` is the name of
    a weight to leave out."""
    config, weights = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    kind = gguf.MODEL_ARCH[config["model_type"].upper()]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
    }.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    letters = [*(chr(code) for code in range(33, 127)), "\u0120", "\u010a"]
    tokens = [*letters, "in", "\u0120\u0120", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokens += [f"[PAD{number}]" for number in range(config["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    special = [3 if token.startswith("<|") else 4 if token.startswith("[PAD") else 1 for token in tokens]
    writer.add_token_types(special)
    writer.add_token_merges(["i n", "\u0120 \u0120"])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_chat_template(TEMPLATE)
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint16
        add(key, value)
    if head is not None:
        weights["lm_head.weight"] = head
    weights.pop(without, None)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    for name, weight in weights.items():
        values, stem = weight.float().numpy(), name.rpartition(".")
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quantize(values, kind)
        writer.add_tensor(f"{names.get_name(stem[0])}.{stem[2]}", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    return make_checkpoint("qwen2", tied=True, vocab_size=128)


def test_a_gguf_file_is_dequantised_once_with_tokenizer_template_and_its_bits(model, tmp_path):
    file = write_gguf(model, tmp_path / "small.gguf")
    assert is_gguf(str(file))
    folder = Path(base_folder(str(file), None))
    assert folder.parent == tmp_path / "cache"
    read, original = load_file(folder / "model.safetensors"), load_file(model / "model.safetensors")
    assert read.keys() == original.keys(), "the head is the embeddings, and is not stored"
    for name, weight in original.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        expected = gguf.dequantize(gguf.quantize(weight.float().numpy(), kind), kind)
        assert torch.equal(read[name], torch.from_numpy(expected).bfloat16()), name
    config = check_base(folder)
    assert (config["model_type"], config["tie_word_embeddings"], config["dtype"]) == ("qwen2", True, "bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.decode(tokenizer("What is 17 in?").input_ids) == "What is 17 in?"
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert ends == sorted(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])), "</s> is an HTML tag here"
    modes = {file.stat().st_mode for file in folder.iterdir()}
    assert modes == {file.with_name("config.json").stat().st_mode for file in folder.iterdir()}, "others may read all"
    assert described(folder) == "weights of 8.66 bits on average (99% Q8_0, 1% F32), dequantised to bfloat16"
    written = folder.stat().st_mtime_ns
    moved = file.rename(tmp_path / "sha256-0")  # Ollama's files have no suffix
    assert gguf_folder(moved).name.rpartition("-")[2] == folder.name.rpartition("-")[2], "found by its content"
    assert is_gguf(moved)
    assert folder.stat().st_mtime_ns == written


def test_a_gguf_file_is_opened_once_and_the_package_is_as_before(model, tmp_path, monkeypatch):
    opened = []

    class Counting(gguf.GGUFReader):
        def __init__(self, path: Path) -> None:
            opened.append(Path(path))
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Counting)
    gguf_folder(write_gguf(model, file := tmp_path / "small.gguf"))
    assert opened == [file]
    assert gguf.GGUFReader is Counting


def test_files_that_threads_convert_at_the_same_time_keep_their_own_weights(model, tmp_path):
    other = write_gguf(model, tmp_path / "other.gguf", split="gpt-2")
    file = write_gguf(model, tmp_path / "small.gguf", split="smollm")
    with ThreadPoolExecutor(2) as threads:
        folders = list(threads.map(gguf_folder, [file, other]))
    kinds = [json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"]["type"] for folder in folders]
    assert kinds == ["Sequence", "ByteLevel"]


@pytest.mark.parametrize(("split", "tokens"), [("smollm", 2), ("gpt-2", 3)])
def test_text_is_split_by_the_rule_that_the_file_names(make_checkpoint, tmp_path, monkeypatch, split, tokens):
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    model = make_checkpoint("llama", tied=True, vocab_size=128)
    file = write_gguf(model, tmp_path / "small.gguf", architecture="llama", split=split)
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder(file))
    assert len(tokenizer("  3").input_ids) == tokens, "digits stand alone, so both spaces are one token"
    assert tokenizer.decode(tokenizer("a  3 in").input_ids) == "a  3 in"


def test_a_vision_model_and_blocks_for_drafts_are_left_out(model, tmp_path):
    others = {name: np.ones(8, np.float32) for name in ("v.blk.0.ln1.weight", "mm.input.weight", "blk.2.nextn.weight")}
    folder = gguf_folder(write_gguf(model, tmp_path / "small.gguf", tensors=others))
    assert load_file(folder / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()


@pytest.mark.parametrize("rule", ["other", "default"])
def test_a_rule_of_splitting_that_is_unknown_is_named(model, tmp_path, rule):
    with pytest.warns(UserWarning, match=f"splits text by the rule '{rule}', which transformers does not know"):
        gguf_folder(write_gguf(model, tmp_path / "small.gguf", split=rule))


@pytest.mark.parametrize(
    ("family", "sizes", "key", "value"),
    [
        ("phi3", {"sliding_window": 24}, "phi3.attention.sliding_window", 24),
        ("phi3", {"sliding_window": None}, "phi3.attention.sliding_window", 0),
        ("qwen3", {"head_dim": 24}, "qwen3.attention.key_length", 24),
    ],
)
@torch.no_grad()
def test_what_transformers_does_not_read_of_a_file_is_set(
    make_checkpoint, tmp_path, monkeypatch, family, sizes, key, value
):
    monkeypatch.setenv("QERL_PL_CACHE", str(tmp_path / "cache"))
    model = make_checkpoint(family, tied=True, vocab_size=128, **sizes)
    file = write_gguf(model, tmp_path / "small.gguf", architecture=family, metadata={key: value})
    read, original = (load_base(path, dtype=torch.float32, device="cpu") for path in (gguf_folder(file), model))
    rows = torch.arange(64)[None]
    logits, expected = read(input_ids=rows).logits, original(input_ids=rows).logits
    assert (logits - expected).norm() < 0.1 * expected.norm(), "they differ by rounding to 8 bits"


def test_dequantising_is_shown_while_it_lasts(model, tmp_path, phases_shown_at_once, capsys):
    gguf_folder(write_gguf(model, tmp_path / "small.gguf"))
    assert "dequantising small.gguf ..." in capsys.readouterr().err


def test_a_head_stored_at_another_precision_is_the_embeddings_and_another_head_is_not(model, tmp_path):
    embeddings = load_file(model / "model.safetensors")["model.embed_tokens.weight"].float()
    coarse = embeddings + 0.05 * embeddings.std() * torch.randn(embeddings.shape)
    tied = load_file(gguf_folder(write_gguf(model, tmp_path / "tied.gguf", head=coarse)) / "model.safetensors")
    assert "lm_head.weight" not in tied
    assert (tied["model.embed_tokens.weight"].float() - coarse).abs().max() < 0.05 * coarse.abs().max(), "the head's"
    other = gguf_folder(write_gguf(model, tmp_path / "untied.gguf", head=torch.randn(embeddings.shape)))
    assert json.loads((other / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(other / "model.safetensors")


def test_a_gguf_file_is_quantised_and_planned_like_a_folder(model, tmp_path):
    file = write_gguf(model, tmp_path / "small.gguf")
    output = tmp_path / "small-nvfp4"
    assert command(["quantize", "--model", str(file), "--output", str(output)]) == 0
    assert "8.66 bits" in str(described(output)), "the copy knows what it was made from"
    folder = prepared_base(str(file), None, Quantization(format="nvfp4"))
    shape = planned_shape(str(file), None, Quantization(format="nvfp4"), torch.bfloat16)
    assert shape == planned_shape(folder, None, None, torch.bfloat16)


def cut(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-4000])
    return file


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model, path: cut(write_gguf(model, path)), "cut short"),
        (lambda model, path: write_gguf(model, path, metadata={"split.count": 3}), "one of 3 parts"),
        (lambda model, path: write_gguf(model, path, architecture="gpt2"), "gpt2"),
        (lambda model, path: write_gguf(model, path, architecture="unheard"), "unheard"),
        (lambda model, path: write_gguf(model, path, metadata={"qwen2.rope.scaling.type": "yarn"}), "rotary positions"),
        (
            lambda model, path: write_gguf(model, path, without="model.layers.0.mlp.up_proj.weight"),
            r"no weights for model.layers.0.mlp.up_proj.weight;",
        ),
        (
            lambda model, path: write_gguf(model, path, tensors={"rope_factors_long.weight": np.ones(8, np.float32)}),
            r"it has \d+ weights, of which a qwen2 model has \d+",
        ),
        (
            lambda model, path: write_gguf(model, path, metadata={"qwen2.attention.head_count_kv": 4}),
            "size mismatch",
        ),
        (lambda model, path: path, "no file"),
        (lambda model, path: path.write_bytes(b"GGUF" + struct.pack("<I", 3)) and path, "cut short"),
        (lambda model, path: path.write_bytes(b"PK\x03\x04") and path, "starts with GGUF"),
    ],
    ids=["cut", "split", "family", "unknown", "rope", "lacks", "unread", "shapes", "missing", "header", "zip"],
)
def test_a_gguf_file_that_cannot_be_used_is_refused_in_one_line(model, tmp_path, make, message):
    file = make(model, tmp_path / "bad.gguf")
    with pytest.raises(ValueError, match=message) as error:
        gguf_folder(file)
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)
    assert not [path for path in (tmp_path / "cache").glob("*") if path.suffix != ".lock"], "nothing is left over"


def test_without_the_package_the_message_names_it(model, tmp_path, monkeypatch):
    file = write_gguf(model, tmp_path / "small.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"gguf is not installed; install it: pip install 'gguf>=0\.17'"):
        gguf_folder(file)


def test_a_copy_next_to_a_gguf_file_is_refused_by_name(model, tmp_path):
    with pytest.raises(ValueError, match=r"model\.quantize nvfp4"):
        base_folder(str(write_gguf(model, tmp_path / "small.gguf")), "nvfp4")
