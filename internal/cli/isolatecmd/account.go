// SPDX-License-Identifier: Apache-2.0

package isolatecmd

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/user"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"sockeye/internal/fault"
	"sockeye/internal/isolate"
	"sockeye/internal/member"
)

// account is the user of the gateway and the program; nil for the current user.
type account struct {
	isolate.User
	name, home string // "" if /etc/passwd has no entry
}

// Account returns the user of the program. Root must choose a user, because root has access to the host's files in any namespace. The
// default is the user of the service; "" if there is no default.
func (i *Options) Account(service string) (*account, error) {
	root := os.Geteuid() == 0
	switch {
	case i.User != "" && i.asRoot:
		return nil, fault.Usage(errors.New("--user and --as-root are mutually exclusive"), "both select the user of the program")
	case !root && i.User != "":
		return nil, &fault.Error{Err: errors.New("only root may change the user"), Hint: "omit --user: the program runs as your user", Code: fault.CodeNotPermitted}
	case !root && i.asRoot:
		return nil, fault.Usage(errors.New("--as-root is for root"), "omit it: the program runs as your user")
	case !root, i.asRoot:
		return nil, nil
	}
	name := i.User
	if name == "" {
		name = service
	}
	if name == "" {
		return nil, fault.Usage(errors.New("the program would have root's access to the host's files"), userHint(""))
	}
	a, err := findAccount(name)
	if err != nil {
		return nil, fault.Usage(fmt.Errorf("user %q: %w", name, err), "as in --user nobody, --user 1000 or --user 1000:1000")
	}
	if a.UID == 0 {
		return nil, fault.Usage(fmt.Errorf("user %q is root, with access to the host's files", name), userHint(service))
	}
	if a.GID == 0 {
		return nil, fault.Usage(fmt.Errorf("user %q has root's group, with access to the host's files", name), "name another group after a colon, as in --user nobody:nogroup, or use --as-root")
	}
	return a, nil
}

// userHint returns the options for root. With sudo(8) the suggested user is the caller.
func userHint(service string) string {
	caller := os.Getenv("SUDO_USER")
	switch {
	case service != "":
		return "name another user in the policy, or use --as-root"
	case caller != "root" && regexp.MustCompile(`^[a-z_][a-z0-9_.-]{0,31}$`).MatchString(caller):
		return fmt.Sprintf("name the user of the program, as in --user %s, or use --as-root", caller)
	}
	return "name the user of the program, as in --user nobody, or use --as-root"
}

// IsMember returns an error if the user is not the user of the service's members; "" is any user. Sockets of different users cannot
// share a port.
func (a *account) IsMember(service string) error {
	if service == "" {
		return nil
	}
	members, err := uidOf(service)
	if err != nil {
		return fault.Usage(fmt.Errorf("the members' user %q: %w", service, err), "the user exists for the agent but not for this command")
	}
	uid := os.Geteuid()
	if a != nil {
		uid = a.UID
	}
	if uid == members {
		return nil
	}
	hint := fmt.Sprintf("start it as %s", service)
	if os.Geteuid() == 0 {
		hint = fmt.Sprintf("omit --user and --as-root: the program runs as %s", service)
		if members == 0 {
			hint = "use --as-root"
		}
	}
	return &fault.Error{Err: fmt.Errorf("user %s is not the members' user %s", member.UserName(uint32(uid)), service), Hint: hint, Code: fault.CodeConflict}
}

// uidOf returns the UID of a user, given by name or UID.
func uidOf(name string) (int, error) {
	u, err := user.Lookup(name)
	if err == nil {
		name = u.Uid
	}
	uid, err := number(name) // a UID needs no entry in /etc/passwd
	if err != nil {
		return 0, errors.New("there is no such user")
	}
	return uid, nil
}

// findAccount parses NAME or UID, optionally followed by a colon and the group's name or GID.
func findAccount(text string) (*account, error) {
	name, group, named := strings.Cut(text, ":")
	if named && group == "" {
		return nil, errors.New("the group is missing after the colon")
	}
	a := &account{}
	u, err := user.Lookup(name)
	if err != nil {
		u, err = user.LookupId(name)
	}
	if err == nil {
		a.name, a.home = u.Username, u.HomeDir
		name, group = u.Uid, cmp.Or(group, u.Gid)
	}
	// A UID needs no entry in /etc/passwd.
	if a.UID, err = number(name); err != nil {
		return nil, errors.New("there is no such user")
	}
	if group == "" {
		return nil, errors.New("the user has no group: name one after a colon")
	}
	if g, err := user.LookupGroup(group); err == nil {
		group = g.Gid
	}
	if a.GID, err = number(group); err != nil {
		return nil, fmt.Errorf("there is no group %q", group)
	}
	return a, nil
}

// number parses a UID or GID. The largest one is reserved for "none".
func number(text string) (int, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err == nil && n == 1<<32-1 {
		err = strconv.ErrRange
	}
	return int(n), err
}

// environment returns the program's environment, with HOME, USER and LOGNAME as set by login(1).
func (a *account) environment(env []string) []string {
	for name, value := range map[string]string{"HOME": a.home, "USER": a.name, "LOGNAME": a.name} {
		env = slices.DeleteFunc(slices.Clone(env), func(v string) bool { return strings.HasPrefix(v, name+"=") })
		if value != "" {
			env = append(env, name+"="+value)
		}
	}
	return env
}
