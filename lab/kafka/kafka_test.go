// SPDX-License-Identifier: Apache-2.0

package kafka

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/xml"
	"errors"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sockeye/internal/testenv"
	"sockeye/lab"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// Each direct dependency of pom.xml is in the list of checksums, with its version.
func TestSumsOfPom(t *testing.T) {
	var project struct {
		Dependencies []struct {
			Group    string `xml:"groupId"`
			Artifact string `xml:"artifactId"`
			Version  string `xml:"version"`
		} `xml:"dependencies>dependency"`
	}
	if err := xml.Unmarshal(pom, &project); err != nil {
		t.Fatal(err)
	}
	if len(project.Dependencies) == 0 {
		t.Error("pom.xml has no dependencies")
	}
	jars, err := parseSums(sums)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range project.Dependencies {
		path := filepath.Join(strings.ReplaceAll(d.Group, ".", "/"), d.Artifact, d.Version, d.Artifact+"-"+d.Version+".jar")
		if !slices.ContainsFunc(jars, func(j jar) bool { return j.path == path }) {
			t.Errorf("jars.sha256 lacks %s", path)
		}
	}
}

func TestParseSumsRefuses(t *testing.T) {
	sum := strings.Repeat("0", 2*sha256.Size)
	for _, line := range []string{"", sum, sum + " a.jar", sum[2:] + "  a.jar", "x" + sum[1:] + "  a.jar", sum + "  ../a.jar", sum + "  /a.jar"} {
		if jars, err := parseSums(line + "\n"); err == nil {
			t.Errorf("%q: accepted as %v", line, jars)
		}
	}
}

func TestVerify(t *testing.T) {
	dir := t.TempDir()
	sum := sha256.Sum256([]byte("content"))
	jars := []jar{{"a/b.jar", hex.EncodeToString(sum[:])}}
	if err := verify(dir, jars); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without the file: %v", err)
	}
	write := func(text string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Join(dir, "a"), 0o755), os.WriteFile(filepath.Join(dir, "a/b.jar"), []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	write("content")
	if err := verify(dir, jars); err != nil {
		t.Error(err)
	}
	write("other")
	if err := verify(dir, jars); !errors.Is(err, ErrChecksum) || !strings.Contains(err.Error(), "b.jar") {
		t.Errorf("with another file: %v", err)
	}
}

// A file that was changed after its download is refused, and not fetched again.
func TestFetchChanged(t *testing.T) {
	t.Setenv("PATH", "") // without Maven
	dir := t.TempDir()
	jars, err := parseSums(sums)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Fetch(t.Context(), dir); err == nil || !strings.Contains(err.Error(), "apt-get install maven") {
		t.Errorf("without files and Maven: %v", err)
	}
	path := filepath.Join(dir, jars[0].path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	if _, err := Fetch(t.Context(), dir); !errors.Is(err, ErrChecksum) || !strings.Contains(err.Error(), "hint: remove "+dir) {
		t.Errorf("with a changed file: %v", err)
	}
}

// Records as nfacctd 1.7.7 writes them, without and with the routes of BMP.
const (
	bare = `{"event_type": "purge", "as_dst": 0, "comms": "", "as_path": "", "peer_ip_src": "10.77.0.1", "ip_src": "10.78.0.10", "ip_dst": "10.78.1.10", "net_dst": "0.0.0.0", "packets": 20, "bytes": 1840, "writer_id": "default_kafka/4711"}`
	full = `{"event_type": "purge", "as_dst": 65002, "comms": "65002:100", "as_path": "65002", "peer_ip_src": "10.77.0.1", "ip_src": "10.78.0.10", "ip_dst": "10.78.1.10", "net_dst": "10.78.1.0", "packets": 20, "bytes": 1840, "writer_id": "default_kafka/4711"}`
	six  = `{"event_type": "purge", "as_dst": 65002, "comms": "65002:100", "as_path": "65002", "peer_ip_src": "fd77::3", "ip_src": "fd78:0:2::a", "ip_dst": "fd78:0:1::a", "net_dst": "fd78:0:1::", "packets": 1, "bytes": 112, "writer_id": "default_kafka/4712"}`
)

func TestCounts(t *testing.T) {
	exited := error(nil)
	topic := newTopic("flows", netip.MustParseAddrPort("10.77.0.253:9092"), func() error { return exited })
	add := func(key, value string) {
		t.Helper()
		if err := topic.add(key, []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	add("nfacctd-0", bare)
	add("nfacctd-1", full)
	before := topic.Counts()
	add("nfacctd-1", full)
	add("nfacctd-1", six)
	four, other := netip.MustParseAddr("10.77.0.1"), netip.MustParseAddr("fd77::3")
	want := map[netip.Addr]Count{four: {With: 2, Without: 1}, other: {With: 1}}
	if got := topic.Counts(); !maps.Equal(got, want) {
		t.Errorf("counts: %v, want %v", got, want)
	}
	if got, want := topic.Counts()[four].Sub(before[four]), (Count{With: 1}); got != want {
		t.Errorf("counts since: %v, want %v", got, want)
	}
	if got := (Count{With: 2, Without: 1}).Add(Count{With: 1}).Share(); got != 0.75 {
		t.Errorf("share: %v, want 0.75", got)
	}

	// Offsets are separate for each collector.
	end, err := topic.End("nfacctd-1")
	if err != nil || end != 3 {
		t.Errorf("end: %d, %v", end, err)
	}
	records, next, err := topic.Records("nfacctd-1", 2)
	if err != nil || next != 3 || len(records) != 1 || records[0].Peer != other || !records[0].Correlated() || records[0].Packets != 1 {
		t.Errorf("records after 2: %+v, next %d, %v", records, next, err)
	}
	if records, next, err := topic.Records("nfacctd-2", 0); err != nil || next != 0 || len(records) > 0 {
		t.Errorf("records of a collector without records: %+v, next %d, %v", records, next, err)
	}

	if err := topic.add("nfacctd-0", []byte("{")); err == nil || !strings.Contains(err.Error(), "nfacctd-0") {
		t.Errorf("incomplete message: %v", err)
	}
	exited = errors.New("kafka exited")
	if _, _, err := topic.Records("nfacctd-0", 0); !errors.Is(err, exited) {
		t.Errorf("records without a broker: %v", err)
	}
	if _, err := topic.End("nfacctd-0"); !errors.Is(err, exited) {
		t.Errorf("end without a broker: %v", err)
	}
}

var _ lab.Output = (*Topic)(nil)
