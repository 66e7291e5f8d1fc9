// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Services with Unix sockets on the host act on behalf of their clients, and would thereby let the program escape from the namespaces.
// Empty directories cover the usual directories of such sockets. Other files of the host are not changed.

// servicesInRun are directories of /run with sockets of services. Sockets in /run itself are hidden, too.
var servicesInRun = []string{
	"user", "dbus", "systemd", "nscd", "docker", "containerd", "podman", "crio", "buildkit", "lxd", "incus", "libvirt",
	"screen", "tmux", "cups", "avahi-daemon", "pcscd", "pulse", "tailscale", "WSL", "postgresql", "mysqld", "mariadb", "redis",
}

// visibleInRun are paths in these directories that stay visible: the journal, which records the sender of each line;
// /run/systemd/system, which sd_booted(3) checks; and targets of a link /etc/resolv.conf, whose content is replaced if the program may
// use name servers.
var visibleInRun = []string{"systemd/journal", "systemd/system", "systemd/resolve/resolv.conf", "systemd/resolve/stub-resolv.conf"}

// socketFolders are patterns of sockets and their directories elsewhere. HOME stands for the program's home directory.
var socketFolders = []string{
	"/tmp/.X11-unix", "/tmp/.ICE-unix", "/tmp/ssh-*", "/tmp/tmux-*", "/tmp/.s.PGSQL.*", "/tmp/mysql.sock", "/var/lib/mysql/mysql.sock",
	"HOME/.ssh/agent", "HOME/.gnupg/S.*",
}

// socketVariables are environment variables that may name a socket, or a directory of sockets.
var socketVariables = []string{
	"XDG_RUNTIME_DIR", "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS", "DBUS_SYSTEM_BUS_ADDRESS", "DBUS_STARTER_ADDRESS",
	"DOCKER_HOST", "CONTAINER_HOST", "NOTIFY_SOCKET", "PULSE_SERVER", "GPG_AGENT_INFO", "TMUX", "WAYLAND_DISPLAY", "DISPLAY",
}

// hidden is the state of the guest's mount namespace during the preparation.
type hidden struct {
	setup   *Setup
	folders []string // covered directories, which are writable until seal
	owned   []string // the user's own folders, which stay writable
	exposed []exposure
}

// exposure is a path, without symbolic links, that stays visible, and a descriptor of the original file.
type exposure struct {
	path string
	fd   int
}

// maxCovers limits the mounts for one pattern.
const maxCovers = 64

// hide covers the directories of sockets, except for the exposed paths, and removes variables that name hidden sockets from the
// program's environment. It must run in a separate mount namespace.
func (s *Setup) hide() (warnings []string, err error) {
	h := hidden{setup: s}
	defer func() {
		for _, e := range h.exposed {
			unix.Close(e.fd)
		}
	}()
	for _, path := range s.Expose {
		e, err := find(path)
		if err != nil {
			return nil, &StepError{StepExpose, fmt.Errorf("--expose %s: %w", path, err)}
		}
		h.exposed = append(h.exposed, e)
	}
	home, before := s.variable("HOME"), s.namedSockets()
	wd, err := unix.Getwd()
	if err != nil {
		wd = "" // removed, or in another mount namespace
	}
	if err := h.run(); err != nil {
		return nil, err
	}
	for _, pattern := range socketFolders {
		if rest, ok := strings.CutPrefix(pattern, "HOME/"); ok {
			if !filepath.IsAbs(home) {
				continue
			}
			pattern = filepath.Join(escapeGlob(home), rest)
		}
		list, err := filepath.Glob(pattern)
		if err != nil {
			return nil, fmt.Errorf("find sockets: %w", err)
		}
		list = slices.DeleteFunc(list, func(path string) bool { return foreign(pattern, path) })
		for _, path := range list[:min(len(list), maxCovers)] {
			if err := h.cover(path); err != nil {
				return nil, err
			}
		}
	}
	for _, n := range before {
		if err := h.coverNamed(n, home); err != nil {
			return nil, err
		}
	}
	if err := h.expose(); err != nil {
		return nil, err
	}
	if err := h.seal(); err != nil {
		return nil, err
	}
	s.removeVariables(before)
	return h.reenter(wd), nil
}

// reenter changes to the working directory by its path, because the current one may be below a cover. If the path is unknown, or does
// not exist below a cover, the program starts in /.
func (h *hidden) reenter(wd string) (warnings []string) {
	why := fmt.Sprintf("%s is hidden inside; use --expose", wd)
	switch {
	case wd == "":
		why = "the working directory was removed, or is in another mount namespace"
	case unix.Chdir(wd) == nil, !slices.ContainsFunc(h.folders, func(folder string) bool { return below(wd, folder) }):
		return nil
	}
	if err := unix.Chdir("/"); err != nil {
		return []string{fmt.Sprintf("the program starts in a directory that may be hidden: %v", err)}
	}
	return []string{"the program starts in /: " + why}
}

// below returns whether a path is the folder or below it.
func below(path, folder string) bool {
	return path == folder || strings.HasPrefix(path, folder+"/")
}

// isExposed returns whether a path is exposed, or below a directory that is.
func (h *hidden) isExposed(path string) bool {
	return slices.ContainsFunc(h.exposed, func(e exposure) bool { return below(path, e.path) })
}

// find opens a path to expose.
func find(path string) (e exposure, err error) {
	if path, err = filepath.Abs(path); err != nil {
		return e, err
	}
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return e, errors.Unwrap(err)
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	return exposure{path, fd}, err
}

// run rebuilds /run without sockets and directories of services. On old hosts /var/run is a separate directory.
func (h *hidden) run() error {
	done := ""
	for _, run := range []string{"/run", "/var/run"} {
		run, err := filepath.EvalSymlinks(run)
		if err != nil || run == done || h.isExposed(run) {
			continue
		}
		done = run
		entries, err := os.ReadDir(run)
		if err != nil {
			return fmt.Errorf("read %s: %w", run, err)
		}
		var keep []string
		for _, e := range entries {
			if e.Type() != fs.ModeSocket && !slices.Contains(servicesInRun, e.Name()) {
				keep = append(keep, e.Name())
			}
		}
		if err := h.rebuild(run, append(keep, visibleInRun...)); err != nil {
			return err
		}
	}
	return nil
}

// readable is the mode of a directory that covers a directory of another user.
const readable = 0o755

// rebuild covers a directory with an empty one and restores the entries in keep.
func (h *hidden) rebuild(folder string, keep []string) error {
	var kept []exposure
	defer func() {
		for _, k := range kept {
			unix.Close(k.fd)
		}
	}()
	type link struct{ path, to string }
	var links []link
	for _, name := range keep {
		path := filepath.Join(folder, name)
		if to, err := os.Readlink(path); err == nil {
			links = append(links, link{path, to})
			continue
		}
		fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		if err != nil {
			continue // removed, or not accessible to the user
		}
		kept = append(kept, exposure{path, fd})
		if unix.Fstat(fd, &unix.Stat_t{}) != nil {
			// A FUSE file system that is accessible only to its owner.
			kept = kept[:len(kept)-1]
			unix.Close(fd)
		}
	}
	if err := h.empty(folder, readable); err != nil {
		return err
	}
	for _, k := range kept {
		if err := k.mount(); err != nil {
			return err
		}
	}
	for _, l := range links {
		if err := os.Symlink(l.to, l.path); err != nil {
			return fmt.Errorf("make %s inside: %w", l.path, err)
		}
	}
	return nil
}

// foreign returns whether a path that matches in a world-writable directory, such as /tmp, may belong to another user. This user could
// create a link to hide its target, or any number of directories. A path without wildcards may belong to root.
func foreign(pattern, path string) bool {
	var st, parent unix.Stat_t
	if unix.Lstat(path, &st) != nil || unix.Stat(filepath.Dir(path), &parent) != nil {
		return true
	}
	if parent.Mode&unix.S_IWOTH == 0 {
		return false
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFSOCK:
		return false
	case unix.S_IFDIR:
		_, own := ownMode(path)
		return pattern != path && !own
	}
	return true
}

// namedSocket is a file that a variable referred to before the sockets were hidden.
type namedSocket struct {
	variable, path string
	was            os.FileInfo
}

// coverNamed hides the socket or directory that a variable refers to. A directory that contains only sockets is hidden as a whole, so
// that sockets created later are hidden, too.
func (h *hidden) coverNamed(n namedSocket, home string) error {
	st, err := os.Lstat(n.path)
	if err != nil {
		return nil // hidden already
	}
	if st.IsDir() {
		const private = 0o700
		if st.Mode().Perm() != private || n.path == home {
			return nil // not a runtime directory
		}
		return h.cover(n.path)
	}
	folder := filepath.Dir(n.path)
	if entries, err := os.ReadDir(folder); err == nil && folder != home && !slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return e.Type() != fs.ModeSocket }) {
		return h.cover(folder)
	}
	return h.cover(n.path)
}

// cover hides a directory or a socket.
func (h *hidden) cover(path string) error {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil // a dangling link
	}
	st, err := os.Lstat(path)
	switch {
	case err != nil, h.isExposed(path):
		return nil
	case st.IsDir():
		return h.emptyLike(path)
	case st.Mode().Type() != fs.ModeSocket:
		return nil
	}
	if err := unix.Mount("/dev/null", path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("hide %s: %w", path, err)
	}
	return nil
}

// emptyLike mounts an empty directory over another one. A directory of the user keeps its mode and stays writable, because programs
// that create sockets there, as tmux and ssh-agent do, refuse a directory that other users may enter.
func (h *hidden) emptyLike(folder string) error {
	mode, own := ownMode(folder)
	if !own {
		return h.empty(folder, readable)
	}
	h.owned = append(h.owned, folder)
	return h.empty(folder, mode)
}

// empty mounts an empty directory, owned by the program's user, over another one.
func (h *hidden) empty(folder string, mode uint32) error {
	if err := unix.Mount("tmpfs", folder, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, fmt.Sprintf("size=1m,mode=%o", mode)); err != nil {
		return fmt.Errorf("hide %s: %w", folder, err)
	}
	h.folders = append(h.folders, folder)
	return nil
}

// ownMode returns the mode of a directory and whether it belongs to this process' user. stat(2) is not sufficient: it reports nobody
// for each user that the namespace does not map, and this process' user may be nobody. O_NOATIME works for the owner only.
func ownMode(folder string) (mode uint32, own bool) {
	fd, err := unix.Open(folder, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOATIME|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, false
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, false
	}
	return st.Mode & 0o7777, true
}

// expose restores the exposed paths.
func (h *hidden) expose() error {
	for _, e := range h.exposed {
		if err := e.mount(); err != nil {
			return &StepError{StepExpose, err}
		}
	}
	return nil
}

// mount mounts the original file at its path.
func (e *exposure) mount() error {
	var st unix.Stat_t
	if err := unix.Fstat(e.fd, &st); err != nil {
		return fmt.Errorf("keep %s: %w", e.path, err)
	}
	if _, err := os.Lstat(e.path); err != nil {
		if err := os.MkdirAll(filepath.Dir(e.path), 0o755); err != nil {
			return fmt.Errorf("keep %s: %w", e.path, err)
		}
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			err = os.Mkdir(e.path, 0o755)
		} else {
			err = os.WriteFile(e.path, nil, 0o644)
		}
		if err != nil {
			return fmt.Errorf("keep %s: %w", e.path, err)
		}
	}
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", e.fd), e.path, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("keep %s: %w", e.path, err)
	}
	return nil
}

// seal makes the covers of other users' directories read-only.
func (h *hidden) seal() error {
	for _, folder := range h.folders {
		if slices.Contains(h.owned, folder) {
			continue
		}
		const flags = unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
		if err := unix.Mount("", folder, "", flags, ""); err != nil {
			return fmt.Errorf("seal %s: %w", folder, err)
		}
	}
	return nil
}

// namedSockets returns the existing sockets and directories that variables of the program's environment refer to.
func (s *Setup) namedSockets() (list []namedSocket) {
	for _, name := range socketVariables {
		path := socketPath(name, s.variable(name))
		if name == "WAYLAND_DISPLAY" && path != "" && !filepath.IsAbs(path) {
			path = filepath.Join(s.variable("XDG_RUNTIME_DIR"), path)
		}
		if !filepath.IsAbs(path) {
			continue
		}
		if path, err := filepath.EvalSymlinks(path); err == nil {
			if st, err := os.Lstat(path); err == nil && (st.IsDir() || st.Mode().Type() == fs.ModeSocket) {
				list = append(list, namedSocket{name, path, st})
			}
		}
	}
	return list
}

// variable returns a variable of the program's environment.
func (s *Setup) variable(name string) string {
	for _, v := range s.Env {
		if value, ok := strings.CutPrefix(v, name+"="); ok {
			return value
		}
	}
	return ""
}

// socketPath returns the path in a variable's value; "" for none.
func socketPath(name, value string) string {
	switch name {
	case "DISPLAY":
		number, ok := strings.CutPrefix(strings.TrimPrefix(value, "unix"), ":")
		if !ok {
			return ""
		}
		number, _, _ = strings.Cut(number, ".")
		return "/tmp/.X11-unix/X" + number
	case "TMUX":
		value, _, _ = strings.Cut(value, ",")
	case "GPG_AGENT_INFO":
		value, _, _ = strings.Cut(value, ":")
	default:
		for _, prefix := range []string{"unix:path=", "unix://", "unix:"} {
			if rest, ok := strings.CutPrefix(value, prefix); ok {
				if strings.HasPrefix(name, "DBUS_") {
					if n := strings.IndexAny(rest, ",;"); n >= 0 {
						rest = rest[:n]
					}
				}
				return rest
			}
		}
	}
	return value
}

// removeVariables removes the variables whose sockets are hidden from the environment.
func (s *Setup) removeVariables(before []namedSocket) {
	var gone []string
	for _, n := range before {
		now, err := os.Lstat(n.path)
		if err != nil || !n.was.IsDir() && !os.SameFile(now, n.was) || n.was.IsDir() && isEmpty(n.path) {
			gone = append(gone, n.variable)
		}
	}
	if slices.Contains(gone, "SSH_AUTH_SOCK") {
		gone = append(gone, "SSH_AGENT_PID")
	}
	s.Env = slices.DeleteFunc(slices.Clone(s.Env), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains(gone, name)
	})
}

func isEmpty(folder string) bool {
	entries, err := os.ReadDir(folder)
	return err == nil && len(entries) == 0
}

func escapeGlob(path string) string {
	return strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`).Replace(path)
}
