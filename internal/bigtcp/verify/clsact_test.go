// SPDX-License-Identifier: Apache-2.0

package verify_test

import (
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/verify"
	"sockeye/internal/fault"
)

// next is TCX_NEXT and TC_ACT_UNSPEC.
const next = -1

// counter is another program's sched_cls program, which counts packets.
type counter struct {
	*ebpf.Program
	packets *ebpf.Map
}

func newCounter(t testing.TB, verdict int32) *counter {
	t.Helper()
	packets, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	must(t, err)
	t.Cleanup(func() { packets.Close() })
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "others", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.StoreImm(asm.R10, -4, 0, asm.Word),
			asm.Mov.Reg(asm.R2, asm.R10),
			asm.Add.Imm(asm.R2, -4),
			asm.LoadMapPtr(asm.R1, packets.FD()),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "end"),
			asm.Mov.Imm(asm.R1, 1),
			asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
			asm.Mov.Imm(asm.R0, verdict).WithSymbol("end"),
			asm.Return(),
		},
	})
	must(t, err)
	t.Cleanup(func() { program.Close() })
	return &counter{program, packets}
}

func (c *counter) count(t testing.TB) uint64 {
	t.Helper()
	var n uint64
	must(t, c.packets.Lookup(uint32(0), &n))
	return n
}

// attachTCX attaches another program's BPF program to an interface.
func attachTCX(t testing.TB, h *host, name string, c *counter, at ebpf.AttachType) {
	t.Helper()
	must(t, h.Do(func() error {
		l, err := link.AttachTCX(link.TCXOptions{Interface: h.link(name).Attrs().Index, Program: c.Program, Attach: at})
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	}))
}

func addClsact(t testing.TB, h *host, name string) {
	t.Helper()
	must(t, h.kernel.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: h.link(name).Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}))
}

func addFilter(t testing.TB, h *host, name string, parent uint32, priority uint16, c *counter, title string) {
	t.Helper()
	must(t, h.kernel.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: h.link(name).Attrs().Index, Parent: parent, Priority: priority, Protocol: unix.ETH_P_ALL},
		Fd:          c.FD(), Name: title, DirectAction: true,
	}))
}

// attached lists the number of TCX programs of an interface, the names of its filters, and whether it has a clsact
// queueing discipline.
func attached(t testing.TB, h *host, name string) (programs int, filters []string, clsact bool) {
	t.Helper()
	l := h.link(name)
	must(t, h.Do(func() error {
		if method() != "tcx" {
			return nil
		}
		for _, at := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
			found, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: at})
			if err != nil {
				return err
			}
			programs += len(found.Programs)
		}
		return nil
	}))
	qdiscs, err := h.kernel.QdiscList(l)
	must(t, err)
	for _, q := range qdiscs {
		clsact = clsact || q.Type() == "clsact"
	}
	if !clsact {
		return programs, nil, false
	}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		list, err := h.kernel.FilterList(l, parent)
		must(t, err)
		for _, f := range list {
			if b, ok := f.(*netlink.BpfFilter); ok {
				filters = append(filters, b.Name)
			}
		}
	}
	return programs, filters, true
}

// TestVerifyBesideOthers runs beside TCX programs and filters of others, with both ways of attaching: these still get
// each packet, and stay attached.
func TestVerifyBesideOthers(t *testing.T) {
	if method() != "tcx" {
		t.Skip("kernel: no TCX before Linux 6.6")
	}
	for _, clsact := range []bool{false, true} {
		t.Run("clsact "+strconv.FormatBool(clsact), func(t *testing.T) {
			a, b := pair(t)
			a.set("va", large, large)
			tcx, ingress, egress := newCounter(t, next), newCounter(t, 0), newCounter(t, 0)
			attachTCX(t, a, "va", tcx, ebpf.AttachTCXEgress)
			addClsact(t, a, "va")
			addFilter(t, a, "va", netlink.HANDLE_MIN_INGRESS, 1, ingress, "theirs")
			addFilter(t, a, "va", netlink.HANDLE_MIN_EGRESS, 1, egress, "theirs")
			late, missed := newCounter(t, next), uint64(0)
			p := prove(t, a, "va", verify.Options{Clsact: clsact}, func() {
				attachTCX(t, a, "va", late, ebpf.AttachTCXEgress)
				missed = tcx.count(t) // the kernel sends packets by itself: neighbour discovery
				// The stream is long because a pause of the host in slow start lengthens the smoothed RTT, which
				// lowers the pacing rate; TSO packets hold 1 ms of that rate (tcp_tso_autosize).
				connect(t, a, b, "fd09::2").send(stream, 1<<20)
			})
			if share := shareOf(t, p); share < 0.9 {
				t.Error(text(t, p))
			}
			var sent, received uint64
			for _, c := range p.Counts {
				switch c.Point {
				case verify.Sent:
					sent += c.Packets
				case verify.Received:
					received += c.Packets
				}
			}
			for name, n := range map[string][2]uint64{
				"TCX": {tcx.count(t), sent}, "late TCX": {late.count(t) + missed, sent}, "egress": {egress.count(t), sent}, "ingress": {ingress.count(t), received},
			} {
				if n[0] < n[1] || n[1] == 0 {
					t.Errorf("%s: %d packets, of %d that were counted", name, n[0], n[1])
				}
			}
			programs, filters, kept := attached(t, a, "va")
			if programs != 2 || strings.Join(filters, " ") != "theirs theirs" || !kept {
				t.Errorf("left: %d programs, filters %q, clsact %v", programs, filters, kept)
			}
		})
	}
}

// TestVerifyClsact counts the same packets as with TCX, and leaves nothing attached.
func TestVerifyClsact(t *testing.T) {
	a, b := pair(t)
	a.set("va", large, large)
	p := prove(t, a, "va", verify.Options{Clsact: true}, func() {
		if programs, filters, _ := attached(t, a, "va"); programs != 0 || len(filters) != 2 || !strings.HasPrefix(filters[0], "sockeye-verify/") {
			t.Errorf("attached: %d programs, filters %q", programs, filters)
		}
		connect(t, a, b, "fd09::2").send(stream, 1<<20)
	})
	if share := shareOf(t, p); share < 0.9 || p.Method != "clsact" {
		t.Error(text(t, p))
	}
	checkCounts(t, p, true, "fd09::2")
	if programs, filters, clsact := attached(t, a, "va"); programs != 0 || clsact {
		t.Errorf("left: %d programs, filters %q, clsact %v", programs, filters, clsact)
	}
}

// TestVerifyClsactTwice runs twice at a time on an interface: the last run to end removes the queueing discipline.
func TestVerifyClsactTwice(t *testing.T) {
	a, b := pair(t)
	outer := prove(t, a, "va", verify.Options{Clsact: true}, func() {
		inner := prove(t, a, "va", verify.Options{Clsact: true}, func() {
			connect(t, a, b, "10.9.0.2").send(stream/8, 1<<20)
		})
		if inner.TCPBytes < stream/8 {
			t.Error(text(t, inner))
		}
		if _, filters, _ := attached(t, a, "va"); len(filters) != 2 {
			t.Errorf("after the inner one: filters %q", filters)
		}
	})
	if outer.TCPBytes < stream/8 {
		t.Error(text(t, outer))
	}
	if _, filters, clsact := attached(t, a, "va"); clsact {
		t.Errorf("left: filters %q", filters)
	}
}

// TestVerifyClsactAfterKill removes the programs of a killed process, and the queueing discipline if that process had
// added it, and nothing else.
func TestVerifyClsactAfterKill(t *testing.T) {
	dead := exec.Command("/proc/self/exe", "-test.run=^$")
	must(t, dead.Run())
	for _, test := range []struct {
		name, left string
		others     bool
		clsact     bool // stays
	}{
		{"its own clsact", "sockeye-verify/" + strconv.Itoa(dead.Process.Pid) + "/7/q", false, false},
		{"clsact of others", "sockeye-verify/" + strconv.Itoa(dead.Process.Pid) + "/7", false, true},
		{"its own clsact, that others use by now", "sockeye-verify/" + strconv.Itoa(dead.Process.Pid) + "/7/q", true, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			a, b := pair(t)
			addClsact(t, a, "va")
			killed, theirs := newCounter(t, next), newCounter(t, 0)
			for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
				addFilter(t, a, "va", parent, 1, killed, test.left)
				if test.others {
					addFilter(t, a, "va", parent, 7, theirs, "theirs")
				}
			}
			p := prove(t, a, "va", verify.Options{Clsact: true}, func() { connect(t, a, b, "10.9.0.2").send(1<<20, 1<<20) })
			if p.TCPBytes < 1<<20 || test.others && theirs.count(t) == 0 {
				t.Error(text(t, p))
			}
			_, filters, clsact := attached(t, a, "va")
			want := ""
			if test.others {
				want = "theirs theirs"
			}
			if strings.Join(filters, " ") != want || clsact != test.clsact {
				t.Errorf("left: filters %q, clsact %v", filters, clsact)
			}
		})
	}
}

// TestVerifyClsactConflict uses a queueing discipline in the place of clsact.
func TestVerifyClsactConflict(t *testing.T) {
	a, _ := pair(t)
	must(t, a.kernel.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: a.link("va").Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_INGRESS,
	}}))
	_, err := verify.RunWith(t.Context(), a.Namespace, "va", time.Second, verify.Options{Clsact: true})
	var refused *fault.Error
	if !errors.As(err, &refused) || refused.Code != fault.CodeConflict || refused.Hint == "" {
		t.Errorf("error %v", err)
	}
	qdiscs, err := a.kernel.QdiscList(a.link("va"))
	must(t, err)
	if len(qdiscs) == 0 || qdiscs[len(qdiscs)-1].Type() != "ingress" {
		t.Errorf("left: %v", qdiscs)
	}
}

// TestVerifyLeavesNothing counts descriptors and programs.
func TestVerifyLeavesNothing(t *testing.T) {
	a, _ := pair(t)
	descriptors := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(list)
	}
	verify := func() {
		for _, clsact := range []bool{false, true} {
			_, err := verify.RunWith(t.Context(), a.Namespace, "va", time.Millisecond, verify.Options{Clsact: clsact})
			must(t, err)
		}
	}
	verify()
	before := descriptors()
	for range 5 {
		verify()
	}
	for deadline := time.Now().Add(verifyPatience); descriptors() > before; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors, before %d", descriptors(), before)
		}
	}
	if programs, filters, clsact := attached(t, a, "va"); programs != 0 || clsact {
		t.Errorf("left: %d programs, filters %q, clsact %v", programs, filters, clsact)
	}
}
