// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/table"
)

const fleetFile = `
epoch: 1
nonce: 77
hosts:
  - {name: b, weight: 20, addresses: [192.0.2.2, "2001:db8::2"]}
  - {name: a, weight: 10, addresses: [192.0.2.1]}
  - {name: c, state: drain}
`

// TestFile checks the table of a file, its changes, and what is refused.
func TestFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	f := OpenFile(path)
	ctx, cancel := context.WithCancel(t.Context())
	snapshots, done := make(chan *Snapshot, 1), make(chan struct{})
	go func() { f.Run(ctx, snapshots); close(done) }()
	defer func() { cancel(); <-done }()
	next := func() *Snapshot {
		t.Helper()
		select {
		case s := <-snapshots:
			return s
		case <-time.After(patience):
			t.Fatal("no snapshot")
			return nil
		}
	}
	if s := next(); s.Table != nil || len(s.Problems) != 1 || !strings.Contains(s.Problems[0], "no such file") {
		t.Errorf("without a file: %+v", s)
	}
	write(fleetFile)
	s := next()
	if len(s.Problems) > 0 || s.Leads || s.Table == nil || s.Table.Epoch != 1 || s.Table.Nonce != 77 || len(s.Hosts) != 3 || s.Hosts[2].State != lead.Drain {
		t.Fatalf("%+v", s)
	}
	shares := s.Table.Shares()
	if want := table.Buckets / 3; shares[0] < want*9/10 || shares[0] > want*11/10 || shares[2] != 0 || s.Table.Hosts[0].Name != "a" {
		t.Errorf("shares %v", shares)
	}
	for text, want := range map[string]string{
		strings.Replace(fleetFile, "epoch: 1", "epoch: 0", 1):                                    "the epoch is 0",
		strings.Replace(fleetFile, "weight: 20", "weight: 21", 1):                                "raise it with each change",
		strings.NewReplacer("epoch: 1", "epoch: 2", "nonce: 77", "nonce: 78").Replace(fleetFile): "the nonce differs",
		"epoch: [":                       "line",
		"epochs: 1":                      "epochs",
		"epoch: 2\nnonce: 77\nhosts: []": "no host is ready",
		"epoch: 2\nnonce: 77\nhosts: [{name: a, state: gone}]":                                                             "no state",
		"epoch: 2\nnonce: 77\nhosts: [{name: a, addresses: [x]}]":                                                          "host a",
		"epoch: 2\nnonce: 77\nhosts: [{name: a}, {name: a}]":                                                               "occurs twice",
		"epoch: 2\nnonce: 77\nhosts: [{name: a, weight: 5000}]":                                                            "weight 5000",
		"epoch: 2\nnonce: 77\nhosts: [{name: a, weight: 0}]":                                                               "weight 0",
		"epoch: 2\nnonce: 77\nhosts: [{name: a, macs: [\"ff:ff:ff:ff:ff:ff\"]}]":                                           "is refused: host a has the MAC address ff:ff:ff:ff:ff:ff, which is not",
		"epoch: 2\nnonce: 77\nhosts: [{name: a, macs: [\"00:00:00:00:00:00\"]}]":                                           "is not that of an interface",
		"epoch: 2\nnonce: 77\nhosts: [{name: a, macs: [\"02:00:00:00:00:01\"]}, {name: b, macs: [\"02:00:00:00:00:01\"]}]": "hosts a and b have the address 02:00:00:00:00:01",
		"epoch: 2\nnonce: 77\nhosts: [{name: a}]\n---\nepoch: 3\n":                                                         "more than one document",
		strings.Repeat("#", mostFile+1):                                                                                    "more than",
	} {
		write(text)
		if s := next(); len(s.Problems) != 1 || !strings.Contains(s.Problems[0], want) || s.Table == nil || s.Table.Epoch != 1 || !s.Damaged {
			t.Errorf("%.60q: %+v, want %q", text, s, want)
		}
	}
	write(fleetFile)
	if s = next(); s.Table.Epoch != 1 || len(s.Problems) > 0 || s.Damaged {
		t.Errorf("the former contents again: %+v", s)
	}
	write(strings.NewReplacer("epoch: 1", "epoch: 2", ", state: drain", "").Replace(fleetFile))
	if s = next(); s.Table.Epoch != 2 || len(s.Problems) > 0 || s.Table.Shares()[2] == 0 {
		t.Errorf("the next epoch: %+v", s)
	}
	f.Update(Registration{})
	if err := errors.Join(f.Write(ctx, s, s.Table), f.ChangeSetting(ctx, "a", nil), f.Close(true)); !errors.Is(err, ErrReadOnly) {
		t.Errorf("changes: %v", err)
	}
}

func FuzzFile(f *testing.F) {
	f.Add([]byte(fleetFile))
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := parseFile(text)
		if err == nil {
			err = s.Table.Check()
			if err != nil {
				t.Error(err)
			}
		}
	})
}

// FuzzView reads keys that anybody may have written.
func FuzzView(f *testing.F) {
	f.Add(hostKeys+"a", []byte(`{"name":"a","weight":1,"addresses":["192.0.2.1"]}`), settingKeys+"a", []byte(`{"state":"drain"}`), true)
	f.Add(tableKey, []byte("{}"), leaderKey, []byte(`{"name":"a","instance":"i"}`), false)
	f.Fuzz(func(t *testing.T, keyA string, a []byte, keyB string, b []byte, leased bool) {
		v := &view{instance: "i"}
		v.startSession(0, DefaultLease)
		v.table = first(3, "a")
		v.set(keyA, a, 1, leased)
		v.set(keyB, b, 2, leased)
		s := v.snapshot(0)
		if s.Table == nil || s.Table.Epoch < 3 {
			t.Errorf("the good table is gone: %+v", s)
		}
		for i := range s.Hosts {
			if h := &s.Hosts[i]; h.Name == "" && h.Alive {
				t.Errorf("a host without a name: %+v", h)
			}
		}
		if len(fmt.Sprint(s.Problems)) > 10*mostValue {
			t.Error("long problems")
		}
	})
}
