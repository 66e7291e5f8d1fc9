// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// newestPin finds a pin of a service: in a layout with a hash, which is newer,
// or in the one without. It fails with os.ErrNotExist if there is none.
func newestPin(base, name string) (string, error) {
	dirs, err := layouts(base)
	if err != nil {
		return "", err
	}
	for _, dir := range slices.Backward(dirs) {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			return path, err
		}
	}
	return "", fmt.Errorf("open pinned map %s: %w", filepath.Join(base, name), os.ErrNotExist)
}

// A layout is what a version of Sockeye takes for granted of pinned maps: their
// types, sizes and flags, what is in maps of maps, and each field of keys and
// values. Its hash ends the name of what is pinned, after layoutMark, so that a
// version finds pins of its own layout or none. Versions without hashes know
// names without a mark only: they take a marked directory of a cgroup for a
// left-over, and remove it before they attach.
const layoutMark = "@"

// meaning is raised when pinned data changes its meaning and not its layout.
const meaning = 1

// layoutHash hashes maps, and the enums whose names begin with a prefix.
func layoutHash(specs map[string]*ebpf.MapSpec, enums map[string]*btf.Enum) string {
	var text strings.Builder
	fmt.Fprintf(&text, "meaning %d\n", meaning)
	for _, name := range slices.Sorted(maps.Keys(specs)) {
		fmt.Fprintf(&text, "map %s %s\n", name, mapLayout(specs[name]))
	}
	for _, name := range slices.Sorted(maps.Keys(enums)) {
		fmt.Fprintf(&text, "enum %s %s\n", name, typeLayout(enums[name]))
	}
	sum := sha256.Sum256([]byte(text.String()))
	return hex.EncodeToString(sum[:6])
}

func mapLayout(m *ebpf.MapSpec) string {
	text := fmt.Sprintf("%v key=%d:%s value=%d:%s entries=%d flags=%#x",
		m.Type, m.KeySize, typeLayout(m.Key), m.ValueSize, typeLayout(m.Value), m.MaxEntries, m.Flags)
	if m.InnerMap != nil {
		text += " of {" + mapLayout(m.InnerMap) + "}"
	}
	return text
}

// typeLayout describes a type by its fields. Names of types do not matter.
func typeLayout(t btf.Type) string {
	switch t := btf.UnderlyingType(t).(type) {
	case nil:
		return ""
	case *btf.Int:
		return fmt.Sprintf("int%d.%d", t.Size, t.Encoding)
	case *btf.Enum:
		values := make([]string, len(t.Values))
		for i, v := range t.Values {
			values[i] = fmt.Sprintf("%s=%d", v.Name, v.Value)
		}
		return fmt.Sprintf("enum%d{%s}", t.Size, strings.Join(values, " "))
	case *btf.Array:
		return fmt.Sprintf("[%d]%s", t.Nelems, typeLayout(t.Type))
	case *btf.Struct:
		return fmt.Sprintf("struct%d%s", t.Size, memberLayout(t.Members))
	case *btf.Union:
		return fmt.Sprintf("union%d%s", t.Size, memberLayout(t.Members))
	default:
		// Pointers, and what has no layout of its own.
		return fmt.Sprintf("%T", t)
	}
}

func memberLayout(members []btf.Member) string {
	texts := make([]string, len(members))
	for i, m := range members {
		texts[i] = fmt.Sprintf("%s@%d:%d %s", m.Name, m.Offset, m.BitfieldSize, typeLayout(m.Type))
	}
	return "{" + strings.Join(texts, "; ") + "}"
}

// objectsLayout hashes all maps of some objects, and their enums.
func objectsLayout(prefixes []string, loads ...func() (*ebpf.CollectionSpec, error)) (string, error) {
	specs, enums := make(map[string]*ebpf.MapSpec), make(map[string]*btf.Enum)
	for _, load := range loads {
		spec, err := load()
		if err != nil {
			return "", err
		}
		for name, m := range spec.Maps {
			if !isVariables(name) {
				specs[name] = m
			}
		}
		for t, err := range spec.Types.All() {
			if err != nil {
				return "", fmt.Errorf("read types of programs: %w", err)
			}
			if e, ok := t.(*btf.Enum); ok && slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(e.Name, p) }) {
				enums[e.Name] = e
			}
		}
	}
	return layoutHash(specs, enums), nil
}

// The layouts of this version.
var (
	tuneLayout = sync.OnceValues(func() (string, error) {
		return objectsLayout([]string{"tune_", "match_"}, loadTuneSockops)
	})
	traceLayout = sync.OnceValues(func() (string, error) {
		return objectsLayout([]string{"trace_", "tune_", "match_"}, loadTraceSockops, loadTraceRX, loadTraceUDP)
	})
)

// steerUnhashed are the layouts of sk_reuseport and sk_lookup in versions without
// hashes. Their pins have no mark: sockets can be in one array at a time, so that
// a change of directory would cost refusals.
var steerUnhashed = map[bool]string{false: "260fd5cd21e0", true: "ed22a42a0fbb"}

// steerFree are maps that can be made anew at any time, of what was seen or is used for
// an instant: one that changes its layout gets another name.
var steerFree = []string{pinDevices, "pending", "admission", "unlisted", "next_devices"}

// steerLayouts hashes the maps that are one set, and those of steerFree.
func steerLayouts(lookup bool) (set, free string, err error) {
	load := loadSteerReuseport
	if lookup {
		load = loadSteerLookup
	}
	steering, err := load()
	if err != nil {
		return "", "", err
	}
	members, err := loadSteerMembers()
	if err != nil {
		return "", "", err
	}
	listeners, err := listenersSpec()
	if err != nil {
		return "", "", err
	}
	all := map[string]*ebpf.MapSpec{pinListeners: listeners}
	maps.Copy(all, steering.Maps)
	maps.Copy(all, members.Maps)
	rest := make(map[string]*ebpf.MapSpec)
	for name, m := range all {
		if isVariables(name) {
			delete(all, name)
		} else if slices.Contains(steerFree, name) {
			rest[name] = m
			delete(all, name)
		}
	}
	return layoutHash(all, nil), layoutHash(rest, nil), nil
}

// steerDir is where a service is pinned, in this version's layout.
func steerDir(base string, lookup bool) (string, error) {
	hash, _, err := steerLayouts(lookup)
	if err != nil || hash == steerUnhashed[lookup] {
		return base, err
	}
	return base + layoutMark + hash, nil
}

// inLayout is the directory of a layout, of the pins named base.
func inLayout(base string, layout func() (string, error)) (string, error) {
	hash, err := layout()
	if err != nil {
		return "", err
	}
	return base + layoutMark + hash, nil
}

// layouts lists what there is of pins named base, in any layout: without a hash
// first.
func layouts(base string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Dir(base))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read pin directory: %w", err)
	}
	var found []string
	for _, e := range entries {
		if name, _, _ := strings.Cut(e.Name(), layoutMark); name == filepath.Base(base) {
			found = append(found, filepath.Join(filepath.Dir(base), e.Name()))
		}
	}
	return found, nil
}

// otherLayouts are those but own.
func otherLayouts(base, own string) ([]string, error) {
	found, err := layouts(base)
	return slices.DeleteFunc(found, func(path string) bool { return path == own }), err
}

// eachLayout does something to each layout's directory of the pins named base.
func eachLayout(base string, do func(dir string) error) error {
	dirs, err := layouts(base)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := do(dir); err != nil {
			return err
		}
	}
	return nil
}

// FindServices lists the directories of services that match a pattern, without
// their layouts.
func FindServices(pattern string) ([]string, error) {
	var bases []string
	for _, p := range []string{pattern, pattern + layoutMark + "*"} {
		dirs, err := filepath.Glob(p)
		if err != nil {
			return nil, err
		}
		for _, dir := range dirs {
			base, _, _ := strings.Cut(dir, layoutMark)
			bases = append(bases, base)
		}
	}
	slices.Sort(bases)
	return slices.Compact(bases), nil
}

// Pinned tells whether there are pins of a cgroup, of whatever layout.
func Pinned(base string) (bool, error) {
	found, err := layouts(base)
	return len(found) > 0, err
}
