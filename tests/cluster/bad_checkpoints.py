"""Jobs whose checkpoint block is bad, as rows of `bad_jobs`."""

from tests.cluster.bad_placements import SAME

CHECKPOINTS = {
    "resume-from-two": (
        {"checkpoint": {"resumeFrom": {"job": "a", "path": "/b"}}},
        "spec.checkpoint.resumeFrom",
        "resumeFrom must have either job or path, got both; give one of them",
        SAME,
    ),
    "resume-from-nothing": (
        {"checkpoint": {"resumeFrom": {"step": 3}}},
        "spec.checkpoint.resumeFrom",
        "resumeFrom must have either job or path, got neither; give one of them",
        SAME,
    ),
    "resume-from-a-wrong-step": (
        {"checkpoint": {"resumeFrom": {"job": "a", "step": "newest"}}},
        "spec.checkpoint.resumeFrom.step",
        "must be latest, best or the number of a step, got newest; write one of them",
        SAME,
    ),
}
