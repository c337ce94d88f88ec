{{/* Names, labels and addresses. Templates that concern one component take (dict "root" $ "component" "context"). */}}

{{- define "twostroke.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "twostroke.componentName" -}}
{{ include "twostroke.fullname" .root }}-{{ .component }}
{{- end -}}

{{- define "twostroke.selector" -}}
app.kubernetes.io/name: twostroke
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "twostroke.labels" -}}
{{ include "twostroke.selector" . }}
app.kubernetes.io/part-of: twostroke
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "twostroke.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "twostroke.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{- define "twostroke.secretName" -}}
{{ .Values.clusterSecret.existingSecret | default (printf "%s-cluster" (include "twostroke.fullname" .)) }}
{{- end -}}

{{/* Ports of the pods. */}}
{{- define "twostroke.port.public" -}}8000{{- end -}}
{{- define "twostroke.port.admin" -}}8001{{- end -}}
{{- define "twostroke.port.http" -}}8080{{- end -}}
{{- define "twostroke.port.worker" -}}7000{{- end -}}
{{- define "twostroke.port.transfer" -}}7100{{- end -}}
