// SPDX-License-Identifier: Apache-2.0

package member

import "strings"

// UnitOf returns the system unit of a cgroup, and the instance name of a template unit, with the algorithm of systemd
// (cg_path_get_unit in src/basic/cgroup-util.c): the unit is the first path component that is not a slice, if it is a
// valid unit name, regardless of the components below. All units of a user's service manager, which the user may name
// freely, are therefore user@UID.service. Both results are "" if there is no unit.
func UnitOf(cgroup string) (unit, instance string) {
	for part := range strings.SplitSeq(cgroup, "/") {
		if part == "" {
			continue
		}
		// systemd prefixes _ to names that could be files of the kernel (cg_escape).
		name := strings.TrimPrefix(part, "_")
		base, kind, ok := cutUnit(name)
		if ok && kind == "slice" && !strings.Contains(base, "@") {
			continue
		}
		if !ok || kind == "slice" {
			return "", ""
		}
		_, instance, _ = strings.Cut(base, "@")
		return name, instance
	}
	return "", ""
}

// isUserControlled reports whether a cgroup belongs to a login session or to a user's service manager. The user decides
// which processes run in such a cgroup.
func isUserControlled(cgroup string) bool {
	return strings.HasPrefix(cgroup+"/", "/user.slice/")
}

// unitKinds has the unit types of systemd.unit(5).
var unitKinds = map[string]bool{
	"service": true, "socket": true, "target": true, "device": true, "mount": true, "automount": true,
	"swap": true, "timer": true, "path": true, "slice": true, "scope": true,
}

// maxUnitName is UNIT_NAME_MAX; valid names are shorter.
const maxUnitName = 256

// cutUnit splits a unit name at its last dot. ok is false for an invalid name (unit_name_is_valid in
// src/basic/unit-name.c), and for a template such as a@.service, which has no processes.
func cutUnit(name string) (base, kind string, ok bool) {
	dot := strings.LastIndexByte(name, '.')
	if dot <= 0 || len(name) >= maxUnitName {
		return "", "", false
	}
	base, kind = name[:dot], name[dot+1:]
	const others = `@:-_.\`
	for _, c := range []byte(base) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && strings.IndexByte(others, c) < 0 {
			return "", "", false
		}
	}
	at := strings.IndexByte(base, '@')
	return base, kind, unitKinds[kind] && at != 0 && at != len(base)-1
}
