"""Processes that are forked from one in which the libraries of ranks and receivers are imported."""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.integration.rank_imports"])
