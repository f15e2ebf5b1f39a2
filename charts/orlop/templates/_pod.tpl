{{/* The pod of the StatefulSet and of the Deployment. Volumes and settings of the database differ. */}}
{{- define "orlop.pod" -}}
metadata:
  labels:
    {{- $labels := include "orlop.podLabels" . | fromYaml }}
    {{- merge (dict) .Values.podLabels (dict "orlop/datastore" .Values.datastore.kind) $labels | toYaml | nindent 4 }}
  {{- with .Values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "orlop.serviceAccountName" . | quote }}
  automountServiceAccountToken: {{ .Values.serviceAccount.automountServiceAccountToken }}
  # Otherwise a Service named orlop adds variables that begin with ORLOP_ to every pod of the namespace.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "orlop.spread" . | fromYamlArray }}
  topologySpreadConstraints:
    {{- $selector := dict "matchLabels" (include "orlop.selectorLabels" $ | fromYaml) }}
    {{- range . }}
    - {{- merge (deepCopy .) (dict "labelSelector" (ternary .labelSelector $selector (hasKey . "labelSelector"))) | toYaml | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- with .Values.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: orlop
      image: {{ include "orlop.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      {{- $args := list }}
      {{- if ne (include "orlop.retention" .) "0" }}
      {{- $args = append $args (printf "--auto-compaction-mode=%s" .Values.autoCompaction.mode) }}
      {{- $args = append $args (printf "--auto-compaction-retention=%s" (include "orlop.retention" .)) }}
      {{- end }}
      {{- with concat $args .Values.extraArgs }}
      args:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      env:
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        # The member id is derived from the name: instances on one database need different names.
        - name: ORLOP_NAME
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        - name: ORLOP_LISTEN_CLIENT_URLS
          value: {{ printf "%s://%s:2379" (include "orlop.scheme" .) .Values.listenAddress | quote }}
        - name: ORLOP_ADVERTISE_CLIENT_URLS
          value: {{ include "orlop.advertiseClientUrls" . | quote }}
        # Always without TLS: probes and Prometheus have no client certificate.
        - name: ORLOP_LISTEN_METRICS_URLS
          value: {{ printf "http://%s:%d" .Values.listenAddress (int .Values.metrics.port) | quote }}
        - name: ORLOP_METRICS
          value: {{ .Values.metrics.detail | quote }}
        - name: ORLOP_LOG_FORMAT
          value: {{ .Values.logFormat | quote }}
        - name: ORLOP_LOG_LEVEL
          value: {{ .Values.logLevel | quote }}
        - name: ORLOP_QUOTA_BACKEND_BYTES
          value: {{ printf "%d" (int64 .Values.quotaBackendBytes) | quote }}
        {{- if eq .Values.datastore.kind "postgres" }}
        - name: ORLOP_DATASTORE_ENDPOINT
          valueFrom:
            secretKeyRef:
              name: {{ .Values.datastore.postgres.existingSecret | quote }}
              key: {{ .Values.datastore.postgres.secretKey | quote }}
        - name: ORLOP_DATASTORE_CONNECTIONS
          value: {{ printf "%d" (int .Values.datastore.postgres.connections) | quote }}
        {{- else }}
        - name: ORLOP_DATA_DIR
          # A subdirectory: the root of a file system may contain lost+found and belongs to root.
          value: /var/lib/orlop/data
        {{- end }}
        {{- if .Values.tls.enabled }}
        - name: ORLOP_CERT_FILE
          value: /etc/orlop/tls/tls.crt
        - name: ORLOP_KEY_FILE
          value: /etc/orlop/tls/tls.key
        {{- if .Values.tls.clientCertAuth }}
        - name: ORLOP_CLIENT_CERT_AUTH
          value: "true"
        - name: ORLOP_TRUSTED_CA_FILE
          value: /etc/orlop/client-ca/ca.crt
        {{- end }}
        {{- end }}
        {{- with .Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with .Values.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - name: client
          containerPort: 2379
        - name: metrics
          containerPort: {{ .Values.metrics.port }}
      {{- range $probe := list "startupProbe" "livenessProbe" "readinessProbe" }}
      {{- with index $.Values $probe }}
      {{- if .enabled }}
      {{ $probe }}:
        {{- omit . "enabled" | toYaml | nindent 8 }}
      {{- end }}
      {{- end }}
      {{- end }}
      {{- with .Values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- $mounts := include "orlop.mounts" . | fromYamlArray }}
      {{- with concat $mounts .Values.extraVolumeMounts }}
      volumeMounts:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    {{- with .Values.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $volumes := include "orlop.volumes" . | fromYamlArray }}
  {{- with concat $volumes .Values.extraVolumes }}
  volumes:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Several replicas run in different zones and on different nodes if possible; each revision is spread anew. */}}
{{- define "orlop.spread" -}}
{{- if kindIs "slice" .Values.topologySpreadConstraints }}
{{- toYaml .Values.topologySpreadConstraints }}
{{- else if gt (int .Values.replicaCount) 1 }}
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  matchLabelKeys: [pod-template-hash]
{{- end }}
{{- else }}
{{- list | toYaml }}
{{- end }}
{{- end }}

{{- define "orlop.mounts" -}}
{{- if eq .Values.datastore.kind "sqlite" }}
- name: data
  mountPath: /var/lib/orlop
{{- else if .Values.datastore.postgres.tlsSecret }}
- name: postgres
  mountPath: /etc/orlop/postgres
  readOnly: true
{{- end }}
{{- if include "orlop.tmp" . }}
# Temporary files of the CPU profiler (enable-pprof) and of commands.
- name: tmp
  mountPath: /tmp
{{- end }}
{{- if .Values.tls.enabled }}
# Directories, not files (subPath): the pod receives renewed certificates and uses them without a restart.
- name: tls
  mountPath: /etc/orlop/tls
  readOnly: true
{{- if .Values.tls.clientCertAuth }}
- name: client-ca
  mountPath: /etc/orlop/client-ca
  readOnly: true
{{- end }}
{{- end }}
{{- end }}

{{- define "orlop.volumes" -}}
{{- if eq .Values.datastore.kind "sqlite" }}
{{- if .Values.persistence.existingClaim }}
- name: data
  persistentVolumeClaim:
    claimName: {{ .Values.persistence.existingClaim | quote }}
{{- else if not .Values.persistence.enabled }}
- name: data
  emptyDir: {}
{{- end }}
{{- else if .Values.datastore.postgres.tlsSecret }}
- name: postgres
  secret:
    secretName: {{ .Values.datastore.postgres.tlsSecret | quote }}
    defaultMode: 0440
{{- end }}
{{- if include "orlop.tmp" . }}
- name: tmp
  emptyDir: {}
{{- end }}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "orlop.tlsSecret" . | quote }}
    defaultMode: 0440
{{- if .Values.tls.clientCertAuth }}
- name: client-ca
  secret:
    secretName: {{ default (include "orlop.tlsSecret" .) .Values.tls.clientCA.existingSecret | quote }}
    defaultMode: 0440
    items:
      - key: {{ .Values.tls.clientCA.key | quote }}
        path: ca.crt
{{- end }}
{{- end }}
{{- end }}
