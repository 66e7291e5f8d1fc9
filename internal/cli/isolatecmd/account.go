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

// account is the user that the gateway and the program become, nil for the one that they are.
type account struct {
	isolate.User
	name, home string // "" where /etc/passwd has none
}

// Account decides who the program is. Root has to say it: whoever is root outside is root to the host's files, whatever
// namespaces there are. The default is the user of a service, "" for none.
func (i *Options) Account(service string) (*account, error) {
	root := os.Geteuid() == 0
	switch {
	case i.User != "" && i.asRoot:
		return nil, fault.Usage(errors.New("--user and --as-root do not go together"), "each says who the program is")
	case !root && i.User != "":
		return nil, &fault.Error{Err: errors.New("only root may become another user"), Hint: "leave --user out: the program has your own user", Code: fault.CodeNotPermitted}
	case !root && i.asRoot:
		return nil, fault.Usage(errors.New("--as-root is for root"), "leave it out: the program has your own user")
	case !root, i.asRoot:
		return nil, nil
	}
	name := i.User
	if name == "" {
		name = service
	}
	if name == "" {
		return nil, fault.Usage(errors.New("the program would be root to the host's files"), userHint(""))
	}
	a, err := findAccount(name)
	if err != nil {
		return nil, fault.Usage(fmt.Errorf("user %q: %w", name, err), "as in --user nobody, --user 1000 or --user 1000:1000")
	}
	if a.UID == 0 {
		return nil, fault.Usage(fmt.Errorf("user %q is root, also to the host's files", name), userHint(service))
	}
	if a.GID == 0 {
		return nil, fault.Usage(fmt.Errorf("user %q has root's group, also to the host's files", name), "name another group behind a colon, as in --user nobody:nogroup, or say --as-root")
	}
	return a, nil
}

// userHint names what root may say. With sudo(8), that is most often the user who called it.
func userHint(service string) string {
	caller := os.Getenv("SUDO_USER")
	switch {
	case service != "":
		return "name another user in the policy, or say --as-root"
	case caller != "root" && regexp.MustCompile(`^[a-z_][a-z0-9_.-]{0,31}$`).MatchString(caller):
		return fmt.Sprintf("name the user to become, as in --user %s, or say --as-root", caller)
	}
	return "name the user to become, as in --user nobody, or say --as-root"
}

// IsMember refuses a user who is not that of a service's members, "" for any: sockets of two users share no port.
func (a *account) IsMember(service string) error {
	if service == "" {
		return nil
	}
	members, err := uidOf(service)
	if err != nil {
		return fault.Usage(fmt.Errorf("the members' user %q: %w", service, err), "the policy names a user whom the agent knows, and this command does not")
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
		hint = fmt.Sprintf("leave --user and --as-root out: the program becomes %s", service)
		if members == 0 {
			hint = "say --as-root"
		}
	}
	return &fault.Error{Err: fmt.Errorf("user %s is not the members' user %s", member.UserName(uint32(uid)), service), Hint: hint, Code: fault.CodeConflict}
}

// uidOf is the number of a user that is named by name or number.
func uidOf(name string) (int, error) {
	u, err := user.Lookup(name)
	if err == nil {
		name = u.Uid
	}
	uid, err := number(name) // a number needs no line in /etc/passwd
	if err != nil {
		return 0, errors.New("there is no such user")
	}
	return uid, nil
}

// findAccount reads NAME or UID, and behind a colon the group by name or number.
func findAccount(text string) (*account, error) {
	name, group, named := strings.Cut(text, ":")
	if named && group == "" {
		return nil, errors.New("the group behind the colon is missing")
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
	// A number needs no line in /etc/passwd.
	if a.UID, err = number(name); err != nil {
		return nil, errors.New("there is no such user")
	}
	if group == "" {
		return nil, errors.New("it has no group: name one behind a colon")
	}
	if g, err := user.LookupGroup(group); err == nil {
		group = g.Gid
	}
	if a.GID, err = number(group); err != nil {
		return nil, fmt.Errorf("there is no group %q", group)
	}
	return a, nil
}

// number reads the number of a user or a group. The last one stands for none.
func number(text string) (int, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err == nil && n == 1<<32-1 {
		err = strconv.ErrRange
	}
	return int(n), err
}

// environment is that of the program, with what login(1) sets.
func (a *account) environment(env []string) []string {
	for name, value := range map[string]string{"HOME": a.home, "USER": a.name, "LOGNAME": a.name} {
		env = slices.DeleteFunc(slices.Clone(env), func(v string) bool { return strings.HasPrefix(v, name+"=") })
		if value != "" {
			env = append(env, name+"="+value)
		}
	}
	return env
}
