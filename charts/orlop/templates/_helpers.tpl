{{- define "orlop.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 52 | trimSuffix "-" }}
{{- end }}

{{/* At most 52 characters: with the suffix of a pod, "-headless" or the hash of a revision it must not exceed 63. */}}
{{- define "orlop.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains (include "orlop.name" .) .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "orlop.name" .) | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "orlop.headless" -}}
{{ include "orlop.fullname" . }}-headless
{{- end }}

{{- define "orlop.selectorLabels" -}}
app.kubernetes.io/name: {{ include "orlop.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/*
Pods that the Service selects: those with the database of datastore.kind. The selector of a StatefulSet or a Deployment cannot
be changed, so it does not contain this label.
*/}}
{{- define "orlop.serviceSelector" -}}
{{ include "orlop.selectorLabels" . }}
orlop/datastore: {{ .Values.datastore.kind }}
{{- end }}

{{/* Contains no versions, so that a new version of the chart alone does not restart pods. */}}
{{- define "orlop.podLabels" -}}
{{ include "orlop.selectorLabels" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "orlop.labels" -}}
{{ include "orlop.podLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Whether the chart mounts a volume at /tmp. It does not if the values do so or have a volume with this name. */}}
{{- define "orlop.tmp" -}}
{{- $own := true }}
{{- range .Values.extraVolumeMounts }}
{{- if eq (trimSuffix "/" .mountPath) "/tmp" }}
{{- $own = false }}
{{- end }}
{{- end }}
{{- range .Values.extraVolumes }}
{{- if eq .name "tmp" }}
{{- $own = false }}
{{- end }}
{{- end }}
{{- ternary "true" "" $own }}
{{- end }}

{{- define "orlop.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "orlop.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "orlop.image" -}}
{{- with .Values.image }}
{{- $repository := list .registry .repository | compact | join "/" }}
{{- if .digest -}}
{{ $repository }}@{{ .digest }}
{{- else -}}
{{ $repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end }}
{{- end }}
{{- end }}

{{- define "orlop.scheme" -}}
{{ ternary "https" "http" .Values.tls.enabled }}
{{- end }}

{{/* Name of the Secret with the server's certificate. */}}
{{- define "orlop.tlsSecret" -}}
{{- default (printf "%s-tls" (include "orlop.fullname" .)) .Values.tls.existingSecret }}
{{- end }}

{{/* The CronJob and the claim of backups. At most 52 characters: Kubernetes appends 11 for the name of a Job. */}}
{{- define "orlop.backup" -}}
{{ include "orlop.fullname" . | trunc 45 | trimSuffix "-" }}-backup
{{- end }}

{{/* Labels of backup pods. They differ from those that the Services select. */}}
{{- define "orlop.backupLabels" -}}
app.kubernetes.io/name: {{ include "orlop.name" . }}-backup
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Arguments: the values `persistence` or `backup.persistence`. */}}
{{- define "orlop.claimSpec" -}}
accessModes:
  {{- toYaml .accessModes | nindent 2 }}
{{- if eq .storageClassName "-" }}
storageClassName: ""
{{- else if .storageClassName }}
storageClassName: {{ .storageClassName | quote }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end }}

{{- define "orlop.serviceUrl" -}}
{{ include "orlop.scheme" . }}://{{ include "orlop.fullname" . }}.{{ .Release.Namespace }}.svc:{{ .Values.service.port }}
{{- end }}

{{/*
URLs that a pod advertises to clients. A pod of the StatefulSet has a name, which the certificate contains. A pod of the
Deployment only has an IP address, which a certificate cannot contain in advance: with TLS all pods advertise the Service,
because all of them serve the same data.
*/}}
{{- define "orlop.advertiseClientUrls" -}}
{{- if .Values.advertiseClientUrls }}
{{- .Values.advertiseClientUrls }}
{{- else if eq .Values.datastore.kind "sqlite" }}
{{- printf "%s://$(ORLOP_NAME).%s.%s.svc:2379" (include "orlop.scheme" .) (include "orlop.headless" .) .Release.Namespace }}
{{- else if .Values.tls.enabled }}
{{- include "orlop.serviceUrl" . }}
{{- else -}}
http://$(POD_IP):2379
{{- end }}
{{- end }}

{{/* Without int64, a number such as 10000000 would be printed as 1e+07. */}}
{{- define "orlop.retention" -}}
{{- with .Values.autoCompaction.retention }}
{{- kindIs "string" . | ternary . (int64 . | toString) }}
{{- else }}
{{- 0 }}
{{- end }}
{{- end }}

{{/* Rules on combinations of values, which the schema cannot express. */}}
{{- define "orlop.validate" -}}
{{- /* With --reuse-values, Helm takes no defaults of this chart, but the values that an older one was installed with. */}}
{{- if not (hasKey .Values "backup") }}
{{- fail "values of an older chart: use --reset-then-reuse-values instead of --reuse-values" }}
{{- end }}
{{- if and (eq .Values.datastore.kind "sqlite") (gt (int .Values.replicaCount) 1) }}
{{- fail "replicaCount must be 0 or 1 with datastore.kind sqlite: one process owns the file; several instances need datastore.kind postgres" }}
{{- end }}
{{- if and (eq .Values.datastore.kind "postgres") (not .Values.datastore.postgres.existingSecret) }}
{{- fail "datastore.kind postgres needs datastore.postgres.existingSecret, a Secret with the database's URL" }}
{{- end }}
{{- with .Values.tls }}
{{- if and .enabled (not .existingSecret) (not .certManager.enabled) }}
{{- fail "tls.enabled needs tls.existingSecret or tls.certManager.enabled" }}
{{- end }}
{{- if and .existingSecret .certManager.enabled }}
{{- fail "tls.existingSecret and tls.certManager.enabled exclude each other" }}
{{- end }}
{{- if and .certManager.enabled (not .certManager.issuerRef.name) }}
{{- fail "tls.certManager.enabled needs tls.certManager.issuerRef.name" }}
{{- end }}
{{- if and (not .enabled) (or .clientCertAuth .certManager.enabled .existingSecret) }}
{{- fail "tls.existingSecret, tls.certManager and tls.clientCertAuth need tls.enabled" }}
{{- end }}
{{- end }}
{{- if and (hasPrefix "[" .Values.listenAddress) (eq .Values.datastore.kind "postgres") (not .Values.tls.enabled) (not .Values.advertiseClientUrls) }}
{{- fail "listenAddress of IPv6 with datastore.kind postgres and without TLS needs advertiseClientUrls: the IP address of a pod has no brackets" }}
{{- end }}
{{- if and .Values.service.loadBalancerSourceRanges (ne .Values.service.type "LoadBalancer") }}
{{- fail "service.loadBalancerSourceRanges needs service.type LoadBalancer" }}
{{- end }}
{{- if and .Values.backup.enabled .Values.tls.clientCertAuth (not .Values.backup.tlsSecret) }}
{{- fail "backup.enabled with tls.clientCertAuth needs backup.tlsSecret, a Secret with a client certificate" }}
{{- end }}
{{- if eq .Values.updateStrategy.type (ternary "Recreate" "OnDelete" (eq .Values.datastore.kind "sqlite")) }}
{{- fail (printf "updateStrategy.type %s does not exist with datastore.kind %s" .Values.updateStrategy.type .Values.datastore.kind) }}
{{- end }}
{{- with .Values.podDisruptionBudget }}
{{- if and (ne (toString .minAvailable) "") (ne (toString .maxUnavailable) "") }}
{{- fail "podDisruptionBudget takes minAvailable or maxUnavailable, not both" }}
{{- end }}
{{- end }}
{{- if and (eq .Values.autoCompaction.mode "revision") (not (regexMatch "^[0-9]+$" (include "orlop.retention" .))) }}
{{- fail "autoCompaction.retention must be a number of revisions with autoCompaction.mode revision" }}
{{- end }}
{{- end }}
