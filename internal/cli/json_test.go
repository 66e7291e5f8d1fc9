// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/bigtcp/verify"
	"sockeye/internal/cli/bigtcpcmd"
	"sockeye/internal/cli/socketscmd"
	"sockeye/internal/cli/tracecmd"
	"sockeye/internal/doctor"
	"sockeye/internal/trace/measure"
)

// answers lists the types that commands print with -o json.
var answers = []struct {
	Command string
	value   any
}{
	{"status", api.Status{}},
	{"slots", []api.SlotStatus{}},
	{"devices", []api.DeviceStatus{}},
	{"devices --missing", []api.Missing{}},
	{"templates", []api.TemplateStatus{}},
	{"where", []api.WhereStatus{}},
	{"why", []api.Why{}},
	{"moves", []api.MovesStatus{}},
	{"rebalance", []api.Rebalance{}},
	{"init", initial{}},
	{"check", checked{}},
	{"plan, apply", api.Plan{}},
	{"tune", []api.TuneStatus{}},
	{"tune explain", []api.TuneExplanation{}},
	{"tune explain --socket", api.TuneSocket{}},
	{"tune trial", api.TuneTrial{}},
	{"tune learned", []api.TuneLearned{}},
	{"tune revert", api.TuneLive{}},
	{"trace", tracecmd.Traced{}},
	{"trace slow", []api.TraceSlow{}},
	{"trace samples", measure.Sample{}},
	{"trace report", tracecmd.Report{}},
	{"trace save", tracecmd.Saved{}},
	{"file of trace save", tracecmd.SavedTrace{}},
	{"trace compare", tracecmd.Compared{}},
	{"trace packets", tracecmd.Packets{}},
	{"bigtcp", bigtcpcmd.Shown{}},
	{"bigtcp plan, bigtcp apply", bigtcpcmd.Changes{}},
	{"bigtcp revert", bigtcpcmd.Reverted{}},
	{"bigtcp verify", verify.Report{}},
	{"sockets", socketscmd.Shown{}},
	{"top", api.Frame{}},
	{"fleet", api.FleetStatus{}},
	{"health", api.Health{}},
	{"register, unregister", api.Membership{}},
	{"doctor", []doctor.Finding{}},
	{"version", version{}},
	{"reset", removal{}},
	{"errors", api.Failure{}},
}

// fieldsOf lists the JSON fields of a type as "path type".
func fieldsOf(path string, t reflect.Type, optional bool) []string {
	suffix := ""
	if optional {
		suffix = ", optional"
	}
	switch {
	case t == reflect.TypeFor[time.Time]():
		return []string{path + " time" + suffix}
	case t == reflect.TypeFor[netip.Addr]():
		return []string{path + " address" + suffix}
	case t == reflect.TypeFor[measure.Histogram]():
		return []string{path + ".count number", path + ".sum_ns number", path + ".max_ns number", path + ".buckets[][] number"}
	case t.Kind() != reflect.Pointer && t.Implements(reflect.TypeFor[encoding.TextMarshaler]()):
		return []string{path + " string" + suffix}
	}
	switch t.Kind() {
	case reflect.Pointer:
		if !optional {
			suffix = " or null"
		}
		fields := fieldsOf(path, t.Elem(), false)
		for i := range fields {
			fields[i] = strings.TrimSuffix(fields[i], suffix) + suffix
		}
		return fields
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Struct {
			return fieldsOf(path+"[]", t.Elem(), false)
		}
		if t.Elem().Kind() == reflect.Uint8 {
			return []string{path + " string" + suffix}
		}
		return fieldsOf(path+"[]", t.Elem(), optional)
	case reflect.Map:
		value := t.Elem()
		if value.Kind() == reflect.Pointer {
			value = value.Elem()
		}
		return fieldsOf(path+".*", value, optional)
	case reflect.Struct:
		var fields []string
		for _, f := range reflect.VisibleFields(t) {
			name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
			if f.Anonymous || name == "-" || !f.IsExported() || len(f.Index) > 1 && !t.FieldByIndex(f.Index[:1]).Anonymous {
				continue
			}
			sub := strings.TrimPrefix(path+"."+name, ".")
			fields = append(fields, fieldsOf(sub, f.Type, strings.Contains(options, "omit"))...)
		}
		return fields
	case reflect.Bool:
		return []string{path + " true or false" + suffix}
	case reflect.String:
		return []string{path + " string" + suffix}
	}
	return []string{path + " number" + suffix}
}

// TestJSONFields checks that no published JSON field was removed or renamed.
func TestJSONFields(t *testing.T) {
	var all bytes.Buffer
	for _, a := range answers {
		fmt.Fprintln(&all, a.Command)
		for _, field := range fieldsOf("", reflect.TypeOf(a.value), false) {
			fmt.Fprintln(&all, "\t"+field)
		}
	}
	const file = "testdata/json-fields.golden"
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(file, all.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got := all.String(); got != string(want) {
		t.Errorf("the fields of the answers changed; if fields were only added, run with UPDATE=1 and document them in docs/json.md.\ngot\n%s\nwant\n%s", got, want)
	}
}

// TestJSONDocumented checks that docs/json.md lists each field with its type, and no other field.
func TestJSONDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/json.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := make(map[string][]string)
	section := ""
	for line := range strings.Lines(string(text)) {
		if title, ok := strings.CutPrefix(line, "## "); ok {
			section = strings.TrimSpace(title)
		}
		cells := strings.Split(line, "|")
		if len(cells) == 5 && strings.HasPrefix(cells[1], " `") {
			documented[section] = append(documented[section], strings.Trim(cells[1], " `")+" "+strings.TrimSpace(cells[2]))
			if strings.TrimSpace(cells[3]) == "" {
				t.Errorf("%s: %s has no meaning", section, cells[1])
			}
		}
	}
	for _, a := range answers {
		if got, want := documented[a.Command], fieldsOf("", reflect.TypeOf(a.value), false); !slices.Equal(got, want) {
			t.Errorf("%s: documented are\n%s\nwant\n%s", a.Command, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		delete(documented, a.Command)
	}
	for section := range documented {
		t.Errorf("%s is documented, but no command prints it", section)
	}
}

// TestJSONAnswers checks that the commands print these fields and no others.
func TestJSONAnswers(t *testing.T) {
	h, _ := running(t)
	ask("tcp", "127.0.0.3")
	for _, a := range answers {
		var args [][]string
		switch a.Command {
		case "status", "slots", "devices", "moves", "top", "version":
			args = [][]string{{a.Command}}
		case "where":
			args = [][]string{{"where", "127.0.0.1", "::1"}, {"where", "--offline", "--pins", h.pins, "127.0.0.1"}, {"where", "--slots", "3", "--nonce", "7", "127.0.0.1"}}
		case "devices --missing":
			args = [][]string{{"devices", "--missing"}}
		case "why":
			args = [][]string{{"why", "127.0.0.1"}}
		case "plan, apply":
			args = [][]string{{"plan"}, {"apply"}}
		case "register, unregister":
			args = [][]string{{"unregister", "--service", "telemetry", "--slot", "0"}}
		case "check":
			args = [][]string{{"check", h.policy}}
		case "doctor":
			args = [][]string{{"doctor", "--policy", h.policy, "--pins", h.pins}}
		case "tune", "tune learned":
			args = [][]string{strings.Fields(a.Command)}
		case "bigtcp":
			args = [][]string{h.bigtcpArgs(""), h.bigtcpArgs("lo")}
		case "bigtcp plan, bigtcp apply":
			args = [][]string{h.bigtcpArgs("plan lo"), h.bigtcpArgs("apply lo --ipv4 192KB")}
		case "bigtcp revert":
			args = [][]string{h.bigtcpArgs("revert"), h.bigtcpArgs("revert")}
		case "sockets":
			args = [][]string{{"sockets"}, {"sockets", "--all", "--processes"}}
		case "reset":
			args = [][]string{{"reset", "--state-dir", h.state, "--pins", h.pins + "2"}}
		}
		for _, arg := range args {
			r := h.sockeye(append(arg, "-o", "json")...)
			d := json.NewDecoder(strings.NewReader(r.out))
			d.DisallowUnknownFields()
			v := reflect.New(reflect.TypeOf(a.value))
			if err := d.Decode(v.Interface()); err != nil || r.code != 0 || r.err != "" {
				t.Errorf("%q: %v, %+v", arg, err, r)
			}
			if d.More() {
				t.Errorf("%q: more than one value in %s", arg, r.out)
			}
			if strings.Contains(r.out, ": null") && a.Command != "slots" && a.Command != "devices" {
				t.Errorf("%q: a null in %s", arg, r.out)
			}
		}
	}
}
