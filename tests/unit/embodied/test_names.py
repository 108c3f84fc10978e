"""The classes of the embodied programs have the methods, with the arguments, that programs outside the project call."""

import inspect

import pytest

from rl_core.actors.embodied import EmbodiedFSDPActor
from rl_core.envs.embodied import episode_metrics, eval_seeds
from rl_core.envs.gymnasium import GymnasiumVectorEnv
from rl_core.envs.vector_worker import EnvWorker
from rl_core.rollouts.embodied import bootstrap_rewards, merge_env_outputs
from rl_core.rollouts.multi_step import MultiStepRolloutWorker
from rl_core.runner.embodied import AsyncEmbodiedRunner, EmbodiedRunner

# Class -> "method(arguments a caller gives, in order)"; a method marked * is awaited.
METHODS = {
    EnvWorker: (
        "__init__(cfg) init_worker() *interact(input_channel,output_channel) env_interact_step(chunk_actions,stage) "
        "bootstrap_step(stage) prefetch_train_bootstrap() *evaluate(input_channel,output_channel,request) update_reset_state_ids() close()"
    ),
    GymnasiumVectorEnv: "__init__(id,num_envs,auto_reset=,vectorization=) reset(seed) reset() step(actions) chunk_step(actions)",
    MultiStepRolloutWorker: (
        "__init__(cfg) init_worker() predict(env_obs) predict(env_obs,mode) get_dones_and_rewards(env_output) "
        "*recv_env_output(input_channel) *recv_env_output(input_channel,mode) send_chunk_actions(output_channel,chunk_actions) "
        "send_chunk_actions(output_channel,chunk_actions,mode) *generate(input_channel,output_channel,actor_channel) "
        "*evaluate(input_channel,output_channel,request) sync_model_from_actor() offload_model() reload_model() set_global_step(global_step)"
    ),
    EmbodiedFSDPActor: (
        "__init__(cfg) init_worker() model_provider_func() sync_model_to_rollout() *recv_rollout_trajectories(input_channel) "
        "compute_advantages_and_returns() run_training() set_global_step(global_step)"
    ),
    EmbodiedRunner: "build(run) start() loop() run_step() state_dict() load_state_dict(state)",
    AsyncEmbodiedRunner: "build(run) start() loop() run_step() state_dict() load_state_dict(state)",
}
FUNCTIONS = {
    merge_env_outputs: "(shards,sizes)",
    bootstrap_rewards: "(rewards,values,truncations,dones,gamma=,bootstrap_type=)",
    episode_metrics: "(final_infos)",
    eval_seeds: "(base_seed,worker,workers,num_envs)",
}


def accepts(function, arguments, *, bound):
    """Bind the arguments: `a,b=` is one by its place under that name, and one by its name."""
    signature = inspect.signature(function)
    given = [one for one in arguments.strip("()").split(",") if one]
    places = [one for one in given if not one.endswith("=")]
    names = [name for name in signature.parameters if name not in ("self", "cls")]
    assert names[: len(places)] == places
    signature.bind(*([None] if bound else []), *places, **{one[:-1]: None for one in given if one.endswith("=")})


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_methods_take_the_arguments_of_their_callers(kind):
    for call in METHODS[kind].split():
        name, _, arguments = call.lstrip("*").partition("(")
        method = getattr(kind, name)
        assert inspect.iscoroutinefunction(method) or not call.startswith("*"), f"{name} must be async"
        accepts(method, arguments, bound=not inspect.ismethod(method))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions_take_the_arguments_of_their_callers(function):
    accepts(function, FUNCTIONS[function], bound=False)


def test_the_vector_environment_takes_the_arguments_of_its_simulator():
    env = GymnasiumVectorEnv("tests.unit.embodied.simulators:Scripted", 2, auto_reset=False, ends=[1])
    output = env.reset(seed=3)
    assert output.rewards is None and output.obs["states"].shape == (2, 2)
    assert env.step([0.0, 0.0]).terminations.all()
