"""Export the trained policy of a run: the LoRA adapter as a PEFT folder, or base and adapter merged into one model."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from safetensors.torch import save_file
from torch import Tensor

from qerl_pl.base.digest import base_digest
from qerl_pl.base.folder import base_folder
from qerl_pl.base.prepared import prepared_base
from qerl_pl.checkpoint import SafeCheckpointIO, adapter_of, check_identity, identity_of, lora_settings
from qerl_pl.common.files import allow_reading
from qerl_pl.common.run_folder import read_run_config, run_files
from qerl_pl.model.files import CONFIG, has_vision, read_json
from qerl_pl.model.hub import NAME, is_hub_name
from qerl_pl.model.quantization import quantization_of
from qerl_pl.policy.lora import LoraSettings, peft_config
from qerl_pl.policy.lora_experts import adapted, of_experts
from qerl_pl.quant.loading import meta_model
from qerl_pl.quant.output import new_folder
from qerl_pl.tools.merge import export_merged
from qerl_pl.tools.model_card import model_card
from qerl_pl.tools.options import export_options


def main(argv: list[str]) -> int:
    """Parse the command line and export; returns the exit status."""
    options = export_options().parse_args(argv)
    if options.push is not None and not NAME.fullmatch(options.push):
        raise ValueError(f"--push is {options.push!r}; expected OWNER/NAME of a model on the Hugging Face hub")
    if options.merge is not None:
        drift = export_merged(options.run, options.output, options.merge, checkpoint=options.checkpoint)
        print(f"merged model ({options.merge}) written to {options.output}")
        print(drift or "the drift was not measured: the run kept no completions")
    else:
        settings = export_adapter(options.run, options.output, checkpoint=options.checkpoint)
        print(f"adapter of rank {settings.rank} written to {options.output}")
        for line in _left_out_by_vllm(options.output, settings):
            print(line)
    if options.push is not None:
        print(f"pushed to {push(options.output, options.push)}")
    return 0


def _left_out_by_vllm(output: Path, settings: LoraSettings) -> Iterator[str]:
    """Yield one sentence for each feature of an exported adapter that vLLM's own LoRA loader ignores or refuses."""
    if settings.train_norms:
        yield "it holds trained norms (modules_to_save): PEFT loads them, vLLM's own LoRA loader does not"
    if settings.expert_rank:
        yield (
            "it adapts stacked experts, which vLLM loads with enable_mixed_moe_lora_format=True, and is_3d_lora_weight="
            "True in the LoRARequest"
        )
    config = Path(read_json(output / "adapter_config.json")["base_model_name_or_path"]) / CONFIG
    if config.is_file() and "k_proj" in settings.filled_in()[2] and read_json(config).get("attention_k_eq_v"):
        yield (
            "in layers whose keys serve as values, vLLM's own LoRA loader adapts the keys alone: to serve it with "
            "vLLM, export with --merge"
        )


def _local_folder(base: str) -> Path:
    """Return the folder of a base model on this machine. For a model on the Hugging Face hub, this is the folder of one
    of its commits in the hub's local cache. If that cache does not have the model, the result is Path("OWNER/MODEL"),
    so the caller has to check whether the files exist."""
    cached = try_to_load_from_cache(base, CONFIG) if is_hub_name(base) else None
    return Path(cached).parent if isinstance(cached, str) else Path(base)


def export_adapter(run: Path, output: Path, *, checkpoint: str = "last") -> LoraSettings:
    """Write a run's adapter as a folder that PEFT can read: settings, weights and model card; returns the adapter's
    settings.

    The exported settings name the base by its absolute path, or by name and commit on the hub. If the run quantised the
    base, they name the quantised copy in this program's cache. ``checkpoint`` is "last", "best", or the path of a
    checkpoint. Raises ValueError if there is no such run or checkpoint, the checkpoint is damaged, the base's files on
    this machine are not those of the run, or ``output`` exists.
    """
    config_file, path = run_files(run, checkpoint)
    model: dict[str, Any] = read_run_config(config_file)["model"]
    with new_folder(output) as temporary:
        saved = SafeCheckpointIO().load_checkpoint(path)
        adapter, identity = adapter_of(saved), identity_of(saved)
        settings = lora_settings(identity)  # config.yaml may be from a later start and have other settings
        base = base_folder(model["base"], model.get("base_format"))  # of a GGUF file, the folder of a dequantised copy
        quantization, of_base = quantization_of(model.get("quantize")), _local_folder(base) / CONFIG
        if quantization or (of_base.is_file() and has_vision(read_json(of_base))):
            # The adapter was trained on the quantised copy of the base, or on a copy of the base's text model.
            base = prepared_base(model["base"], model.get("base_format"), quantization)
        base = str(Path(base).resolve()) if Path(base).exists() else base
        trained_on = _local_folder(base)
        if next(trained_on.glob("*.safetensors"), None):
            check_identity(identity, {"base": base_digest(trained_on)})
            _check_shapes(adapter, trained_on)
        temporary.mkdir()
        norms = sorted({name.split(".")[-2] for name in adapter if ".lora_" not in name})
        config = peft_config(replace(settings, targets=tuple(adapted(adapter))), base=base, norms=norms)
        config.inference_mode = True
        config.revision = trained_on.name if is_hub_name(base) and trained_on.is_dir() else None  # the hub's commit
        config.save_pretrained(str(temporary))
        weights = temporary / "adapter_model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in adapter.items()}, weights, metadata={"format": "pt"})
        allow_reading(weights)
        card = model_card(saved, settings, base=base, folder=output.name, run=run)
        (temporary / "README.md").write_text(card, encoding="utf-8")
    return settings


def _check_shapes(adapter: Mapping[str, Tensor], base: Path) -> None:
    """Raise ValueError if the base has no parameter for a tensor of an adapter, or one whose size does not fit the
    tensor. Adapters on experts are not checked."""
    shapes = {name: parameter.shape for name, parameter in meta_model(base).named_parameters()}
    for name, tensor in adapter.items():
        linear, lora, matrix = name.removeprefix("base_model.model.").partition(".lora_")
        if lora and of_experts(name):
            continue
        shape = shapes.get(f"{linear}.weight" if lora else linear)
        axes = slice(None) if not lora else slice(1, 2) if matrix == "A.weight" else slice(0, 1)
        if shape is None or tensor.shape[axes] != shape[axes]:
            weight = "the base has no such weight" if shape is None else f"the base's weight is {list(shape)}"
            raise ValueError(f"the checkpoint's adapter tensor {name} is {list(tensor.shape)}, and {weight}")


def push(folder: Path, name: str) -> str:
    """Upload an exported folder to the model repository OWNER/NAME on the Hugging Face hub; returns the repository's
    web address. If the repository does not exist, it is created as a private one. Raises OSError if the hub cannot be
    reached or refuses the upload. The exported folder stays on this machine, and the message has the command that
    uploads it."""
    try:
        api = HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Export by qerl-pl")
    except (HTTPError, OfflineModeIsEnabled) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            why = "the hub refuses it: log in by `hf auth login`, with a token that may write there"
        elif isinstance(error, HfHubHTTPError):
            why = f"the hub answers {' '.join(str(error).split())[:200]}"
        else:
            why = f"the hub cannot be reached ({' '.join(str(error).split())[:200]})"
        raise OSError(f"{folder} is complete and was not pushed: {why}; then: hf upload {name} {folder}") from error
    return str(address)
