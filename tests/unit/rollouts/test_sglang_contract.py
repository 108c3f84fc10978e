"""What `rollouts.sglang` calls and reads of the installed SGLang is there under its name, so that another version fails here at once.

Read from its source: importing the engine takes half a minute of processor time.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
from functools import cache
from pathlib import Path

import pytest

from rl_core.rollouts.sglang import setup
from rl_core.transports.tokens import DIRECTORY, Token, remove_engine_files, remove_orphans

SRT = Path(importlib.util.find_spec("sglang").origin).parent / "srt"
ARGUMENTS = [
    ("entrypoints/engine.py", "Engine", "async_generate", {"input_ids", "sampling_params", "return_logprob", "rid"}),
    ("entrypoints/engine.py", "Engine", "get_all_child_pids", set()),
    ("entrypoints/engine.py", "Engine", "_launch_scheduler_processes", {"server_args", "port_args"}),
    ("managers/load_snapshot.py", "ShmLoadSnapshotReader", "read_all", set()),
    ("managers/tokenizer_manager.py", "TokenizerManager", "abort_request", {"rid", "abort_all"}),
    ("managers/tokenizer_manager.py", "TokenizerManager", "pause_generation", {"obj"}),
    ("managers/tokenizer_manager.py", "TokenizerManager", "continue_generation", {"obj"}),
    ("managers/tokenizer_control_mixin.py", "TokenizerControlMixin", "begin_weight_update", {"obj", "request"}),
    ("managers/tokenizer_control_mixin.py", "TokenizerControlMixin", "end_weight_update", {"obj", "request"}),
    ("managers/tokenizer_control_mixin.py", "TokenizerControlMixin", "update_weights_from_tensor", {"obj", "request"}),
    ("managers/tokenizer_control_mixin.py", "TokenizerControlMixin", "check_weights", {"obj"}),
    (
        "managers/tokenizer_control_mixin.py",
        "TokenizerControlMixin",
        "_weight_update_session_call",
        {"communicator", "obj"},
    ),
    ("managers/communicator.py", "FanOutCommunicator", "merge_results", {"results"}),
    ("managers/scheduler.py", "Scheduler", "_add_request_to_queue", {"req", "is_retracted"}),
    ("managers/scheduler.py", "Scheduler", "record_weight_version_change", {"new_version"}),
    (
        "model_executor/model_runner_components/weight_updater.py",
        "WeightUpdater",
        "end_weight_update",
        {"run_post_load"},
    ),
    ("managers/tokenizer_control_mixin.py", "TokenizerControlMixin", "get_internal_state", set()),
    ("managers/tokenizer_control_mixin.py", "TokenizerControlMixin", "flush_cache", set()),
    ("managers/tokenizer_control_mixin.py", "TokenizerControlMixin", "release_memory_occupation", {"obj", "request"}),
    ("managers/tokenizer_control_mixin.py", "TokenizerControlMixin", "resume_memory_occupation", {"obj", "request"}),
    ("utils/common.py", "MultiprocessingSerializer", "serialize", {"obj"}),
]
FIELDS = [
    ("managers/io_struct.py", "BeginWeightUpdateReqInput", set()),
    ("managers/io_struct.py", "EndWeightUpdateReqInput", set()),
    ("managers/io_struct.py", "CheckWeightsReqInput", {"action", "selector"}),
    ("managers/io_struct.py", "CheckWeightsReqOutput", {"payload"}),
    ("managers/io_struct.py", "ChecksumInfo", {"checksums"}),
    (
        "managers/io_struct.py",
        "UpdateWeightsFromTensorReqInput",
        {"serialized_named_tensors", "load_format", "flush_cache", "weight_version", "selector"},
    ),
    (
        "weight_sync/tensor_bucket.py",
        "FlattenedTensorMetadata",
        {"name", "shape", "dtype", "start_idx", "end_idx", "numel"},
    ),
    ("server_args.py", "PortArgs", {"instance_id"}),
    ("managers/io_struct.py", "PauseGenerationReqInput", {"mode"}),
    ("managers/io_struct.py", "ContinueGenerationReqInput", set()),
    ("managers/io_struct.py", "FlushCacheReqOutput", {"success"}),
    ("managers/io_struct.py", "ReleaseMemoryOccupationReqInput", {"tags"}),
    ("managers/io_struct.py", "ResumeMemoryOccupationReqInput", {"tags"}),
    (
        "sampling/sampling_params.py",
        "SamplingParams",
        {"temperature", "top_p", "top_k", "max_new_tokens", "stop", "stop_token_ids", "no_stop_trim", "ignore_eos"}
        | {"min_p", "logit_bias"},
    ),
]

SETTINGS = (
    {
        "model_path",
        "load_format",
        "dtype",
        "context_length",
        "max_running_requests",
        "random_seed",
        "grammar_backend",
        "port",
    }
    | {"skip_server_warmup", "log_level", "nccl_port", "device", "base_gpu_id", "attention_backend", "sampling_backend"}
    | {"disable_cuda_graph", "max_total_tokens", "sleep_on_idle", "disable_overlap_schedule"}
    | {
        "tp_size",
        "enable_memory_saver",
        "enable_weights_cpu_backup",
        "enable_fp32_lm_head",
        "cuda_graph_backend_prefill",
    }
)


@cache
def classes(file):
    return {node.name: node for node in ast.parse((SRT / file).read_text()).body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize(("file", "cls", "method", "names"), ARGUMENTS, ids=[f"{one[1]}.{one[2]}" for one in ARGUMENTS])
def test_a_method_that_is_called_takes_what_it_is_given(file, cls, method, names):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {node.name: node.args for node in classes(file)[cls].body if isinstance(node, functions)}
    assert method in found, f"sglang {importlib.metadata.version('sglang')} has no {cls}.{method}"
    assert names <= {one.arg for one in (*found[method].args, *found[method].kwonlyargs)}


@pytest.mark.parametrize(("file", "cls", "names"), FIELDS, ids=[one[1] for one in FIELDS])
def test_a_record_that_is_sent_or_read_has_its_fields(file, cls, names):
    found = {node.target.id for node in classes(file)[cls].body if isinstance(node, ast.AnnAssign)}
    bases = {base.id for base in classes(file)[cls].bases if isinstance(base, ast.Name)}
    for base in bases & classes(file).keys():
        found |= {node.target.id for node in classes(file)[base].body if isinstance(node, ast.AnnAssign)}
    assert names <= found, names - found


def test_requests_of_an_update_that_are_sent_together_have_communicators():
    text = (SRT / "managers/tokenizer_control_mixin.py").read_text()
    for name in ("begin_weight_update", "update_weights_from_tensor", "end_weight_update", "check_weights"):
        assert f'("{name}", ' in text and f"{name}_communicator" in text


def test_the_engine_takes_the_settings_that_it_is_given():
    folder = SRT / "arg_groups" / "fields"
    tree = [node for file in folder.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    found = {node.target.id for node in tree if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    assert found >= SETTINGS, SETTINGS - found


def test_the_variables_that_the_engine_is_given_are_its_own(tmp_path):
    known = {node.id for node in ast.walk(ast.parse((SRT / "environ.py").read_text())) if isinstance(node, ast.Name)}
    given = {name for name in setup.variables(tmp_path, "cuda", {}, shares_device=True) if name.startswith("SGLANG_")}
    assert given and given <= known, given - known


def test_the_file_that_a_starting_engine_has_in_memory_goes_with_the_engine_or_with_its_worker(tmp_path):
    """SGLang names it: its own function is asked."""
    tree = ast.parse((SRT / "managers/load_snapshot.py").read_text())
    (function,) = (node for node in tree.body if getattr(node, "name", "") == "shm_path_for")
    space = {"hashlib": hashlib, "os": os}
    exec(compile(ast.Module([function], []), "load_snapshot", "exec"), space)
    living, killed = Token("living", directory=tmp_path), Token("killed", directory=tmp_path)
    files = {}
    for token in (living, killed):
        named = Path(space["shm_path_for"](token.owner))
        assert named.parent == DIRECTORY
        files[token] = tmp_path / named.name
        files[token].touch()
    os.close(killed._descriptor)  # the kernel unlocks what a dead process held
    assert sorted(remove_orphans(directory=tmp_path)) == sorted([files[killed].name, f"{killed.owner}-token"])
    assert files[living].exists()
    remove_engine_files(living.owner, directory=tmp_path)
    living.close()
    assert not list(tmp_path.iterdir())
