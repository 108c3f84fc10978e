"""Megatron's process groups end with the actor that they were made for: each has threads, which poll."""

import gc

import psutil
import torch.distributed as dist

from tests.actor_samples import make_model, make_spec
from tests.integration.fsdp_rank import Rank


def test_a_further_actor_of_a_process_leaves_no_more_groups_and_threads_than_one(tmp_path):
    spec = make_spec(make_model(tmp_path), actor__backend="megatron")
    process, groups, threads = psutil.Process(), [], []
    for _ in range(3):
        rank = Rank(spec, [[0, 1, 2, 3]], 0, 1)
        rank.train(1)
        del rank
        gc.collect()
        groups.append(len(dist.distributed_c10d._world.pg_map))
        threads.append(process.num_threads())
    assert groups[0] == groups[1] == groups[2] > 1
    assert threads[2] < threads[0] + groups[0]  # a group of gloo has three
