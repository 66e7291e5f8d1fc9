// SPDX-License-Identifier: Apache-2.0

package statedir

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestClaim makes directories an agent's own, but not one of others.
func TestClaim(t *testing.T) {
	for name, c := range map[string]struct {
		mode  os.FileMode
		files []string
		want  string
	}{
		"empty":                     {0o755, nil, ""},
		"a file system":             {0o755, []string{"lost+found"}, ""},
		"of an agent":               {0o755, []string{AgentFile, "other"}, ""},
		"a start without space":     {0o700, []string{".applied.yaml", ".applied.yaml.from", "events/", "telemetry.json", "..telemetry.json.372"}, ""},
		"of others, closed, JSON":   {0o700, []string{"config.json"}, "has files that are not of an agent, for example config.json"},
		"of others, closed":         {0o700, []string{".bashrc"}, "has files that are not of an agent, for example .bashrc"},
		"of others, JSON":           {0o755, []string{"package.json"}, "has files that are not of an agent, for example package.json"},
		"records of sizes":          {0o755, []string{"bigtcp/"}, ""},
		"of others":                 {0o755, []string{"data"}, "has files that are not of an agent, for example data"},
		"of others, with the group": {0o750, []string{"data"}, "has files that are not of an agent, for example data"},
	} {
		dir := t.TempDir()
		create(t, dir, c.files)
		if err := os.Chmod(dir, c.mode); err != nil {
			t.Fatal(err)
		}
		err := Claim(dir)
		info, failed := os.Stat(dir)
		if failed != nil {
			t.Fatal(failed)
		}
		want := os.FileMode(0o700)
		if c.want != "" {
			want = c.mode
		}
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) || info.Mode().Perm() != want {
			t.Errorf("%s: %v, mode %o", name, err, info.Mode().Perm())
		}
	}
}

// TestClaimFIFO refuses a directory with a FIFO in the place of a state file, and does not wait for a writer.
func TestClaimFIFO(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.Chmod(dir, 0o700), unix.Mkfifo(filepath.Join(dir, "telemetry.json"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := Claim(dir); err == nil || !strings.Contains(err.Error(), "for example telemetry.json") {
		t.Error(err)
	}
}

// TestRemove removes a directory of an agent with all that it writes, and nothing that has files of others.
func TestRemove(t *testing.T) {
	written := []string{AgentFile, "." + AgentFile + ".2718281828", ".applied.yaml", ".applied.yaml.from", ".previous.yaml", ".telemetry.live.json", ".telemetry.live.journal",
		"telemetry.json", "telemetry.templates", "telemetry.devices", "fleet.table", "fleet.instance", "events/", "frames/", "bigtcp/", "lost+found/"}
	for name, c := range map[string]struct {
		files []string
		want  string
	}{
		"of an agent":               {written, ""},
		"records of sizes":          {[]string{"bigtcp/"}, ""},
		"of others":                 {[]string{"telemetry.json"}, "is not the state directory of an agent"},
		"of an agent and of others": {append(written, ".bashrc"), "has files that are not of an agent, for example .bashrc"},
		"a backup by hand":          {append(written, "telemetry.json.bak"), "for example telemetry.json.bak"},
	} {
		dir := filepath.Join(t.TempDir(), "state")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		create(t, dir, c.files)
		err := Remove(dir)
		entries, _ := os.ReadDir(dir)
		if c.want == "" && (err != nil || len(entries) > 0) || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || len(entries) != len(c.files)) {
			t.Errorf("%s: %v, %d of %d files are left", name, err, len(entries), len(c.files))
		}
	}
}

// create makes files, and directories where a name ends with a slash.
func create(t *testing.T, dir string, files []string) {
	t.Helper()
	for _, name := range files {
		path := filepath.Join(dir, name)
		err := error(nil)
		if strings.HasSuffix(name, "/") {
			err = os.Mkdir(path, 0o700)
		} else {
			text := ""
			if name == "telemetry.json" {
				text = `{"nonce": 7}`
			}
			err = os.WriteFile(path, []byte(text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestCheckSpace fills a file system: the last eighth of a small one is reserved.
func TestCheckSpace(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("small", dir, "tmpfs", 0, "size=800k"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	f, err := os.Create(filepath.Join(dir, "record"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	written := 0
	for ; CheckSpace(f) == nil; written += 4096 {
		if _, err := f.Write(make([]byte, 4096)); err != nil {
			t.Fatalf("after %d bytes: %v", written, err)
		}
	}
	if err := CheckSpace(f); !errors.Is(err, unix.ENOSPC) || written < 600<<10 {
		t.Errorf("after %d bytes: %v", written, err)
	}
	if err := Write(filepath.Join(dir, "state"), make([]byte, 50<<10)); err != nil {
		t.Errorf("the state has no space: %v", err)
	}
}
