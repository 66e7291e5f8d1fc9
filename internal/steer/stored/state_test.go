// SPDX-License-Identifier: Apache-2.0

package stored

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/statedir"
)

func TestStateRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "telemetry.json")
	fresh, known, err := Load(path)
	if err != nil || known || fresh.BootID != statedir.BootID() || statedir.BootID() == "" {
		t.Fatalf("no file: %+v %v %v", fresh, known, err)
	}
	uid := uint32(0)
	s := State{
		Nonce: 1<<64 - 1, ClaimedUID: &uid, BootID: statedir.BootID(),
		Members:  []FirstSight{{member.ID{PID: 1, StartTime: 2}, []string{"a", "b c"}, "3", "/usr/sbin/a", member.FileID{Device: 4, Inode: 5}}, {member.ID{PID: 1, StartTime: 3}, nil, "", "", member.FileID{}}},
		Claims:   []Claim{{member.ID{PID: 4, StartTime: 5}, 6, "run"}},
		Released: []member.ID{{PID: 7, StartTime: 8}},
	}
	if err := s.Save(path); err != nil {
		t.Fatal(err)
	}
	back, known, err := Load(path)
	if err != nil || !known || !reflect.DeepEqual(back, s) {
		t.Errorf("got %+v %v %v, want %+v", back, known, err, s)
	}

	// Process ids of another boot are discarded; the nonce and the user stay.
	s.BootID = "another"
	if err := s.Save(path); err != nil {
		t.Fatal(err)
	}
	want := State{Nonce: s.Nonce, ClaimedUID: &uid, BootID: statedir.BootID()}
	if back, _, err := Load(path); err != nil || !reflect.DeepEqual(back, want) {
		t.Errorf("after a reboot: got %+v %v, want %+v", back, err, want)
	}
}

func TestDamagedState(t *testing.T) {
	path := filepath.Join(t.TempDir(), "telemetry.json")
	for text, message := range map[string]string{
		"":                                  "unexpected end of JSON input",
		"{":                                 "unexpected end of JSON input",
		`{"nonce": 7}`:                      "json: invalid use of ,string struct tag, trying to unmarshal unquoted value into uint64",
		`{"nonce": "7", "claimed_uid": -1}`: "json: cannot unmarshal number -1 into Go struct field State.claimed_uid of type uint32",
		"\x00\x00\x00\x00":                  "invalid character '\\x00' looking for beginning of value",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, _, err := Load(path)
		if err == nil || err.Error() != "read state "+path+": "+message {
			t.Errorf("%q: %v", text, err)
			continue
		}
		if fault.Code(err) != fault.CodeFailed || !strings.HasPrefix(fault.Hint(err), "remove the file: the nonce is also pinned, and members are found again; ") {
			t.Errorf("%q: code %d, hint %q", text, fault.Code(err), fault.Hint(err))
		}
	}
}

// TestWriteFileIsAtomic: a reader of a file that is replaced repeatedly reads one complete version.
func TestWriteFileIsAtomic(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	contents := []string{strings.Repeat("a", 1<<16), strings.Repeat("b", 1<<15)}
	if err := statedir.Write(path, []byte(contents[0])); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		for n := range 100 {
			if err := statedir.Write(path, []byte(contents[n%2])); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for {
		got, err := os.ReadFile(path)
		if err != nil || string(got) != contents[0] && string(got) != contents[1] {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			if entries, _ := os.ReadDir(dir); len(entries) != 1 {
				t.Errorf("left over: %v", entries)
			}
			if info, _ := os.Stat(path); info.Mode().Perm() != 0o600 {
				t.Errorf("mode %v", info.Mode())
			}
			return
		default:
		}
	}
}

// TestWriteFileFails: a failed write leaves the old file and no temporary file.
func TestWriteFileFails(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "d")
	if err := os.MkdirAll(filepath.Join(path, "full"), 0o755); err != nil {
		t.Fatal(err)
	}
	err := statedir.Write(path, []byte("x"))
	if err == nil || !strings.HasPrefix(err.Error(), "write "+path+": ") {
		t.Errorf("over a directory: %v", err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("left over: %v", entries)
	}
	if err := statedir.Write(filepath.Join(dir, "none", "f"), nil); err == nil {
		t.Error("a file in no directory was written")
	}
}

// TestDamagedSettings checks that settings and pins that no command makes are refused, and not the others.
func TestDamagedSettings(t *testing.T) {
	for text, valid := range map[string]bool{
		`{"slots": {"2": {"state": "drain", "weight": 0}}, "pins": [{"device": "a", "slot": 3}, {"prefix": "192.0.2.0/24", "slot": 1023}]}`: true,
		`{"slots": {"2": {"state": "sleeping", "weight": 100}}}`:                                                                            false,
		`{"slots": {"2": {"state": "drain", "weight": -5}}}`:                                                                                false,
		`{"slots": {"2": {"state": "drain", "weight": 257}}}`:                                                                               false,
		`{"slots": {"-1": {"state": "drain", "weight": 1}}}`:                                                                                false,
		`{"slots": {"1024": {"state": "drain", "weight": 1}}}`:                                                                              false,
		`{"slots": {"x": {"state": "drain", "weight": 1}}}`:                                                                                 false,
		`{"pins": [{"slot": 1}]}`:                                                                                                           false,
		`{"pins": [{"device": "a", "slot": -1}]}`:                                                                                           false,
		`{"pins": [{"device": "a", "slot": 1024}]}`:                                                                                         false,
		`{"pins": [{"device": "a", "slot": 1}, {"device": "a", "slot": 2}]}`:                                                                false,
		`{"pins": [{"prefix": "192.0.2.1/24", "slot": 1}]}`:                                                                                 false,
		`{"pins": [{"prefix": "::ffff:192.0.2.1/128", "slot": 1}]}`:                                                                         false,
		`{"pins": [{"device": "a", "prefix": "192.0.2.0/24", "slot": 1}]}`:                                                                  false,
		"null\n":                            false,
		`{"slots": {"2": {"state": "drain"`: false,
	} {
		path := t.TempDir() + "/state.json"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := Load(path); (err == nil) != valid || err != nil && !strings.Contains(fault.Hint(err), "are lost") {
			t.Errorf("%s: %v, %s", text, err, fault.Hint(err))
		}
	}
}
