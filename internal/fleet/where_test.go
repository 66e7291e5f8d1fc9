// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/fleet/store"
	"sockeye/internal/placement"
)

// wherever are services that have every device in slot 1, and say that host b serves it.
type wherever struct {
	services
	service string
}

func (w *wherever) Where(addresses []netip.Addr) (list []api.WhereStatus) {
	ready := true
	for _, a := range addresses {
		list = append(list, api.WhereStatus{Service: cmp.Or(w.service, "telemetry"), Address: a, Slot: 1, Bucket: 7, Host: "b", Ready: &ready})
	}
	return list
}

// answering is a store in which one host answers.
type answering struct {
	store.Store
	mu        sync.Mutex
	questions []int // numbers of addresses
	answer    func(asked json.RawMessage) json.RawMessage
}

func (a *answering) Ask(_ context.Context, host string, asked json.RawMessage) (json.RawMessage, error) {
	var q question
	if err := json.Unmarshal(asked, &q); err != nil {
		return nil, err
	}
	if host == "c" {
		return nil, errors.New("host c is silent")
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.questions = append(a.questions, len(q.Where))
	return a.answer(asked), nil
}

// TestWhere is that a host asks the hosts of devices for their slots, at most a number of addresses at once, and not in vain.
func TestWhere(t *testing.T) {
	at := func(host string) *participation {
		p := &participation{settings: &settings{Fleet: config.Fleet{Etcd: new(config.FleetEtcd)}, host: host}, services: new(wherever), table: snapshot(7).Table, asking: newAsking()}
		p.state.Snapshot = snapshot(7)
		var err error
		p.mapping, err = placement.NewMapping(1, 0, 7, nil)
		check(t, err)
		return p
	}
	a, b := at("a"), at("b")
	hosts := &answering{answer: b.answer}
	a.store = hosts
	var addresses []netip.Addr
	for i := range 3 * mostAskedAddresses {
		addresses = append(addresses, netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), netip.MustParseAddr(fmt.Sprintf("2001:db8::%x%%eth0", i)))
	}
	served := make(map[string]int)
	byHost, _, _ := a.addressesOfOthers(addresses)
	for host, list := range byHost {
		served[host] = len(list)
	}
	where := func(addresses []netip.Addr) *api.FleetWhere {
		t.Helper()
		told, err := a.where(t.Context(), addresses, false)
		check(t, err)
		return told
	}
	if served["a"] > 0 || served["b"] < 50 || served["c"] < 50 {
		t.Fatalf("%v", served)
	}
	all := where(addresses)
	if len(all.Slots) != served["b"] || len(all.Silent) != 1 || all.Silent["c"] != "host c is silent" {
		t.Errorf("%d slots, want %d; silent are %v", len(all.Slots), served["b"], all.Silent)
	}
	asked := 0
	for _, n := range hosts.questions {
		asked += n
		if n > mostAskedAddresses {
			t.Errorf("%d addresses in one question", n)
		}
	}
	if asked != served["b"] {
		t.Errorf("%d addresses were asked for, want %d", asked, served["b"])
	}
	for _, slot := range all.Slots {
		if slot.Host != "b" || slot.Slot != 1 || slot.Bucket != 7 || slot.Ready == nil {
			t.Errorf("%+v", slot)
		}
	}

	// The largest question fits into the store.
	longest := make([]netip.Addr, mostAskedAddresses)
	for i := range longest {
		longest[i] = netip.MustParseAddr("1111:2222:3333:4444:5555:6666:7777:8888")
	}
	large, err := json.Marshal(question{Where: longest})
	check(t, err)
	if len(large) > store.MostQuestion {
		t.Errorf("a question has up to %d bytes", len(large))
	}
	few := addresses[:20]
	// Root does not wait for the questions of others.
	for range mostAskedHosts {
		a.asking.hosts <- struct{}{}
	}
	a.asking.free = time.Now().Add(time.Hour)
	if told, err := a.where(t.Context(), few, true); err != nil || len(told.Slots) == 0 {
		t.Errorf("root: %+v, %v", told, err)
	}
	ended, end := context.WithTimeout(t.Context(), 10*time.Millisecond)
	if told, err := a.where(ended, few, false); err != nil || len(told.Slots) > 0 || !strings.HasPrefix(told.Silent["b"], "host b was not asked") {
		t.Errorf("another user: %+v, %v", told, err)
	}
	end()
	a.asking = newAsking()
	for answer, want := range map[string]string{
		`[{"service":"telemetry","address":"10.9.9.9","ready":true}]`:                      "", // not asked for
		fmt.Sprintf(`[{"service":"telemetry","address":%q,"slot":1024}]`, addresses[0]):    "",
		fmt.Sprintf(`[{"service":"telemetry","address":%q,"bucket":16384}]`, addresses[0]): "",
		`null`: "",
		`{}`:   "host b returned an invalid answer",
		`[1]`:  "host b returned an invalid answer",
	} {
		hosts.answer = func(json.RawMessage) json.RawMessage { return json.RawMessage(answer) }
		told := where(few)
		if len(told.Slots) > 0 || told.Silent["b"] != want {
			t.Errorf("%s: %+v", answer, told)
		}
	}
	// A dead host is not asked, and none without the store.
	hosts.questions = nil
	a.state.Hosts[1].Alive = false
	if told := where(few); told.Silent["b"] != "host b is dead" {
		t.Errorf("%+v", told)
	}
	a.state.Connected = false
	if told := where(few); told.Silent["b"] != "etcd does not answer: the slot is known on host b" || told.Silent["c"] != "etcd does not answer: the slot is known on host c" {
		t.Errorf("%+v", told)
	}
	if _, err := a.where(t.Context(), make([]netip.Addr, mostWhere+1), false); err == nil {
		t.Error("too many addresses are accepted")
	}
	// Hosts of a file are not asked, and without a table there is none.
	a.settings.Etcd = nil
	if told := where(addresses); len(told.Slots)+len(told.Silent)+len(hosts.questions) > 0 || told.Asks || told.Host != "a" {
		t.Errorf("with a file: %+v", told)
	}
	a.table = nil
	if told := where(addresses); len(told.Slots)+len(told.Silent) > 0 {
		t.Errorf("without a table: %+v", told)
	}
	for _, asked := range []string{``, `1`, `{"where":["x"]}`, `{"where":[""]}`, `{"where":[` + strings.Repeat(`"10.0.0.1",`, mostAskedAddresses) + `"10.0.0.1"]}`} {
		if answer := b.answer(json.RawMessage(asked)); answer != nil {
			t.Errorf("%s: %s", asked, answer)
		}
	}
	// A host answers for its own devices alone, and as much as fits into the store.
	if answer := a.answer(json.RawMessage(`{"where":["10.0.0.1"]}`)); string(answer) != `[]` {
		t.Errorf("%s", answer)
	}
	b.services.(*wherever).service = strings.Repeat("x", store.MostAnswer/mostAskedAddresses)
	var list []slotAnswer
	if answer := b.answer(large); json.Unmarshal(answer, &list) != nil || len(list) == 0 || len(list) == mostAskedAddresses || len(answer) > store.MostAnswer {
		t.Errorf("%d entries in %d bytes", len(list), len(answer))
	}
}

// TestPace is that a host asks many questions at once, and then one after the other.
func TestPace(t *testing.T) {
	a := newAsking()
	begun := time.Now()
	for range askBurst + 3 {
		check(t, a.pace(t.Context()))
	}
	if took := time.Since(begun); took < 2*askPause {
		t.Errorf("%d questions took %v", askBurst+3, took)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := a.pace(ended); err == nil {
		t.Error("a request that has ended asks")
	}
}
