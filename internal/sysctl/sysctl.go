// SPDX-License-Identifier: Apache-2.0

// Package sysctl reads and writes the kernel's settings below /proc/sys. A setting of the network (net.*) is the one of the
// network namespace of the calling thread.
package sysctl

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// FirstUnprivilegedPort returns the first port that needs no capability to bind in the network namespace of the calling
// thread: net.ipv4.ip_unprivileged_port_start.
func FirstUnprivilegedPort() int {
	if n, ok := Number("net.ipv4.ip_unprivileged_port_start"); ok {
		return int(n)
	}
	return 1024
}

// Number returns the number of a setting that has one. ok is false if Numbers does not return exactly one number.
func Number(name string) (n int64, ok bool) {
	numbers := Numbers(name)
	if len(numbers) != 1 {
		return 0, false
	}
	return numbers[0], true
}

// Numbers returns the numbers of a setting. The result is nil if the setting cannot be read, or has anything else than
// decimal numbers.
func Numbers(name string) []int64 {
	text, err := Read(name)
	if err != nil {
		return nil
	}
	var numbers []int64
	for field := range strings.FieldsSeq(text) {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return nil
		}
		numbers = append(numbers, n)
	}
	return numbers
}

// Read returns the text of a setting, as in "net.ipv4.tcp_wmem", without white space around the text. The error wraps
// fs.ErrNotExist if the kernel or the network namespace lacks the setting: for example, only the initial network namespace
// of older kernels has net.core.wmem_max.
func Read(name string) (string, error) {
	text, err := os.ReadFile(file(name))
	if err != nil {
		return "", fmt.Errorf("read sysctl %s: %w", name, errors.Unwrap(err))
	}
	return strings.TrimSpace(string(text)), nil
}

// Write changes a setting. The error wraps ENOENT if the kernel or the namespace lacks the setting, and EROFS in a
// container that makes the setting read-only.
func Write(name, value string) error {
	if err := os.WriteFile(file(name), []byte(value), 0); err != nil {
		return fmt.Errorf("set sysctl %s: %w", name, errors.Unwrap(err))
	}
	return nil
}

func file(name string) string { return "/proc/sys/" + strings.ReplaceAll(name, ".", "/") }
