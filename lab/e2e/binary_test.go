// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package e2e_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

// emulated is set on the slow CPU of a virtual machine.
const emulated = false

// build builds the binary in a temporary directory, with the race detector if SOCKEYE_RACE is set.
func build() error {
	dir, err := os.MkdirTemp("", "sockeye-e2e-")
	if err != nil {
		return err
	}
	remover := exec.Command("sh", "-c", `cat; rm -rf "$1"`, "sockeye-e2e", dir)
	remover.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var pipe io.WriteCloser
	if pipe, err = remover.StdinPipe(); err == nil {
		err = remover.Start()
	}
	if err != nil {
		return err
	}
	keepOpen = pipe
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	binary := filepath.Join(dir, "sockeye")
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", binary)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if os.Getenv("SOCKEYE_RACE") != "" {
		cmd.Args = append(cmd.Args, "-race")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	}
	cmd.Args = append(cmd.Args, "sockeye/cmd/sockeye")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return errors.Join(os.Setenv(binaryEnv, binary), installGoflow2(dir))
}

var keepOpen io.Closer // closed by the exit of this process
