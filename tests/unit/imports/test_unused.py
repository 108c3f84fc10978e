"""Every function, class and method of our packages is used by our code or an example, or is listed here with the reason."""

import pytest

from rl_core.api.imports import collection_paused
from tests import ROOT
from tests.lint.import_graph import modules
from tests.lint.reach import Code

PLACEMENT = "name that users of RLinf's placement know"
WORKER = "method of the worker base class, for workers of users"
CHANNEL = "method of a channel, for programs of users"
REQUEST = "RPC method of the channel server, looked up by its name with an underscore"
EMBODIED = "for programs of users that act in simulators"
LIBRARY = "called or imported by a library"
EXPECTED = {
    "rl_core.actors.base:Actor.compute_ref_log_probs": "method of the actors that users of RLinf know",
    "rl_core.actors.fsdp.manager:FSDPModelManager.get_model_state_dict": "method of the model managers that users of RLinf know",
    "rl_core.actors.manager:ModelManager.get_model_state_dict": "method of the model managers that users of RLinf know",
    "rl_core.actors.manager:ModelManager.load_param_and_grad": "method of the model managers that users of RLinf know",
    "rl_core.actors.manager:ModelManager.offload_param_and_grad": "method of the model managers that users of RLinf know",
    "rl_core.actors.megatron.model:PolicyModel._postprocess": LIBRARY,
    "rl_core.actors.megatron.model:PolicyModel._preprocess": LIBRARY,
    "rl_core.algorithms.advantages.embodied:action_log_probs": EMBODIED,
    "rl_core.rollouts.multi_step:MultiStepRolloutWorker.get_dst_ranks": "method of the rollouts that users of RLinf know",
    "rl_core.api.descriptions:_WithDescriptions.model_schema": LIBRARY,
    "rl_core.api.text:Loader.compose_mapping_node": LIBRARY,
    "rl_core.api.identity:WorkerAddress.get_name": WORKER,
    "rl_core.api.records:EnvironmentInterface.global_post_process_and_metrics": "method of NeMo-RL's environments",
    "rl_core.envs.math:MathEnvironment.global_post_process_and_metrics": "method of NeMo-RL's environments",
    "rl_core.samples.lines:array_of": "documented in docs/samples.md",
    "rl_core.envs.registry:register_env": "documented in docs/writing-an-env.md",
    "rl_core.channel.channel:Channel.get_batch_async": CHANNEL,
    **dict.fromkeys(
        (
            f"rl_core.channel.server:ChannelServer.{name}"
            for name in ("_allocate", "_depth", "_full", "_register", "_reserve", "_server_stats")
        ),
        REQUEST,
    ),
    "rl_core.plan.placement.component:ComponentPlacement.components": PLACEMENT,
    "rl_core.plan.placement.component:HybridComponentPlacement": PLACEMENT,
    "rl_core.plan.placement.modes:ModelParallelComponentPlacement.get_parallel": PLACEMENT,
    "rl_core.rollouts.manager:RolloutManager.generate_and_push": "method of NeMo-RL's rollout manager",
    **dict.fromkeys(
        (
            f"rl_core.rollouts.sglang.cpu.stand_in.triton:{name}"
            for name in ("_Modules.create_module", "_Modules.exec_module", "cdiv", "jit", "next_power_of_2")
        ),
        LIBRARY,
    ),
    "rl_core.workers.result:WorkerGroupFuncResult.consume_duration": WORKER,
    "rl_core.workers.result:WorkerGroupFuncResult.consume_durations": WORKER,
    **dict.fromkeys(
        (
            f"rl_core.workers.worker:Worker.{name}"
            for name in (
                *(
                    "acquire_free_port",
                    "connect_channel",
                    "create_channel",
                    "log_debug",
                    "log_error",
                    "log_warning",
                ),
                *("pop_execution_times", "recv_tensor", "send_tensor", "worker_timer"),
            )
        ),
        WORKER,
    ),
    **dict.fromkeys(
        (f"rljob_operator.crd.document:_Dumper.{name}" for name in ("ignore_aliases", "represent_mapping")), LIBRARY
    ),
    "rljob_operator.runtime.handlers:NoDiffs.fetch": LIBRARY,
    "rljob_operator.runtime.logs:TextFormatter.formatMessage": LIBRARY,
}
"""Definitions that only users' code or a library uses, each as "module:Class.method", with the reason."""


@pytest.fixture(scope="module")
def code():
    users = [*ROOT.glob("examples/**/*.py"), *ROOT.glob("examples/**/*.yaml"), ROOT / "pyproject.toml"]
    with collection_paused():  # a finalizer that runs inside ast.parse can make it fail (python/cpython#106905)
        return Code.read(modules(), users)


def test_every_definition_is_used_or_expected(code):
    assert code.unused(EXPECTED) == [], "nothing uses these: use them, or delete them with their tests"


def test_what_is_expected_exists_and_nothing_else_uses_it(code):
    assert sorted(set(EXPECTED) - set(code.unused())) == [], "these are used, or gone: take them off the list"


def test_unused_code_and_what_only_it_uses_are_found(tmp_path):
    (tmp_path / "code.py").write_text(
        "def used(): pass\n"
        "def unused(): helper()\n"
        "def helper(): pass\n"
        "class Face:\n"
        "    def called(self): self._inner()\n"
        "    def _inner(self): pass\n"
        "    def silent(self): self.silent()\n"
        "    @register\n"
        "    def hook(self): pass\n"
    )
    (tmp_path / "user.py").write_text("from code import used, Face\nused()\nFace().called()\n")
    found = Code.read({"code": tmp_path / "code.py"}, [tmp_path / "user.py"])
    assert found.unused() == ["code:Face.silent", "code:helper", "code:unused"]
    assert found.unused(["code:unused"]) == ["code:Face.silent"]
