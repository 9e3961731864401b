{{- define "tiercache.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{- define "tiercache.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tiercache.labels" -}}
{{ include "tiercache.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "tiercache.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "tiercache.toml" -}}
directory = "/var/lib/tiercache"
sockets = "/run/tiercache"
{{- if eq .Values.mode "service" }}
listen = ["0.0.0.0:7070"]
data_port = 7071
{{- end }}
{{ .Values.settings | trim }}

[http]
listen = "0.0.0.0:{{ .Values.http.port }}"
public = true
{{- end }}

{{- /* The HTTP port is in TLS if the settings have certificates. */ -}}
{{- define "tiercache.scheme" -}}
{{- if regexMatch `(?m)^\[tls\]` .Values.settings }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

{{- define "tiercache.pod" -}}
metadata:
  labels: {{- include "tiercache.labels" . | nindent 4 }}
  annotations:
    checksum/settings: {{ include "tiercache.toml" . | sha256sum }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsUser: {{ .Values.user }}
    runAsGroup: {{ .Values.user }}
    runAsNonRoot: true
    seccompProfile: {type: RuntimeDefault}
    {{- if or .Values.secret (eq .Values.mode "service") }}
    fsGroup: {{ .Values.user }}
    fsGroupChangePolicy: OnRootMismatch
    {{- end }}
  {{- if or .Values.secret (eq .Values.mode "node") }}
  initContainers:
    {{- if eq .Values.mode "node" }}
    - name: directories
      image: {{ include "tiercache.image" . }}
      command: [chown, "{{ .Values.user }}:{{ .Values.user }}", /var/lib/tiercache, /run/tiercache]
      securityContext:
        runAsUser: 0
        runAsNonRoot: false
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL], add: [CHOWN]}
      volumeMounts:
        - {name: store, mountPath: /var/lib/tiercache}
        - {name: sockets, mountPath: /run/tiercache}
    {{- end }}
    {{- if .Values.secret }}
    # The files of a Secret are links that the group can read; the daemon takes only files of its own user.
    - name: secrets
      image: {{ include "tiercache.image" . }}
      command: [sh, -c, "install -m 0600 /secret/* /run/secrets/tiercache/"]
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: secret, mountPath: /secret, readOnly: true}
        - {name: secrets, mountPath: /run/secrets/tiercache}
    {{- end }}
  {{- end }}
  containers:
    - name: daemon
      image: {{ include "tiercache.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [serve, --config, /etc/tiercache/tiercache.toml]
      ports:
        {{- if eq .Values.mode "service" }}
        - {name: grpc, containerPort: 7070}
        - {name: data, containerPort: 7071}
        {{- end }}
        - {name: http, containerPort: {{ .Values.http.port }}}
      startupProbe:
        httpGet: {path: /healthz, port: http, scheme: {{ include "tiercache.scheme" . }}}
        periodSeconds: 5
        timeoutSeconds: 10
        failureThreshold: 66
      livenessProbe:
        httpGet: {path: /healthz, port: http, scheme: {{ include "tiercache.scheme" . }}}
        periodSeconds: 30
        timeoutSeconds: 10
      readinessProbe:
        httpGet: {path: /readyz, port: http, scheme: {{ include "tiercache.scheme" . }}}
        periodSeconds: 30
        timeoutSeconds: 10
      resources: {{- toYaml .Values.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: store, mountPath: /var/lib/tiercache}
        - {name: sockets, mountPath: /run/tiercache}
        - {name: settings, mountPath: /etc/tiercache, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if .Values.secret }}
        - {name: secrets, mountPath: /run/secrets/tiercache, readOnly: true}
        {{- end }}
  volumes:
    - {name: settings, configMap: {name: {{ include "tiercache.name" . }}}}
    - {name: tmp, emptyDir: {medium: Memory, sizeLimit: 64Mi}}
    {{- if .Values.secret }}
    - {name: secret, secret: {secretName: {{ .Values.secret }}, defaultMode: 0400}}
    - {name: secrets, emptyDir: {medium: Memory, sizeLimit: 4Mi}}
    {{- end }}
    {{- if eq .Values.mode "node" }}
    - {name: store, hostPath: {path: {{ .Values.node.store }}, type: DirectoryOrCreate}}
    - {name: sockets, hostPath: {path: {{ .Values.node.sockets }}, type: DirectoryOrCreate}}
    {{- else }}
    - {name: sockets, emptyDir: {}}
    {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
