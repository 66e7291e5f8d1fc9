// SPDX-License-Identifier: Apache-2.0

package helm

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"helm.sh/helm/v4/pkg/strvals"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const chart = "../../deploy/helm/sockeye"

// readValues reads a file of testdata, or returns no values for "".
func readValues(t *testing.T, name string) map[string]any {
	t.Helper()
	values := make(map[string]any)
	if name == "" {
		return values
	}
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err == nil {
		err = yaml.Unmarshal(text, &values)
	}
	if err != nil {
		t.Fatal(err)
	}
	return values
}

func kubernetes(t *testing.T, version string) *common.Capabilities {
	t.Helper()
	v, err := common.ParseKubeVersion(version)
	if err != nil {
		t.Fatal(err)
	}
	c := common.DefaultCapabilities.Copy()
	c.KubeVersion = *v
	return c
}

// objects has what the chart renders.
type objects struct {
	DaemonSet      *appsv1.DaemonSet
	ConfigMap      *corev1.ConfigMap
	ServiceAccount *corev1.ServiceAccount
	Service        *corev1.Service
	PodMonitor     *podMonitor
	notes          string
}

// podMonitor has the fields of monitoring.coreos.com/v1 that the chart sets.
type podMonitor struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		JobLabel            string               `json:"jobLabel"`
		Selector            metav1.LabelSelector `json:"selector"`
		PodMetricsEndpoints []struct {
			Port     string `json:"port"`
			Interval string `json:"interval"`
		} `json:"podMetricsEndpoints"`
	} `json:"spec"`
}

// render renders the chart as "helm install", and decodes the objects strictly.
func render(t *testing.T, values map[string]any) (*objects, error) {
	t.Helper()
	c, err := loader.Load(chart)
	if err != nil {
		t.Fatal(err)
	}
	release := common.ReleaseOptions{Name: "sockeye", Namespace: "telemetry", Revision: 1, IsInstall: true}
	all, err := util.ToRenderValues(c, values, release, kubernetes(t, "v1.34.0"))
	if err != nil {
		return nil, err
	}
	rendered, err := engine.Render(c, all)
	if err != nil {
		return nil, err
	}
	o := &objects{}
	for name, text := range rendered {
		if strings.TrimSpace(text) == "" || strings.HasSuffix(name, ".tpl") {
			continue
		}
		if strings.HasSuffix(name, "NOTES.txt") {
			o.notes = text
			continue
		}
		var kind metav1.TypeMeta
		if err := yaml.Unmarshal([]byte(text), &kind); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		targets := map[string]any{
			"apps/v1 DaemonSet": &o.DaemonSet, "v1 ConfigMap": &o.ConfigMap, "v1 ServiceAccount": &o.ServiceAccount,
			"v1 Service": &o.Service, "monitoring.coreos.com/v1 PodMonitor": &o.PodMonitor,
		}
		target, ok := targets[kind.APIVersion+" "+kind.Kind]
		if !ok {
			t.Fatalf("%s: unexpected object %v", name, kind)
		}
		if err := yaml.UnmarshalStrict([]byte(text), target); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, text)
		}
	}
	return o, nil
}

func mustRender(t *testing.T, values map[string]any) *objects {
	t.Helper()
	o, err := render(t, values)
	if err != nil {
		t.Fatal(err)
	}
	if o.DaemonSet == nil || o.ConfigMap == nil || o.ServiceAccount == nil || o.notes == "" {
		t.Fatalf("rendered %+v", o)
	}
	return o
}

// TestLint checks that "helm lint" has no warnings.
func TestLint(t *testing.T) {
	version := kubernetes(t, "v1.34.0").KubeVersion
	for _, name := range []string{"", "all.yaml"} {
		for _, m := range lint.RunAll(chart, readValues(t, name), "telemetry", lint.WithKubeVersion(&version)).Messages {
			if m.Severity > support.InfoSev {
				t.Errorf("values %q: %v", name, m)
			}
		}
	}
}

// unitCapabilities returns the capabilities of a unit or drop-in, without the prefix CAP_.
func unitCapabilities(t *testing.T, name string) (list []corev1.Capability) {
	t.Helper()
	text, err := os.ReadFile("../../dist/" + name)
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(`(?m)^CapabilityBoundingSet=(.*)$`).FindSubmatch(text)
	if line == nil {
		t.Fatalf("%s has no capabilities", name)
	}
	for _, field := range strings.Fields(string(line[1])) {
		list = append(list, corev1.Capability(strings.TrimPrefix(field, "CAP_")))
	}
	return list
}

// TestPrivileges checks that the agent has the capabilities of the systemd unit, those of its drop-ins only by request, and
// nothing else that a container can do without.
func TestPrivileges(t *testing.T) {
	unit := unitCapabilities(t, "sockeye.service")
	more := slices.Concat(unit, unitCapabilities(t, "sockeye.service.d/ports.conf"), unitCapabilities(t, "sockeye.service.d/cgroups.conf"))
	for name, want := range map[string][]corev1.Capability{"": unit, "all.yaml": more} {
		o := mustRender(t, readValues(t, name))
		pod := o.DaemonSet.Spec.Template.Spec
		if len(pod.Containers) != 1 || len(pod.InitContainers) > 0 {
			t.Fatalf("values %q: containers %+v", name, pod.Containers)
		}
		c := pod.Containers[0]
		s := c.SecurityContext
		if !slices.Equal(s.Capabilities.Add, want) || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) {
			t.Errorf("values %q: capabilities %v, want %v", name, s.Capabilities, want)
		}
		if s.Privileged != nil || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
			t.Errorf("values %q: security context %+v", name, s)
		}
		if !pod.HostNetwork || !pod.HostPID || pod.HostIPC || *pod.AutomountServiceAccountToken || *o.ServiceAccount.AutomountServiceAccountToken ||
			pod.ServiceAccountName != o.ServiceAccount.Name {
			t.Errorf("values %q: pod %+v", name, pod)
		}
		writable := map[string]bool{}
		for _, m := range c.VolumeMounts {
			writable[m.MountPath] = !m.ReadOnly
		}
		// DAC_OVERRIDE is for cgroups that the agent creates.
		wantMounts := map[string]bool{"/etc/sockeye": false, "/sys/fs/bpf": true, "/sys/fs/cgroup": name != "", "/var/lib/sockeye": true, "/run/sockeye": true}
		if fmt.Sprint(writable) != fmt.Sprint(wantMounts) {
			t.Errorf("values %q: writable mounts %v, want %v", name, writable, wantMounts)
		}
		if u := o.DaemonSet.Spec.UpdateStrategy; u.Type != appsv1.RollingUpdateDaemonSetStrategyType || u.RollingUpdate.MaxUnavailable.IntValue() != 1 || u.RollingUpdate.MaxSurge.IntValue() != 0 {
			t.Errorf("values %q: update strategy %+v", name, u)
		}
	}
}

// TestValues checks that all values arrive, and that texts arrive unchanged.
func TestValues(t *testing.T) {
	values := readValues(t, "all.yaml")
	o := mustRender(t, values)
	pod := o.DaemonSet.Spec.Template
	c := pod.Spec.Containers[0]
	if c.Image != "example.net:5000/telemetry/sockeye:1.10" || c.ImagePullPolicy != corev1.PullAlways || pod.Spec.ImagePullSecrets[0].Name != "example" {
		t.Errorf("image %s, %s, %v", c.Image, c.ImagePullPolicy, pod.Spec.ImagePullSecrets)
	}
	if want := []string{"agent", "--watch-policy", "--log-format=json", "--log-level=debug"}; !slices.Equal(c.Args, want) {
		t.Errorf("arguments %q", c.Args)
	}
	if c.Resources.Requests.Cpu().String() != "1" || c.Resources.Limits.Memory().String() != "1Gi" {
		t.Errorf("resources %+v", c.Resources)
	}
	if len(pod.Spec.Tolerations) != 2 || pod.Spec.NodeSelector["telemetry"] != "true" || pod.Spec.PriorityClassName != "telemetry" ||
		pod.Spec.Affinity.NodeAffinity == nil || pod.Annotations["example.net/team"] != "telemetry" || pod.Labels["team"] != "telemetry" {
		t.Errorf("pod %+v", pod)
	}
	for key, value := range o.DaemonSet.Spec.Selector.MatchLabels {
		if pod.Labels[key] != value {
			t.Errorf("the label %s is %q, and %q in the selector", key, pod.Labels[key], value)
		}
	}
	files := map[string]string{"policy.yaml": values["policy"].(string), "devices.csv": values["files"].(map[string]any)["devices.csv"].(string)}
	if fmt.Sprint(o.ConfigMap.Data) != fmt.Sprint(files) {
		t.Errorf("files %q, want %q", o.ConfigMap.Data, files)
	}
	if volume := pod.Spec.Volumes[0]; volume.ConfigMap == nil || volume.ConfigMap.Name != o.ConfigMap.Name {
		t.Errorf("volume %+v", volume)
	}
	if len(c.Ports) != 1 || c.Ports[0].ContainerPort != 9732 || o.Service.Spec.Ports[0].Port != 9732 || o.Service.Spec.ClusterIP != "None" ||
		o.PodMonitor.Spec.PodMetricsEndpoints[0].Port != c.Ports[0].Name || o.PodMonitor.Spec.PodMetricsEndpoints[0].Interval != "10s" ||
		o.DaemonSet.Spec.Template.Labels[o.PodMonitor.Spec.JobLabel] != "sockeye" { // the job of the rules in dist/prometheus
		t.Errorf("metrics: ports %+v, service %+v, monitor %+v", c.Ports, o.Service, o.PodMonitor)
	}
	o = mustRender(t, readValues(t, ""))
	if c := o.DaemonSet.Spec.Template.Spec.Containers[0]; c.Image != "sockeye:dev" || len(c.Ports) > 0 || o.Service != nil || o.PodMonitor != nil {
		t.Errorf("without values: image %s, ports %v, %v, %v", c.Image, c.Ports, o.Service, o.PodMonitor)
	}
}

// TestPolicies checks that "sockeye check" accepts the policies of the chart and of the example.
func TestPolicies(t *testing.T) {
	example, err := os.ReadFile("../../deploy/examples/nfacctd/policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for name, values := range map[string]map[string]any{
		"default": readValues(t, ""), "all": readValues(t, "all.yaml"), "example": {"policy": string(example)},
	} {
		dir := t.TempDir()
		for file, text := range mustRender(t, values).ConfigMap.Data {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if out, err := exec.Command(sockeye, "check", filepath.Join(dir, "policy.yaml")).CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
}

// TestExample checks that the pods of the example are the members of its policy.
func TestExample(t *testing.T) {
	text, err := os.ReadFile("../../deploy/examples/nfacctd/statefulset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var set appsv1.StatefulSet
	if err := yaml.UnmarshalStrict(text, &set); err != nil {
		t.Fatal(err)
	}
	policy, err := os.ReadFile("../../deploy/examples/nfacctd/policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	pod := set.Spec.Template.Spec
	for _, want := range []string{fmt.Sprintf("user: %q", fmt.Sprint(*pod.SecurityContext.RunAsUser)), fmt.Sprintf("slots: %d", *set.Spec.Replicas), "slot: environment"} {
		if !bytes.Contains(policy, []byte(want)) {
			t.Errorf("the policy has no %q", want)
		}
	}
	c := pod.Containers[0]
	pattern := regexp.MustCompile(`command_line: "(.*?)"`).FindSubmatch(policy)
	if pattern == nil || !regexp.MustCompile(string(pattern[1])).MatchString(strings.Join(c.Command, " ")) {
		t.Errorf("the command %q does not match %q", c.Command, pattern)
	}
	if !pod.HostNetwork || len(c.Ports) > 0 || c.Env[0].Name != "SOCKEYE_SLOT" || c.Env[0].ValueFrom.FieldRef.FieldPath != fmt.Sprintf("metadata.labels['%s']", appsv1.PodIndexLabel) {
		t.Errorf("pod %+v", pod)
	}
}

// TestRefused checks that wrong values are refused, with a message that names the value.
func TestRefused(t *testing.T) {
	for values, want := range map[string]string{
		"image: {tag: 1.10}":                  "at '/image/tag': got number, want string",
		"image: {tag: 7}":                     "at '/image/tag': got number, want string",
		"image: {tag: 'a b'}":                 "at '/image/tag': 'a b' does not match pattern",
		"image: {repository: ''}":             "at '/image/repository': '' does not match pattern",
		"image: {repository: 'x y'}":          "at '/image/repository'",
		"image: {name: x}":                    "at '/image': additional properties 'name' not allowed",
		"policies: x":                         "additional properties 'policies' not allowed",
		"policy: {services: {}}":              "at '/policy': got object, want string",
		"policy: ''":                          "at '/policy': minLength: got 0, want 1",
		"files: {policy.yaml: x}":             "invalid propertyName 'policy.yaml'",
		"files: {../x: x}":                    "invalid propertyName '../x'",
		"files: {devices.csv: 1}":             "at '/files/devices.csv': got number, want string",
		"extraCapabilities: [SYS_ADMIN]":      "at '/extraCapabilities/0': value must be one of 'DAC_OVERRIDE', 'NET_BIND_SERVICE'",
		"logLevel: all":                       "at '/logLevel': value must be one of",
		"nodeSelector: {telemetry: true}":     "at '/nodeSelector/telemetry': got boolean, want string",
		"resources: {limits: {memory: 1 GB}}": "at '/resources/limits/memory'",
		"metrics: {podMonitor: 'true'}":       "at '/metrics/podMonitor': got string, want boolean",
		"metrics: {podMonitor: true}":         `metrics.podMonitor and metrics.service need an address in the policy, as in metrics: {listen: "0.0.0.0:9732"}`,
		"{metrics: {service: true}, policy: 'metrics: {listen: \"127.0.0.1:9732\"}'}": "Prometheus cannot reach 127.0.0.1:9732",
		"{metrics: {service: true}, policy: 'metrics: ['}":                            "policy: error converting YAML to JSON",
	} {
		v := make(map[string]any)
		if err := yaml.Unmarshal([]byte(values), &v); err != nil {
			t.Fatalf("%s: %v", values, err)
		}
		if _, err := render(t, v); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v\nwant %s", values, err, want)
		}
	}
}

// TestGuide checks that Helm reads the values of the commands of docs/kubernetes.md, and that the chart accepts them.
func TestGuide(t *testing.T) {
	guide, err := os.ReadFile("../../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.ReplaceAll(string(guide), chart[len("../../"):], chart)
	if !strings.Contains(text, "helm install sockeye "+chart+" ") {
		t.Error("the guide does not install the chart")
	}
	settings := regexp.MustCompile("--set(-string|-file)? ((?:'[^']*'|[^\\s'`])+)").FindAllStringSubmatch(text, -1)
	if len(settings) < 6 {
		t.Fatalf("settings %q", settings)
	}
	for _, s := range settings {
		setting := strings.ReplaceAll(s[2], "'", "")
		values := make(map[string]any)
		switch s[1] {
		case "":
			err = strvals.ParseInto(setting, values)
		case "-string":
			err = strvals.ParseIntoString(setting, values)
		case "-file":
			err = strvals.ParseIntoFile(setting, values, func(name []rune) (any, error) {
				if text, err := os.ReadFile("../../" + string(name)); err == nil {
					return string(text), nil
				}
				return "services: {}\n", nil // a file that the reader writes
			})
		}
		if err != nil {
			t.Errorf("%s: %v", s[0], err)
			continue
		}
		o, err := render(t, values)
		if err != nil {
			t.Errorf("%s: %v", s[0], err)
			continue
		}
		switch path, value, _ := strings.Cut(setting, "="); {
		case path == "image.tag" && !strings.HasSuffix(o.DaemonSet.Spec.Template.Spec.Containers[0].Image, ":"+value),
			path == "policy" && !strings.HasPrefix(o.ConfigMap.Data["policy.yaml"], "services:") && !strings.Contains(o.ConfigMap.Data["policy.yaml"], "\nservices:"),
			strings.HasPrefix(path, "files.") && o.ConfigMap.Data["devices.csv"] == "":
			t.Errorf("%s has no effect: %v", s[0], o.ConfigMap.Data)
		}
	}
}
