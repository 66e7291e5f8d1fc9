// SPDX-License-Identifier: Apache-2.0

package pin

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

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// Newest returns the path of a pin in the newest layout of base that has it. A layout with a hash is newer than one
// without. The error wraps os.ErrNotExist if no layout has the pin.
func Newest(base, name string) (string, error) {
	dirs, err := Layouts(base)
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

// ObjectsLayout returns the hash of the maps of some objects, and of their enums whose names have one of the prefixes.
func ObjectsLayout(prefixes []string, loads ...func() (*ebpf.CollectionSpec, error)) (string, error) {
	specs, enums := make(map[string]*ebpf.MapSpec), make(map[string]*btf.Enum)
	for _, load := range loads {
		spec, err := load()
		if err != nil {
			return "", err
		}
		for name, m := range spec.Maps {
			if !IsVariables(name) {
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
	return LayoutHash(specs, enums), nil
}

// meaning is part of the hash. It is incremented when pinned data changes its meaning but not its layout.
const meaning = 1

// LayoutHash returns the hash of the layout of maps and enums: 12 hexadecimal digits.
func LayoutHash(specs map[string]*ebpf.MapSpec, enums map[string]*btf.Enum) string {
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

// typeLayout describes a type by its fields, without the names of types.
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
		// Pointers, and types without a layout.
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

// LayoutMark separates the name of a directory of pins from the hash of its layout. A layout consists of the types,
// sizes and flags of the maps, of their inner maps, and of each field of keys and values, so that a version of Sockeye
// finds pins of its own layout or none. Versions before the hash know only names without a mark: they remove the marked
// directory of a cgroup before they attach.
const LayoutMark = "@"

// InLayout returns the directory of the pins of base in a layout.
func InLayout(base string, layout func() (string, error)) (string, error) {
	hash, err := layout()
	if err != nil {
		return "", err
	}
	return base + LayoutMark + hash, nil
}

// OtherLayouts lists the existing directories of base except own.
func OtherLayouts(base, own string) ([]string, error) {
	found, err := Layouts(base)
	return slices.DeleteFunc(found, func(path string) bool { return path == own }), err
}

// EachLayout calls do for each existing directory of base, and stops at the first error.
func EachLayout(base string, do func(dir string) error) error {
	dirs, err := Layouts(base)
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

// Find lists the bases, without their layouts, that match a pattern of filepath.Glob.
func Find(pattern string) ([]string, error) {
	var bases []string
	for _, p := range []string{pattern, pattern + LayoutMark + "*"} {
		dirs, err := filepath.Glob(p)
		if err != nil {
			return nil, err
		}
		for _, dir := range dirs {
			base, _, _ := strings.Cut(dir, LayoutMark)
			bases = append(bases, base)
		}
	}
	slices.Sort(bases)
	return slices.Compact(bases), nil
}

// Pinned reports whether base has pins in any layout.
func Pinned(base string) (bool, error) {
	found, err := Layouts(base)
	return len(found) > 0, err
}

// Layouts lists the existing directories of base in all layouts. The one without a hash comes first.
func Layouts(base string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Dir(base))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read pin directory: %w", err)
	}
	var found []string
	for _, e := range entries {
		if name, _, _ := strings.Cut(e.Name(), LayoutMark); name == filepath.Base(base) {
			found = append(found, filepath.Join(filepath.Dir(base), e.Name()))
		}
	}
	return found, nil
}

// IsVariables reports whether a map contains the global variables of a program: .data, .bss, .rodata.
func IsVariables(name string) bool { return name[0] == '.' }
