"""Jobs with bad `spec.weights`; rows as in bad_jobs."""

from tests.cluster.bad_placements import SAME

WEIGHTS = {
    "patches-in-a-group": (
        {"weights": {"syncer": "patch", "transport": "gloo"}},
        "spec.weights.transport",
        "transport must be auto or zmq with syncer patch, got gloo; remove it",
        SAME,
    ),
    "encrypted-in-a-group": (
        {"weights": {"encrypt": True, "transport": "gloo"}},
        "spec.weights.transport",
        "transport must be auto, zmq or ipc with encrypt, as a broadcast is not encrypted, got gloo; remove it",
        SAME,
    ),
}
