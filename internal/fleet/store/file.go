// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v4"

	"sockeye/internal/fault"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/table"
	"sockeye/internal/owned"
)

// filePeriod is the time between two looks at the file. Editors and tools that deploy files replace them in many ways.
const filePeriod = time.Second

// mostFile is the size of the largest file in bytes.
const mostFile = 1 << 20

// File is a store of hosts that people edit, and deploy to all hosts. Each host computes the same table from it. Nobody
// leads, and no host is ever dead: devices of a host that does not run wait until the file says otherwise.
type File struct {
	path string
}

// fileFormat is the contents of the file.
type fileFormat struct {
	Epoch uint64 `yaml:"epoch"`
	Nonce uint64 `yaml:"nonce"`
	Hosts []struct {
		Name      string     `yaml:"name"`
		Weight    *uint32    `yaml:"weight"` // nil: 1
		State     lead.State `yaml:"state"`
		Addresses []string   `yaml:"addresses"`
		MACs      []string   `yaml:"macs"`
	} `yaml:"hosts"`
}

// OpenFile returns a store in a file.
func OpenFile(path string) *File { return &File{path: path} }

// Run sends a snapshot when the file has changed, until ctx is done.
func (f *File) Run(ctx context.Context, snapshots chan *Snapshot) {
	var last *Snapshot
	var text, seen []byte
	failed := ""
	for {
		now, err := readFile(f.path)
		switch {
		case err == nil && last != nil && bytes.Equal(now, text):
			if failed != "" { // the file has its former contents again
				failed = ""
				offer(snapshots, last)
			}
		case err == nil && last != nil && !bytes.Equal(now, seen): // it may be written in place, and incomplete
		case err == nil:
			var next *Snapshot
			if next, err = parseFile(now); err == nil {
				err = follows(last, next)
			}
			if err == nil {
				last, text, failed = next, now, ""
				offer(snapshots, next)
			}
		}
		seen = now
		if err != nil && err.Error() != failed {
			failed = err.Error()
			refused := &Snapshot{Problems: []string{f.path + " is refused: " + failed}}
			if last != nil {
				refused.Table, refused.Hosts, refused.Connected, refused.Damaged = last.Table, last.Hosts, true, true
			}
			offer(snapshots, refused)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(filePeriod):
		}
	}
}

// follows returns an error if a table cannot come after another one.
func follows(last, next *Snapshot) error {
	switch {
	case last == nil:
		return nil
	case next.Table.Nonce != last.Table.Nonce:
		return errors.New("the nonce differs: every device would get another host")
	case next.Table.Epoch <= last.Table.Epoch:
		return fmt.Errorf("the contents differ, and the epoch goes from %d to %d: raise it with each change", last.Table.Epoch, next.Table.Epoch)
	}
	return nil
}

func readFile(path string) ([]byte, error) { return owned.ReadFile(path, false, mostFile) }

// CheckFile returns an error if a file has no table, or not a host.
func CheckFile(path, host string) error {
	text, err := readFile(path)
	if err != nil {
		return fault.Usage(fmt.Errorf("read file of hosts: %w", err), "write the file first: it has the hosts of the fleet")
	}
	s, err := parseFile(text)
	if err != nil {
		return fault.Usage(fmt.Errorf("%s: %w", path, err), "docs/fleet.md has an example")
	}
	if s.Table.Index(host) == table.None {
		return fault.Usage(fmt.Errorf("%s has no host %q, which is the name of this host", path, host), "add the host, or name this host with the key host")
	}
	return nil
}

// typeName is what the error of the decoder tells about the type in Go.
var typeName = regexp.MustCompile(`(?s) in type struct \{.*\}`)

// parseFile computes the table of a file.
func parseFile(text []byte) (*Snapshot, error) {
	var c fileFormat
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(&c); errors.Is(err, io.EOF) {
		return nil, errors.New("the file is empty")
	} else if err != nil {
		return nil, errors.New(typeName.ReplaceAllString(err.Error(), ""))
	} else if !errors.Is(decoder.Decode(new(any)), io.EOF) {
		return nil, errors.New("the file has more than one document (---)")
	}
	s := &Snapshot{Connected: true}
	t := &table.Table{Epoch: c.Epoch, Nonce: c.Nonce}
	var r table.Ranking
	for _, h := range c.Hosts {
		one := table.Host{Name: h.Name, Weight: 1, MACs: h.MACs}
		if h.Weight != nil {
			one.Weight = *h.Weight
		}
		for _, text := range h.Addresses {
			a, err := netip.ParseAddr(text)
			if err != nil {
				return nil, fmt.Errorf("host %s: %w", h.Name, err)
			}
			one.Addresses = append(one.Addresses, a)
		}
		setting := Setting{State: h.State}
		if err := one.Check(); err != nil {
			return nil, err
		}
		if err := setting.Check(); err != nil {
			return nil, fmt.Errorf("host %s: %w", h.Name, err)
		}
		state := h.State
		if state == "" {
			state = lead.Ready
		}
		t.Hosts = append(t.Hosts, one)
		s.Hosts = append(s.Hosts, lead.Host{Host: one, State: state, Alive: true, Healthy: true, Applied: c.Epoch, Handed: c.Epoch, Prepared: c.Epoch})
		if state == lead.Ready || state == lead.Maint {
			r.Set(one.Name, one.Weight)
		}
	}
	slices.SortFunc(t.Hosts, func(a, b table.Host) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(s.Hosts, func(a, b lead.Host) int { return strings.Compare(a.Name, b.Name) })
	if r.Hosts() == 0 {
		return nil, errors.New("no host is ready")
	}
	owner := make(map[string]string)
	for i := range t.Hosts {
		h := &t.Hosts[i]
		own := slices.Clone(h.MACs)
		for _, a := range h.Addresses {
			own = append(own, a.String())
		}
		for _, a := range own {
			if owner[a] != "" && owner[a] != h.Name {
				return nil, fmt.Errorf("hosts %s and %s have the address %s", owner[a], h.Name, a)
			}
			owner[a] = h.Name
		}
	}
	t.Owner = *r.Column(t.Index)
	for b := range table.Buckets {
		t.Previous[b], t.Next[b] = table.None, table.None
	}
	s.Table = t
	return s, t.Check()
}

// Update does nothing: a file does not say what hosts do.
func (f *File) Update(Registration) {}

// Write returns ErrReadOnly.
func (f *File) Write(context.Context, *Snapshot, *table.Table) error { return ErrReadOnly }

// ChangeSetting returns ErrReadOnly.
func (f *File) ChangeSetting(context.Context, string, func(Setting) (Setting, error)) error {
	return ErrReadOnly
}

// Ask returns ErrNoAnswers.
func (f *File) Ask(context.Context, string, json.RawMessage) (json.RawMessage, error) {
	return nil, ErrNoAnswers
}

// HandOver does nothing: hosts with a file do not move devices one after the other.
func (f *File) HandOver(context.Context, string, bool, map[netip.Addr][]byte) error { return nil }

// TakeOver returns nothing.
func (f *File) TakeOver(context.Context, bool) (handed []map[netip.Addr][]byte, more bool, err error) {
	return nil, false, nil
}

// Close does nothing.
func (f *File) Close(bool) error { return nil }

// RenewCopies returns 0: there are no copies.
func (f *File) RenewCopies(context.Context) (number int64, err error) { return 0, nil }

// CopyTemplates does nothing.
func (f *File) CopyTemplates(context.Context, int64, map[netip.Addr][]byte) error { return nil }

// Copies finds none.
func (f *File) Copies(context.Context, string, string, func(map[netip.Addr][]byte)) (next string, err error) {
	return "", nil
}
