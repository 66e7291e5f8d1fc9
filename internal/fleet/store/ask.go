// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"sockeye/internal/fleet/table"
)

// A host asks another one by the key asks/HOST/ID, where ID is random. All hosts watch the keys of the fleet: the other host replaces the
// question by the answer, and the first one removes the key. A key without an answer ends with its lease.
const (
	askKeys = "asks/"
	// askLease is the lease of a question in seconds. Servers of etcd with the default election timeout grant 2 s at least.
	askLease = 2
	// MostQuestion is the size of the largest question in bytes.
	MostQuestion = 4000
	// MostAnswer is the size of the largest answer in bytes.
	MostAnswer = 32 << 10
	// mostAsked is the size of the largest value of a key: an envelope.
	mostAsked = MostAnswer + 100
	// mostAnswering is the number of questions that a host answers at the same time, and mostWaiting the number of those that wait for it.
	// Whoever can write to etcd can ask; further questions are not answered.
	mostAnswering, mostWaiting = 4, 64
)

// ErrNoAnswers is the error of a store whose hosts cannot be asked.
var ErrNoAnswers = errors.New("hosts of a fleet with a file cannot be asked")

// envelope is the value of asks/HOST/ID.
type envelope struct {
	Question json.RawMessage `json:"question,omitempty"`
	Answer   json.RawMessage `json:"answer,omitempty"`
}

// questions are the questions of this host, and the questions that this host answers.
type questions struct {
	open    map[string]chan json.RawMessage // by ID; guarded by mu of Etcd
	waiting chan struct{}                   // a semaphore, with those that are answered
	running chan struct{}                   // another one
	answers sync.WaitGroup
}

func newQuestions() questions {
	return questions{open: make(map[string]chan json.RawMessage), waiting: make(chan struct{}, mostWaiting), running: make(chan struct{}, mostAnswering)}
}

// Ask sends a question to another host, and returns the answer, which is untrusted: anybody with write access to etcd can answer.
func (e *Etcd) Ask(ctx context.Context, host string, question json.RawMessage) (json.RawMessage, error) {
	named := table.Host{Name: host, Weight: 1}
	if err := named.Check(); err != nil {
		return nil, err
	}
	value, err := json.Marshal(envelope{Question: question})
	if err == nil && len(question) > MostQuestion {
		err = fmt.Errorf("a question of %d bytes, at most %d", len(question), MostQuestion)
	}
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	id, answer := rand.Text(), make(chan json.RawMessage, 1)
	e.mu.Lock()
	client := e.client
	e.questions.open[id] = answer
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.questions.open, id)
	}()
	if client == nil {
		return nil, errors.New("not connected to etcd")
	}
	failed := func(err error) error {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = fmt.Errorf("etcd has not answered within %v", requestTimeout)
		}
		return fmt.Errorf("ask host %s: %w", host, err)
	}
	lease, err := client.Grant(ctx, askLease)
	if err != nil {
		return nil, failed(err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
		defer cancel()
		_, _ = client.Revoke(ctx, lease.ID) // otherwise the lease expires
	}()
	if _, err := client.Put(ctx, e.prefix+askKeys+host+"/"+id, string(value), clientv3.WithLease(lease.ID)); err != nil {
		return nil, failed(err)
	}
	select {
	case a := <-answer:
		return a, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("host %s has not answered within %v", host, requestTimeout)
	}
}

// handleAsk handles a change of the key asks/HOST/ID, where ask is HOST/ID: a question to this host, an answer to a question of this host, or
// a key of other hosts. With registered, no other host has the name of this host, so this host answers.
func (e *Etcd) handleAsk(ctx context.Context, client *clientv3.Client, ask string, kv *mvccpb.KeyValue, registered bool) {
	host, id, _ := strings.Cut(ask, "/")
	e.mu.Lock()
	answer := e.questions.open[id]
	e.mu.Unlock()
	mine := host == e.config.Host.Name && registered && e.config.Answer != nil && kv.Lease != 0
	if !mine && answer == nil || kv.Value == nil { // or the key was removed
		return
	}
	var a envelope
	valid := len(kv.Value) <= mostAsked && json.Unmarshal(kv.Value, &a) == nil
	switch {
	case answer != nil && (!valid || a.Answer != nil):
		select {
		case answer <- a.Answer: // without contents if the value is not valid: the caller refuses such an answer
		default: // answered
		}
	case valid && a.Answer == nil && mine && a.Question != nil && len(a.Question) <= MostQuestion:
		e.answer(ctx, client, kv, a.Question)
	}
}

// answer answers a question, unless too many wait.
func (e *Etcd) answer(ctx context.Context, client *clientv3.Client, kv *mvccpb.KeyValue, question json.RawMessage) {
	q := &e.questions
	select {
	case q.waiting <- struct{}{}:
	default:
		return
	}
	q.answers.Go(func() {
		defer func() { <-q.waiting }()
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		select {
		case q.running <- struct{}{}:
			defer func() { <-q.running }()
		case <-ctx.Done():
			return
		}
		answer := e.config.Answer(question)
		value, err := json.Marshal(envelope{Answer: answer})
		if answer == nil || err != nil || len(answer) > MostAnswer {
			return
		}
		key := string(kv.Key)
		_, _ = client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", kv.ModRevision)).
			Then(clientv3.OpPut(key, string(value), clientv3.WithIgnoreLease())).Commit() // without an answer, the other host says so
	})
}
