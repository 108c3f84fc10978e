"""`python -m testcluster`."""

from testcluster.cli import main

main()
