// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"

	"sockeye/internal/bpf"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/testenv"
)

// TestLayoutHash checks that each part of a layout changes the hash.
func TestLayoutHash(t *testing.T) {
	spec := func() *ebpf.MapSpec {
		field := &btf.Int{Name: "unsigned int", Size: 4}
		value := &btf.Struct{Name: "rule", Size: 8, Members: []btf.Member{
			{Name: "a", Type: field}, {Name: "b", Type: &btf.Typedef{Name: "u32", Type: field}, Offset: 32}}}
		return &ebpf.MapSpec{Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 2,
			InnerMap: &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1, Value: value}}
	}
	hash := func(m *ebpf.MapSpec) string { return bpf.LayoutHash(map[string]*ebpf.MapSpec{"m": m}) }
	want := hash(spec())
	members := func(m *ebpf.MapSpec) []btf.Member { return m.InnerMap.Value.(*btf.Struct).Members }
	for name, change := range map[string]func(m *ebpf.MapSpec){
		"type":             func(m *ebpf.MapSpec) { m.Type = ebpf.HashOfMaps },
		"entries":          func(m *ebpf.MapSpec) { m.MaxEntries++ },
		"flags":            func(m *ebpf.MapSpec) { m.Flags = 1 },
		"key":              func(m *ebpf.MapSpec) { m.KeySize = 8 },
		"inner type":       func(m *ebpf.MapSpec) { m.InnerMap.Type = ebpf.Hash },
		"inner value size": func(m *ebpf.MapSpec) { m.InnerMap.ValueSize = 12 },
		"name of a field":  func(m *ebpf.MapSpec) { members(m)[0].Name = "c" },
		"offset":           func(m *ebpf.MapSpec) { members(m)[1].Offset = 0 },
		"order": func(m *ebpf.MapSpec) {
			slices.Reverse(members(m))
			members(m)[0].Offset, members(m)[1].Offset = 0, 32
		},
		"size of a field": func(m *ebpf.MapSpec) { members(m)[1].Type = &btf.Int{Size: 2} },
		"signedness":      func(m *ebpf.MapSpec) { members(m)[1].Type = &btf.Int{Size: 4, Encoding: btf.Signed} },
		"array":           func(m *ebpf.MapSpec) { members(m)[1].Type = &btf.Array{Nelems: 1, Type: &btf.Int{Size: 4}} },
	} {
		m := spec()
		change(m)
		if hash(m) == want {
			t.Errorf("another %s has the same hash", name)
		}
	}
	same := spec()
	same.Name = "other"
	same.InnerMap.Value.(*btf.Struct).Name = "other"
	members(same)[1].Type = &btf.Int{Name: "__u32", Size: 4}
	if hash(same) != want {
		t.Error("a name that nobody reads changes the hash")
	}
}

// pinOther pins maps and a sock_ops program of another version's layout in dir, as versions without hashes did: the
// maps of maps hold smaller maps. It returns the id of the link.
func pinOther(t testing.TB, dir, cgroup string, spec *ebpf.CollectionSpec) link.ID {
	t.Helper()
	check(t, os.Mkdir(dir, 0o700))
	for name, m := range spec.Maps {
		if name[0] == '.' {
			continue
		}
		if m.InnerMap != nil && m.InnerMap.Type == ebpf.Array {
			m.InnerMap.ValueSize -= 8
			m.InnerMap.Value = nil
		}
		made, err := ebpf.NewMap(m)
		check(t, err)
		check(t, made.Pin(filepath.Join(dir, name)))
		check(t, made.Close())
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SockOps, AttachType: ebpf.AttachCGroupSockOps, License: "GPL", Instructions: returns(1)})
	check(t, err)
	defer p.Close()
	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: ebpf.AttachCGroupSockOps, Program: p})
	check(t, err)
	defer l.Close()
	check(t, l.Pin(filepath.Join(dir, "link_sockops")))
	info, err := l.Info()
	check(t, err)
	return info.ID
}

func attachedSockOps(t testing.TB, cgroup string) []uint32 {
	t.Helper()
	ids, err := bpf.SockOps(cgroup)
	check(t, err)
	return ids
}

// anyRule is one rule that counts all connections.
func anyRule() *bpf.TuneRules {
	rules := &bpf.TuneRules{Rules: []bpf.TuneRule{{Rwnd: 20}}}
	rules.Ruleset.Terms = 1
	rules.Ruleset.Rule[0] = 1
	for role := range rules.Ruleset.Role {
		rules.Ruleset.Role[role].Word[0] = 1
	}
	rules.Ruleset.Untagged.Word[0] = 1
	return rules
}

// TestTuneOfAnotherLayout has maps of maps of an earlier version, whose inner maps have another size. The pins do not
// show that size, and rules cannot be installed in these maps.
func TestTuneOfAnotherLayout(t *testing.T) {
	for _, mark := range []string{"", "@0123456789ab"} {
		t.Run("pins"+mark, func(t *testing.T) {
			dir, cgroup := filepath.Join(testenv.BPFFS(t), "tune_test"), testenv.Cgroup()
			spec, err := bpf.LoadTuneSockops()
			check(t, err)
			before := pinOther(t, dir+mark, cgroup, spec)
			t.Cleanup(func() { check(t, bpf.RemoveTune(dir)) })
			boom := errors.New("boom")
			attached := attachedSockOps(t, cgroup)
			if _, err := bpf.OpenTune(bpf.TuneConfig{Dir: dir, Cgroup: cgroup, Ready: func(*bpf.Tune) error { return boom }}); !errors.Is(err, boom) {
				t.Fatalf("opened: %v", err)
			}
			if got := attachedSockOps(t, cgroup); !slices.Equal(got, attached) {
				t.Fatalf("attached %v, before a failure %v", got, attached)
			}
			tune, err := bpf.OpenTune(bpf.TuneConfig{Dir: dir, Cgroup: cgroup, Ready: func(tune *bpf.Tune) error {
				if got := attachedSockOps(t, cgroup); !slices.Equal(got, attached) {
					t.Errorf("attached %v while rules are installed, before %v", got, attached)
				}
				return tune.Install(anyRule())
			}})
			if err != nil {
				t.Fatalf("%+v", err)
			}
			defer tune.Close()
			fd, _ := tracedPair(t)
			if c, err := tune.Connection(fd); err != nil || c == nil || c.Rule != 1 {
				t.Errorf("connection %+v, %v", c, err)
			}
			if got := attachedSockOps(t, cgroup); len(got) != 1 {
				t.Errorf("attached: %v", got)
			}
			if got := describe(t, filepath.Join(tune.Dir(), "link_sockops")); got != fmt.Sprintf("link %d", before) {
				t.Errorf("%s, want link %d: it is updated in one step", got, before)
			}
			if _, err := os.Stat(dir + mark); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("pins of the other layout: %v", err)
			}
		})
	}
}

// TestTuneKeepsWhatWasLearned checks that learned values, and nothing else, are shared with a layout that has the
// same map.
func TestTuneKeepsWhatWasLearned(t *testing.T) {
	dir, cgroup := filepath.Join(testenv.BPFFS(t), "tune_test"), subgroup(t, "learned")
	open := func() *bpf.Tune {
		tune, err := bpf.OpenTune(bpf.TuneConfig{Dir: dir, Cgroup: cgroup, Ready: func(tune *bpf.Tune) error { return tune.Install(anyRule()) }})
		if err != nil {
			t.Fatalf("%+v", err)
		}
		return tune
	}
	t.Cleanup(func() { check(t, bpf.RemoveTune(dir)) })
	first := open()
	own := first.Dir()
	key, value := bpf.TuneLearnedKey{Learn: 7, Bits: 120}, bpf.TuneLearned{Settled: 1, Chosen: 3}
	check(t, first.Maps()["learned"].Put(key, value))
	check(t, first.SetScope(pin.Scope("the scope")))
	check(t, first.Close())
	check(t, os.Rename(own, dir+"@0123456789ab"))
	if scope, err := pin.ReadScope(dir); err != nil || string(scope) != "the scope" {
		t.Errorf("scope %q, %v", scope, err)
	}

	second := open()
	defer second.Close()
	learned, err := second.Learned()
	check(t, err)
	if len(learned) != 1 || learned[key] != value {
		t.Errorf("learned: %+v", learned)
	}
	if got := attachedSockOps(t, cgroup); len(got) != 1 {
		t.Errorf("attached: %v", got)
	}
}

// TestTraceOfAnotherLayout checks that pins of another layout are never adopted. Their program stays attached until
// that of this version is.
func TestTraceOfAnotherLayout(t *testing.T) {
	for _, mark := range []string{"", "@0123456789ab"} {
		t.Run("pins"+mark, func(t *testing.T) {
			dir, cgroup := filepath.Join(testenv.BPFFS(t), "trace_test"), subgroup(t, "layout")
			spec, err := bpf.LoadTraceSockops()
			check(t, err)
			pinOther(t, dir+mark, cgroup, spec)
			t.Cleanup(func() { check(t, bpf.RemoveTrace(dir)) })
			c := bpf.TraceConfig{Dir: dir, Cgroup: cgroup, Rules: traceAll(), Adopt: true}
			if incompatible, ok := errors.AsType[*pin.IncompatibleError](func() error { _, err := bpf.OpenTrace(c); return err }()); !ok {
				t.Fatalf("adopted: %v", incompatible)
			}
			if got := attachedSockOps(t, cgroup); len(got) != 1 {
				t.Errorf("attached: %v", got)
			}
			c.Adopt = false
			trace := openTrace(t, c)
			defer trace.Close()
			if got := attachedSockOps(t, cgroup); len(got) != 1 || !trace.Attached() {
				t.Errorf("attached: %v", got)
			}
			if _, err := os.Stat(dir + mark); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("pins of the other layout: %v", err)
			}
		})
	}
}

// TestLayoutsAreOneName checks that a version without hashes takes a marked directory for that of a cgroup outside
// the policy, and removes it.
func TestLayoutsAreOneName(t *testing.T) {
	root, err := bpf.OpenRoot(filepath.Join(testenv.BPFFS(t), "sockeye"))
	check(t, err)
	defer root.Close()
	for _, name := range []string{"tune_a_1", "tune_a_1@0123", "tune_a_1@4567", "tune_a_1_b@89ab"} {
		check(t, os.Mkdir(filepath.Join(root.Dir, name), 0o700))
	}
	names, err := root.Tunings()
	slices.Sort(names)
	if err != nil || !slices.Equal(names, []string{"a_1", "a_1_b"}) {
		t.Errorf("tunings %q, %v", names, err)
	}
	check(t, bpf.RemoveTune(root.Tuning("a_1")))
	if names, err = root.Tunings(); err != nil || !slices.Equal(names, []string{"a_1_b"}) {
		t.Errorf("tunings %q, %v", names, err)
	}
}
