// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"sockeye/internal/clsact"
)

// filterPrefix begins the names of the filters of verifications. The PID and the descriptor of a program follow.
const filterPrefix = "sockeye-verify/"

// filters attach the programs of a verification to an interface, on kernels without TCX links.
type filters struct {
	*clsact.Filters
	index int
	name  string
}

// attachFilters adds filters, after it has removed those of processes that were killed. It must run in the interface's namespace.
func (v *verifier) attachFilters() (_ *filters, err error) {
	ingress, egress := v.counting.Programs()
	f := &filters{index: v.before.Index, name: fmt.Sprintf("%s%d/%d", filterPrefix, os.Getpid(), ingress.FD())}
	if f.Filters, err = clsact.Open(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if err := f.Detach(f.index, isStale); err != nil {
		return nil, err
	}
	if err := f.Attach(f.index, clsact.Ingress, ingress, f.name); err != nil {
		return nil, err
	}
	if err := f.Attach(f.index, clsact.Egress, egress, f.name); err != nil {
		return nil, err
	}
	return f, nil
}

// isStale reports whether a filter is one of a process that has ended.
func isStale(_ clsact.Hook, name string) bool {
	owner, ours := strings.CutPrefix(name, filterPrefix)
	pid, _, _ := strings.Cut(owner, "/")
	_, err := os.Stat("/proc/" + pid)
	return ours && os.IsNotExist(err)
}

// Close removes the filters.
func (f *filters) Close() error {
	defer f.Filters.Close()
	return f.Detach(f.index, func(_ clsact.Hook, name string) bool { return name == f.name })
}
