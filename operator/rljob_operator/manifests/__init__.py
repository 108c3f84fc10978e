"""From a job to Kubernetes objects, as plain dictionaries. Pure: equal arguments give equal objects, nothing is read or sent.

pods.build(job, pod_plan, config=...)       one pod of the launch plan
support.build(job, config=...)              Service, ConfigMap, NetworkPolicies, a disruption budget, claim templates, gang objects
secret.build(job, master=...)               keys, derived and never stored elsewhere
template_hash(job, role, config=...)        whether a pod is still as it would be made today
"""

from rljob_operator.manifests import claims, config, gang, network, pods, secret, service, support
from rljob_operator.manifests.template import template_hash

__all__ = ["claims", "config", "gang", "network", "pods", "secret", "service", "support", "template_hash"]
