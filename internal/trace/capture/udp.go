// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf/btf"

	"sockeye/internal/bpf/load"
)

// OpenUDP follows the UDP socket with a SO_COOKIE, which was created in the cgroup of a directory. See Open for the
// buffer and for errors.
func OpenUDP(cookie uint64, cgroup string, buffer int) (*Capture, error) {
	if cookie == 0 {
		return nil, errors.New("follow packets: a socket has no cookie 0")
	}
	spec, err := loadTraceUDPPackets()
	if err != nil {
		return nil, err
	}
	bySocket, err := load.HaveTracepoint("sock_recv_length")
	if err != nil {
		return nil, fmt.Errorf("follow packets: %w", err)
	}
	reasons, err := DropReasons()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables["has_reason"].Set(len(reasons) > 0); err != nil {
		return nil, err
	}
	read := tracepoint{"udp_read", "sock_recv_length", true}
	if !bySocket {
		read = tracepoint{"udp_consume", "consume_skb", true}
	}
	return open(spec, []tracepoint{
		read,
		{"udp_drop", "kfree_skb", true},
		{"udp_driver", "net_dev_start_xmit", true},
		{"udp_queue", "net_dev_queue", true},
	}, cgroup, cookie, buffer)
}

// DropReasons returns the names of the reasons for which the kernel drops packets (enum skb_drop_reason), such as
// socket_rcvbuff. The map is empty before Linux 5.17.
func DropReasons() (map[uint32]string, error) {
	kernel, err := load.KernelTypes.Kernel()
	if err != nil {
		return nil, fmt.Errorf("read the reasons of drops: %w", err)
	}
	var enum *btf.Enum
	if err := kernel.TypeByName("skb_drop_reason", &enum); errors.Is(err, btf.ErrNotFound) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("read the reasons of drops: %w", err)
	}
	names := make(map[uint32]string, len(enum.Values))
	for _, v := range enum.Values {
		if name, found := strings.CutPrefix(v.Name, "SKB_DROP_REASON_"); found {
			names[uint32(v.Value)] = strings.ToLower(name)
		}
	}
	return names, nil
}
