// SPDX-License-Identifier: Apache-2.0

// Command notices writes the licences of the Go modules and of the standard library that are linked into a binary.
//
//	go run ./tools/notices BINARY
//
// The output depends only on the modules: they are those that the binary names, in the order of their paths, with the
// files of their root that have licences, notices and authors. It fails if a module has no licence.
//
// Exit codes: 0 done, 1 failed, 2 wrong usage.
package main

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
)

func main() {
	if len(os.Args) != 2 || strings.HasPrefix(os.Args[1], "-") {
		fmt.Fprintln(os.Stderr, "usage: notices BINARY")
		os.Exit(2)
	}
	if err := write(os.Stdout, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "notices:", err)
		os.Exit(1)
	}
}

// write writes the licences of what is linked into a binary.
func write(w io.Writer, binary string) error {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return fmt.Errorf("read the modules of a binary: %w", err)
	}
	goroot, err := output("go", "env", "GOROOT")
	if err != nil {
		return err
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "The binary has code of these modules.\n\n")
	if err := add(&out, "Go standard library "+info.GoVersion, strings.TrimSpace(string(goroot))); err != nil {
		return err
	}
	deps := slices.Clone(info.Deps)
	slices.SortFunc(deps, func(a, b *debug.Module) int { return strings.Compare(a.Path, b.Path) })
	for _, dep := range deps {
		if dep.Replace != nil {
			dep = dep.Replace
		}
		dir, err := sources(dep.Path, dep.Version)
		if err != nil {
			return err
		}
		if err := add(&out, dep.Path+" "+dep.Version, dir); err != nil {
			return err
		}
	}
	_, err = w.Write(out.Bytes())
	return err
}

// sources returns the directory with the sources of a module.
func sources(path, version string) (string, error) {
	text, err := output("go", "mod", "download", "-json", path+"@"+version)
	if err != nil {
		return "", err
	}
	var module struct{ Dir string }
	if err := json.Unmarshal(text, &module); err != nil {
		return "", fmt.Errorf("find %s: %w", path, err)
	}
	return module.Dir, nil
}

func output(name string, args ...string) ([]byte, error) {
	cmd := exec.Command(name, args...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, bytes.TrimSpace(errs.Bytes()))
	}
	return out, nil
}

var (
	licences = regexp.MustCompile(`(?i)^(licen[cs]e|copying|unlicense)([.-].*)?$`)
	notices  = regexp.MustCompile(`(?i)^(notice|patents|authors|copyright)([.-].*)?$`)
	copied   = regexp.MustCompile(`(?i)^third[_-]party[_-]licen[cs]es$`) // a directory, of code that a module has copied
)

// add adds the licences of a module in a directory. os.ReadDir sorts by name.
func add(out *bytes.Buffer, name, dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	found := false
	for _, e := range entries {
		var files []string
		switch {
		case e.IsDir() && copied.MatchString(e.Name()):
			if files, err = filepath.Glob(filepath.Join(dir, e.Name(), "*")); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		case e.Type().IsRegular() && (licences.MatchString(e.Name()) || notices.MatchString(e.Name())):
			files = []string{filepath.Join(dir, e.Name())}
			found = found || licences.MatchString(e.Name())
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			fmt.Fprintf(out, "==== %s: %s\n\n%s\n\n", name, strings.TrimPrefix(file, dir+"/"), bytes.TrimSpace(text))
		}
	}
	if !found {
		return fmt.Errorf("%s: no licence in %s", name, dir)
	}
	return nil
}
