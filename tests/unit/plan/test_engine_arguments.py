"""`rollout.engineArgs`: the arguments of the installed SGLang by name and type, without those that rljob sets itself."""

import ast
import subprocess
import sys

import pytest

from rl_core.api.errors import ConfigError
from rl_core.api.job import RLJob, RLJobSpec
from rl_core.plan.engine_arguments import FILE, RESERVED, check_engine_arguments
from rl_core.plan.launch import build_launch_plan
from rl_core.rollouts.sglang import setup
from tests.cluster.bad_jobs import GOOD, merged
from tests.lint import sglang_arguments
from tests.unit.rollouts.test_sglang_contract import SRT


def spec(arguments, engine="sglang", **changes):
    rollout = {"engine": engine, "engineArgs": arguments}
    return RLJobSpec.model_validate(merged(GOOD, {"spec": {"rollout": rollout} | changes})["spec"])


def test_the_names_are_those_of_the_installed_sglang():
    assert FILE.read_text() == sglang_arguments.text()


def test_sglangs_own_list_of_positional_arguments_has_only_names_that_are_known():
    """SGLang keeps the order of its constructor's arguments in another file than their types."""
    tree = ast.parse((SRT / "arg_groups" / "field_order.py").read_text())
    names = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    known = set(sglang_arguments.arguments(SRT.parent))
    ordered = {name for name in names if name.isidentifier() and not name.startswith("_")}
    assert len(ordered) > 300 and len(ordered - known) <= 2, sorted(ordered - known)


def test_choices_stand_in_the_table_in_place_of_the_type_that_they_have():
    known = sglang_arguments.arguments(SRT.parent)
    chosen = {name for name, of in known.items() if any(isinstance(kind, dict) for kind in of)}
    source = "".join(file.read_text() for file in (SRT / "arg_groups" / "fields").glob("*.py"))
    assert len(chosen) >= source.count("choices=") - 1, "all but those of lora_target_modules, a list"
    assert not [name for name in chosen if {"string", "integer", "number"} & {str(kind) for kind in known[name]}]


@pytest.mark.parametrize(
    "given",
    [
        {"mem_fraction_static": 0.7, "attention_backend": "fa3", "kv_cache_dtype": "fp8_e5m2"},
        {"enable_deterministic_inference": True, "chunked_prefill_size": 4096, "attn_dp_size": 1},
        {"cuda_graph_bs_decode": [1, 2, 4], "mem_fraction_static": 0.999, "deepep_mode": "low_latency"},
        {"dsa_triton_union": 4, "sampling_backend": "pytorch"},
        {"radix_eviction_policy_config": {"a": 1}, "cuda_graph_backend_decode": "full"},
    ],
)
def test_arguments_of_sglang_are_passed_on(given, tmp_path):
    job = spec(given)
    check_engine_arguments(job)
    options = setup.options(job, tmp_path, "cuda:0", 64)
    assert {name: options[name] for name in given} == given
    assert options["tp_size"] == 1 and options["load_format"] == "dummy"


def test_arguments_precede_our_defaults_on_a_cpu(tmp_path):
    options = setup.options(spec({"max_total_tokens": 77, "log_level": "info"}), tmp_path, "cpu", 64)
    assert (options["max_total_tokens"], options["log_level"], options["device"]) == (77, "info", "cpu")
    assert options["attention_backend"] == "torch_native"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mem_fraction_static", "much", "must be null or number, got 'much'"),
        ("chunked_prefill_size", True, "must be integer or null, got True"),
        ("chunked_prefill_size", 0.5, "must be integer or null, got 0.5"),
        ("deepep_mode", "slow", "must be one of 'auto', 'low_latency', 'normal', got 'slow'; correct it"),
        ("kv_cache_dtype", "fp8_foo", "'fp8_e5m2', 'mxfp8', 'nvfp4', got 'fp8_foo'"),
        ("attention_backend", "flash_infer", "must be null or one of 'aiter', "),
        ("attention_backend", "flash_infer", "got 'flash_infer'; write flashinfer"),
        ("linear_attn_verify_backend", "nv_cutedls", "write nv_cutedsl"),
        ("sampling_backend", "torch", "write pytorch"),
        ("dsa_triton_union", 3, "must be one of 0, 2, 4, got 3; correct it"),
        (
            "mem_fraction_static",
            1,
            "must be above 0 and below 1, as a share of the memory of an accelerator, got 1; correct",
        ),
        ("mem_fraction_static", 0.0, "must be above 0 and below 1"),
        (
            "trust_remote_code",
            True,
            "neither the trainer nor the engine runs code from the folder of a model; remove it",
        ),
        ("custom_sigquit_handler", "f", "a function cannot be given"),
        ("mem_fraction", 0.7, "SGLang 0.5.23, which has none of that name; write mem_fraction_static"),
        ("gpu_memory_utilization", 0.7, "which has none of that name; write mem_fraction_static"),
        ("max_model_len", 4096, "which has none of that name; use rollout.maxSequenceLength"),
        ("--tp", 2, "which has none of that name; remove it"),
        ("pp_size", 2, "use rollout.gpus"),
        ("tp_size", True, "must be integer, got True"),
        ("enable_dp_attention", True, "use attn_dp_size"),
        ("dtype", "float16", "use spec.model.dtype"),
        ("max_running_requests", 8, "use rollout.maxBatch"),
    ],
)
def test_a_wrong_argument_is_refused_by_name_with_the_way_out(name, value, words):
    with pytest.raises(ConfigError) as refused:
        check_engine_arguments(spec({name: value, "sampling_defaults": "model"}))
    first, second = str(refused.value).splitlines()
    assert first.startswith(f"rollout.engineArgs.{name} ") and words in first
    assert second.startswith("rollout.engineArgs.sampling_defaults ") and "use rollout.sampling" in second


def test_the_hf_engine_takes_none():
    with pytest.raises(ConfigError, match="arguments of SGLang, got engine hf; choose sglang"):
        check_engine_arguments(spec({"mem_fraction_static": 0.7}, engine="hf"))


def test_what_keeping_the_cache_needs_cannot_be_switched_off():
    kept = {
        "weights": {"onUpdate": "keep_kv"},
        "algorithm": {"maxStaleness": 1, "importance": {}, "recomputeLogProbs": True},
    }
    check_engine_arguments(spec({"disable_overlap_schedule": False}))
    check_engine_arguments(spec({"disable_overlap_schedule": True, "disable_radix_cache": False}, **kept))
    with pytest.raises(ConfigError, match="disable_overlap_schedule must not be false with weights.onUpdate keep_kv"):
        check_engine_arguments(spec({"disable_overlap_schedule": False}, **kept))


@pytest.mark.parametrize("name", ["presencePenalty", "frequencyPenalty", "repetitionPenalty"])
def test_penalties_are_refused_with_sglang_which_applies_them_late(name):
    algorithm = {"allowTruncatedSampling": True, "recomputeLogProbs": True}
    rollout = {"sampling": {name: 1.2, "minP": 0.1, "logitBias": {"5": 1.0}}}
    document = merged(GOOD, {"spec": {"algorithm": algorithm, "rollout": rollout}})["spec"]
    check_engine_arguments(RLJobSpec.model_validate(document))
    document["rollout"]["engine"] = "sglang"
    with pytest.raises(ConfigError, match="need engine hf, got sglang, which penalises each token one step late"):
        check_engine_arguments(RLJobSpec.model_validate(document))
    del document["rollout"]["sampling"][name]
    check_engine_arguments(RLJobSpec.model_validate(document))


def test_each_argument_that_a_job_may_not_set_exists_and_each_that_we_set_is_among_them(tmp_path):
    known = sglang_arguments.arguments(SRT.parent)
    assert set(RESERVED) <= set(known)
    colocated = {"placement": {"mode": "colocated"}}
    given = setup.options(spec({}, **colocated), tmp_path, "cuda:0", 64)
    own_defaults = {"log_level", "cuda_graph_backend_prefill", "attention_backend"}
    assert set(given) - set(RESERVED) == {"tp_size"} | own_defaults, "the size is checked against the accelerators"


def test_the_attention_of_a_gpu_engine_in_float32_is_one_that_computes_in_it(tmp_path):
    """SGLang would choose one that does not, and end while it starts."""

    def chosen(arguments, dtype):
        job = spec(arguments, model={"dtype": dtype})
        return setup.options(job, tmp_path, "cuda:0", 64).get("attention_backend")

    assert chosen({}, "float32") == "triton" and chosen({"attention_backend": "fa3"}, "float32") == "fa3"
    assert chosen({}, "bfloat16") is None


def test_a_plan_of_the_operator_and_of_validate_checks_them():
    job = RLJob.model_validate(merged(GOOD, {"spec": {"rollout": {"engine": "sglang", "engineArgs": {"tp_size": 2}}}}))
    with pytest.raises(ConfigError, match="rollout.engineArgs.tp_size"):
        build_launch_plan(job, name="a", uid="u")


@pytest.mark.parametrize(
    ("gpus", "given", "engines", "ranks"),
    [
        (4, {}, 1, 4),
        (4, {"tp_size": 4}, 1, 4),
        (4, {"tp_size": 2}, 2, 2),
        (4, {"dp_size": 2}, 2, 2),
        (4, {"tp_size": 2, "dp_size": 2}, 2, 2),
        (8, {"tp_size": 1}, 8, 1),
        (0, {"dp_size": 3}, 3, 1),
        (0, {"tp_size": 1}, 1, 1),
    ],
)
def test_sizes_of_engines_divide_the_accelerators_of_a_pod_and_sglang_gets_its_own_alone(
    gpus, given, engines, ranks, tmp_path
):
    job = spec(given, rollout={"gpus": gpus, "engine": "sglang", "engineArgs": given})
    check_engine_arguments(job)
    assert (job.rollout.engines, job.rollout.tensor_parallel) == (engines, ranks)
    options = setup.options(job, tmp_path, "cuda:0" if gpus else "cpu", 64)
    assert options.get("tp_size", 1) == ranks and "dp_size" not in options


@pytest.mark.parametrize(
    ("gpus", "given", "words"),
    [
        (4, {"tp_size": 3}, "engineArgs.tp_size must divide rollout.gpus 4, got 3"),
        (4, {"tp_size": 8}, "engineArgs.tp_size must divide rollout.gpus 4, got 8"),
        (4, {"dp_size": 3}, "engineArgs.dp_size must divide rollout.gpus 4, got 3"),
        (8, {"tp_size": 2, "dp_size": 2}, "tp_size x dp_size must be rollout.gpus 8, got 2 x 2"),
        (4, {"dp_size": 0}, "engineArgs.dp_size must be 1 to 64, got 0"),
        (
            4,
            {"attn_dp_size": 3},
            r"engineArgs.attn_dp_size must divide the ranks of an engine \(tp_size\), 4, got 3; change it",
        ),
        (
            4,
            {"tp_size": 2, "attn_dp_size": 4},
            r"attn_dp_size must divide the ranks of an engine \(tp_size\), 2, got 4",
        ),
        (4, {"dp_size": 4, "ep_size": 2}, r"ep_size must divide the ranks of an engine \(tp_size\), 1, got 2"),
        (0, {"attn_dp_size": 2}, r"attn_dp_size must divide the ranks of an engine \(tp_size\), 1, got 2"),
        (4, {"attn_dp_size": 2, "attn_cp_size": 4}, r"attn_dp_size x attn_cp_size must divide .*, 4, got 2 x 4"),
        (4, {"ep_size": 4, "moe_dp_size": 2}, r"ep_size x moe_dp_size must divide .*, 4, got 4 x 2"),
        (4, {"ep_size": 0}, "engineArgs.ep_size must be at least 1, got 0; correct it"),
        (
            0,
            {"tp_size": 2},
            "engineArgs.tp_size must be 1 with rollout.gpus 0, as an engine on CPU is one process, got 2",
        ),
    ],
)
def test_sizes_that_leave_accelerators_over_are_refused(gpus, given, words):
    job = spec(given, rollout={"gpus": gpus, "engine": "sglang", "engineArgs": given})
    with pytest.raises(ConfigError, match=words):
        check_engine_arguments(job)


def test_sizes_that_divide_the_ranks_of_an_engine_are_passed_on(tmp_path):
    given = {"tp_size": 4, "attn_dp_size": 2, "attn_cp_size": 2, "ep_size": 4, "moe_dp_size": 1}
    job = spec(given, rollout={"gpus": 8, "engine": "sglang", "engineArgs": given})
    check_engine_arguments(job)
    assert given.items() <= setup.options(job, tmp_path, "cuda:0", 64).items()


def test_the_tensor_parallel_size_cannot_be_given_twice_and_differently():
    job = spec({}, rollout={"gpus": 4, "engine": "sglang", "engineArgs": {"tp_size": 2}, "parallel": {"tensor": 4}})
    with pytest.raises(
        ConfigError, match=r"tp_size must be rollout\.parallel\.tensor 4, got 2; remove rollout\.parallel"
    ):
        check_engine_arguments(job)


def test_the_check_needs_neither_torch_nor_sglang():
    code = (
        "import sys; from rl_core.plan.engine_arguments import _arguments; _arguments();"
        "assert not {'torch', 'sglang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
