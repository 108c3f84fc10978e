"""Jobs with bad teachers of on-policy distillation; rows as in bad_jobs."""

from typing import Any

from tests.cluster.bad_placements import OWN, SAME

TEACHER = {"name": "teacher", "worker": "rl_core.groups.teacher:Teacher", "callers": ["actor"]}


def taught(**distillation: Any) -> dict[str, Any]:
    return {"algorithm": {"name": "distill", "distillation": distillation}, "groups": [TEACHER]}


def said_of_groups(*names: str) -> str:
    listed = ", ".join(f'"{name}"' for name in names)
    return f"algorithm.distillation must name groups of spec.groups with actor in callers, got [{listed}]; declare them"


DISTILLATION = {
    "distillation-of-another-estimator": (
        {**taught(teacher="teacher"), "algorithm": {"distillation": {"teacher": "teacher"}}},
        "spec.algorithm.distillation",
        "distillation must be given exactly with name distill, got name grpo; set both or neither",
        SAME,
    ),
    "distillation-that-is-not-given": (
        {"algorithm": {"name": "distill"}},
        "spec.algorithm.distillation",
        "distillation must be given exactly with name distill, got name distill; set both or neither",
        SAME,
    ),
    "no-teacher": (
        taught(rewardWeight=1.0),
        "spec.algorithm.distillation.teacher",
        "teacher or teachers must be given, not both; set one of them",
        SAME,
    ),
    "one-teacher-and-several": (
        taught(teacher="teacher", teachers={"math": "teacher"}, column="subject"),
        "spec.algorithm.distillation.teacher",
        "teacher or teachers must be given, not both; set one of them",
        SAME,
    ),
    "teachers-without-a-column": (
        taught(teachers={"math": "teacher"}),
        "spec.algorithm.distillation.column",
        "column must be given exactly with teachers, whose keys are its values; set both or neither",
        SAME,
    ),
    "column-of-one-teacher": (
        taught(teacher="teacher", column="subject"),
        "spec.algorithm.distillation.column",
        "column must be given exactly with teachers, whose keys are its values; set both or neither",
        SAME,
    ),
    "teacher-that-is-no-group": (
        taught(teacher="professor"),
        "spec.algorithm.distillation",
        said_of_groups("professor"),
        SAME,
    ),
    "teacher-in-a-job-without-groups": (
        {**taught(teacher="teacher"), "groups": None},
        "spec.algorithm.distillation",
        said_of_groups("teacher"),
        SAME,
    ),
    "one-of-several-teachers-that-is-no-group": (
        taught(teachers={"math": "teacher", "law": "lawyer"}, column="subject"),
        "spec.algorithm.distillation",
        said_of_groups("lawyer"),
        SAME,
    ),
    "teacher-that-the-actor-may-not-call": (
        {**taught(teacher="teacher"), "groups": [{**TEACHER, "callers": ["env"]}]},
        "spec.algorithm.distillation",
        said_of_groups("teacher"),
        SAME,
    ),
    "loss-over-no-candidates": (
        taught(teacher="teacher", topK=0),
        "spec.algorithm.distillation.topK",
        "Invalid value: 0: spec.algorithm.distillation.topK in body should be greater than or equal to 1",
        OWN,
    ),
    "rewards-that-count-against-the-teacher": (
        taught(teacher="teacher", rewardWeight=-1),
        "spec.algorithm.distillation.rewardWeight",
        "Invalid value: -1: spec.algorithm.distillation.rewardWeight in body should be greater than or equal to 0",
        OWN,
    ),
}
