// SPDX-License-Identifier: Apache-2.0

package access

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ForwardSpec is a published range of ports: ports of the host that lead to ports of the guest.
type ForwardSpec struct {
	Address     netip.Addr // of the host; the zero value: all addresses
	First, Last uint16     // of the host
	Guest       uint16     // first port of the guest
	Protocol    uint8      // unix.IPPROTO_TCP or IPPROTO_UDP
}

// String returns the form that ParseForward parses.
func (f ForwardSpec) String() string {
	address := ""
	if f.Address.IsValid() {
		address = f.Address.String() + ":"
		if f.Address.Is6() {
			address = "[" + f.Address.String() + "]:"
		}
	}
	return fmt.Sprintf("%s%s:%s/%s", address, ports(f.First, f.Last), ports(f.Guest, f.Guest+f.Last-f.First), ProtocolName(f.Protocol))
}

// ParseForward parses [ADDRESS:]PORT[-PORT][:PORT[-PORT]][/tcp|/udp], as in 1790:1790/tcp, [::1]:8080:80 and 9000-9010/udp.
func ParseForward(text string) (f ForwardSpec, err error) {
	rest, protocol, given := strings.Cut(text, "/")
	f.Protocol = unix.IPPROTO_TCP
	if given {
		switch protocol {
		case "tcp":
		case "udp":
			f.Protocol = unix.IPPROTO_UDP
		default:
			return f, fmt.Errorf("%q: the protocol must be tcp or udp", text)
		}
	}
	if strings.HasPrefix(rest, "[") {
		address, after, ok := strings.Cut(rest[1:], "]:")
		if !ok {
			return f, fmt.Errorf("%q: the port is missing after the address", text)
		}
		if f.Address, err = netip.ParseAddr(address); err != nil || f.Address.Zone() != "" {
			return f, fmt.Errorf("%q: %q is not an address", text, address)
		}
		rest = after
	} else if address, after, ok := strings.Cut(rest, ":"); ok && strings.Contains(address, ".") {
		if f.Address, err = netip.ParseAddr(address); err != nil {
			return f, fmt.Errorf("%q: %q is not an address", text, address)
		}
		rest = after
	}
	f.Address = f.Address.Unmap()
	host, guest, two := strings.Cut(rest, ":")
	if f.First, f.Last, err = parsePorts(host); err != nil {
		return f, fmt.Errorf("%q: %w", text, err)
	}
	f.Guest = f.First
	if two {
		first, last, err := parsePorts(guest)
		if err != nil {
			return f, fmt.Errorf("%q: %w", text, err)
		}
		if last-first != f.Last-f.First {
			return f, fmt.Errorf("%q: %s and %s have different numbers of ports", text, guest, host)
		}
		f.Guest = first
	}
	return f, nil
}

// ErrNeverOutside is returned for a rule whose addresses are never outside the guest: loopback, multicast, and IPv6 link-local
// addresses.
var ErrNeverOutside = errors.New("is not an outside destination")

// ParseRule parses PREFIX[:PORT[-PORT]][/tcp|/udp|/icmp], as in 10.0.0.0/8:9092/tcp, 192.0.2.1 and [2001:db8::/32]:443.
func ParseRule(text string) (r Rule, err error) {
	rest := text
	r.Last = 65535
	for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP} {
		if before, ok := strings.CutSuffix(rest, "/"+ProtocolName(protocol)); ok {
			rest, r.Protocol = before, protocol
			break
		}
	}
	prefix, port, ported := rest, "", false
	if strings.HasPrefix(rest, "[") {
		inside, after, ok := strings.Cut(rest[1:], "]")
		if !ok || after != "" && !strings.HasPrefix(after, ":") {
			return r, fmt.Errorf("%q: ] is missing after the prefix", text)
		}
		prefix, port, ported = inside, strings.TrimPrefix(after, ":"), after != ""
	} else if before, after, ok := strings.Cut(rest, ":"); ok && strings.Contains(before, ".") {
		prefix, port, ported = before, after, true
	}
	if r.Prefix, err = parsePrefix(prefix); err != nil {
		return r, fmt.Errorf("%q: %q is not a prefix", text, prefix)
	}
	if masked := r.Prefix.Masked(); r.Prefix != masked {
		return r, fmt.Errorf("%q: %s has bits set after its length: write %s, or %s for that address", text, prefix, masked, r.Prefix.Addr())
	}
	// 0.0.0.0/0, ::/0 and similar prefixes begin with the unspecified address but contain valid destinations.
	if a := r.Prefix.Addr(); forbidden(a) && (!a.IsUnspecified() || r.Prefix.IsSingleIP()) {
		return r, fmt.Errorf("%q: %w", text, ErrNeverOutside)
	}
	if ported {
		if r.Protocol == unix.IPPROTO_ICMP {
			return r, fmt.Errorf("%q: ICMP has no ports", text)
		}
		if r.First, r.Last, err = parsePorts(port); err != nil {
			return r, fmt.Errorf("%q: %w", text, err)
		}
	}
	if r.Protocol == unix.IPPROTO_ICMP && r.Prefix.Addr().Is6() {
		r.Protocol = unix.IPPROTO_ICMPV6
	}
	return r, nil
}

func parsePorts(text string) (first, last uint16, err error) {
	a, b, two := strings.Cut(text, "-")
	if first, err = parsePort(a); err != nil {
		return 0, 0, err
	}
	last = first
	if two {
		if last, err = parsePort(b); err != nil {
			return 0, 0, err
		}
	}
	if last < first {
		return 0, 0, fmt.Errorf("port range %s: the last port is below the first", text)
	}
	return first, last, nil
}

func parsePort(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not a port (1 to 65535)", text)
	}
	return uint16(n), nil
}

// parsePrefix parses a prefix or an address. IPv4-mapped IPv6 addresses become IPv4 addresses.
func parsePrefix(text string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
		return netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	if err == nil && p.Addr().Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p, err
}

// String returns the form that ParseRule parses.
func (r Rule) String() string {
	text := r.Prefix.String()
	if r.First > 0 {
		if r.Prefix.Addr().Is6() {
			text = "[" + text + "]"
		}
		text += ":" + ports(r.First, r.Last)
	}
	if r.Protocol != 0 {
		text += "/" + ProtocolName(r.Protocol)
	}
	return text
}

func ports(first, last uint16) string {
	if first == last {
		return strconv.Itoa(int(first))
	}
	return fmt.Sprintf("%d-%d", first, last)
}

// ProtocolName returns the name of an IP protocol in a rule.
func ProtocolName(p uint8) string {
	switch p {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		return "icmp"
	}
	return "any"
}

// Overlap returns an error for two specifications with a common port of the host.
func Overlap(specs []ForwardSpec) error {
	for i, a := range specs {
		for _, b := range specs[:i] {
			if a.Protocol == b.Protocol && a.First <= b.Last && b.First <= a.Last && meet(a.Address, b.Address) {
				return fmt.Errorf("%v and %v overlap", b, a)
			}
		}
	}
	return nil
}

// meet returns whether sockets bound to two addresses conflict.
func meet(a, b netip.Addr) bool {
	everything := func(a netip.Addr) bool { return !a.IsValid() || a == netip.IPv6Unspecified() }
	if everything(a) || everything(b) || a == b {
		return true
	}
	return a.Is4() == b.Is4() && (a.IsUnspecified() || b.IsUnspecified())
}
