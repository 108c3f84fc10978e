"""Reads Hugging Face model folders: the configuration, the model without storage, and the parts of the weights that a rank stores.

A folder contains `config.json`, safetensors (one file, or several with an index) and tokenizer files. The model is built on the meta
device, wrapped by the backend, given storage, and then loaded here: every parameter exactly once, with no stored tensor left over. Only the
model's own module of transformers is imported; the Auto classes would load all of them.
"""

import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rl_core.actors import attention
from rl_core.actors.critic import HEAD, SEPARATE, is_critic_name
from rl_core.actors.slices import LocalSlice, Slices
from rl_core.api.errors import ConfigError
from rl_core.api.imports import collection_paused
from rl_core.checkpoint.files import file_digest
from rl_core.weights.manifest import is_adapter_name
from rl_core.weights.stored_parts import StoredPart, in_folder, stored_parts, views

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CAUSAL = "ForCausalLM"
"""How the names of the architectures end that can be trained."""
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
    if not isinstance(architecture, str) or not architecture.endswith(CAUSAL):
        raise ConfigError(
            f"architecture in {path} must end in {CAUSAL}, got {architecture}; choose a causal language model"
        )
    return dict(config)


def build_model(config: Mapping[str, Any], *, dtype: torch.dtype) -> "PreTrainedModel":
    """Return the causal LM on the meta device in `dtype`: without storage, with tied weights tied and attention for packed rows.

    Raises ConfigError for a configuration that transformers does not accept.
    """
    architecture = config["architectures"][0]
    with collection_paused():
        model_class = _model_class(architecture, str(config.get("model_type")))
        attention.register()
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
    if problem := _untrainable(model):
        raise ConfigError(f"{architecture} cannot be trained: {problem}; choose another model")
    return model


def _model_class(architecture: str, family: str) -> Any:
    """Return the class of transformers for an architecture and `model_type` of a config.json. Raises ConfigError if there is none."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    package = model_type_to_module_name(family)
    try:
        module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
        return getattr(module, architecture)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"transformers must have the architecture of config.json, got no {architecture} with model_type {family}; choose a model that "
            "transformers has itself"
        ) from error


def _untrainable(model: Any) -> str:
    """Return why packed rows cannot be computed or scored with `model`; "" if they can."""
    head = getattr(model, "lm_head", None)
    if not isinstance(head, nn.Linear) or not isinstance(getattr(model, "model", None), nn.Module):
        return "it must have a decoder `model` and an output layer `lm_head`"
    if head.bias is not None:
        return "its output layer must have no bias"
    if not model._supports_attention_backend:
        return "its attention must be one that transformers lets others compute"
    return "" if decoder_layer_classes(model) else "it must name the classes of its decoder layers"


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
            # Packed rows have no padding. A sampled padding token is trained like any other token, as under megatron.
            module.padding_idx = None
    return model


def decoder_layer_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes of the model's decoder layers."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return tuple({type(module) for module in model.modules() if type(module).__name__ in names})


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return alias -> name of every parameter that is the same object as an earlier one."""
    names_by_id: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in names_by_id:
            aliases[name] = names_by_id[id(parameter)]
        names_by_id.setdefault(id(parameter), name)
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
    slices: Slices | None = None,
) -> None:
    """Load every parameter and persistent buffer from the folder's safetensors. Each rank reads the parts that it stores.

    `slices` are the parts of the folder's tensors that this rank stores; None for a model that is not wrapped. A critic's decoder starts
    with the policy's weights and its value head with zeros; adapters are not set. Raises ConfigError as `stored_readers` does, and for
    shapes that differ.
    """
    if slices is None:
        slices = {name: [LocalSlice.of_whole(tensor)] for name, tensor in stored_tensors(model).items()}
    for name, stored, where in stored_readers(slices, model, folder, aliases):
        for target_name in {name, f"{SEPARATE}.{name}"} & slices.keys():
            for part in slices[target_name]:
                fill(part, stored, where)
    for name, parts in slices.items():
        for part in parts if HEAD in name else ():
            part.tensor.zero_()


def stored_readers(
    names: Iterable[str], model: "PreTrainedModel", folder: str | Path, aliases: Mapping[str, str]
) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, reader, location) for each tensor in the folder's safetensors. A reader is valid until the next one.

    `names` are the names of `model`'s tensors as a folder has them; those of a critic and of adapters are left out. Raises ConfigError
    listing stored tensors that are not among them, and those that are not stored.
    """
    files = weight_files(Path(folder))
    policy = [name for name in names if not is_critic_name(name) and not is_adapter_name(name)]
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


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, tied ones once, and persistent buffers by the names that they had before wrapping."""
    return {**named_parameters(model), **dict(_persistent_buffers(model))}


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a model folder contains, by name, sharing memory with a model that is not wrapped; tied ones once."""
    return views(named_tensors(model), stored_parts(model))


def stored_names(model: nn.Module, parts: Mapping[str, StoredPart]) -> list[str]:
    """Return the names in a model folder of all parameters, including every alias, and of persistent buffers, in the model's order.

    `parts` are the model's `stored_parts`.
    """
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return in_folder([*parameters, *(name for name, _ in _persistent_buffers(model))], parts)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield _unwrapped(name), buffer


def _unwrapped(name: str) -> str:
    """Return a name without what FSDP1 puts into it."""
    return name.replace("_fsdp_wrapped_module.", "")


def _match(
    names: Sequence[str], files: Mapping[str, Path], aliases: Mapping[str, str], model: nn.Module, folder: Path
) -> dict[str, str]:
    """Return name in the model -> name in the files; a tied weight may be stored under any of its names."""
    stored_as = {name: name for name in names if name in files}
    for alias, name in aliases.items():
        if name not in stored_as and alias in files:
            stored_as[name] = alias
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unused = [
        name for name in files if name not in names and name not in aliases and not any(p.search(name) for p in ignored)
    ]
    missing = sorted(set(names) - set(stored_as))
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
