{{/* The objects of one engine role; both roles have the same. Takes (dict "root" $ "component" "context"). */}}

{{- define "twostroke.server" -}}
{{- $values := index .root.Values .component -}}
{{- $name := include "twostroke.componentName" . -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels:
    {{- include "twostroke.labels" . | nindent 4 }}
spec:
  {{- if not (kindIs "invalid" $values.replicas) }}
  replicas: {{ $values.replicas }}
  {{- end }}
  strategy:
    type: RollingUpdate
    # A spare GPU is rarely at hand: replace pods in place.
    rollingUpdate: {maxSurge: 0, maxUnavailable: 1}
  selector:
    matchLabels:
      {{- include "twostroke.selector" . | nindent 6 }}
  template:
    metadata:
      {{- $metadata := dict "root" .root "component" .component "metricsPort" (include "twostroke.port.http" .root) }}
      {{- include "twostroke.podMetadata" $metadata | nindent 6 }}
    spec:
      {{- include "twostroke.podPlacement" . | nindent 6 }}
      {{- with $values.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      containers:
        - {{- $container := dict "root" .root "component" .component "command" (printf "%s-server" .component) }}
          {{- include "twostroke.container" $container | nindent 10 }}
          startupProbe:
            httpGet: {path: /health, port: http}
            periodSeconds: 5
            failureThreshold: {{ div $values.startupSeconds 5 }}
          ports:
            - {name: http, containerPort: {{ include "twostroke.port.http" .root }}}
            - {name: worker, containerPort: {{ include "twostroke.port.worker" .root }}}
            - {name: transfer, containerPort: {{ include "twostroke.port.transfer" .root }}}
          resources:
            {{- include "twostroke.server.resources" $values | nindent 12 }}
          volumeMounts:
            {{- include "twostroke.volumeMounts" .root | nindent 12 }}
            - {name: shared-memory, mountPath: /dev/shm}
      volumes:
        {{- include "twostroke.volumes" .root | nindent 8 }}
        - name: shared-memory
          emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}
---
# The router finds every ready pod of the role behind this name, and attaches to each.
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}-headless
  labels:
    {{- include "twostroke.labels" . | nindent 4 }}
spec:
  clusterIP: None
  selector:
    {{- include "twostroke.selector" . | nindent 4 }}
  ports:
    - {name: worker, port: {{ include "twostroke.port.worker" .root }}, targetPort: worker}
    - {name: http, port: {{ include "twostroke.port.http" .root }}, targetPort: http}
{{- end -}}

{{- define "twostroke.server.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpus -}}
{{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" .gpus) ($resources.limits | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
