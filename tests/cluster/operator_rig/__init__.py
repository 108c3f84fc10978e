"""What the operator's tests on the real API server share: a replica in the test's loop, a kubelet and a runner that do as told."""
