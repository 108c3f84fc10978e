"""Builds the runner of a resolved job in the runner's process: reads the model files, creates the hub, the run and the program."""

import os
from pathlib import Path

from rl_core.api.errors import ConfigError
from rl_core.api.identity import Identity
from rl_core.api.job import RLJob
from rl_core.channel.client import configure
from rl_core.data.tokenizer import read_files
from rl_core.observability.trackers import Trackers
from rl_core.plan.groups import groups_of
from rl_core.runner.programs import load_program, program_name
from rl_core.runner.run import Run
from rl_core.runner.runner import Runner
from rl_core.transports.curve import KeyRing
from rl_core.workers.group import Cluster
from rl_core.workers.hub import Hub


def build(job: RLJob, identity: Identity, *, output: Path, resume: str) -> Runner:
    """Create the runner of the job's program and start its hub, so that members can register.

    `resume` is "auto", "none" or the path of a checkpoint. Raises ConfigError for a missing model folder.
    """
    model = Path(job.spec.model.path)
    if not (model / "config.json").is_file():
        raise ConfigError(f"model.path must be a folder with config.json, got {model}; check the path")
    files = read_files(model)
    program = load_program(program_name(job.spec))
    keys = KeyRing(Path(identity.curve_dir), "runner", groups_of(job.spec)) if identity.curve_dir else None
    configure(identity.channel, keys, identity)
    hub = Hub(job=job, identity=identity, keys=keys, files=files)
    run = Run(
        job,
        Cluster(hub),
        Trackers.build(job.spec.trackers, name=job.metadata.name, output=output),
        planned=program.groups(job.spec),
        output=output,
        epoch=identity.epoch,
        resume=resume,
        first_epoch=int(os.environ.get("RLJOB_FIRST_EPOCH", identity.epoch)),
        in_cluster=identity.in_cluster,
        model_files=files,
    )
    runner = Runner(run, program.build(run))
    hub.start()
    return runner
