// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
)

// filterPrefix begins the names of our filters. The PID follows, the descriptor of a
// program, and "/q" if the qdisc is ours too.
const filterPrefix = "sockeye-verify/"

// clsact has our filters on an interface, for kernels without TCX links. Filters
// outlive their process: the next verification removes those of a killed one.
type clsact struct {
	handle *netlink.Handle
	index  int
	ours   bool // the qdisc is removed with the last of our filters
	name   string
}

var clsactParents = []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS}

// attachClsact adds the programs before the existing filters as far as their
// priorities permit. It must run in the interface's namespace.
func attachClsact(index int, ingress, egress *ebpf.Program) (_ *clsact, err error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open route socket: %w", err)
	}
	c := &clsact{handle: handle, index: index, name: fmt.Sprintf("%s%d/%d", filterPrefix, os.Getpid(), ingress.FD())}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if err := c.removeStale(); err != nil {
		return nil, err
	}
	if err := c.addQdisc(); err != nil {
		return nil, err
	}
	if c.ours {
		c.name += "/q"
	}
	for i, program := range []*ebpf.Program{ingress, egress} {
		filters, err := c.filters(clsactParents[i])
		if err != nil {
			return nil, err
		}
		err = handle.FilterAdd(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: index, Parent: clsactParents[i], Priority: freePriority(filters), Protocol: unix.ETH_P_ALL,
			},
			Fd: program.FD(), Name: c.name, DirectAction: true,
		})
		if err != nil {
			return nil, fmt.Errorf("add filter to interface %d: %w", index, err)
		}
	}
	return c, nil
}

// freePriority returns the first priority that is free, or is used by bpf filters for
// all protocols.
func freePriority(filters []netlink.Filter) uint16 {
	for priority := uint16(1); ; priority++ {
		taken := slices.ContainsFunc(filters, func(f netlink.Filter) bool {
			a := f.Attrs()
			return a.Priority == priority && (f.Type() != "bpf" || a.Protocol != unix.ETH_P_ALL)
		})
		if !taken {
			return priority
		}
	}
}

func (c *clsact) filters(parent uint32) ([]netlink.Filter, error) {
	filters, err := c.handle.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: c.index}}, parent)
	if err != nil {
		return nil, fmt.Errorf("list filters of interface %d: %w", c.index, err)
	}
	return filters, nil
}

func (c *clsact) qdisc() *netlink.Clsact {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: c.index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
}

func (c *clsact) addQdisc() error {
	err := c.handle.QdiscAdd(c.qdisc())
	if err == nil {
		c.ours = true
		return nil
	}
	if !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact to interface %d: %w", c.index, err)
	}
	qdiscs, err := c.handle.QdiscList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: c.index}})
	if err != nil {
		return fmt.Errorf("list qdiscs of interface %d: %w", c.index, err)
	}
	for _, q := range qdiscs {
		if q.Type() == "ingress" {
			return fault.Conflict(errors.New("count packets: the interface has an ingress qdisc, which excludes clsact"),
				"replace it by clsact, which has an ingress hook too; Linux 6.6 needs neither")
		}
	}
	return nil
}

// removeStale removes the filters of processes that have ended. A qdisc that one of
// them added becomes ours.
func (c *clsact) removeStale() error {
	for _, parent := range clsactParents {
		filters, err := c.filters(parent)
		if errors.Is(err, unix.EINVAL) {
			return nil // there is no clsact or ingress qdisc
		}
		if err != nil {
			return err
		}
		for _, f := range filters {
			owner, isOurs := filterOwner(f)
			if !isOurs {
				continue
			}
			pid, _, _ := strings.Cut(owner, "/")
			c.ours = c.ours || strings.HasSuffix(owner, "/q")
			if _, err := os.Stat("/proc/" + pid); !os.IsNotExist(err) {
				continue
			}
			if err := c.remove(f); err != nil {
				return err
			}
		}
	}
	return nil
}

// filterOwner returns the PID and flags in the name of a filter of ours.
func filterOwner(f netlink.Filter) (owner string, ok bool) {
	b, ok := f.(*netlink.BpfFilter)
	if !ok {
		return "", false
	}
	return strings.CutPrefix(b.Name, filterPrefix)
}

func (c *clsact) remove(f netlink.Filter) error {
	if err := c.handle.FilterDel(f); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove filter from interface %d: %w", c.index, err)
	}
	return nil
}

// Close removes our filters, and the qdisc if it is ours and has no other filters. An
// interface that has vanished has no filters.
func (c *clsact) Close() error {
	defer c.handle.Close()
	left := 0
	for _, parent := range clsactParents {
		filters, err := c.filters(parent)
		if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, f := range filters {
			if b, ok := f.(*netlink.BpfFilter); !ok || b.Name != c.name {
				left++
				continue
			}
			if err := c.remove(f); err != nil {
				return err
			}
		}
	}
	if !c.ours || left > 0 {
		return nil
	}
	if err := c.handle.QdiscDel(c.qdisc()); err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("remove clsact from interface %d: %w", c.index, err)
	}
	return nil
}
