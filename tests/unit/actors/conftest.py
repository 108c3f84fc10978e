"""The tiny model of tests/actor_samples.py as fixtures."""

import pytest

from rl_core.api.job import RLJobSpec
from tests import actor_samples


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return actor_samples.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_spec(model_folder):
    def make(**changes):
        return RLJobSpec.model_validate(actor_samples.make_spec(model_folder, **changes))

    return make


@pytest.fixture
def make_actor(make_spec):
    from rl_core.actors.fsdp.actor import FSDPActor

    def make(**changes):
        actor = FSDPActor(make_spec(**changes))
        actor.init_worker()
        return actor

    return make


@pytest.fixture
def records():
    return [actor_samples.make_record(group) for group in range(4)]
