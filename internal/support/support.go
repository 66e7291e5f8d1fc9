// SPDX-License-Identifier: Apache-2.0

// Package support packs what a maintainer needs to understand a host: an archive of the outputs of commands, of files of
// the host, and of the sizes of maps.
package support

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/cilium/ebpf"
	"go.yaml.in/yaml/v4"

	"sockeye/internal/config"
	"sockeye/internal/sysctl"
)

const (
	// mostBytes is the maximum size of a file in the archive.
	mostBytes = 16 << 20
	// journalLines is the maximum number of lines of the journal.
	journalLines = 5000
	// journalTimeout is the maximum time for journalctl(1).
	journalTimeout = 30 * time.Second
)

// File is a file of the archive.
type File struct {
	Name    string `json:"name"`
	About   string `json:"about"`             // content, or its source
	Problem string `json:"problem,omitempty"` // why the content is missing or cut
	Bytes   int    `json:"bytes"`

	content []byte
}

// Policy returns a policy file without its comments, which may have names and secrets that the agent does not need.
func Policy(file string) File {
	text, err := config.ReadFile(file)
	if err == nil {
		text, err = withoutComments(text)
	}
	return New("policy.yaml", file+" without comments", text, err)
}

func withoutComments(text []byte) ([]byte, error) {
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return nil, fmt.Errorf("left out: comments cannot be told from values: %w", err)
	}
	var strip func(*yaml.Node)
	strip = func(n *yaml.Node) {
		n.HeadComment, n.LineComment, n.FootComment = "", "", ""
		for _, child := range n.Content {
			strip(child)
		}
	}
	strip(&document)
	if len(document.Content) == 0 {
		return nil, nil
	}
	return yaml.Marshal(&document)
}

var (
	commandValues = regexp.MustCompile(`"command": *"(?:[^"\\]|\\.)*"`)
	secretOptions = regexp.MustCompile(`(?i)([\w.-]*(?:passw(?:or)?d|passphrase|secret|token|api-?key|private-?key|credential)[\w.-]*(?:[=:]| +))[^ ]+`)
	secretURLs    = regexp.MustCompile(`(://[^ /:@]*:)[^ /@]+@`)
)

// MaskCommands replaces secrets in the command lines of JSON output: what follows an option or a key whose name contains
// password, secret, token and the like, and the passwords of URLs. It cannot know other secrets.
func MaskCommands(output []byte) []byte {
	return commandValues.ReplaceAllFunc(output, func(field []byte) []byte {
		key, value, _ := bytes.Cut(field, []byte(":"))
		var command string
		if err := json.Unmarshal(value, &command); err != nil {
			return []byte(`"command": "(left out)"`)
		}
		command = secretOptions.ReplaceAllString(command, "${1}(masked)")
		masked, _ := json.Marshal(secretURLs.ReplaceAllString(command, "${1}(masked)@")) // it never fails for a string
		return fmt.Appendf(nil, "%s: %s", key, masked)
	})
}

// Host returns files about the kernel and the distribution.
func Host() []File {
	files := []File{}
	for name, path := range map[string]string{
		"host/kernel.txt": "/proc/version", "host/os-release.txt": "/etc/os-release", "host/meminfo.txt": "/proc/meminfo",
		"host/lockdown.txt": "/sys/kernel/security/lockdown", "host/mounts.txt": "/proc/self/mountinfo",
		"host/netstat.txt": "/proc/net/netstat", "host/snmp.txt": "/proc/net/snmp", "host/sockstat.txt": "/proc/net/sockstat",
	} {
		text, err := os.ReadFile(path)
		files = append(files, New(name, path, text, err))
	}
	slices.SortFunc(files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	return append(files, sysctls())
}

// sysctls are the settings that change what Sockeye can do.
func sysctls() File {
	var text bytes.Buffer
	for _, name := range []string{
		"kernel.unprivileged_bpf_disabled", "kernel.yama.ptrace_scope", "net.core.bpf_jit_enable", "net.core.netdev_max_backlog",
		"net.core.rmem_default", "net.core.rmem_max", "net.core.somaxconn", "net.core.wmem_max", "net.ipv4.tcp_max_syn_backlog",
		"net.ipv4.tcp_migrate_req", "net.ipv4.tcp_rmem", "net.ipv4.tcp_syncookies", "net.ipv4.tcp_wmem", "net.ipv4.udp_mem",
		"net.ipv6.bindv6only", "user.max_user_namespaces",
	} {
		value, err := sysctl.Read(name)
		if err != nil {
			value = "(" + err.Error() + ")"
		}
		fmt.Fprintf(&text, "%s = %s\n", name, value)
	}
	return New("host/sysctls.txt", "settings that Sockeye depends on", text.Bytes(), nil)
}

// Journal returns the last lines of the agent's unit.
func Journal(ctx context.Context) File {
	ctx, cancel := context.WithTimeout(ctx, journalTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "journalctl", "-u", "sockeye.service", "-o", "short-iso-precise", "--no-pager", "-n", fmt.Sprint(journalLines))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	text, err := cmd.Output()
	switch {
	case err != nil && stderr.Len() > 0:
		err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	case err == nil && os.Geteuid() != 0 && stderr.Len() > 0: // journalctl succeeds without the lines that the caller may not read
		err = errors.New("only the lines that this user may read")
	}
	return New("journal.txt", fmt.Sprintf("last %d lines of sockeye.service in the journal", journalLines), text, err)
}

// Pins returns the pinned maps and programs below a directory with their sizes.
func Pins(dir string) File {
	var text bytes.Buffer
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "PIN\tKIND\tNAME\tKEY\tVALUE\tENTRIES\tMEMORY")
	var errs []error
	err := filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		row, err := describePin(file)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", file, err))
			return nil
		}
		rel, _ := filepath.Rel(dir, file)
		fmt.Fprintf(w, "%s\t%s\n", rel, row)
		return nil
	})
	_ = w.Flush() // to memory
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
		fmt.Fprintln(&text, "no", dir)
	}
	return New("pins.txt", "maps and programs in "+dir, text.Bytes(), errors.Join(append(errs, err)...))
}

// describePin describes a pinned object; only maps have sizes.
func describePin(file string) (string, error) {
	m, err := ebpf.LoadPinnedMap(file, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		if p, err := ebpf.LoadPinnedProgram(file, &ebpf.LoadPinOptions{ReadOnly: true}); err == nil {
			defer p.Close()
			return fmt.Sprintf("program %v\t\t\t\t\t", p.Type()), nil
		}
		if errors.Is(err, os.ErrPermission) {
			return "", err
		}
		return "other\t\t\t\t\t", nil // a link, or a file of the bpffs itself
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return "", err
	}
	memory := "-"
	if bytes, ok := info.Memlock(); ok {
		memory = fmt.Sprint(bytes)
	}
	return fmt.Sprintf("map %v\t%s\t%d\t%d\t%d\t%s", m.Type(), info.Name, m.KeySize(), m.ValueSize(), m.MaxEntries(), memory), nil
}

// Write writes files as a compressed archive with one directory, and adds contents.txt.
func Write(w io.Writer, dir string, files []File, now time.Time) error {
	var contents bytes.Buffer
	table := tabwriter.NewWriter(&contents, 0, 0, 2, ' ', 0)
	Table(table, files)
	_ = table.Flush()
	files = append([]File{New("contents.txt", "list of the files", contents.Bytes(), nil)}, files...)
	compressed := gzip.NewWriter(w)
	archive := tar.NewWriter(compressed)
	for _, f := range files {
		header := &tar.Header{Name: path.Join(dir, f.Name), Mode: 0o600, Size: int64(len(f.content)), ModTime: now, Typeflag: tar.TypeReg, Format: tar.FormatPAX}
		if err := archive.WriteHeader(header); err != nil {
			return fmt.Errorf("write %s: %w", f.Name, err)
		}
		if _, err := archive.Write(f.content); err != nil {
			return fmt.Errorf("write %s: %w", f.Name, err)
		}
	}
	if err := archive.Close(); err != nil {
		return err
	}
	return compressed.Close()
}

// New returns a file with a content, or with the error of its source.
func New(name, about string, content []byte, err error) File {
	f := File{Name: name, About: about, content: content}
	if err != nil {
		f.Problem = err.Error()
	}
	if len(f.content) > mostBytes {
		f.content, f.Problem = f.content[:mostBytes], fmt.Sprintf("cut after %d MiB", mostBytes>>20)
	}
	f.Bytes = len(f.content)
	return f
}

// Table writes the list of files with a tab between columns.
func Table(w io.Writer, files []File) {
	fmt.Fprintln(w, "FILE\tBYTES\tCONTENT")
	for _, f := range files {
		about := f.About
		if f.Problem != "" {
			about += " (" + strings.ReplaceAll(f.Problem, "\n", "; ") + ")"
		}
		fmt.Fprintf(w, "%s\t%d\t%s\n", f.Name, f.Bytes, about)
	}
}
