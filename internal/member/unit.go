// SPDX-License-Identifier: Apache-2.0

package member

import "strings"

// UnitOf returns the unit of the system's service manager that the processes of a cgroup belong to, and
// the instance of a template's unit: what systemd itself makes of the path (cg_path_get_unit in
// systemd's src/basic/cgroup-util.c). Slices at the beginning are passed over; the first component
// after them is the unit if it is a valid unit's name, whatever is below it. So the units of a
// user's own service manager, which anybody may name as he likes, are all user@UID.service. Both are
// "" where there is no unit.
func UnitOf(cgroup string) (unit, instance string) {
	for part := range strings.SplitSeq(cgroup, "/") {
		if part == "" {
			continue
		}
		// A component that would look like a file of the kernel's begins with _ (cg_escape).
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

// isUsers tells whether a cgroup is that of a login session or of a user's own service manager, in
// which this user decides what runs in which group.
func isUserControlled(cgroup string) bool {
	return strings.HasPrefix(cgroup+"/", "/user.slice/")
}

// unitKinds are the types of units (systemd.unit(5)).
var unitKinds = map[string]bool{
	"service": true, "socket": true, "target": true, "device": true, "mount": true, "automount": true,
	"swap": true, "timer": true, "path": true, "slice": true, "scope": true,
}

// maxUnitName is UNIT_NAME_MAX, which no name reaches.
const maxUnitName = 256

// cutUnit splits the name of a unit at its last dot. It says no to what is no name of a unit: those
// of templates, as a@.service, have no processes (unit_name_is_valid in src/basic/unit-name.c).
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
