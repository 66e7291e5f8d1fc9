// SPDX-License-Identifier: Apache-2.0

package agent

import "golang.org/x/sys/unix"

func isBPFFS(dir string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(dir, &fs) == nil && fs.Type == unix.BPF_FS_MAGIC
}
