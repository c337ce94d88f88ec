{{/*
The one YAML document that configures every part. What the chart itself decides (addresses, ports, files) cannot be
set by the `config` values. Replica counts are left out, so that scaling restarts no pod.
*/}}

{{- define "twostroke.config" -}}
{{- $name := include "twostroke.fullname" . -}}
{{- $worker := include "twostroke.port.worker" . -}}
model:
  path: {{ .Values.model.path | quote }}
  {{- with .Values.model.servedName }}
  served_name: {{ . | quote }}
  {{- end }}
  dtype: {{ .Values.model.dtype }}
  {{- with .Values.model.maxModelLen }}
  max_model_len: {{ int . }}
  {{- end }}
  generation_config: {{ .Values.model.generationConfig }}
{{- with .Values.frontend.config }}
frontend:
  {{- toYaml . | nindent 2 }}
{{- end }}
router:
  {{- $public := include "twostroke.port.public" . | int }}
  {{- $admin := include "twostroke.port.admin" . | int }}
  {{- $fixed := dict "host" "0.0.0.0" "port" $public "admin_host" "0.0.0.0" "admin_port" $admin }}
  {{- include "twostroke.config.section" (dict "root" . "component" "router" "fixed" $fixed) | nindent 2 }}
context:
  {{- include "twostroke.config.server" (dict "root" . "component" "context") | nindent 2 }}
generation:
  {{- include "twostroke.config.server" (dict "root" . "component" "generation") | nindent 2 }}
workers:
  context: ["dns://{{ $name }}-context-headless:{{ $worker }}"]
  generation: ["dns://{{ $name }}-generation-headless:{{ $worker }}"]
security:
  secret_file: /etc/twostroke/cluster-secret/secret
  {{- if .Values.apiKeys.existingSecret }}
  api_keys_file: /etc/twostroke/api-keys/api-keys
  {{- end }}
{{- end -}}

{{- define "twostroke.config.server" -}}
{{- $http := include "twostroke.port.http" .root | int -}}
{{- $worker := printf "tcp://0.0.0.0:%s" (include "twostroke.port.worker" .root) -}}
{{- $transfer := dict "bind" (printf "tcp://0.0.0.0:%s" (include "twostroke.port.transfer" .root)) -}}
{{- $fixed := dict "host" "0.0.0.0" "port" $http "worker_bind" $worker "transfer" $transfer -}}
{{- include "twostroke.config.section" (dict "root" .root "component" .component "fixed" $fixed) -}}
{{- end -}}

{{- define "twostroke.config.section" -}}
{{- $config := index .root.Values .component "config" -}}
{{- range $key := append (keys .fixed) "replicas" -}}
{{- if and (hasKey $config $key) (ne $key "transfer") -}}
{{- fail (printf "%s.config.%s: the chart decides this; take it out" $.component $key) -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite (deepCopy $config) .fixed) -}}
{{- end -}}
