{{/* What the pods of all components have in common. */}}

{{- define "twostroke.podMetadata" -}}
{{- $values := index .root.Values .component -}}
labels:
  {{- include "twostroke.labels" . | nindent 2 }}
annotations:
  checksum/config: {{ include "twostroke.config" .root | sha256sum }}
  {{- if .root.Values.metrics.annotations }}
  prometheus.io/scrape: "true"
  prometheus.io/path: /metrics
  prometheus.io/port: {{ .metricsPort | quote }}
  {{- end }}
  {{- with $values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "twostroke.podPlacement" -}}
{{- $values := index .root.Values .component -}}
serviceAccountName: {{ include "twostroke.serviceAccountName" .root }}
automountServiceAccountToken: false
# A service named twostroke-... would set variables such as TWOSTROKE_PORT in every pod.
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "twostroke.container" -}}
{{- $values := index .root.Values .component -}}
name: {{ .component }}
image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: [twostroke, {{ .command }}, --config, /etc/twostroke/config/cluster.yaml]
securityContext:
  {{- toYaml .root.Values.securityContext | nindent 2 }}
env:
  # The root file system is read-only; what libraries cache goes to /tmp.
  - {name: HOME, value: /tmp}
  - {name: NUMBA_CACHE_DIR, value: /tmp/numba}
  - {name: TRITON_CACHE_DIR, value: /tmp/triton}
  {{- with $values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
lifecycle:
  preStop:
    # Until every node has heard that this pod takes no new connections.
    sleep: {seconds: 5}
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}

{{- define "twostroke.volumeMounts" -}}
- {name: config, mountPath: /etc/twostroke/config, readOnly: true}
- {name: cluster-secret, mountPath: /etc/twostroke/cluster-secret, readOnly: true}
- {name: models, mountPath: /models, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "twostroke.volumes" -}}
{{- $volume := .Values.model.volume -}}
{{- if and $volume.existingClaim $volume.hostPath -}}
{{- fail "model.volume: name existingClaim or hostPath, not both" -}}
{{- end -}}
- name: config
  configMap:
    name: {{ include "twostroke.fullname" . }}
- name: cluster-secret
  secret:
    secretName: {{ include "twostroke.secretName" . }}
    defaultMode: 0440
    items: [{key: secret, path: secret}]
- name: models
  {{- if $volume.existingClaim }}
  persistentVolumeClaim: {claimName: {{ $volume.existingClaim }}, readOnly: true}
  {{- else if $volume.hostPath }}
  hostPath: {path: {{ $volume.hostPath }}, type: Directory}
  {{- else }}
  emptyDir: {}
  {{- end }}
- name: tmp
  emptyDir: {}
{{- end -}}
