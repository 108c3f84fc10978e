{{- /* What the operator does in a namespace that it serves, and nothing more: a test runs it with these rights and sees each used. */ -}}
{{- define "rljob.rules" -}}
- apiGroups: [rljob.dev]
  resources: [rljobs]
  verbs: [get, list, watch, delete]  # delete: ttlSecondsAfterFinished
- apiGroups: [rljob.dev]
  resources: [rljobs/status]
  verbs: [patch]
- apiGroups: [rljob.dev]
  resources: [rljobs/scale]  # rollout.autoscale
  verbs: [patch]
- apiGroups: [rljob.dev]
  resources: [rljobs/finalizers]  # blockOwnerDeletion of its objects, where the cluster enforces it
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [scheduling.k8s.io, scheduling.volcano.sh, scheduling.x-k8s.io]
  resources: [podgroups]  # the first of these that the cluster serves; without the right pods are scheduled one by one
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [secrets]  # the keys of jobs: made, never read
  verbs: [create]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end }}
