// SPDX-License-Identifier: Apache-2.0

// Package exposure runs systemd-analyze(1) to compute the exposure score of a unit.
package exposure

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// Install copies the unit and drop-ins from the directory dist to the paths of make install below root, and
// returns the path of the unit.
func Install(root, dist string, dropIns ...string) (unit string, err error) {
	const unitDir = "etc/systemd/system"
	write := func(name string, text []byte, mode os.FileMode) (path string) {
		path = filepath.Join(root, name)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(path), 0o755)
		}
		if err == nil {
			err = os.WriteFile(path, text, mode)
		}
		return path
	}
	read := func(name string) (text []byte) {
		if err == nil {
			text, err = os.ReadFile(filepath.Join(dist, name))
		}
		return text
	}
	binary := write("usr/local/bin/sockeye", []byte("#!/bin/sh\n"), 0o755)
	prefix := strings.TrimSuffix(binary, "/bin/sockeye")
	unit = write(unitDir+"/sockeye.service", bytes.ReplaceAll(read("sockeye.service"), []byte("@PREFIX@"), []byte(prefix)), 0o644)
	for _, name := range dropIns {
		write(unitDir+"/sockeye.service.d/"+name, read("sockeye.service.d/"+name), 0o644)
	}
	return unit, err
}

// finding is one line of systemd-analyze security. Set is true if the setting is safe.
type finding struct {
	Set   *bool  `json:"set"`
	Field string `json:"json_field"`
}

var overall = regexp.MustCompile(`exposure level for \S+: ([0-9.]+)`)

// Analyze returns the exposure score (0 to 10) of a unit that is installed below root, and the names of the
// settings that are not safe.
func Analyze(root, unit string) (score float64, unsafe []string, err error) {
	text, err := analyze(root, unit)
	if err != nil {
		return 0, nil, err
	}
	match := overall.FindSubmatch(text)
	if match == nil {
		return 0, nil, fmt.Errorf("systemd-analyze security: no score in: %s", text)
	}
	if score, err = strconv.ParseFloat(string(match[1]), 64); err != nil {
		return 0, nil, err
	}
	if text, err = analyze(root, unit, "--json=short"); err != nil {
		return 0, nil, err
	}
	var findings []finding
	if err := json.Unmarshal(text, &findings); err != nil {
		return 0, nil, fmt.Errorf("systemd-analyze security: %w", err)
	}
	for _, f := range findings {
		if f.Set == nil || *f.Set {
			continue
		}
		// Some names of combined settings depend on the version of systemd.
		for _, first := range []string{"CapabilityBoundingSet_CAP_NET_BIND_SERVICE", "CapabilityBoundingSet_CAP_SYS_NICE"} {
			if strings.HasPrefix(f.Field, first) {
				f.Field = first
			}
		}
		unsafe = append(unsafe, f.Field)
	}
	return score, unsafe, nil
}

func analyze(root, unit string, more ...string) ([]byte, error) {
	cmd := exec.Command("systemd-analyze", append([]string{"security", "--offline=true", "--no-pager", "--root=" + root, unit}, more...)...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("systemd-analyze security (package systemd): %w: %s", err, errs.String())
	}
	return out, nil
}
