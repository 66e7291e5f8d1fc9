// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"reflect"
	"strconv"
	"strings"
)

// schema is the subset of JSON Schema 2020-12 that the policy file needs.
type schema struct {
	Schema        string            `json:"$schema,omitempty"`
	Title         string            `json:"title,omitempty"`
	Description   string            `json:"description,omitempty"`
	Type          string            `json:"type,omitempty"`
	Enum          []string          `json:"enum,omitempty"`
	Default       any               `json:"default,omitempty"`
	Minimum       *int              `json:"minimum,omitempty"`
	Maximum       *int              `json:"maximum,omitempty"`
	MinLength     int               `json:"minLength,omitempty"`
	Pattern       string            `json:"pattern,omitempty"`
	Items         *schema           `json:"items,omitempty"`
	MinItems      int               `json:"minItems,omitempty"`
	MaxItems      int               `json:"maxItems,omitempty"`
	Required      []string          `json:"required,omitempty"`
	MinProperties int               `json:"minProperties,omitempty"`
	PropertyNames *schema           `json:"propertyNames,omitempty"`
	Properties    map[string]schema `json:"properties,omitempty"`
	// AdditionalProperties is false or a schema.
	AdditionalProperties any      `json:"additionalProperties,omitempty"`
	OneOf                []schema `json:"oneOf,omitempty"`
	AnyOf                []schema `json:"anyOf,omitempty"`
}

// Schema returns the JSON Schema (2020-12) of the policy file, for editors. The schema accepts every valid policy. Only
// [Parse] finds invalid combinations of values, and invalid addresses and patterns.
func Schema() ([]byte, error) {
	s := schemaOf(reflect.TypeFor[Policy](), `doc:"Policy file of Sockeye."`)
	s.Schema = "https://json-schema.org/draft/2020-12/schema"
	s.Title = "Sockeye policy"
	s.AnyOf = []schema{{Required: []string{"services"}}, {Required: []string{"tune"}}, {Required: []string{"trace"}}, {Required: []string{"bigtcp"}}, {Required: []string{"fleet"}}}
	data, err := json.MarshalIndent(s, "", "  ")
	return append(data, '\n'), err
}

// schemaOf returns the schema of a value of type t with a tag, as decoder.value decodes it.
func schemaOf(t reflect.Type, tag reflect.StructTag) schema {
	var s schema
	lo, hi, _ := limits(tag)
	switch name, hasForm := tag.Lookup("form"); {
	case hasForm:
		s = formOf(name).schema
	case t.Kind() == reflect.Pointer:
		return schemaOf(t.Elem(), tag)
	case t.Kind() == reflect.Struct:
		s = schema{Type: "object", Properties: map[string]schema{}, AdditionalProperties: false, MinProperties: lo}
		for _, f := range fieldsOf(t) {
			key := f.Tag.Get("yaml")
			s.Properties[key] = schemaOf(f.Type, f.Tag)
			if f.Tag.Get("required") != "" {
				s.Required = append(s.Required, key)
			}
		}
	case t.Kind() == reflect.Slice && tag.Get("keyed") != "":
		s = schema{Type: "object", PropertyNames: &schema{Pattern: serviceName.String()}, AdditionalProperties: schemaOf(t.Elem(), "")}
	case t.Kind() == reflect.Slice:
		s = schema{Type: "array", Items: new(schemaOf(t.Elem(), "")), MinItems: lo, MaxItems: hi}
	case t.Kind() == reflect.Int:
		s = schema{Type: "integer", Minimum: &lo, Maximum: &hi}
	case t.Kind() == reflect.Bool:
		s = schema{Type: "boolean"}
	case t.Kind() == reflect.String:
		s = schema{Enum: strings.Split(tag.Get("enum"), ",")}
	}
	s.Description = tag.Get("doc")
	if value, ok := tag.Lookup("default"); ok {
		s.Default = value
		if i, err := strconv.Atoi(value); err == nil {
			s.Default = i
		} else if b, err := strconv.ParseBool(value); err == nil {
			s.Default = b
		}
	}
	return s
}
