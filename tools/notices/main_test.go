// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// TestWrite checks that the licences of all linked modules are written, and those of no other module.
func TestWrite(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "sockeye")
	if out, err := exec.Command("go", "build", "-o", binary, "../../cmd/sockeye").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var out bytes.Buffer
	if err := write(&out, binary); err != nil {
		t.Fatal(err)
	}
	text := out.String()
	for _, want := range []string{
		"==== Go standard library go1.", "==== github.com/cilium/ebpf v", "Permission is hereby granted",
		"==== github.com/spf13/cobra v", "==== gonum.org/v1/gonum v", ": THIRD_PARTY_LICENSES/", "Redistribution and use in source and binary forms",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q", want)
		}
	}
	if strings.Contains(text, "inconshreveable/mousetrap") { // cobra needs it on another system
		t.Error("a module that is not linked")
	}
}

func TestNoLicence(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "NOTICE"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := add(&bytes.Buffer{}, "example.com/a v1.0.0", dir); err == nil || err.Error() != "example.com/a v1.0.0: no licence in "+dir {
		t.Errorf("error %v of a module without a licence", err)
	}
}
