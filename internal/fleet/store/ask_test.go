// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"sockeye/internal/fleet/lead"
	"sockeye/internal/testenv"
)

// answerer answers questions, and counts them.
type answerer struct {
	name  string
	mu    sync.Mutex
	asked map[string]int
}

func (a *answerer) set(c *EtcdConfig) { c.Answer = a.answer }

func (a *answerer) answer(question json.RawMessage) json.RawMessage {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked[string(question)]++
	switch string(question) {
	case `"large"`:
		return json.RawMessage(`"` + strings.Repeat("x", MostAnswer) + `"`)
	case `"none"`:
		return nil
	}
	return json.RawMessage(fmt.Sprintf(`{"to":%s,"by":%q}`, question, a.name))
}

func (a *answerer) count(question string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.asked[question]
}

// asks asks until there is an answer, and checks the answer: a busy host may not answer in time.
func (m *member) asks(host, question, want string) {
	m.t.Helper()
	for begun := time.Now(); ; {
		answer, err := m.Ask(m.t.Context(), host, json.RawMessage(question))
		switch {
		case err == nil && string(answer) == want:
			return
		case err == nil:
			m.t.Fatalf("host %s has answered %s, want %s", host, answer, want)
		case time.Since(begun) > patience:
			m.t.Fatal(err)
		}
	}
}

// TestAsk lets hosts ask each other: each answer belongs to its question, a host that does not answer is named, and no key is left.
func TestAsk(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	one, two := &answerer{name: "one", asked: make(map[string]int)}, &answerer{name: "two", asked: make(map[string]int)}
	a, b := join(t, endpoints, "a"), join(t, endpoints, "b", one.set)
	a.awaitAlive("a b")
	b.awaitAlive("a b")
	for i := range 10 {
		question := fmt.Sprintf(`"question %d"`, i)
		a.asks("b", question, `{"to":`+question+`,"by":"one"}`)
	}
	b.asks("b", `1`, `{"to":1,"by":"one"}`) // itself
	for _, silent := range []struct{ host, question string }{{"a", `2`}, {"c", `2`}, {"b", `"large"`}, {"b", `"none"`}} {
		if answer, err := b.Ask(t.Context(), silent.host, json.RawMessage(silent.question)); err == nil || !strings.HasSuffix(err.Error(), " has not answered within 2s") {
			t.Errorf("%s, %v", answer, err)
		}
		if n := one.count(silent.question); n > 1 || n > 0 && silent.host != "b" {
			t.Errorf("host b was asked %s %d times", silent.question, n)
		}
	}
	for host, question := range map[string]string{"b": `"` + strings.Repeat("x", MostQuestion) + `"`, "b/c": `3`} {
		if _, err := a.Ask(t.Context(), host, json.RawMessage(question)); err == nil {
			t.Errorf("host %s was asked a question of %d bytes", host, len(question))
		}
	}
	client := raw(t, endpoints)
	if left, err := client.Get(t.Context(), a.prefix+askKeys, clientv3.WithPrefix()); err != nil || left.Count > 0 {
		t.Errorf("%d questions are left: %v, %v", left.Count, left.Kvs, err)
	}

	// A second host of the name does not answer, nor does anybody to rubbish.
	second := join(t, endpoints, "b", two.set, func(c *EtcdConfig) { c.Instance = "second" })
	second.await("the name to be taken", func(s *Snapshot) bool { return s.Taken })
	for key, value := range map[string]string{"b/x": "rubbish", "b": "{}", "": "{}", "b/y": `{"answer":1}`, "b/z": `{"question":4}`} {
		if _, err := client.Put(t.Context(), a.prefix+askKeys+key, value); err != nil {
			t.Fatal(err)
		}
	}
	a.asks("b", `5`, `{"to":5,"by":"one"}`)
	if len(two.asked)+one.count("4")+one.count("") > 0 {
		t.Errorf("host b has answered rubbish, or with a name that another host has: %v %v", one.asked, two.asked)
	}
	b.leave()
	second.await("the name", func(s *Snapshot) bool { return !s.Taken })
	a.asks("b", `6`, `{"to":6,"by":"two"}`)
}

// TestBusyWithQuestions is that a host answers some questions at the same time, lets some wait, and goes on with the rest of its work.
func TestBusyWithQuestions(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	var running, most int
	var mu sync.Mutex
	end := make(chan struct{})
	release := sync.OnceFunc(func() { close(end) })
	a := join(t, endpoints, "a")
	b := join(t, endpoints, "b", func(c *EtcdConfig) {
		c.Answer = func(json.RawMessage) json.RawMessage {
			mu.Lock()
			running++
			most = max(most, running)
			mu.Unlock()
			<-end
			mu.Lock()
			running--
			mu.Unlock()
			return json.RawMessage(`1`)
		}
	})
	t.Cleanup(release) // before host b stops
	a.awaitAlive("a b")
	client := raw(t, endpoints)
	lease, err := client.Grant(t.Context(), 60)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2 * mostWaiting { // questions of which nobody waits for the answer
		if _, err := client.Put(t.Context(), fmt.Sprintf("%s%sb/%d", a.prefix, askKeys, i), `{"question":1}`, clientv3.WithLease(lease.ID)); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Within(t, "as many questions as a host answers", func() bool { mu.Lock(); defer mu.Unlock(); return running == mostAnswering })
	setting := Setting{Weight: 7}
	if err := a.ChangeSetting(t.Context(), "a", func(Setting) (Setting, error) { return setting, nil }); err != nil {
		t.Fatal(err)
	}
	b.await("the weight of host a", func(s *Snapshot) bool { return len(s.Hosts) == 2 && s.Hosts[0].Weight == 7 })
	release()
	a.asks("b", `1`, `1`)
	if most != mostAnswering {
		t.Errorf("%d questions at the same time", most)
	}
	if _, err := (&File{}).Ask(t.Context(), "b", nil); !errors.Is(err, ErrNoAnswers) {
		t.Errorf("with a file: %v", err)
	}
}

// TestLargeKeys fills etcd with more than a response can have: as questions, they mean nothing to a host that connects. As settings, they keep the
// host away, and it says so, until they are deleted.
func TestLargeKeys(t *testing.T) {
	t.Parallel()
	_, endpoints := startCluster(t, 1)
	client := raw(t, endpoints)
	a := join(t, endpoints, "a")
	a.write(first(3, "a"))
	fill := func(key string) {
		t.Helper()
		large := strings.Repeat("x", 1<<20)
		for i := range mostResponse >> 20 {
			if _, err := client.Put(t.Context(), fmt.Sprintf("%s%s%d", a.prefix, key, i), large); err != nil {
				t.Fatal(err)
			}
		}
	}
	fill(askKeys + "a/")
	fill("!")
	if s := join(t, endpoints, "b").awaitAlive("a b"); s.Table == nil || s.Table.Epoch != 3 || s.Leader != "a" || len(s.Problems) > 0 {
		t.Errorf("table %v, leader %s, problems %.500q", s.Table != nil, s.Leader, s.Problems)
	}
	fill(settingKeys + "!")
	c := join(t, endpoints, "c")
	c.await("too many settings", func(s *Snapshot) bool {
		return !s.Connected && strings.Contains(strings.Join(s.Problems, ""), "the keys below sockeye/test/hosts/ and sockeye/test/settings/ have more than 64 MiB: delete those of strangers")
	})
	if _, err := client.Delete(t.Context(), a.prefix+settingKeys+"!", clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	c.awaitAlive("a b c")

	// A setting without contents is none.
	if _, err := client.Put(t.Context(), a.prefix+settingKeys+"nobody", "{}"); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Put(t.Context(), a.prefix+settingKeys+"somebody", `{"state":"drain"}`); err != nil {
		t.Fatal(err)
	}
	s := a.await("the last setting", func(s *Snapshot) bool {
		return slices.ContainsFunc(s.Hosts, func(h lead.Host) bool { return h.Name == "somebody" })
	})
	if slices.ContainsFunc(s.Hosts, func(h lead.Host) bool { return h.Name == "nobody" }) {
		t.Errorf("%+v", s.Hosts)
	}
}
