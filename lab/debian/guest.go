// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/lab/qemu"
)

// boot is one boot of the guest.
type boot struct {
	test    string
	timeout time.Duration
}

// boots are the boots of the guest in order, with the test of lab/debian/guest
// that runs in each of them.
var boots = []boot{
	{"TestPackage", 10 * time.Minute},
	{"TestFirstBoot", 11 * time.Minute},
	{"TestReboot", 3 * time.Minute},
	{"TestMembersBeforeAgent", 4 * time.Minute},
}

// guestCommand is the argument with which this program runs as the guest's service.
const guestCommand = "guest"

// The guest's directories and devices.
const (
	payloadDir = "/payload"
	jobPath    = "/run/sockeye-lab.json"
)

// unit runs the tests as a service of the guest's systemd.
const unit = `[Unit]
Description=Tests of Sockeye
After=multi-user.target
[Service]
Type=exec
ExecStart=/payload/debian guest
TasksMax=infinity
[Install]
WantedBy=multi-user.target
`

// managerConf has long timeouts, for a machine that is emulated on a busy host.
const managerConf = "[Manager]\nDefaultTimeoutStartSec=240s\nDefaultTimeoutStopSec=240s\nDefaultDeviceTimeoutSec=240s\n"

// initramfs runs as process 1 before systemd. It mounts the root and the payload,
// adds the service with the tests, and executes systemd.
func initramfs() {
	qemu.Must(unix.Mount("dev", "/dev", "devtmpfs", 0, "mode=0755"), "mount /dev")
	text, err := os.ReadFile("/job.json")
	qemu.Must(err, "read the job")
	var j job
	qemu.Must(json.Unmarshal(text, &j), "read the job")
	for _, name := range j.Modules {
		qemu.LoadModule(filepath.Join("/modules", name))
	}
	mountDisk("/dev/vda", "/root", 0)
	mountDisk("/dev/vdb", "/root"+payloadDir, unix.MS_RDONLY)
	const units = "/root/etc/systemd/system/"
	qemu.Must(os.MkdirAll(units+"multi-user.target.wants", 0o755), "add the service")
	qemu.Must(os.WriteFile(units+"sockeye-lab.service", []byte(unit), 0o644), "add the service")
	if err := os.Symlink("../sockeye-lab.service", units+"multi-user.target.wants/sockeye-lab.service"); !errors.Is(err, os.ErrExist) {
		qemu.Must(err, "add the service")
	}
	qemu.Must(os.MkdirAll("/root/etc/systemd/system.conf.d", 0o755), "configure systemd")
	qemu.Must(os.WriteFile("/root/etc/systemd/system.conf.d/lab.conf", []byte(managerConf), 0o644), "configure systemd")
	qemu.Must(unix.Mount("run", "/root/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"), "mount /run")
	qemu.Must(os.WriteFile("/root"+jobPath, text, 0o644), "hand the job over")
	qemu.Must(unix.Mount("/dev", "/root/dev", "", unix.MS_MOVE, ""), "move /dev")
	qemu.Must(unix.Chdir("/root"), "go to the root")
	qemu.Must(unix.Mount(".", "/", "", unix.MS_MOVE, ""), "move the root")
	qemu.Must(unix.Chroot("."), "go to the root")
	qemu.Must(unix.Chdir("/"), "go to the root")
	qemu.Must(unix.Exec("/sbin/init", []string{"/sbin/init"}, []string{"TERM=linux"}), "start systemd")
}

// mountDisk mounts a disk as soon as its device exists.
func mountDisk(device, dir string, flags uintptr) {
	err := unix.Mount(device, dir, "ext4", flags, "")
	for deadline := time.Now().Add(20 * time.Second); errors.Is(err, unix.ENOENT) && time.Now().Before(deadline); {
		time.Sleep(50 * time.Millisecond)
		err = unix.Mount(device, dir, "ext4", flags, "")
	}
	qemu.Must(err, "mount ", device)
}

// guest runs the tests of a boot and sends the results and the journal to the host.
// Then it reboots, which terminates the virtual machine. The host starts the next
// boot.
func guest() {
	p := qemu.OpenPort(qemu.GuestPort())
	func() {
		defer func() {
			if e := recover(); e != nil {
				p.Send(qemu.Event{Error: fmt.Sprint(e)})
			}
		}()
		text, err := os.ReadFile(jobPath)
		qemu.Must(err, "read the job")
		var j job
		qemu.Must(json.Unmarshal(text, &j), "read the job")
		suite := 0
		p.Send(qemu.Event{Start: &suite})
		tests := exec.Command(filepath.Join(payloadDir, "guest.test"), "-test.v=test2json", "-test.paniconexit0",
			"-test.timeout="+j.Timeout.String(), "-test.run="+j.Pattern)
		tests.Stdout, tests.Stderr, tests.Dir = p, p, "/root"
		tests.Env = append(os.Environ(), "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C")
		tests.WaitDelay = 5 * time.Second
		end := ""
		if err := tests.Run(); err != nil {
			end = err.Error()
		}
		p.Send(qemu.Event{End: &end})
	}()
	journal := exec.Command("journalctl", "-b", "--no-pager", "-o", "short-precise")
	journal.Stdout = journalWriter{p}
	if err := journal.Run(); err != nil {
		p.Send(qemu.Event{Error: fmt.Sprintf("read the journal: %v", err)})
	}
	p.Send(qemu.Event{Done: true})
	if err := exec.Command("systemctl", "reboot").Run(); err != nil {
		_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	}
}

// journalWriter sends the journal to the host.
type journalWriter struct{ p *qemu.Port }

func (w journalWriter) Write(b []byte) (int, error) {
	w.p.Send(qemu.Event{Journal: b})
	return len(b), nil
}
