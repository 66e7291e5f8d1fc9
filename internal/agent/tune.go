// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/tune"
)

// tuner keeps the tuning of one cgroup in step with the policy. Connections
// never wait for it.
type tuner struct {
	host *host
	log  *slog.Logger
	name string // of the cgroup in the policy

	mu       sync.Mutex
	rules    []config.TuneRule
	services []config.Service
	skipped  map[string][]TuneSkipped // by rule
	scope    tuneScope
	tune     *bpf.Tune // nil while there is no such cgroup
	problem  error
}

// tuneScope is kept with the pins: what to undo, whoever does it.
type tuneScope struct {
	Cgroup string `json:"cgroup"` // as in the policy
	Path   string `json:"path"`   // absolute
	// Created are the folders that were made for it, outermost first.
	Created []string `json:"created,omitempty"`
}

// tuneChange is what a new policy makes of one cgroup's tuning. Rules is nil
// where there is none any more.
type tuneChange struct {
	name     string
	rules    []config.TuneRule
	services []config.Service
}

func (h *host) tuningDir(cgroup string) string {
	// Names in a bpffs have no dots.
	readable := strings.Trim(strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' {
			return r
		}
		return '_'
	}, cgroup), "_")
	sum := sha256.Sum256([]byte(cgroup))
	return h.root.Tuning(readable[:min(len(readable), 40)] + "_" + hex.EncodeToString(sum[:4]))
}

func openTuner(h *host, log *slog.Logger, c tuneChange) (*tuner, error) {
	t := &tuner{host: h, log: log.With("cgroup", c.name), name: c.name}
	t.mu.Lock()
	defer t.mu.Unlock()
	dir := h.tuningDir(c.name)
	_, err := os.Stat(dir)
	fresh := errors.Is(err, fs.ErrNotExist)
	if data, err := bpf.ReadScope(dir); err == nil {
		// A damaged record is made anew.
		_ = json.Unmarshal(data, &t.scope)
	}
	t.rules, t.services = c.rules, c.services
	if err := t.open(); err != nil {
		t.release()
		if fresh {
			err = joined(err, bpf.RemoveTune(dir), removeCreated([]tuneScope{t.scope}))
		}
		return nil, err
	}
	return t, nil
}

// open attaches to the cgroup, and installs the rules. A unit that is not
// there is waited for.
func (t *tuner) open() error {
	t.problem = nil
	path, err := t.host.findCgroup(t.name)
	if errors.Is(err, fs.ErrNotExist) && !isUnit(t.name) {
		path = filepath.Join(t.host.cgroups, t.name)
		created, err := makeCgroup(t.host.cgroups, path)
		// Some may have been made before, and removed by others.
		t.scope.Created = slices.Compact(slices.Sorted(slices.Values(append(t.scope.Created, created...))))
		if err != nil {
			return err
		}
	} else if errors.Is(err, fs.ErrNotExist) {
		t.problem = withHint(fmt.Errorf("there is no unit %s", t.name), "its connections are tuned from the moment it starts")
		return nil
	} else if err != nil {
		return err
	}
	t.scope.Cgroup, t.scope.Path = t.name, path
	opened, err := bpf.OpenTune(bpf.TuneConfig{Dir: t.host.tuningDir(t.name), Cgroup: path})
	if err != nil {
		return err
	}
	t.tune = opened
	record, err := json.Marshal(t.scope)
	if err != nil {
		return err
	}
	if err := opened.SetScope(record); err != nil {
		return err
	}
	return t.install(t.rules, t.services)
}

// install makes rules take effect; those before stay if it fails.
func (t *tuner) install(rules []config.TuneRule, services []config.Service) error {
	skipped, err := t.host.lacking(rules)
	if err != nil {
		return err
	}
	if t.tune != nil {
		compiled, err := compileTune(rules, services, skipped)
		if err != nil {
			return err
		}
		if err := t.tune.Install(compiled); err != nil {
			return err
		}
	}
	t.rules, t.services, t.skipped = rules, services, skipped
	if t.tune != nil {
		t.problem = nil
	}
	return nil
}

func compileTune(rules []config.TuneRule, services []config.Service, skipped map[string][]TuneSkipped) (*bpf.TuneRules, error) {
	compiled, err := tune.Compile(rules, services, func(rule config.TuneRule, option string) bool {
		return slices.ContainsFunc(skipped[rule.Name], func(s TuneSkipped) bool { return s.Option == option })
	})
	if err != nil {
		return nil, Usage(err, "join prefixes of rules that set the same")
	}
	return compiled, nil
}

// renew attaches again if the cgroup was made anew, as when a unit starts.
// Others are the cgroups that the policy names.
func (t *tuner) renew(others []tuneChange) {
	t.mu.Lock()
	defer t.mu.Unlock()
	path, err := t.host.findCgroup(t.name)
	if t.tune != nil && t.tune.Attached() && err == nil && path == t.scope.Path {
		return
	}
	t.release()
	if err := t.reopen(others); err != nil {
		if t.problem == nil || t.problem.Error() != err.Error() {
			t.log.Warn("cgroup not tuned", "error", err)
		}
		t.problem = err
		return
	}
	if t.tune != nil {
		t.log.Info("cgroup tuned", "path", t.scope.Path)
	}
}

func (t *tuner) reopen(others []tuneChange) error {
	for _, other := range others {
		// A unit may start anywhere.
		if err := t.host.checkNested([]tuneChange{{name: t.name}, other}); err != nil {
			return err
		}
	}
	return t.open()
}

func (t *tuner) release() {
	if t.tune != nil {
		t.tune.Close()
		t.tune = nil
	}
}

func (t *tuner) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.release()
}

// retire ends the tuning. New connections get the kernel's defaults, open ones
// keep what they have.
func (t *tuner) retire() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.release()
	if err := bpf.RemoveTune(t.host.tuningDir(t.name)); err != nil {
		return err
	}
	return removeCreated([]tuneScope{t.scope})
}

// tuneScopes reads the records of all tunings that are pinned.
func tuneScopes(pins string) []tuneScope {
	dirs, err := filepath.Glob(filepath.Join(pins, bpf.TunePins+"*"))
	if err != nil {
		return nil
	}
	var scopes []tuneScope
	for _, dir := range dirs {
		var s tuneScope
		if data, err := bpf.ReadScope(dir); err == nil && json.Unmarshal(data, &s) == nil {
			scopes = append(scopes, s)
		}
	}
	return scopes
}

// removeCreated removes the cgroups that were made for tuning, unless somebody
// uses them.
func removeCreated(scopes []tuneScope) error {
	var errs []error
	for _, s := range scopes {
		for _, dir := range slices.Backward(s.Created) {
			err := unix.Rmdir(dir)
			if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTEMPTY) {
				break
			}
			if err != nil && !errors.Is(err, unix.ENOENT) {
				errs = append(errs, fmt.Errorf("remove cgroup %s: %w", dir, err))
			}
		}
	}
	return joined(errs...)
}

// makeCgroup makes a cgroup and those above it, and returns what it made.
func makeCgroup(mount, path string) (created []string, err error) {
	below, err := filepath.Rel(mount, path)
	if err != nil {
		return nil, err
	}
	dir := mount
	for part := range strings.SplitSeq(below, "/") {
		dir = filepath.Join(dir, part)
		err := os.Mkdir(dir, 0o755)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return created, fmt.Errorf("create cgroup: %w", err)
		}
		created = append(created, dir)
	}
	return created, nil
}

// isTop tells whether a cgroup is right below the root, where only those may
// make one who may write everywhere.
func isTop(name string) bool { return filepath.Dir(name) == "/" && name != "/" }

// mayCreate fails if the cgroup of a policy is to be made and this process has
// no right to.
func (h *host) mayCreate(name string) error {
	if isUnit(name) {
		return nil
	}
	dir := filepath.Join(h.cgroups, name)
	for {
		_, err := os.Stat(dir)
		if err == nil {
			break
		}
		if !errors.Is(err, fs.ErrNotExist) || dir == h.cgroups {
			return err
		}
		dir = filepath.Dir(dir)
	}
	if dir == filepath.Join(h.cgroups, name) {
		return nil
	}
	if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK, unix.AT_EACCESS); err != nil {
		return &Error{Err: fmt.Errorf("create cgroup %s: %w", name, err),
			Hint: "create it, or restart the agent: it keeps that right if the policy names such a cgroup then", Code: CodeNotPermitted}
	}
	return nil
}

func isUnit(name string) bool { return !strings.HasPrefix(name, "/") }

// findCgroup finds the folder of a cgroup of the policy: a path, or the name
// of a systemd unit. It fails with fs.ErrNotExist if there is none.
func (h *host) findCgroup(name string) (string, error) {
	if !isUnit(name) {
		path := filepath.Join(h.cgroups, name)
		_, err := os.Stat(path)
		return path, err
	}
	if strings.HasSuffix(name, ".slice") {
		path := filepath.Join(h.cgroups, slicePath(name))
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			return path, err
		}
	}
	var found []string
	err := filepath.WalkDir(h.cgroups, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // gone meanwhile
		case err != nil:
			return err
		case d.IsDir() && d.Name() == name:
			found = append(found, path)
			return filepath.SkipDir
		}
		return nil
	})
	switch {
	case err != nil:
		return "", fmt.Errorf("find unit %s: %w", name, err)
	case len(found) == 0:
		return "", fmt.Errorf("find unit %s: %w", name, fs.ErrNotExist)
	case len(found) > 1:
		return "", conflict(fmt.Errorf("find unit %s: there are %d: %s", name, len(found), strings.Join(found, ", ")), "name one by its path")
	}
	return found[0], nil
}

// slicePath is where systemd puts a slice: a-b.slice is in a.slice
// (systemd.slice(5)).
func slicePath(name string) string {
	if name == "-.slice" {
		return "/"
	}
	var path strings.Builder
	base := strings.TrimSuffix(name, ".slice")
	for i, r := range base {
		if r == '-' {
			path.WriteString("/" + base[:i] + ".slice")
		}
	}
	return path.String() + "/" + name
}

// tunings splits the rules of a policy by cgroup.
func tunings(policy *config.Policy) []tuneChange {
	var all []tuneChange
	for _, rule := range policy.Tune {
		i := slices.IndexFunc(all, func(c tuneChange) bool { return c.name == rule.Cgroup })
		if i < 0 {
			i = len(all)
			all = append(all, tuneChange{name: rule.Cgroup, services: policy.Services})
		}
		all[i].rules = append(all[i].rules, rule)
	}
	return all
}

// prepareTune says what a policy changes in the tuning of cgroups, and checks
// that it can be done.
func (a *Agent) prepareTune(policy *config.Policy) ([]tuneChange, []Change, error) {
	var (
		steps   []tuneChange
		changes []Change
	)
	wanted := tunings(policy)
	if err := a.host.checkNested(wanted); err != nil {
		return nil, nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(a.tuners)) {
		if !slices.ContainsFunc(wanted, func(c tuneChange) bool { return c.name == name }) {
			steps = append(steps, tuneChange{name: name})
			for _, rule := range a.tuners[name].rules {
				changes = append(changes, removedRule(name, rule))
			}
		}
	}
	for _, c := range wanted {
		t := a.tuners[c.name]
		if t == nil {
			if err := a.host.mayCreate(c.name); err != nil {
				return nil, nil, ofCgroup(c.name, err)
			}
		}
		skipped, err := a.host.lacking(c.rules)
		if err != nil {
			return nil, nil, ofCgroup(c.name, err)
		}
		if _, err := compileTune(c.rules, c.services, skipped); err != nil {
			return nil, nil, ofCgroup(c.name, err)
		}
		if t == nil {
			steps = append(steps, c)
			changes = append(changes, a.host.newTuning(c)...)
			for _, rule := range c.rules {
				changes = append(changes, addedRule(c.name, rule))
			}
			continue
		}
		diff := changedRules(c.name, t.rules, c.rules)
		if len(diff) > 0 || servicesMatter(c.rules) && !reflect.DeepEqual(listenersOf(t.services), listenersOf(c.services)) {
			steps = append(steps, c)
			changes = append(changes, diff...)
		}
	}
	return steps, changes, nil
}

func listenersOf(services []config.Service) map[string][]config.Listener {
	listeners := make(map[string][]config.Listener)
	for _, s := range services {
		listeners[s.Name] = s.Listeners
	}
	return listeners
}

func servicesMatter(rules []config.TuneRule) bool {
	return slices.ContainsFunc(rules, func(r config.TuneRule) bool { return r.Match.Service != "" })
}

// newTuning says what beginning with a cgroup does to it.
func (h *host) newTuning(c tuneChange) []Change {
	_, err := h.findCgroup(c.name)
	switch {
	case !errors.Is(err, fs.ErrNotExist):
		return nil
	case isUnit(c.name):
		return []Change{{Cgroup: c.name, Action: "add", What: "unit", Effect: "there is none now: it is tuned from the moment it starts"}}
	}
	return []Change{{Cgroup: c.name, Action: "add", What: "cgroup", Effect: "it is created, and removed when the policy names it no more"}}
}

func addedRule(cgroup string, rule config.TuneRule) Change {
	what := "rule " + rule.Name
	if set := describeSet(rule); set != "" {
		what += ": " + set
	}
	return Change{Cgroup: cgroup, Action: "add", What: what, Effect: "for new connections: " + rule.Match.String()}
}

func removedRule(cgroup string, rule config.TuneRule) Change {
	return Change{Cgroup: cgroup, Action: "remove", What: "rule " + rule.Name,
		Effect: "new connections get a later rule or the kernel's defaults, open ones keep what they have"}
}

// describeSet says what a rule does.
func describeSet(rule config.TuneRule) string {
	var parts []string
	for _, s := range rule.Set {
		parts = append(parts, s.String())
	}
	if rule.Tag != nil {
		parts = append(parts, "tag "+config.FormatTag(rule.Tag))
	}
	return strings.Join(parts, ", ")
}

// changedRules compares lists of rules, by name.
func changedRules(cgroup string, from, to []config.TuneRule) []Change {
	var changes []Change
	find := func(rules []config.TuneRule, name string) int {
		return slices.IndexFunc(rules, func(r config.TuneRule) bool { return r.Name == name })
	}
	var before, after []string
	for _, rule := range from {
		if find(to, rule.Name) < 0 {
			changes = append(changes, removedRule(cgroup, rule))
		} else {
			before = append(before, rule.Name)
		}
	}
	for _, rule := range to {
		i := find(from, rule.Name)
		if i < 0 {
			changes = append(changes, addedRule(cgroup, rule))
			continue
		}
		after = append(after, rule.Name)
		old := from[i]
		parts := changedSettings(old, rule)
		for _, part := range []struct{ what, from, to string }{
			{"match", old.Match.String(), rule.Match.String()},
			{"react", textOf(old.React), textOf(rule.React)},
			{"trial", textOf(old.Trial), textOf(rule.Trial)},
			{"observe", string(old.Observe), string(rule.Observe)},
			{"optional", fmt.Sprint(old.Optional), fmt.Sprint(rule.Optional)},
		} {
			if part.from != part.to {
				parts = append(parts, fmt.Sprintf("%s: %s -> %s", part.what, orNone(part.from), orNone(part.to)))
			}
		}
		if len(parts) == 0 && !reflect.DeepEqual(old, rule) {
			parts = append(parts, "match: other prefixes or ports") // which the text shortens
		}
		for _, part := range parts {
			changes = append(changes, Change{Cgroup: cgroup, Action: "change", What: "rule " + rule.Name + ": " + part, Effect: "for new connections"})
		}
	}
	if !slices.Equal(before, after) {
		changes = append(changes, Change{Cgroup: cgroup, Action: "change", Effect: "the first rule that matches decides",
			What: fmt.Sprintf("order: %s -> %s", strings.Join(before, ", "), strings.Join(after, ", "))})
	}
	return changes
}

// changedSettings compares what two versions of a rule set, option by option.
func changedSettings(from, to config.TuneRule) []string {
	value := func(rule config.TuneRule, option string) string {
		for _, s := range rule.Set {
			if s.Option == option {
				return strings.TrimPrefix(s.String(), option+" ")
			}
		}
		return ""
	}
	var changed []string
	for _, o := range config.TuneOptions {
		if a, b := value(from, o.Name), value(to, o.Name); a != b {
			changed = append(changed, fmt.Sprintf("%s: %s -> %s", o.Name, cmp.Or(a, "unset"), cmp.Or(b, "unset")))
		}
	}
	if a, b := config.FormatTag(from.Tag), config.FormatTag(to.Tag); a != b {
		changed = append(changed, fmt.Sprintf("tag: %s -> %s", orNone(a), orNone(b)))
	}
	return changed
}

func textOf[T any](v *T) string {
	if v == nil {
		return ""
	}
	return fmt.Sprint(any(v))
}

// checkNested refuses cgroups of which one holds another: the programs of both
// would run, and the outer one's would have the last word.
func (h *host) checkNested(all []tuneChange) error {
	paths := make(map[string]string)
	for _, c := range all {
		path, err := h.findCgroup(c.name)
		if errors.Is(err, fs.ErrNotExist) {
			path = filepath.Join(h.cgroups, c.name)
		} else if err != nil {
			return ofCgroup(c.name, err)
		}
		paths[c.name] = path
	}
	for _, outer := range all {
		for _, inner := range all {
			if outer.name == inner.name {
				continue
			}
			if below, err := filepath.Rel(paths[outer.name], paths[inner.name]); err == nil && below != ".." && !strings.HasPrefix(below, "../") {
				return conflict(fmt.Errorf("tune: cgroup %s is in cgroup %s, whose rules would override its own", inner.name, outer.name),
					"write all rules for one of them, or for cgroups beside each other")
			}
		}
	}
	return nil
}

// lacking tells which options of rules the kernel cannot set. It fails for a
// rule that does not say optional.
func (h *host) lacking(rules []config.TuneRule) (map[string][]TuneSkipped, error) {
	skipped := make(map[string][]TuneSkipped)
	for _, rule := range rules {
		settings := rule.Set
		if rule.React != nil {
			settings = slices.Concat(settings, rule.React.Set)
		}
		for _, s := range settings {
			needs, err := h.lacks(s)
			if err != nil {
				return nil, err
			}
			if needs == "" {
				continue
			}
			if !rule.Optional {
				return nil, &Error{Err: fmt.Errorf("rule %s: this kernel cannot set %s: it needs %s", rule.Name, s.Option, needs),
					Hint: "leave it out, or give the rule optional: true to have it skipped", Code: CodeUnsupported}
			}
			skipped[rule.Name] = append(skipped[rule.Name], TuneSkipped{s.Option, needs})
		}
	}
	return skipped, nil
}

// lacks says what the kernel would need for a setting, "" if nothing.
func (h *host) lacks(s config.Setting) (string, error) {
	supported, err := h.probeTune()
	if err != nil {
		return "", err
	}
	o, _ := tune.FindOption(s.Option)
	if err := supported[s.Option]; errors.Is(err, ebpf.ErrNotSupported) {
		return "Linux " + o.Since + " or later", nil
	} else if err != nil {
		return "", fmt.Errorf("probe %s: %w", s.Option, err)
	}
	if s.Option == "congestion" {
		available, err := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control")
		if err != nil {
			return "", fmt.Errorf("read congestion controls: %w", err)
		}
		if !slices.Contains(strings.Fields(string(available)), s.Text) {
			return fmt.Sprintf("the module tcp_%s, loaded", s.Text), nil
		}
	}
	return "", nil
}

// probeTune tries, once, what the kernel can set.
func (h *host) probeTune() (map[string]error, error) {
	h.probing.Lock()
	defer h.probing.Unlock()
	if h.probed == nil {
		probed, err := h.probeOptions()
		if err != nil {
			return nil, fmt.Errorf("probe options: %w", err)
		}
		h.probed = probed
	}
	return h.probed, nil
}

// probeOptions probes in a cgroup at the top. There, unlike below its own, the
// agent can make one only before it has given up its rights.
func (h *host) probeOptions() (map[string]error, error) {
	probed, err := tune.Probe(h.cgroups, h.root.Dir)
	if !errors.Is(err, fs.ErrPermission) {
		return probed, err
	}
	own, failed := cgroupOf(os.Getpid())
	if failed != nil {
		return nil, joined(err, failed)
	}
	probed, err = tune.Probe(filepath.Join(h.cgroups, own), h.root.Dir)
	if errors.Is(err, fs.ErrPermission) {
		err = withHint(err, "restart the agent, which tries options before it gives up its rights")
	}
	return probed, err
}

// takeTune carries a change out, and returns what takes it back.
func (a *Agent) takeTune(c tuneChange) (back func() error, err error) {
	switch t := a.tuners[c.name]; {
	case c.rules == nil:
		before := tuneChange{c.name, t.rules, t.services}
		back = func() error { return a.openTuner(before) }
		delete(a.tuners, c.name)
		if err := t.retire(); err != nil {
			return nil, ofCgroup(c.name, joined(err, back()))
		}
	case t == nil:
		back = func() error {
			t := a.tuners[c.name]
			delete(a.tuners, c.name)
			return t.retire()
		}
		if err := a.openTuner(c); err != nil {
			return nil, err
		}
	default:
		before := tuneChange{c.name, t.rules, t.services}
		change := func(c tuneChange) error {
			t.mu.Lock()
			defer t.mu.Unlock()
			return t.install(c.rules, c.services)
		}
		back = func() error { return change(before) }
		if err := change(c); err != nil {
			return nil, ofCgroup(c.name, err)
		}
	}
	a.watchCgroups()
	return back, nil
}

func (a *Agent) openTuner(c tuneChange) error {
	t, err := openTuner(a.host, a.log, c)
	if err != nil {
		return ofCgroup(c.name, err)
	}
	a.tuners[c.name] = t
	return nil
}

// startTune makes the policy's tuning true for the first time in this agent's
// life, and removes what an earlier one left of other cgroups.
func (a *Agent) startTune(policy *config.Policy) error {
	pinned, err := a.host.root.Tunings()
	if err != nil {
		return err
	}
	wanted := tunings(policy)
	for _, name := range pinned {
		dir := a.host.root.Tuning(name)
		if slices.ContainsFunc(wanted, func(c tuneChange) bool { return a.host.tuningDir(c.name) == dir }) {
			continue
		}
		var scope tuneScope
		if data, err := bpf.ReadScope(dir); err == nil {
			// Without its record there is nothing more to remove.
			_ = json.Unmarshal(data, &scope)
		}
		if err := joined(bpf.RemoveTune(dir), removeCreated([]tuneScope{scope})); err != nil {
			return err
		}
		a.log.Info("tuning removed, it is not in the policy", "cgroup", cmp.Or(scope.Cgroup, name))
	}
	if len(wanted) > 0 {
		// Now, while there is every right to. An error comes again where it matters.
		_, _ = a.host.probeTune()
	}
	for _, c := range wanted {
		err := a.host.checkNested(wanted)
		if err == nil {
			err = a.openTuner(c)
		}
		if err == nil {
			continue
		}
		// What a policy that was good cannot do on this host today, such as after a
		// reboot with another kernel, is no reason not to do the rest.
		a.log.Warn("cgroup not tuned", "cgroup", c.name, "error", err)
		a.tuners[c.name] = &tuner{host: a.host, log: a.log.With("cgroup", c.name), name: c.name,
			rules: c.rules, services: c.services, problem: err}
	}
	a.watchCgroups()
	return nil
}

func ofCgroup(name string, err error) error {
	return &Error{Err: fmt.Errorf("tune %s: %w", name, err), Hint: Hint(err), Code: Code(err)}
}
