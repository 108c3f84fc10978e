"""From a job to Kubernetes objects, as plain dictionaries. Pure: equal arguments give equal objects, nothing is read or sent.

pods.build(job, pod_plan, config=...)       one pod of the launch plan
support.build(job, config=...)              Service, ConfigMap, NetworkPolicies, disruption budgets, claim templates, gang objects
secret.build(job, master=...)               the keys of the job, derived from the master key
template_hash(job, group, config=...)       a hash of the settings from which the pods of a group are made

Each takes the groups of the job as the keyword `groups`; None stands for those that the spec of the job describes.
"""

from rljob_operator.manifests import claims, config, gang, network, pods, secret, service, support
from rljob_operator.manifests.template import template_hash

__all__ = ["claims", "config", "gang", "network", "pods", "secret", "service", "support", "template_hash"]
