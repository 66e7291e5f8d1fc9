// SPDX-License-Identifier: Apache-2.0

package agent

func (h *host) tuningDir(cgroup string) string { return h.root.Tuning(pinName(cgroup)) }

func (h *host) tracingDir(cgroup string) string { return h.root.Tracing(pinName(cgroup)) }
