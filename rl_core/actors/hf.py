"""Reads Hugging Face model folders: the configuration, the model without storage, and the parts of the weights that a rank stores.

A folder contains `config.json`, safetensors (one file, or several with an index) and tokenizer files. The model is built on the meta
device, wrapped by the backend, given storage, and then loaded here: every parameter exactly once, with no stored tensor left over. Only the
model's own module of transformers is imported; the Auto classes would load all of them.
"""

import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rl_core.actors import attention
from rl_core.actors.critic import HEAD, SEPARATE, is_critic_name
from rl_core.actors.slices import LocalSlice
from rl_core.api.errors import ConfigError
from rl_core.api.imports import collection_paused
from rl_core.checkpoint.files import file_digest
from rl_core.weights.manifest import is_adapter_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
"""Architecture in config.json -> model package of transformers."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return `config.json` of a model folder.

    Raises ConfigError when the folder or file is missing, is no JSON, or the architecture is not supported.
    """
    path = Path(folder) / "config.json"
    try:
        config: Any = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"model.path must be a folder with config.json, got {folder}; give a Hugging Face model folder"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} must be JSON: {error}; repair or download it again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold an object, got {type(config).__name__}; download it again")
    listed = config.get("architectures")
    architecture = listed[0] if isinstance(listed, list) and listed else listed
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ConfigError(
            f"architecture in {path} must be one of {', '.join(ARCHITECTURES)}, got {architecture}; choose such a model"
        )
    return dict(config)


def build_model(config: Mapping[str, Any], *, dtype: torch.dtype) -> "PreTrainedModel":
    """Return the causal LM on the meta device in `dtype`: without storage, with tied weights tied and attention for packed rows.

    Raises ConfigError for a configuration that transformers does not accept.
    """
    architecture = config["architectures"][0]
    package = f"transformers.models.{ARCHITECTURES[architecture]}"
    with collection_paused():
        module = importlib.import_module(f"{package}.modeling_{ARCHITECTURES[architecture]}")
        attention.register()
    model_class = getattr(module, architecture)
    try:
        settings = model_class.config_class.from_dict(dict(config))
        settings._attn_implementation = attention.PACKED
        model = _on_meta(model_class, settings, dtype)
    except Exception as error:  # transformers raises anything, a KeyError for an activation it does not know
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(
            f"config.json must describe a {architecture}: {cause}; repair or download it again"
        ) from error
    model.tie_weights()
    return model


def _on_meta(model_class: Any, settings: Any, dtype: torch.dtype) -> "PreTrainedModel":
    from transformers.initialization import no_init_weights

    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), no_init_weights():
            model: PreTrainedModel = model_class(settings)
    finally:
        torch.set_default_dtype(default)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = (
                None  # packed rows have no padding: its token, once sampled, trains like any other, as under megatron
            )
    return model


def decoder_layer_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes of the model's decoder layers."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return tuple({type(module) for module in model.modules() if type(module).__name__ in names})


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return alias -> name of every parameter that is the same object as an earlier one."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return aliases


def materialize(model: "PreTrainedModel", device: torch.device, aliases: Mapping[str, str]) -> None:
    """Allocate storage on `device` for a model on the meta device, wrapped by FSDP2 or not, then call `retie`."""
    model.to_empty(device=device)
    retie(model, aliases)


def retie(model: "PreTrainedModel", aliases: Mapping[str, str]) -> None:
    """Tie the parameters of a model that was given storage again, and recompute its buffers that are not stored in a folder.

    `aliases` maps each tied name to the name of its parameter.
    """
    for alias, name in aliases.items():
        module, _, attribute = alias.rpartition(".")
        setattr(model.get_submodule(module), attribute, model.get_parameter(name))
    for module in model.modules():
        if module._non_persistent_buffers_set:
            model._init_weights(module)


def load_weights(
    model: "PreTrainedModel",
    folder: str | Path,
    aliases: Mapping[str, str],
    *,
    slice_of: Callable[[Tensor], LocalSlice] = LocalSlice.of_whole,
) -> None:
    """Load every parameter and persistent buffer from the folder's safetensors. Each rank reads the parts that it stores.

    `slice_of` returns the part of a tensor that this rank stores. A critic's decoder starts with the policy's weights and its value head
    with zeros; adapters are not set. Raises ConfigError as `stored_readers` does, and for shapes that differ.
    """
    wanted = stored_tensors(model)
    for name, stored, where in stored_readers(model, folder, aliases):
        for place in {name, f"{SEPARATE}.{name}"} & wanted.keys():
            fill(slice_of(wanted[place]), stored, where)
    for name, tensor in wanted.items():
        if HEAD in name:
            slice_of(tensor).tensor.zero_()


def stored_readers(
    model: "PreTrainedModel", folder: str | Path, aliases: Mapping[str, str]
) -> Iterator[tuple[str, Any, str]]:
    """Yield (name in the policy, reader, location) for each tensor in the folder's safetensors. A reader is valid until the next one.

    Raises ConfigError listing stored tensors that the model does not have, and tensors of the model that are not stored.
    """
    files = weight_files(Path(folder))
    policy = {
        name: tensor
        for name, tensor in stored_tensors(model).items()
        if not is_critic_name(name) and not is_adapter_name(name)
    }
    stored_as = _match(policy, files, aliases, model, Path(folder))
    by_file: dict[Path, list[str]] = {}
    for name, stored in stored_as.items():
        by_file.setdefault(files[stored], []).append(name)
    for path, names in by_file.items():
        try:
            with safe_open(path, framework="pt") as reader:
                for name in names:
                    yield name, reader.get_slice(stored_as[name]), f"{name} in {path}"
        except SafetensorError as error:
            raise _broken(path, error) from error


def weight_files(folder: Path) -> dict[str, Path]:
    """Return tensor name -> safetensors file of a model folder. Raises ConfigError when there are no weights or a file is damaged."""
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    path = folder / SINGLE
    if not path.is_file():
        raise ConfigError(f"model.path must hold {SINGLE} or {INDEX}, got {folder}; convert the weights to safetensors")
    try:
        with safe_open(path, framework="pt") as reader:
            return dict.fromkeys(reader.keys(), path)
    except SafetensorError as error:
        raise _broken(path, error) from error


def weights_digest(folder: str | Path) -> str:
    """Return a digest over the bytes of all weights of a model folder. Raises ConfigError as `weight_files`."""
    files = sorted(set(weight_files(Path(folder)).values()))
    return hashlib.sha256(" ".join(map(file_digest, files)).encode()).hexdigest()


def _indexed_files(folder: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        files = {name: folder / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{folder / INDEX} must be JSON with a weight_map of tensors to files: {error}; download it again"
        ) from error
    absent = sorted({path.name for path in files.values() if not path.is_file()})
    if absent:
        raise ConfigError(
            f"{folder} must hold the files its {INDEX} names, got no {', '.join(absent)}; download them again"
        )
    return files


def _broken(path: Path, error: SafetensorError) -> ConfigError:
    return ConfigError(f"{path} must be a whole safetensors file: {error}; download or export it again")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters, tied ones once, by the names that they had before wrapping."""
    return {_unwrapped(name): parameter for name, parameter in model.named_parameters()}


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a model folder contains, by name: parameters, tied ones once, and persistent buffers."""
    return {**named_parameters(model), **dict(_persistent_buffers(model))}


def stored_names(model: nn.Module) -> list[str]:
    """Return all names of parameters, including every alias, and of persistent buffers, in the model's order."""
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return parameters + [name for name, _ in _persistent_buffers(model)]


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield _unwrapped(name), buffer


def _unwrapped(name: str) -> str:
    """Return a name without what FSDP1 puts into it."""
    return name.replace("_fsdp_wrapped_module.", "")


def _match(
    wanted: Mapping[str, Tensor], files: Mapping[str, Path], aliases: Mapping[str, str], model: nn.Module, folder: Path
) -> dict[str, str]:
    """Return name in the model -> name in the files; a tied weight may be stored under any of its names."""
    stored_as = {name: name for name in wanted if name in files}
    for alias, name in aliases.items():
        if name not in stored_as and alias in files:
            stored_as[name] = alias
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unused = [
        name
        for name in files
        if name not in wanted and name not in aliases and not any(p.search(name) for p in ignored)
    ]
    missing = sorted(set(wanted) - set(stored_as))
    if unused or missing:
        raise ConfigError(
            f"the weights in {folder} must fill the model of config.json exactly, got missing: {', '.join(missing) or 'none'};"
            f" unused: {', '.join(sorted(unused)) or 'none'}; config.json and weights must belong together"
        )
    return stored_as


def fill(target: LocalSlice, stored: Any, where: str) -> None:
    """Copy the elements of `target` from the stored tensor `stored`. Raises ConfigError when the whole tensor has another shape."""
    if tuple(stored.get_shape()) != target.shape:
        raise ConfigError(f"{where} must have shape {list(target.shape)} by config.json, got {stored.get_shape()}")
    if target.tensor.numel():
        for part in target.boxes():
            part.tensor.copy_(stored[part.box] if part.shape else stored[...])
