"""A small real Kubernetes cluster on one Linux machine, for tests and for trying the operator.

`build` compiles the programs (etcd, API server, kubelet, containerd ...) from Go modules, `control_plane` runs those
that need no root, `node` runs nodes made of Linux namespaces whose containers are real, `cluster` ties them together
and `cli` (`python -m tests.cluster.testcluster`) is the same for people. Nothing here knows of RLJobs.
"""
