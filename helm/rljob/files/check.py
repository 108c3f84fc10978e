"""The chart's test: a bad job is refused, a suspended one is understood by the operator, and nothing is left.

Runs in the operator's image as `helm test`. A suspended job makes no pod and holds no device.
"""

import os
import sys
import time

from kubernetes import client, config

GROUP, VERSION, PLURAL = "rljob.dev", "v1alpha1", "rljobs"
PATIENCE = 60.0
"""Seconds the operator has to write the status."""


def job(name: str, **spec: object) -> dict:
    """Return a job that is suspended from the start."""
    needed = {"model": {"path": "/models/none"}, "data": {"train": "/data/none.jsonl"}, "suspend": True}
    document = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "RLJob", "metadata": {"name": name}}
    return document | {"spec": needed | spec}


def main() -> int:
    """Return 0 when all is well, else 1 with a sentence on standard error."""
    config.load_incluster_config()
    jobs, namespace, name = client.CustomObjectsApi(), os.environ["NAMESPACE"], os.environ["NAME"]
    where = {"group": GROUP, "version": VERSION, "namespace": namespace, "plural": PLURAL}
    try:
        jobs.create_namespaced_custom_object(**where, body=job(name, algorithm={"groupSize": 1}), dry_run="All")
    except client.ApiException as error:
        if "groupSize must be at least 2" not in (error.body or ""):
            return complain(f"a bad job must be refused by its rule, got {error.body}")
    else:
        return complain("a bad job must be refused, but was taken; is the RLJob definition of this chart installed?")
    jobs.create_namespaced_custom_object(**where, body=job(name), dry_run="All")
    jobs.create_namespaced_custom_object(**where, body=job(name))
    try:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            status = jobs.get_namespaced_custom_object(**where, name=name).get("status", {})
            if status.get("phase") == "Suspended":
                sys.stdout.write(f"job {namespace}/{name} was understood: {status['phase']}\n")
                return 0
            time.sleep(0.5)
        return complain(
            f"the operator must write a status within {PATIENCE:.0f} s, got {status or 'none'}; see its logs"
        )
    finally:
        jobs.delete_namespaced_custom_object(**where, name=name)


def complain(words: str) -> int:
    """Say what is wrong; return 1."""
    sys.stderr.write(f"{words}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
