// SPDX-License-Identifier: Apache-2.0

package member

import (
	"errors"
	"fmt"
	"os/user"
	"path"
	"slices"
	"strconv"
	"strings"

	"sockeye/internal/config"
)

// AnySlot is the slot of a member that gets the first free slot.
const AnySlot = -1

// Rule is a member rule of the policy with a resolved user.
type Rule struct {
	config.Member
	uid *uint32 // nil: the users of the service
}

// Rules resolves the users of member rules. An unknown user is an error.
func Rules(members []config.Member) ([]Rule, error) {
	rules := make([]Rule, len(members))
	for i, m := range members {
		rules[i].Member = m
		if m.Match.User == "" {
			continue
		}
		uid, err := LookupUser(m.Match.User)
		if err != nil {
			return nil, fmt.Errorf("members[%d]: %w", i, err)
		}
		rules[i].uid = &uid
	}
	return rules, nil
}

// Users returns the users of the members of a service: the named users, or otherwise the users of the rules. The result
// is empty if there are no such users.
func Users(names []string, rules []Rule) ([]uint32, error) {
	var uids []uint32
	for _, name := range names {
		uid, err := LookupUser(name)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(uids, uid) { // one user may be given by name and by number
			uids = append(uids, uid)
		}
	}
	if len(names) == 0 {
		for _, r := range rules {
			if r.uid != nil && !slices.Contains(uids, *r.uid) {
				uids = append(uids, *r.uid)
			}
		}
	}
	return uids, nil
}

// CheckUsers returns an error of type [config.Errors] that lists all unknown users of a policy, or nil.
func CheckUsers(policy *config.Policy) error {
	var flaws config.Errors
	check := func(path, name string) {
		if name == "" {
			return
		}
		_, err := LookupUser(name)
		if _, ok := errors.AsType[user.UnknownUserError](err); ok {
			flaws = append(flaws, policy.Flaw(path, fmt.Sprintf("there is no user %q", name), "create it, or name another"))
		} else if err != nil {
			flaws = append(flaws, policy.Flaw(path, err.Error(), ""))
		}
	}
	for _, s := range policy.Services {
		path := "services." + s.Name
		for i, name := range s.Users {
			if len(s.Users) == 1 {
				check(path+".user", name)
			} else {
				check(fmt.Sprintf("%s.user[%d]", path, i), name)
			}
		}
		for i, m := range s.Members {
			check(fmt.Sprintf("%s.members[%d].match.user", path, i), m.Match.User)
		}
	}
	if len(flaws) == 0 {
		return nil
	}
	flaws.Sort()
	return flaws
}

// Users returns the users whose processes the rule admits: the user of the rule, or otherwise the users of the service.
func (r *Rule) Users(service []uint32) []uint32 {
	if r.uid != nil {
		return []uint32{*r.uid}
	}
	return service
}

// LookupUser returns the id of a user given by name or number.
func LookupUser(name string) (uint32, error) {
	if uid, err := strconv.ParseUint(name, 10, 32); err == nil {
		return uint32(uid), nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		return 0, fmt.Errorf("look up user %s: %w", name, err)
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("look up user %s: %w", name, err)
	}
	return uint32(uid), nil
}

// InCgroup returns whether a process is in a cgroup or in a descendant of it.
func (p *Process) InCgroup(cgroup string) bool {
	return cgroup == "/" || p.Cgroup == cgroup || strings.HasPrefix(p.Cgroup, cgroup+"/")
}

// Matches returns whether the process has the attributes of the rule. Admit then checks whether the process may be a
// member.
func (r *Rule) Matches(p *Process) bool {
	m := r.Match
	unit, _ := p.Unit()
	return glob(m.SystemdUnit, unit) && glob(m.Cgroup, p.Cgroup) && glob(m.Executable, p.Exe) &&
		(m.CommandLine == nil || m.CommandLine.MatchString(p.Command()))
}

func glob(pattern, name string) bool {
	if pattern == "" {
		return true
	}
	ok, err := path.Match(pattern, name)
	return ok && err == nil
}

// Slot returns the slot of a matching process, 0 to slots-1, or AnySlot.
func (r *Rule) Slot(p *Process, slots int) (int, error) {
	var text, source string
	switch r.SlotRule().Kind {
	case config.SlotFree:
		return AnySlot, nil
	case config.SlotNumber:
		return r.SlotRule().Number, nil
	case config.SlotInstance:
		unit, instance := p.Unit()
		text, source = instance, "instance of unit "+unit
	case config.SlotGroup:
		groups := r.Match.CommandLine.FindStringSubmatch(p.Command())
		if len(groups) < 2 {
			return 0, errors.New("the command line has no slot number")
		}
		text, source = groups[1], "slot number of the command line"
	case config.SlotEnvironment:
		if text = p.SlotVariable(); text == "" {
			return 0, errors.New("the environment has no SOCKEYE_SLOT")
		}
		source = "SOCKEYE_SLOT"
	}
	slot, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("%s is %q, want a number", source, text[:min(len(text), maxValue)])
	}
	if slot < 0 || slot >= slots {
		return 0, fmt.Errorf("%s is %d, want 0 to %d", source, slot, slots-1)
	}
	return slot, nil
}

// SlotRule returns the source of the slot number.
func (r *Rule) SlotRule() config.SlotRule { return r.Member.Slot }
