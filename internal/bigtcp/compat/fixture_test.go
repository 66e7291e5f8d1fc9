// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/netif/netiftest"
	"sockeye/internal/linux"
	"sockeye/internal/netns"
	"sockeye/internal/nlattr"
)

// newNamespace creates a network namespace, with lo up.
func newNamespace(t testing.TB) *netif.Namespace {
	t.Helper()
	path := filepath.Join(t.TempDir(), "netns")
	must(t, os.WriteFile(path, nil, 0o600))
	must(t, netns.Thread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
	}))
	t.Cleanup(func() { must(t, unix.Unmount(path, unix.MNT_DETACH)) })
	n, err := netif.OpenNamespace(path)
	must(t, err)
	t.Cleanup(func() { must(t, n.Close()) })
	inside(t, n, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	})
	return n
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func inside(t testing.TB, n *netif.Namespace, f func() error) {
	t.Helper()
	must(t, n.Do(f))
}

// newPair creates two namespaces with a veth pair between them, whose ends have sizes of
// 196608 bytes: a with 10.9.0.1 and fd09::1, b with 10.9.0.2 and fd09::2.
func newPair(t testing.TB) (a, b *netif.Namespace) {
	t.Helper()
	if mustKernel(t).Before(linux.Version{5, 19, 0}) {
		t.Skip("kernel: there are no large packets before 5.19")
	}
	a, b = newNamespace(t), newNamespace(t)
	for _, n := range []*netif.Namespace{a, b} {
		// A pause of the host during the handshake must not make packets smaller: see newHost of internal/bigtcp/verify.
		inside(t, n, func() error { return os.WriteFile("/proc/sys/net/ipv4/tcp_tso_rtt_log", []byte("20"), 0) })
	}
	inside(t, a, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "va"}, PeerName: "vb", PeerNamespace: netlink.NsFd(netiftest.OpenFile(t, b.Path()).Fd())})
	})
	setUp(t, a, "va", 196608, "10.9.0.1/24", "fd09::1/64")
	setUp(t, b, "vb", 196608, "10.9.0.2/24", "fd09::2/64")
	return a, b
}

// setUp sets an interface up, with addresses, and sizes unless they are 0.
func setUp(t testing.TB, n *netif.Namespace, name string, size uint32, addresses ...string) {
	t.Helper()
	inside(t, n, func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		for _, a := range addresses {
			address, err := netlink.ParseAddr(a)
			if err != nil {
				return err
			}
			address.Flags = unix.IFA_F_NODAD
			if err := netlink.AddrAdd(link, address); err != nil {
				return err
			}
		}
		return netlink.LinkSetUp(link)
	})
	if size != 0 {
		setSizes(t, n, name, size)
	}
}

func setSizes(t testing.TB, n *netif.Namespace, name string, size uint32) {
	t.Helper()
	inside(t, n, func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		r := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
		m := nl.NewIfInfomsg(unix.AF_UNSPEC)
		m.Index = int32(link.Attrs().Index)
		r.AddData(m)
		for _, kind := range []int{unix.IFLA_GSO_MAX_SIZE, unix.IFLA_GRO_MAX_SIZE, unix.IFLA_GSO_IPV4_MAX_SIZE, unix.IFLA_GRO_IPV4_MAX_SIZE} {
			r.AddData(nl.NewRtAttr(kind, nl.Uint32Attr(size)))
		}
		_, err = r.Execute(unix.NETLINK_ROUTE, 0)
		return err
	})
}

// stream sends to an address of b for a time, as fast as possible, and returns the number
// of received bytes.
func stream(t testing.TB, a, b *netif.Namespace, address string, d time.Duration) int64 {
	t.Helper()
	var listener net.Listener
	inside(t, b, func() (err error) {
		var c net.ListenConfig
		c.SetMultipathTCP(false)
		listener, err = c.Listen(t.Context(), "tcp", net.JoinHostPort(address, "0"))
		return err
	})
	defer listener.Close()
	arrived := make(chan int64, 1)
	go func() {
		var n int64
		defer func() { arrived <- n }()
		c, err := listener.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		buffer := make([]byte, 1<<20)
		for {
			k, err := c.Read(buffer)
			n += int64(k)
			if err != nil {
				return
			}
		}
	}()
	var conn *net.TCPConn
	inside(t, a, func() error {
		c, err := (&net.Dialer{Timeout: 20 * time.Second}).Dial("tcp", listener.Addr().String())
		if err == nil {
			conn = c.(*net.TCPConn)
		}
		return err
	})
	must(t, conn.SetWriteDeadline(time.Now().Add(d)))
	buffer := make([]byte, 1<<20)
	for {
		if _, err := conn.Write(buffer); err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error(err)
			}
			break
		}
	}
	// Data that is not sent yet does not count.
	must(t, conn.SetLinger(0))
	must(t, conn.Close())
	return <-arrived
}

// expr is an expression of a rule of nftables.
func expr(name string, attributes ...*nl.RtAttr) *nl.RtAttr {
	e := nl.NewRtAttr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, nil)
	e.AddRtAttr(unix.NFTA_EXPR_NAME, nl.ZeroTerminated(name))
	data := e.AddRtAttr(unix.NFTA_EXPR_DATA|unix.NLA_F_NESTED, nil)
	for _, a := range attributes {
		data.AddChild(a)
	}
	return e
}

func be32(kind int, value uint32) *nl.RtAttr {
	return nl.NewRtAttr(kind, binary.BigEndian.AppendUint32(nil, value))
}

func meta(key uint32) *nl.RtAttr {
	return expr("meta", be32(unix.NFTA_META_KEY, key), be32(unix.NFTA_META_DREG, unix.NFT_REG_1))
}

func payload(base, offset, size uint32) *nl.RtAttr {
	return expr("payload", be32(unix.NFTA_PAYLOAD_DREG, unix.NFT_REG_1), be32(unix.NFTA_PAYLOAD_BASE, base),
		be32(unix.NFTA_PAYLOAD_OFFSET, offset), be32(unix.NFTA_PAYLOAD_LEN, size))
}

func compare(op uint32, constant ...byte) *nl.RtAttr {
	data := nl.NewRtAttr(unix.NFTA_CMP_DATA|unix.NLA_F_NESTED, nil)
	data.AddRtAttr(unix.NFTA_DATA_VALUE, constant)
	return expr("cmp", be32(unix.NFTA_CMP_SREG, unix.NFT_REG_1), be32(unix.NFTA_CMP_OP, op), data)
}

func extension(kind byte) *nl.RtAttr {
	return expr("exthdr", be32(unix.NFTA_EXTHDR_DREG, unix.NFT_REG_1), nl.NewRtAttr(unix.NFTA_EXTHDR_TYPE, []byte{kind}),
		be32(unix.NFTA_EXTHDR_OFFSET, 0), be32(unix.NFTA_EXTHDR_LEN, 1), be32(unix.NFTA_EXTHDR_FLAGS, unix.NFT_EXTHDR_F_PRESENT))
}

// notLength is the match of iptables -m length ! --length 0:65535.
func notLength() *nl.RtAttr {
	return expr("match", nl.NewRtAttr(unix.NFTA_MATCH_NAME, nl.ZeroTerminated("length")), be32(unix.NFTA_MATCH_REV, 0),
		nl.NewRtAttr(unix.NFTA_MATCH_INFO, []byte{0, 0, 0xff, 0xff, 1, 0, 0, 0}))
}

func counter() *nl.RtAttr { return expr("counter") }

var (
	isIPv4 = []*nl.RtAttr{meta(unix.NFT_META_NFPROTO), compare(unix.NFT_CMP_EQ, unix.NFPROTO_IPV4)}
	isIPv6 = []*nl.RtAttr{meta(unix.NFT_META_NFPROTO), compare(unix.NFT_CMP_EQ, unix.NFPROTO_IPV6)}
)

func nftMessage(kind int, family uint8, flags int, attributes ...*nl.RtAttr) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|kind, flags)
	r.AddData(&nl.Nfgenmsg{NfgenFamily: family})
	for _, a := range attributes {
		r.AddData(a)
	}
	return r
}

// nftTable creates a table t with a chain c, in the hook, and its rules. The handles of
// the rules start at 2.
func nftTable(t testing.TB, n *netif.Namespace, family uint8, hook uint32, rules ...[]*nl.RtAttr) {
	t.Helper()
	table := nl.ZeroTerminated("t")
	where := nl.NewRtAttr(unix.NFTA_CHAIN_HOOK|unix.NLA_F_NESTED, nil)
	switch family {
	case unix.NFPROTO_NETDEV:
		hook = unix.NF_NETDEV_INGRESS
		where.AddRtAttr(unix.NFTA_HOOK_DEV, nl.ZeroTerminated("lo"))
	case unix.NFPROTO_ARP:
		hook = 0 // NF_ARP_IN
	}
	where.AddChild(be32(unix.NFTA_HOOK_HOOKNUM, hook))
	where.AddChild(be32(unix.NFTA_HOOK_PRIORITY, 0))
	messages := []*nl.NetlinkRequest{
		nftMessage(unix.NFT_MSG_NEWTABLE, family, unix.NLM_F_CREATE, nl.NewRtAttr(unix.NFTA_TABLE_NAME, table)),
		nftMessage(unix.NFT_MSG_NEWCHAIN, family, unix.NLM_F_CREATE, nl.NewRtAttr(unix.NFTA_CHAIN_TABLE, table),
			nl.NewRtAttr(unix.NFTA_CHAIN_NAME, nl.ZeroTerminated("c")), where, nl.NewRtAttr(unix.NFTA_CHAIN_TYPE, nl.ZeroTerminated("filter"))),
	}
	for _, r := range rules {
		expressions := nl.NewRtAttr(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, nil)
		for _, e := range r {
			expressions.AddChild(e)
		}
		messages = append(messages, nftMessage(unix.NFT_MSG_NEWRULE, family, unix.NLM_F_CREATE|unix.NLM_F_APPEND,
			nl.NewRtAttr(unix.NFTA_RULE_TABLE, table), nl.NewRtAttr(unix.NFTA_RULE_CHAIN, nl.ZeroTerminated("c")), expressions))
	}
	const atOnce = 10_000
	for batch := range slices.Chunk(messages, atOnce) {
		switch err := n.Do(func() error { return nftCommit(batch) }); {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPROTONOSUPPORT):
			t.Skipf("kernel: nftables lacks what this takes for %s: %v", nftFamilies[family], err)
		case err != nil:
			t.Fatal(err)
		}
	}
}

func nftCommit(messages []*nl.NetlinkRequest) error {
	limit := func(kind int) []byte {
		r := nl.NewNetlinkRequest(kind, 0)
		// The subsystem is in network byte order.
		r.AddData(&nl.Nfgenmsg{ResId: unix.NFNL_SUBSYS_NFTABLES << 8})
		return r.Serialize()
	}
	batch := limit(unix.NFNL_MSG_BATCH_BEGIN)
	for k, m := range messages {
		if k == len(messages)-1 {
			m.Flags |= unix.NLM_F_ACK
		}
		batch = append(batch, m.Serialize()...)
	}
	batch = append(batch, limit(unix.NFNL_MSG_BATCH_END)...)
	socket, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	if err := unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 2*len(batch)+1<<16); err != nil {
		return err
	}
	if err := unix.Sendto(socket, batch, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 1<<16)
	size, _, err := unix.Recvfrom(socket, answer, 0)
	if err != nil {
		return err
	}
	if size < unix.SizeofNlMsghdr+4 {
		return errors.New("no answer of nftables")
	}
	if errno := int32(binary.NativeEndian.Uint32(answer[unix.SizeofNlMsghdr:])); errno != 0 {
		number := binary.NativeEndian.Uint32(answer[8:])
		return fmt.Errorf("message %d of %d: %w", number-messages[0].Seq+1, len(messages), unix.Errno(-errno))
	}
	return nil
}

// nftCounters returns the packet counters of the rules of a family, by handle.
func nftCounters(t testing.TB, n *netif.Namespace, family uint8) map[uint64]uint64 {
	t.Helper()
	counters := map[uint64]uint64{}
	inside(t, n, func() error {
		r := nftMessage(unix.NFT_MSG_GETRULE, family, unix.NLM_F_DUMP)
		return r.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(message []byte) bool {
			rule := message[nl.SizeofNfgenmsg:]
			for _, e := range nlattr.Attributes(nlattr.Find(rule, unix.NFTA_RULE_EXPRESSIONS)).All {
				if nlattr.String(e, unix.NFTA_EXPR_NAME) == "counter" {
					packets := nlattr.Find(nlattr.Find(e, unix.NFTA_EXPR_DATA), unix.NFTA_COUNTER_PACKETS)
					counters[binary.BigEndian.Uint64(nlattr.Find(rule, unix.NFTA_RULE_HANDLE))] = binary.BigEndian.Uint64(packets)
				}
			}
			return true
		})
	})
	return counters
}

// findAll returns all incompatibilities of a namespace.
func findAll(t testing.TB, n *netif.Namespace) (host []Incompatibility, byInterface map[string][]Incompatibility) {
	t.Helper()
	ifaces, err := n.Interfaces()
	must(t, err)
	host, byInterface, err = Find(n, ifaces, n.Support())
	must(t, err)
	return host, byInterface
}

// find returns the incompatibility with a name whose detail contains all words.
func find(all []Incompatibility, name string, words ...string) (Incompatibility, bool) {
	for _, x := range all {
		if x.Name == name && !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(x.Detail, w) }) {
			return x, true
		}
	}
	return Incompatibility{}, false
}

func wantFound(t testing.TB, all []Incompatibility, name string, words ...string) {
	t.Helper()
	found, ok := find(all, name, words...)
	if !ok {
		t.Errorf("no incompatibility %s with %q in %+v", name, words, all)
	} else if found.Hint == "" {
		t.Errorf("no hint of %+v", found)
	}
}

func wantNotFound(t testing.TB, all []Incompatibility, name string, words ...string) {
	t.Helper()
	if found, ok := find(all, name, words...); ok {
		t.Errorf("incompatibility %+v", found)
	}
}
