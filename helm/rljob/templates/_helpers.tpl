{{- define "rljob.fullname" -}}
{{ printf "%s-operator" .Release.Name | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- /* Names of what is not in a namespace: two operators of different namespaces do not meet. */ -}}
{{- define "rljob.clustername" -}}
{{ printf "%s-%s" .Release.Namespace (include "rljob.fullname" .) }}
{{- end }}

{{- define "rljob.selector" -}}
app.kubernetes.io/name: rljob-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "rljob.labels" -}}
{{ include "rljob.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: rljob
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "rljob.serviceaccount" -}}
{{ .Values.serviceAccount.name | default (include "rljob.fullname" .) }}
{{- end }}

{{- /* A reference as it is when it has a tag or digest, else with the appVersion as tag. Call with (list $ reference). */ -}}
{{- define "rljob.image" -}}
{{- $root := index . 0 }}{{ $reference := index . 1 -}}
{{- if or (contains "@" $reference) (regexMatch ":[^/]+$" $reference) }}{{ $reference }}{{ else }}{{ $reference }}:{{ $root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "rljob.pairs" -}}
{{- $pairs := list }}{{ range $key, $value := . }}{{ $pairs = append $pairs (printf "%s=%s" $key $value) }}{{ end }}{{ join "," $pairs }}
{{- end }}

{{- /* What every pod of the chart may reach: DNS and the API server. */ -}}
{{- define "rljob.egress" -}}
- to:  # DNS
  - namespaceSelector: {matchLabels: {{ toJson .Values.dns.namespaceLabels }}}
    podSelector: {matchLabels: {{ toJson .Values.dns.podLabels }}}
  {{- range .Values.dns.cidrs }}
  - ipBlock: {cidr: {{ . }}}
  {{- end }}
  ports:
  {{- range $port := list 53 5353 }}{{ range $protocol := list "UDP" "TCP" }}
  - {port: {{ $port }}, protocol: {{ $protocol }}}
  {{- end }}{{ end }}
- ports:  # the API server
  {{- range .Values.networkPolicy.apiServerPorts }}
  - {port: {{ . }}}
  {{- end }}
{{- end }}
