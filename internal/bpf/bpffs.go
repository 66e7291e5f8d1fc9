// SPDX-License-Identifier: Apache-2.0

package bpf

import "golang.org/x/sys/unix"

func IsBPFFS(dir string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(dir, &fs) == nil && fs.Type == unix.BPF_FS_MAGIC
}
