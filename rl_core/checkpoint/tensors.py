"""Sharded tensors in a checkpoint: each rank writes what it holds as safetensors; any number of ranks reads them back.

The files are those of torch Distributed Checkpoint's Hugging Face storage (`DCP_SHARDING_INFO` in the header), so any DCP
reader can load them. No rank talks to another and nothing is pickled.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rl_core.api.errors import DataError
from rl_core.checkpoint.files import sync_file, sync_folder


def write_shard(folder: Path, parts: Mapping[str, tuple[Tensor, tuple[int, ...]]], *, rank: int) -> None:
    """Write and sync this rank's `parts`: name -> (local tensor, offset of its first element in the full tensor).

    A rank without parts writes nothing. Raises OSError as the storage does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: (tensor, offset) for name, (tensor, offset) in parts.items() if tensor.numel()}
    if not held:
        return
    offsets = {name: {"saved_offsets": list(offset)} for name, (_, offset) in held.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    path = folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
    try:
        save_file({name: tensor.detach().contiguous() for name, (tensor, _) in held.items()}, path, metadata)
    except SafetensorError as error:
        # The library wraps the system's error as text; writing the path again brings out the number.
        raise _as_os_error(path, error) from error
    sync_file(path)
    sync_folder(folder)


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` (plain or DTensor) in place with what the files of all ranks hold.

    Raises FileNotFoundError without files, DataError naming tensor and folder for a missing tensor or another shape.
    """
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(
            f"{folder} must hold the safetensors of a checkpoint, got none; choose another checkpoint"
        )
    reader, planner = HuggingFaceStorageReader(str(folder)), DefaultLoadPlanner(flatten_state_dict=False)
    try:
        metadata = reader.read_metadata()
        _check(folder, metadata, tensors)
        # The steps of torch's `load` without its coordination: what a rank reads follows from its own tensors alone.
        planner.set_up_planner(dict(tensors), metadata, True)
        reader.set_up_storage_reader(metadata, True)
        reader.read_data(planner.create_local_plan(), planner).wait()
    except SafetensorError as error:
        raise DataError(f"tensors in {folder} cannot be read: {error}; resume from another checkpoint") from error


def _check(folder: Path, metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        stored = metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            raise DataError(f"{folder} must hold tensor {name}, got none; the checkpoint belongs to another model")
        if tuple(stored.size) != tuple(tensor.shape):
            raise DataError(
                f"tensor {name} in {folder} must have shape {list(tensor.shape)}, got {list(stored.size)}; the checkpoint belongs to another model"
            )
        if stored.properties.dtype != tensor.dtype:
            raise DataError(
                f"tensor {name} in {folder} must be {tensor.dtype}, got {stored.properties.dtype}; resume with the saved model.dtype"
            )


def _as_os_error(path: Path, error: SafetensorError) -> OSError:
    for number in (28, 122, 27):
        if f"code: {number}" in str(error) or f"os error {number}" in str(error):
            return OSError(number, str(error), str(path))
    return OSError(None, str(error), str(path))
