"""`python -m tests.cluster.testcluster`."""

from tests.cluster.testcluster.cli import main

main()
