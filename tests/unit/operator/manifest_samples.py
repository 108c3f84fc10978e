"""Jobs whose manifests are tested, on paper and by a real API server."""

import yaml

from rl_core.api.job import RLJob
from rl_core.plan.launch import build_launch_plan
from rljob_operator import manifests
from rljob_operator.model import OperatorConfig

UID = "0b7c1a2d-3e4f-4a5b-8c6d-7e8f9a0b1c2d"
CONFIG = OperatorConfig(images={role: f"registry.test/{role}:1" for role in ("actor", "rollout", "env")})
MASTER = bytes(range(32))
FULL_POD = yaml.safe_load(
    """
image: registry.test/own@sha256:0000000000000000000000000000000000000000000000000000000000000123
imagePullPolicy: IfNotPresent
imagePullSecrets: [{name: registry}]
env: {HF_HOME: /tmp/hf, PRICE: "$5 $(HOME) $$", PYTHONPATH: /mine}
envFrom: [{prefix: W_, secretRef: {name: wandb, optional: true}}, {configMapRef: {name: settings}}]
resources: {requests: {cpu: 500m, memory: 2Gi, rdma/hca: "1"}, limits: {cpu: 2, memory: 2Gi, rdma/hca: "1"}}
envValueFrom: [{name: NODE, fieldRef: {fieldPath: spec.nodeName}}, {name: API_KEY, secretKeyRef: {name: wandb, key: key, optional: true}}]
gpus: 2
gpuResource: amd.com/gpu
gpuAllocation: dra
deviceClass: gpu.example.com
resourceClaims: [{name: nic, resourceClaimTemplateName: nics, request: one}, {name: shared, resourceClaimName: all}]
nodeSelector: {zone: a}
tolerations: [{key: gpu, operator: Exists, effect: NoSchedule}, {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 5}]
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: gpu, operator: In, values: [h100, h200]}]}]}
    preferredDuringSchedulingIgnoredDuringExecution: [{weight: 5, preference: {matchExpressions: [{key: spot, operator: DoesNotExist}]}}]
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution: [{weight: 100, podAffinityTerm: {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {a: b}}}}]
topologySpreadConstraints: [{maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway}]
volumes:
- {name: disk, persistentVolumeClaim: {claimName: models, readOnly: true}}
- {name: scratch, ephemeral: {volumeClaimTemplate: {metadata: {labels: {a: b}}, spec: {accessModes: [ReadWriteOnce], storageClassName: local, resources: {requests: {storage: 1Gi}}}}}}
- {name: settings, configMap: {name: settings, optional: true, defaultMode: 292, items: [{key: a, path: b, mode: 256}]}}
- {name: token, secret: {secretName: token, optional: true}}
- {name: memory, emptyDir: {medium: Memory, sizeLimit: 1Gi}}
- {name: both, projected: {sources: [{secret: {name: a, optional: true}}, {configMap: {name: b, items: [{key: k, path: p}]}}]}}
- {name: weights, image: {reference: registry.test/weights:1, pullPolicy: IfNotPresent}}
- {name: pages, emptyDir: {medium: HugePages-2Mi}}
- {name: vault, csi: {driver: secrets-store.csi.k8s.io, readOnly: true, volumeAttributes: {secretProviderClass: hub}}}
volumeMounts:
- {name: disk, mountPath: /models, readOnly: true}
- {name: scratch, mountPath: /scratch, subPath: here}
- {name: settings, mountPath: /settings}
- {name: token, mountPath: /token}
- {name: memory, mountPath: /tmp}
- {name: both, mountPath: /both}
- {name: weights, mountPath: /weights}
initContainers:
- {name: fetch, command: [sh, -c], args: ["echo $(HOME)"], env: {KEY: "$x"}, resources: {limits: {memory: 1Gi}}, volumeMounts: [{name: scratch, mountPath: /scratch}]}
- {name: other, image: "registry.test/other:1"}
- {name: sidecar, image: "registry.test/logs:1", restartPolicy: Always, envValueFrom: [{name: MEMORY, resourceFieldRef: {resource: limits.memory}}]}
serviceAccountName: trainer
priorityClassName: system-cluster-critical
runtimeClassName: nvidia
schedulerName: other
dnsConfig: {nameservers: [192.0.2.53], searches: [example.com], options: [{name: ndots, value: "2"}, {name: edns0}]}
securityContext: {runAsUser: 2000, runAsGroup: 3000, fsGroup: 4000, supplementalGroups: [5000], readOnlyRootFilesystem: false, seccompProfile: {type: RuntimeDefault}}
terminationGracePeriodSeconds: 77
labels: {team: research}
annotations: {note: hello}
shmSize: 8Gi
"""
)
ROLES = ("actor", "rollout", "env")


def make_job(*, name="sums", uid=UID, namespace="default", labels=None, **spec):
    """Return a job of the API server with `spec` blocks over a minimal one."""
    meta = {"name": name, "namespace": namespace, "uid": uid, "labels": labels or {}}
    written = {"model": {"path": "/models/m"}, "data": {"train": "/data/t.jsonl"}} | spec
    return RLJob.model_validate(
        {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": meta, "spec": written}
    )


def full_job(**meta):
    """Return a job that uses every field of a pod in every role."""
    return make_job(
        **meta,
        **{
            role: FULL_POD | ({"egress": [{"cidr": "192.0.2.0/24", "ports": [443]}]} if role == "env" else {})
            for role in ROLES
        },
        code={"configMap": "my-code"},
        checkpoint={"path": "/scratch/checkpoints"},
    )


def make_plan(job, *, epoch=1, **more):
    """Return the launch plan of `job` as the operator makes it."""
    meta = job.metadata
    return build_launch_plan(job, name=meta.name, namespace=meta.namespace, uid=meta.uid, epoch=epoch, **more)


def make_pods(job, *, config=CONFIG, plan=None, **more):
    """Return the pods of `job` by name."""
    found = plan or make_plan(job, **more)
    return {pod.name: manifests.pods.build(job, pod, config=config) for pod in found.pods}
