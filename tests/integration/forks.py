"""`FORKS` starts processes by forking a server that has imported the libraries of ranks and receivers already."""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.integration.rank_imports"])
