{{/* SPDX-License-Identifier: Apache-2.0 */}}

{{- define "sockeye.name" -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "sockeye.selector" -}}
app.kubernetes.io/name: sockeye
app.kubernetes.io/instance: {{ include "sockeye.name" . }}
{{- end -}}

{{- define "sockeye.labels" -}}
{{ include "sockeye.selector" . }}
app.kubernetes.io/version: {{ include "sockeye.tag" . | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "sockeye.tag" -}}
{{- .Values.image.tag | default .Chart.AppVersion -}}
{{- end -}}

{{/* The port of the metrics, as the policy names it. "" without PodMonitor and Service. */}}
{{- define "sockeye.metricsPort" -}}
{{- if or .Values.metrics.podMonitor .Values.metrics.service -}}
{{- $policy := fromYaml .Values.policy -}}
{{- if hasKey $policy "Error" -}}
{{- fail (printf "policy: %s" $policy.Error) -}}
{{- end -}}
{{- $listen := dig "metrics" "listen" "" $policy -}}
{{- if not (regexMatch ":[0-9]+$" $listen) -}}
{{- fail "metrics.podMonitor and metrics.service need an address in the policy, as in metrics: {listen: \"0.0.0.0:9732\"}" -}}
{{- end -}}
{{- if regexMatch "^(127\\.|localhost:|\\[::1\\])" $listen -}}
{{- fail (printf "metrics.podMonitor and metrics.service: Prometheus cannot reach %s, as the policy has it: use \"0.0.0.0:9732\"" $listen) -}}
{{- end -}}
{{- regexFind "[0-9]+$" $listen -}}
{{- end -}}
{{- end -}}
