// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/statedir"
)

// Files of the state directory. Each policy has a second file, with the suffix fromSuffix, that contains the original
// path: relative paths in the policy are relative to the directory of that path.
const (
	appliedFile  = ".applied.yaml"
	previousFile = ".previous.yaml"
	fromSuffix   = ".from"
)

// loadedPolicy is a parsed policy with its text and its path.
type loadedPolicy struct {
	policy *config.Policy
	text   []byte
	path   string
	// referenced has the state of the files that the policy names, from before their contents were read. So a file that
	// changes while the policy is applied differs from its state afterwards.
	referenced map[string]fileMark
}

// startPolicy is the policy that an agent starts with.
type startPolicy struct {
	loadedPolicy
	// refused is the error of the policy file if the agent starts with the last applied policy instead; refusedText
	// is the text of the file.
	refused     error
	refusedText []byte
}

// inForce describes the policy in force, for the comparison with the policy file.
type inForce struct {
	text       []byte
	referenced map[string]fileMark // of loadedPolicy
	notSaved   error               // why the policy is not in the state directory
	// refused is the error of the policy file at the start of the agent, and refusedText the text of the file then.
	refused     error
	refusedText []byte
}

// fileMark identifies the contents of a file by its metadata.
type fileMark struct {
	dev, ino uint64
	size     int64
	modified unix.Timespec
}

// choosePolicy reads the policy file. If the file is invalid, or names something that the host does not have, the
// result is the last applied policy: a typing error must not keep the agent from starting.
func (a *Agent) choosePolicy() (*startPolicy, error) {
	file, err := readPolicy(a.options.Policy)
	if err == nil {
		err = a.checkHost(file.policy)
	}
	if err == nil {
		return &startPolicy{loadedPolicy: file}, nil
	}
	applied, failed := a.readSaved(appliedFile)
	if errors.Is(failed, os.ErrNotExist) {
		return nil, err
	}
	if string(applied.text) == string(file.text) {
		return nil, fmt.Errorf("the last applied policy has the text of the policy file, and is refused, too: %w", err)
	}
	if failed == nil {
		failed = a.checkHost(applied.policy)
	}
	if failed != nil {
		return nil, fmt.Errorf("the last applied policy (%s) is refused, too: %s; the policy file: %w",
			filepath.Join(a.options.StateDir, appliedFile), firstLine(failed), err)
	}
	return &startPolicy{loadedPolicy: applied, refused: err, refusedText: file.text}, nil
}

// readSaved reads and parses a policy of the state directory. After a parse error the result has the text.
func (a *Agent) readSaved(name string) (loadedPolicy, error) {
	path := filepath.Join(a.options.StateDir, name)
	text, err := os.ReadFile(path)
	if err != nil {
		return loadedPolicy{}, err
	}
	from := a.savedPath(name)
	policy, err := parsePolicy(text, from)
	var flaws config.Errors
	if errors.As(err, &flaws) {
		for _, f := range flaws {
			if f.File == from {
				f.File = path // line numbers refer to the saved file
			}
		}
	}
	return policy, err
}

// savePolicy saves the policy in force, and the policy that it replaces if the texts differ.
func (a *Agent) savePolicy(p loadedPolicy) error {
	applied, previous := filepath.Join(a.options.StateDir, appliedFile), filepath.Join(a.options.StateDir, previousFile)
	last, err := os.ReadFile(applied)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read applied policy: %w", err)
	}
	from := []byte(p.path + "\n")
	if err == nil && string(last) == string(p.text) && a.savedPath(appliedFile) == p.path {
		return nil
	}
	if err == nil && string(last) == string(p.text) {
		return statedir.Write(applied+fromSuffix, from)
	}
	if err == nil {
		before := []byte(a.savedPath(appliedFile) + "\n")
		if err := fault.Join(statedir.Write(previous, last), statedir.Write(previous+fromSuffix, before)); err != nil {
			return err
		}
	}
	return fault.Join(statedir.Write(applied, p.text), statedir.Write(applied+fromSuffix, from))
}

// savedPath returns the original path of a policy in the state directory.
func (a *Agent) savedPath(name string) string {
	data, err := os.ReadFile(filepath.Join(a.options.StateDir, name+fromSuffix))
	if err != nil {
		return a.options.Policy // saved by a version without fromSuffix
	}
	return strings.TrimSpace(string(data))
}

// checkHost returns an error if a policy names something that the host does not have.
func (a *Agent) checkHost(policy *config.Policy) error {
	for _, d := range a.domains {
		if err := d.Check(policy); err != nil {
			return err
		}
	}
	return nil
}

// policyProblem describes the difference between the policy file and the policy in force, or the error of the
// listeners for metrics and the web page. Both results are "" if there is none.
func (a *Agent) policyProblem() (problem, hint string) {
	a.mu.Lock()
	now, metrics, page := a.inForce, cmp.Or(a.metricsProblem, a.exportProblem), a.pageProblem
	a.mu.Unlock()
	const show = "sockeye plan shows what sockeye apply would change"
	path := a.options.Policy
	file, err := readPolicy(path)
	switch {
	case now.refused != nil && string(file.text) == string(now.refusedText):
		return "the policy file is not in force, the agent started with the last applied policy: " + firstLine(now.refused), "correct it (sockeye check " + path + "), then sockeye apply"
	case err != nil:
		return "the policy file is invalid and not in force: " + firstLine(err), "correct it (sockeye check " + path + "), then sockeye apply"
	case string(file.text) != string(now.text):
		return "the policy file differs from the policy in force", show
	}
	for name, mark := range file.referenced {
		if before, ok := now.referenced[name]; ok && before != mark {
			return name + ", which the policy names, has changed since it was applied", show
		}
	}
	if now.notSaved != nil {
		return "the policy in force is not saved: " + firstLine(now.notSaved), "sockeye apply saves it"
	}
	for _, listener := range []error{metrics, page} {
		if listener != nil {
			return fault.Message(listener), strings.TrimPrefix(fault.Hint(listener)+", then sockeye apply", ", then ")
		}
	}
	return "", ""
}

// readPolicy reads and parses a policy file. After a parse error the result has the text.
func readPolicy(path string) (loadedPolicy, error) {
	text, err := config.ReadFile(path)
	if err != nil {
		return loadedPolicy{}, fault.Unreadable(err, "sockeye init --write writes one from the processes that share ports; a file with the line services: {} is a policy that does nothing")
	}
	return parsePolicy(text, path)
}

// parsePolicy parses a policy. After a parse error the result has the text.
func parsePolicy(text []byte, path string) (loadedPolicy, error) {
	policy, err := config.Parse(text, path)
	p := loadedPolicy{policy: policy, text: text, path: path}
	if err != nil {
		return p, err
	}
	p.referenced = referencedFiles(policy)
	if len(remoteFiles(policy)) > 0 { // which Parse has read before
		p.policy, err = config.Parse(text, path)
	}
	return p, err
}

// referencedFiles returns the state of the files that a policy names, by path.
func referencedFiles(policy *config.Policy) map[string]fileMark {
	files := make(map[string]fileMark)
	add := func(path string) {
		if path != "" {
			files[path] = statMark(path)
		}
	}
	for _, path := range settingsFiles(policy) {
		add(path)
	}
	for _, s := range policy.Services {
		add(s.DeviceMap)
	}
	for _, path := range remoteFiles(policy) {
		add(path)
	}
	return files
}

// remoteFiles returns the files of prefixes that the rules of a policy name.
func remoteFiles(policy *config.Policy) (files []string) {
	for _, r := range policy.Tune {
		if r.Match.RemoteFile != "" {
			files = append(files, r.Match.RemoteFile)
		}
	}
	for _, r := range policy.Trace {
		if r.Match.RemoteFile != "" {
			files = append(files, r.Match.RemoteFile)
		}
	}
	return files
}

// settingsFiles returns the files that are named outside of services and rules: by the web page, fleet.etcd and metrics.otlp.
func settingsFiles(policy *config.Policy) []string {
	files := []string{policy.UI.TLS.Cert, policy.UI.TLS.Key, policy.UI.TLS.ClientCA, policy.UI.TokenFile}
	if f := policy.Fleet; f != nil && f.Etcd != nil {
		files = append(files, f.Etcd.CA, f.Etcd.PasswordFile)
	}
	if o := policy.Metrics.OTLP; o != nil {
		files = append(files, o.HeadersFile, o.CA)
	}
	return files
}

func statMark(path string) (m fileMark) {
	var stat unix.Stat_t
	if unix.Stat(path, &stat) == nil {
		m = fileMark{stat.Dev, stat.Ino, stat.Size, stat.Mtim}
	}
	return m
}

// firstLine returns an error in one line: the first error of a policy file, and the number of the others.
func firstLine(err error) string {
	var flaws config.Errors
	if !errors.As(err, &flaws) {
		line, _, _ := strings.Cut(fault.Message(err), "\n")
		return line
	}
	first := *flaws[0]
	first.Hint = ""
	if len(flaws) > 1 {
		return fmt.Sprintf("%v, and %s", &first, format.Count(len(flaws)-1, "more error", "more errors"))
	}
	return first.Error()
}
