// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v4"
)

var (
	serviceName = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,31}$`)
	decimal     = regexp.MustCompile(`^-?(0|[1-9][0-9]*)$`)
)

const nameHint = "use 1 to 32 of a-z, 0-9, _ and -, the first of them a letter or a digit"

type position struct{ line, column int }

func positionOf(n *yaml.Node) position { return position{n.Line, n.Column} }

// decoder decodes nodes into values and collects errors. Refused values stay zero, so that later checks skip them and no
// error is reported twice.
type decoder struct {
	file string
	at   map[string]position // position of each given value, by path
	errs Errors
	bad  map[string]bool // paths at or below which a value was refused
	// misspelt has the paths that unknown keys probably mean.
	misspelt map[string]bool
	// files has the prefixes of each file; nil for a refused file.
	files map[string][]PrefixTerm
}

// refuseAt refuses the value at a path that is given.
func (d *decoder) refuseAt(path, message, hint string) { d.refuse(path, d.at[path], message, hint) }

// decode decodes a mapping into the struct that out points to.
func (d *decoder) decode(path string, n *yaml.Node, out any) {
	d.value(path, n, n, reflect.ValueOf(out).Elem(), "")
}

// value decodes n into v. A missing key of n is reported at the position of key.
func (d *decoder) value(path string, key, n *yaml.Node, v reflect.Value, tag reflect.StructTag) {
	d.at[path] = positionOf(n)
	if !d.plain(path, n) {
		return
	}
	if name, ok := tag.Lookup("form"); ok {
		if x := formOf(name).decode(d, path, n, tag); x != nil {
			v.Set(reflect.ValueOf(x).Convert(v.Type()))
		}
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		d.value(path, key, n, v.Elem(), tag)
	case reflect.Struct:
		d.object(path, key, n, v, tag)
	case reflect.Slice:
		if tag.Get("keyed") != "" {
			d.keyed(path, n, v)
		} else {
			d.list(path, n, v, tag)
		}
	case reflect.Int:
		if i, ok := d.integer(path, n, tag); ok {
			v.SetInt(int64(i))
		}
	case reflect.Bool:
		b, _ := d.boolean(path, n)
		v.SetBool(b)
	case reflect.String:
		values := strings.Split(tag.Get("enum"), ",")
		if tag := n.ShortTag(); n.Kind == yaml.ScalarNode && n.Value != "" && tag != "!!str" && tag != "!!null" {
			d.refuse(path, positionOf(n), fmt.Sprintf("must be %s, is %s", strings.Join(values, " or "), describe(n)), "")
		} else if s, ok := d.text(path, n); ok {
			if slices.Contains(values, s) {
				v.SetString(s)
			} else {
				d.refuse(path, positionOf(n), fmt.Sprintf("must be %s, is %s", strings.Join(values, " or "), describe(n)), didYouMean(s, values))
			}
		}
	}
}

// object decodes a mapping with known keys.
func (d *decoder) object(path string, key, n *yaml.Node, v reflect.Value, tag reflect.StructTag) {
	fields := fieldsOf(v.Type())
	for _, f := range fields {
		if value, ok := f.Tag.Lookup("default"); ok {
			d.setDefault(join(path, f.Tag.Get("yaml")), v.FieldByIndex(f.Index), value, f.Tag)
		}
	}
	complete := d.mapping(path, n, func(name string, k, value *yaml.Node) {
		sub := join(path, name)
		i := slices.IndexFunc(fields, func(f reflect.StructField) bool { return f.Tag.Get("yaml") == name })
		if i < 0 {
			known := make([]string, len(fields))
			for i, f := range fields {
				known[i] = f.Tag.Get("yaml")
			}
			hint := didYouMean(name, known)
			if hint != "" {
				d.misspelt[join(path, Nearest(name, known))] = true
			} else {
				hint = "known keys: " + strings.Join(known, ", ")
			}
			d.refuse(sub, positionOf(k), "unknown key", hint)
			return
		}
		field := v.FieldByIndex(fields[i].Index)
		field.SetZero()
		d.value(sub, k, value, field, fields[i].Tag)
	})
	if least, _, _ := limits(tag); complete && len(n.Content) < least {
		d.refuse(path, positionOf(n), "must have at least one key", "")
	}
	for _, f := range fields {
		if sub := join(path, f.Tag.Get("yaml")); complete && f.Tag.Get("required") != "" && !d.given(sub) && !d.misspelt[sub] {
			d.refuse(sub, positionOf(key), "is missing", "")
		}
	}
}

func (d *decoder) given(path string) bool {
	_, ok := d.at[path]
	return ok
}

// keyed decodes a mapping of names to structs into a slice of structs.
func (d *decoder) keyed(path string, n *yaml.Node, v reflect.Value) {
	d.mapping(path, n, func(name string, k, value *yaml.Node) {
		sub := join(path, name)
		if !serviceName.MatchString(name) {
			d.refuse(sub, positionOf(k), "is not a valid name", nameHint)
		}
		item := reflect.New(v.Type().Elem()).Elem()
		item.FieldByName("Name").SetString(name)
		d.value(sub, k, value, item, "")
		v.Set(reflect.Append(v, item))
	})
}

// mapping calls each for every distinct key, and reports whether n is a mapping.
func (d *decoder) mapping(path string, n *yaml.Node, each func(name string, key, value *yaml.Node)) bool {
	if n.Kind != yaml.MappingNode {
		d.refuse(path, positionOf(n), "must be a mapping, is "+describe(n), "")
		return false
	}
	lines := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if !d.plain(path, key) {
			continue
		}
		if key.Kind != yaml.ScalarNode {
			d.refuse(path, positionOf(key), "a key must be a string, is "+describe(key), "")
			continue
		}
		if key.ShortTag() == "!!merge" {
			d.refuse(path, positionOf(key), "merge keys are not supported", "")
			continue
		}
		if line, ok := lines[key.Value]; ok {
			d.refuse(join(path, key.Value), positionOf(key), fmt.Sprintf("is given twice, first in line %d", line), "")
			continue
		}
		lines[key.Value] = key.Line
		each(key.Value, key, value)
	}
	return true
}

func (d *decoder) list(path string, n *yaml.Node, v reflect.Value, tag reflect.StructTag) {
	if n.Kind != yaml.SequenceNode {
		d.refuse(path, positionOf(n), "must be a list, is "+describe(n), "")
		return
	}
	items := n.Content
	if lo, hi, ok := limits(tag); ok && (len(items) < lo || len(items) > hi) {
		d.refuse(path, positionOf(n), fmt.Sprintf("must have %d to %d items, has %d", lo, hi, len(items)), "")
		items = items[:min(len(items), hi)] // later checks compare items in pairs
	}
	v.Set(reflect.MakeSlice(v.Type(), len(items), len(items)))
	for i, item := range items {
		d.value(fmt.Sprintf("%s[%d]", path, i), item, item, v.Index(i), "")
	}
}

// integer decodes a number within the limits of the tag.
func (d *decoder) integer(path string, n *yaml.Node, tag reflect.StructTag) (int, bool) {
	if n.Kind != yaml.ScalarNode || n.ShortTag() == "!!str" || !decimal.MatchString(n.Value) {
		d.refuse(path, positionOf(n), "must be a decimal whole number, is "+describe(n), unquote(n))
		return 0, false
	}
	lo, hi, _ := limits(tag)
	i, err := strconv.Atoi(n.Value)
	if err != nil || i < lo || i > hi {
		d.refuse(path, positionOf(n), fmt.Sprintf("must be %d to %d, is %s", lo, hi, describe(n)), "")
		return 0, false
	}
	return i, true
}

func (d *decoder) boolean(path string, n *yaml.Node) (value, ok bool) {
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!bool" {
		d.refuse(path, positionOf(n), "must be true or false, is "+describe(n), "")
		return false, false
	}
	return strings.EqualFold(n.Value, "true"), true
}

// text decodes a non-empty string without control characters.
func (d *decoder) text(path string, n *yaml.Node) (string, bool) {
	if n.Kind != yaml.ScalarNode {
		d.refuse(path, positionOf(n), "must be a string, is "+describe(n), "")
		return "", false
	}
	switch tag := n.ShortTag(); {
	case tag == "!!null" || n.Value == "":
		d.refuse(path, positionOf(n), "must not be empty", "")
	case tag != "!!str" && tag != "!!timestamp": // YAML 1.2 has no timestamps
		d.refuse(path, positionOf(n), "must be a string, is "+describe(n), fmt.Sprintf("write %q, with the quotes", n.Value))
	case strings.ContainsFunc(n.Value, unicode.IsControl):
		d.refuse(path, positionOf(n), "must not hold control characters, is "+describe(n), "")
	default:
		return n.Value, true
	}
	return "", false
}

// plain refuses aliases, anchors and tags, with which one place of a file affects another.
func (d *decoder) plain(path string, n *yaml.Node) bool {
	switch {
	case n.Kind == yaml.AliasNode:
		d.refuse(path, positionOf(n), "aliases are not supported", "write the value out")
	case n.Anchor != "":
		d.refuse(path, positionOf(n), "anchors are not supported", "")
	case n.Style&yaml.TaggedStyle != 0:
		hint := ""
		if n.Kind == yaml.ScalarNode && n.Value == "" {
			hint = fmt.Sprintf("write %q, with the quotes", n.Tag)
		}
		d.refuse(path, positionOf(n), "tags are not supported", hint)
	default:
		return true
	}
	return false
}

func (d *decoder) refuse(path string, at position, message, hint string) {
	d.errs = append(d.errs, &Error{d.file, at.line, at.column, path, message, hint})
	for path != "" && !d.bad[path] {
		d.bad[path] = true
		path = path[:max(strings.LastIndexAny(path, ".["), 0)]
	}
}

// unquote returns the hint for a number in quotes, or "".
func unquote(n *yaml.Node) string {
	if n.ShortTag() == "!!str" && decimal.MatchString(n.Value) {
		return "write " + describe(&yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: n.Value}) + ", without the quotes"
	}
	return ""
}

// describe returns a shortened description of a value for a message.
func describe(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case n.ShortTag() == "!!null":
		return "empty"
	}
	value := []rune(n.Value)
	if len(value) > 64 {
		value = append(value[:61], []rune("...")...)
	}
	if n.ShortTag() == "!!str" {
		return strconv.Quote(string(value))
	}
	return string(value)
}

func didYouMean(word string, known []string) string {
	if nearest := Nearest(word, known); nearest != "" {
		return fmt.Sprintf("did you mean %s?", nearest)
	}
	return ""
}

// join appends a key to a path. Keys with other characters than names are quoted, so that a dot in a key does not look
// like a level of the path.
func join(path, key string) string {
	if !serviceName.MatchString(key) {
		if runes := []rune(key); len(runes) > 64 {
			key = string(runes[:61]) + "..."
		}
		key = strconv.Quote(key)
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

// fieldsOf returns the fields of a struct that have a key in the file.
func fieldsOf(t reflect.Type) []reflect.StructField {
	return slices.DeleteFunc(reflect.VisibleFields(t), func(f reflect.StructField) bool { return f.Tag.Get("yaml") == "-" })
}

func limits(tag reflect.StructTag) (lo, hi int, ok bool) {
	lo, errLo := strconv.Atoi(tag.Get("min"))
	hi, errHi := strconv.Atoi(tag.Get("max"))
	return lo, hi, errLo == nil && errHi == nil
}

// setDefault sets v, the value of path, to the default in its tag.
func (d *decoder) setDefault(path string, v reflect.Value, value string, tag reflect.StructTag) {
	if name, ok := tag.Lookup("form"); ok {
		n := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: value}
		if decimal.MatchString(value) {
			n.Tag = "!!int"
		}
		if x := formOf(name).decode(d, path, n, tag); x != nil { // an invalid tag fails for every policy
			v.Set(reflect.ValueOf(x).Convert(v.Type()))
		}
		return
	}
	switch v.Kind() {
	case reflect.Int:
		i, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			panic(err) // an invalid tag fails in every test
		}
		v.SetInt(i)
	case reflect.Bool:
		v.SetBool(value == "true")
	default:
		v.SetString(value)
	}
}
