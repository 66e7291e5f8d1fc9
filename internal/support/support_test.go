// SPDX-License-Identifier: Apache-2.0

package support_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"sockeye/internal/support"
	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { testenv.MainWithMaps(m) }

// contents returns the files of the archive of the given files.
func contents(t *testing.T, files ...support.File) map[string]string {
	t.Helper()
	var archive bytes.Buffer
	if err := support.Write(&archive, "bundle", files, time.Unix(1e9, 0)); err != nil {
		t.Fatal(err)
	}
	compressed, err := gzip.NewReader(&archive)
	if err != nil {
		t.Fatal(err)
	}
	list := make(map[string]string)
	for r := tar.NewReader(compressed); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return list
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil || header.Mode != 0o600 {
			t.Errorf("%s: mode %o, %v", header.Name, header.Mode, err)
		}
		list[header.Name] = string(text)
	}
}

func TestWrite(t *testing.T) {
	list := contents(t, support.New("a/b.txt", "a file", []byte("text"), nil), support.New("c.txt", "a missing file", nil, errors.New("not there\nat all")))
	if len(list) != 3 || list["bundle/a/b.txt"] != "text" || list["bundle/c.txt"] != "" {
		t.Errorf("%q", list)
	}
	if want := "FILE     BYTES  CONTENT\na/b.txt  4      a file\nc.txt    0      a missing file (not there; at all)\n"; list["bundle/contents.txt"] != want {
		t.Errorf("contents.txt:\n%s\nwant\n%s", list["bundle/contents.txt"], want)
	}
	long := support.New("long", "", make([]byte, 17<<20), nil)
	if long.Bytes != 16<<20 || long.Problem != "cut after 16 MiB" {
		t.Errorf("%d bytes, %q", long.Bytes, long.Problem)
	}
}

// TestPolicy checks that no comment of a policy is packed, and that the values are.
func TestPolicy(t *testing.T) {
	file := filepath.Join(t.TempDir(), "policy.yaml")
	for _, test := range []struct{ name, text, want, problem string }{
		{"comments", "# secret 1\nservices: # secret 2\n  # secret 3\n  telemetry:\n    slots: 4 # secret 4\n    user: 'a # b'\n# secret 5\n",
			"services:\n    telemetry:\n        slots: 4\n        user: 'a # b'\n", ""},
		{"only comments", "# secret\n", "", ""},
		{"no policy", "# secret\nservices: [\n", "", "comments cannot be told from values"},
	} {
		if err := os.WriteFile(file, []byte(test.text), 0o600); err != nil {
			t.Fatal(err)
		}
		f := support.Policy(file)
		got := contents(t, f)["bundle/policy.yaml"]
		if got != test.want || !strings.Contains(f.Problem, test.problem) || test.problem == "" && f.Problem != "" {
			t.Errorf("%s: %q, problem %q", test.name, got, f.Problem)
		}
	}
	if f := support.Policy("/nonexistent"); !strings.Contains(f.Problem, "no such file") {
		t.Errorf("problem %q of a missing policy", f.Problem)
	}
}

// TestMaskCommands checks that secrets of command lines are masked, and that everything else stays as it was.
func TestMaskCommands(t *testing.T) {
	for in, want := range map[string]string{
		`nfacctd -f /etc/a.conf`:                    `nfacctd -f /etc/a.conf`,
		`a --password x --token=y --verbose`:        `a --password (masked) --token=(masked) --verbose`,
		`a DB_PASSWORD=x sasl.password=y,z -p 1`:    `a DB_PASSWORD=(masked) sasl.password=(masked) -p 1`,
		`a --Api-Key "x y`:                          `a --Api-Key (masked) y`,
		`a --brokers amqp://user:secret1@host/v -x`: `a --brokers amqp://user:(masked)@host/v -x`,
		`a --url http://host:9092/ -x`:              `a --url http://host:9092/ -x`,
		`a --token`:                                 `a --token`,
		`a "quoted" \ \u0001`:                       `a "quoted" \ \u0001`,
	} {
		field := func(command string) string {
			text, err := json.Marshal(command)
			if err != nil {
				t.Fatal(err)
			}
			return fmt.Sprintf("{\n  \"pid\": 18446744073709551615,\n  \"command\": %s,\n  \"password\": \"x\"\n}\n", text)
		}
		if got := string(support.MaskCommands([]byte(field(in)))); got != field(want) {
			t.Errorf("got  %s\nwant %s", got, field(want))
		}
	}
}

func TestPins(t *testing.T) {
	dir := testenv.BPFFS(t)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "devices", Type: ebpf.Hash, KeySize: 16, ValueSize: 8, MaxEntries: 4096})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "steer_telemetry"), 0o700), m.Pin(filepath.Join(dir, "steer_telemetry/devices"))); err != nil {
		t.Fatal(err)
	}
	f := support.Pins(dir)
	text := strings.Join(strings.Fields(contents(t, f)["bundle/pins.txt"]), " ")
	if want := "steer_telemetry/devices map Hash devices 16 8 4096"; f.Problem != "" || !strings.Contains(text, want) {
		t.Errorf("%s\nproblem %q, want %q", text, f.Problem, want)
	}
	if f := support.Pins(filepath.Join(dir, "none")); f.Problem != "" || !strings.Contains(contents(t, f)["bundle/pins.txt"], "no "+dir) {
		t.Errorf("%+v", f)
	}
}
