// SPDX-License-Identifier: Apache-2.0

//go:build vm

package selftest

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

func load(t *testing.T, spec *ebpf.ProgramSpec) *ebpf.Program {
	t.Helper()
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	p, err := ebpf.NewProgram(spec)
	if err != nil {
		t.Fatalf("load program: %+v", err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func returns(value int32) asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R0, value), asm.Return()}
}

func TestProgramIsLoadedPinnedAndRun(t *testing.T) {
	p := load(t, &ebpf.ProgramSpec{Type: ebpf.SocketFilter, License: "GPL", Instructions: returns(42)})
	pin := filepath.Join("/sys/fs/bpf", t.Name())
	if err := p.Pin(pin); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(pin)
	again, err := ebpf.LoadPinnedProgram(pin, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	got, _, err := again.Test(make([]byte, 64))
	if err != nil || got != 42 {
		t.Fatalf("program returned %d, %v, want 42", got, err)
	}
}

func TestKernelHasBTF(t *testing.T) {
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		t.Fatal(err)
	}
	var sock *btf.Struct
	if err := spec.TypeByName("sock", &sock); err != nil {
		t.Fatal(err)
	}
}

func TestCgroupProgramRefusesSockets(t *testing.T) {
	group := filepath.Join("/sys/fs/cgroup", t.Name())
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(group)
	p := load(t, &ebpf.ProgramSpec{Type: ebpf.CGroupSock, AttachType: ebpf.AttachCGroupInetSockCreate, License: "GPL", Instructions: returns(0)})
	l, err := link.AttachCgroup(link.CgroupOptions{Path: group, Attach: ebpf.AttachCGroupInetSockCreate, Program: p})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	join := func(group string) {
		if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte("0"), 0); err != nil {
			t.Fatal(err)
		}
	}
	socket := func() error {
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		if err == nil {
			unix.Close(s)
		}
		return err
	}
	join(group)
	inside := socket()
	join("/sys/fs/cgroup")
	if inside != unix.EPERM {
		t.Errorf("socket in the group: %v, want %v", inside, unix.EPERM)
	}
	if outside := socket(); outside != nil {
		t.Errorf("socket outside the group: %v", outside)
	}
}

func TestLoopback(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "127.1.2.3:0", "[::1]:0"} {
		server, err := net.ListenPacket("udp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		client, err := net.Dial("udp", server.LocalAddr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		if _, err := client.Write([]byte("sockeye")); err != nil {
			t.Fatal(err)
		}
		if err := server.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 16)
		n, from, err := server.ReadFrom(buf)
		if err != nil || string(buf[:n]) != "sockeye" || from.String() != client.LocalAddr().String() {
			t.Errorf("%s: read %q from %v, %v", address, buf[:n], from, err)
		}
	}
}

func TestModules(t *testing.T) {
	loaded, err := os.ReadFile("/proc/modules")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"veth", "tun", "sch_netem", "sch_fq", "tcp_bbr"} {
		if !strings.Contains("\n"+string(loaded), "\n"+name+" ") {
			t.Errorf("module %s is not loaded", name)
		}
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Error(err)
	}
}

func TestTestdata(t *testing.T) {
	if text, err := os.ReadFile("testdata/greeting"); err != nil || string(text) != "hello\n" {
		t.Errorf("read %q, %v", text, err)
	}
}

// TestOutput checks that output of any kind and length reaches the host unchanged. The kernel's console uses another
// serial port.
func TestOutput(t *testing.T) {
	if err := os.WriteFile("/dev/kmsg", []byte("<0>sockeye: a message of the kernel in the midst\n"), 0); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", strings.Repeat("0123456789abcdef", 1<<6))
}
