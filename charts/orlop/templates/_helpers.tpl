{{- define "orlop.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 52 | trimSuffix "-" }}
{{- end }}

{{/* 52 characters: pods' names, "-headless" and a revision's hash have to fit into 63 behind it. */}}
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

{{/* Without versions: a new chart alone is no reason to restart a pod. */}}
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

{{- define "orlop.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "orlop.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "orlop.image" -}}
{{- with .Values.image }}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end }}
{{- end }}
{{- end }}

{{- define "orlop.scheme" -}}
{{ ternary "https" "http" .Values.tls.enabled }}
{{- end }}

{{/* The Secret with the server's certificate. */}}
{{- define "orlop.tlsSecret" -}}
{{- default (printf "%s-tls" (include "orlop.fullname" .)) .Values.tls.existingSecret }}
{{- end }}

{{- define "orlop.serviceUrl" -}}
{{ include "orlop.scheme" . }}://{{ include "orlop.fullname" . }}.{{ .Release.Namespace }}.svc:{{ .Values.service.port }}
{{- end }}

{{/*
What a pod tells clients to dial. A pod of the StatefulSet has a name that the certificate holds. One of the Deployment has
an address alone, which no certificate can know beforehand: with TLS the Service stands for all, as all serve the same.
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

{{/* A number may come as 10000000, which would be printed as 1e+07. */}}
{{- define "orlop.retention" -}}
{{- with .Values.autoCompaction.retention }}
{{- kindIs "string" . | ternary . (int64 . | toString) }}
{{- else }}
{{- 0 }}
{{- end }}
{{- end }}

{{/* What no schema of single values can say. */}}
{{- define "orlop.validate" -}}
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
{{- with .Values.podDisruptionBudget }}
{{- if and (ne (toString .minAvailable) "") (ne (toString .maxUnavailable) "") }}
{{- fail "podDisruptionBudget takes minAvailable or maxUnavailable, not both" }}
{{- end }}
{{- end }}
{{- if and (eq .Values.autoCompaction.mode "revision") (not (regexMatch "^[0-9]+$" (include "orlop.retention" .))) }}
{{- fail "autoCompaction.retention must be a number of revisions with autoCompaction.mode revision" }}
{{- end }}
{{- end }}
