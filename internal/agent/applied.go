// SPDX-License-Identifier: Apache-2.0

package agent

import (
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

// inForce is the policy that the agent works by, and what is known of how it
// differs from the file.
type inForce struct {
	text []byte
	// named are the files that the policy names, as they were.
	referenced map[string]fileMark
	// refused is why the agent did not start with the policy file, and refusedText
	// what was in that file.
	refused     error
	refusedText []byte
}

// fileMark tells a file from one that was written later.
type fileMark struct {
	dev, ino uint64
	size     int64
	modified unix.Timespec
}

func statMark(path string) (m fileMark) {
	var stat unix.Stat_t
	if unix.Stat(path, &stat) == nil {
		m = fileMark{stat.Dev, stat.Ino, stat.Size, stat.Mtim}
	}
	return m
}

// namedFiles are the files that a policy has the agent read.
func referencedFiles(policy *config.Policy) map[string]fileMark {
	named := make(map[string]fileMark)
	add := func(path string) {
		if path != "" {
			named[path] = statMark(path)
		}
	}
	for _, s := range policy.Services {
		add(s.DeviceMap)
	}
	for _, r := range policy.Tune {
		add(r.Match.RemoteFile)
	}
	for _, r := range policy.Trace {
		add(r.Match.RemoteFile)
	}
	return named
}

// chosen is the policy that an agent starts with.
type startPolicy struct {
	policy *config.Policy
	text   []byte
	// refused is why it is not that of the file, nil if it is; refusedText is what
	// the file has.
	refused     error
	refusedText []byte
}

// choosePolicy reads the policy file. If that is broken, as it is or by what it
// names, the policy is the one that was applied last: the host is not left without
// an agent for a typing error.
func (a *Agent) choosePolicy() (*startPolicy, error) {
	policy, text, err := readPolicy(a.options.Policy)
	if err == nil {
		err = a.checkHost(policy)
	}
	if err == nil {
		return &startPolicy{policy: policy, text: text}, nil
	}
	c := &startPolicy{refused: err, refusedText: text}
	var failed error
	c.policy, c.text, failed = a.readSaved(appliedFile)
	if errors.Is(failed, os.ErrNotExist) {
		return nil, err
	}
	if string(c.text) == string(text) {
		return nil, fmt.Errorf("the policy that was applied last is the same as the file, and refused, too: %w", err)
	}
	if failed == nil {
		failed = a.checkHost(c.policy)
	}
	if failed != nil {
		return nil, fmt.Errorf("the policy that was applied last (%s) was tried, and refused, too: %s; the policy file: %w",
			filepath.Join(a.options.StateDir, appliedFile), firstLine(failed), err)
	}
	return c, nil
}

const (
	appliedFile  = ".applied.yaml"
	previousFile = ".previous.yaml"
	// fromSuffix is of the file that has the path of a policy that is kept: relative
	// paths in it are relative to that.
	fromSuffix = ".from"
)

// saved reads a policy that is kept. The text is returned with an error in it, too.
func (a *Agent) readSaved(name string) (*config.Policy, []byte, error) {
	path := filepath.Join(a.options.StateDir, name)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, err
	}
	from := a.savedPath(name)
	policy, err := config.Parse(text, from)
	var flaws config.Errors
	if errors.As(err, &flaws) {
		for _, f := range flaws {
			if f.File == from {
				f.File = path // the lines are of what was kept
			}
		}
	}
	return policy, text, err
}

// from is the path that a policy that is kept had.
func (a *Agent) savedPath(name string) string {
	data, err := os.ReadFile(filepath.Join(a.options.StateDir, name+fromSuffix))
	if err != nil {
		return a.options.Policy // as of an agent that did not keep it
	}
	return strings.TrimSpace(string(data))
}

// remember keeps the policy in force, and the one before if it differs. From is the
// path of its file.
func (a *Agent) savePolicy(policy *config.Policy, text []byte, from string) error {
	applied, previous := filepath.Join(a.options.StateDir, appliedFile), filepath.Join(a.options.StateDir, previousFile)
	a.inForce = inForce{text: text, referenced: referencedFiles(policy)}
	last, err := os.ReadFile(applied)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read applied policy: %w", err)
	}
	if err == nil && string(last) == string(text) {
		return statedir.Write(applied+fromSuffix, []byte(from+"\n"))
	}
	if err == nil {
		before := []byte(a.savedPath(appliedFile) + "\n")
		if err := fault.Join(statedir.Write(previous, last), statedir.Write(previous+fromSuffix, before)); err != nil {
			return err
		}
	}
	return fault.Join(statedir.Write(applied, text), statedir.Write(applied+fromSuffix, []byte(from+"\n")))
}

// check fails if a policy names something that the host does not have.
func (a *Agent) checkHost(policy *config.Policy) error {
	for _, d := range a.domains {
		if err := d.Check(policy); err != nil {
			return err
		}
	}
	return nil
}

// policyProblem tells how the policy file differs from what is in force, "" if it
// does not.
func (a *Agent) policyProblem() (problem, hint string) {
	a.mu.Lock()
	now, metrics := a.inForce, a.metricsProblem
	a.mu.Unlock()
	const show = "sockeye plan shows what sockeye apply would change"
	file := a.options.Policy
	policy, text, err := readPolicy(file)
	switch {
	case now.refused != nil && string(text) == string(now.refusedText):
		return "the policy file is not in force, the agent started with the policy that was applied last: " + firstLine(now.refused), "correct it (sockeye check " + file + "), then sockeye apply"
	case err != nil:
		return "the policy file is not in force, it is broken: " + firstLine(err), "correct it (sockeye check " + file + "), then sockeye apply"
	case string(text) != string(now.text):
		return "the policy file differs from the policy in force", show
	}
	for path, mark := range referencedFiles(policy) {
		if before, ok := now.referenced[path]; ok && before != mark {
			return path + ", which the policy names, has changed since it was applied", show
		}
	}
	if metrics != nil {
		return fault.Message(metrics), fault.Hint(metrics) + ", then sockeye apply"
	}
	return "", ""
}

// firstLine is an error in one line: of a policy file with many errors, the first.
func firstLine(err error) string {
	var flaws config.Errors
	if !errors.As(err, &flaws) {
		return fault.Message(err)
	}
	first := *flaws[0]
	first.Hint = ""
	if len(flaws) > 1 {
		return fmt.Sprintf("%v, and %s", &first, format.Count(len(flaws)-1, "more error", "more errors"))
	}
	return first.Error()
}
