// SPDX-License-Identifier: Apache-2.0

// Command dashboards writes the dashboards for Grafana:
//
//	go run ./tools/dashboards dist/grafana
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: dashboards DIRECTORY")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "dashboards:", err)
		os.Exit(1)
	}
}

// write writes one file for each dashboard.
func write(dir string) error {
	for _, d := range dashboards() {
		var text bytes.Buffer
		encoder := json.NewEncoder(&text)
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")
		if err := encoder.Encode(d); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, d.UID+".json"), text.Bytes(), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func dashboards() []*dashboard {
	return []*dashboard{overview(), steer(), tune(), trace(), host()}
}
