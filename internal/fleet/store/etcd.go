// SPDX-License-Identifier: Apache-2.0

package store

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"sockeye/internal/clock"
	"sockeye/internal/fleet/table"
)

const (
	// DefaultLease is the time after which the others take a host for dead. Servers of etcd with the default election timeout
	// grant 2 s at least.
	DefaultLease = 3 * time.Second
	// requestTimeout is the time that a request may take.
	requestTimeout = 2 * time.Second
	// changeTimeout is the time that a change by the operator may take: more than etcd needs to elect a leader.
	changeTimeout = 10 * time.Second
	// gatherTime is the time in which changes are gathered for one snapshot.
	gatherTime = 5 * time.Millisecond
	// mostResponse is the size of the largest response in bytes.
	mostResponse = 64 << 20
	// leastPause and mostPause are the pauses before another attempt to connect.
	leastPause, mostPause = 100 * time.Millisecond, 2 * time.Second
)

// connectParams let all hosts connect again within seconds after an outage (absentTime): by default, the pauses between two
// attempts grow to two minutes.
var connectParams = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: leastPause, Multiplier: backoff.DefaultConfig.Multiplier, Jitter: backoff.DefaultConfig.Jitter, MaxDelay: mostPause},
	MinConnectTimeout: requestTimeout,
}

// EtcdConfig names the servers of etcd, and the fleet.
type EtcdConfig struct {
	Endpoints []string
	TLS       *tls.Config // nil: without
	Username  string
	Password  string
	// Fleet is the name of the fleet: its keys begin with sockeye/NAME/.
	Fleet string
	// Lease is the time after which the others take this host for dead, in whole seconds; 0: DefaultLease.
	Lease time.Duration
	// Host is the registration of this host at first.
	Host Registration
	// Instance names the registration; another process with the same one continues it. "": a new one.
	Instance string
	// Answer returns the answer of this host to a question of another one. It may be called several times at once; nil: this host does not
	// answer. A question has at most MostQuestion bytes; an answer that is nil, or has more than MostAnswer, is not sent.
	Answer func(question json.RawMessage) json.RawMessage
	Log    *slog.Logger
}

// Etcd is a store in etcd.
type Etcd struct {
	config   EtcdConfig
	prefix   string
	instance string

	mu           sync.Mutex
	client       *clientv3.Client // nil: not connected yet, or closed
	closed       bool
	registration Registration
	changed      chan struct{}    // the registration has changed
	lease        clientv3.LeaseID // 0: none
	last         clientv3.LeaseID // of the last session
	copies       copyLease
	problem      string // that was logged last
	questions    questions
}

// OpenEtcd returns a store in etcd. It connects later, so that an agent starts while no server answers.
func OpenEtcd(c EtcdConfig) (*Etcd, error) {
	if c.Fleet == "" || strings.ContainsAny(c.Fleet, "/ \x00") {
		return nil, fmt.Errorf("the name %q of the fleet is empty, or contains a slash or a blank", c.Fleet)
	}
	if err := c.Host.Check(); err != nil {
		return nil, err
	}
	if c.Lease == 0 {
		c.Lease = DefaultLease
	}
	return &Etcd{config: c, prefix: "sockeye/" + c.Fleet + "/", instance: cmp.Or(c.Instance, rand.Text()),
		registration: c.Host, changed: make(chan struct{}, 1),
		questions: newQuestions()}, nil
}

// Update changes the registration of this host.
func (e *Etcd) Update(r Registration) {
	e.mu.Lock()
	e.registration = r
	e.mu.Unlock()
	select {
	case e.changed <- struct{}{}:
	default:
	}
}

// Close closes the connection. With leave, the registration ends at once.
func (e *Etcd) Close(leave bool) error {
	e.mu.Lock()
	client, lease := e.client, e.last
	e.client, e.closed = nil, true
	e.mu.Unlock()
	if client == nil {
		return nil
	}
	if leave && lease != 0 {
		ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
		defer cancel()
		_, _ = client.Revoke(ctx, lease) // otherwise the lease expires
	}
	return client.Close()
}

// Run registers this host, and sends snapshots until ctx is done.
func (e *Etcd) Run(ctx context.Context, snapshots chan *Snapshot) {
	v := &view{instance: e.instance}
	defer e.questions.answers.Wait()
	for pause := leastPause; ; pause = min(2*pause, mostPause) {
		begun := time.Now()
		err := e.session(ctx, v, snapshots)
		if ctx.Err() != nil {
			return
		}
		problem := "not connected to etcd: " + e.diagnose(ctx, err).Error()
		e.note(problem)
		if v.entries != nil {
			last := v.snapshot(clock.Monotonic())
			last.Connected, last.Leads, last.Problems = false, false, append(last.Problems, problem)
			offer(snapshots, last)
		} else {
			offer(snapshots, &Snapshot{Problems: []string{problem}})
		}
		if time.Since(begun) > 10*mostPause {
			pause = leastPause
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// session reads all keys, registers this host with a lease, and follows the changes until an error.
func (e *Etcd) session(ctx context.Context, v *view, snapshots chan *Snapshot) error {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx)) // a server without a quorum is not a store
	defer cancel()
	client, err := e.connect()
	if err != nil {
		return err
	}
	all, err := e.read(ctx, client)
	if err != nil {
		return err
	}
	v.startSession(clock.Monotonic(), e.config.Lease)
	for _, some := range all.Responses {
		for _, kv := range some.GetResponseRange().GetKvs() {
			v.set(strings.TrimPrefix(string(kv.Key), e.prefix), kv.Value, kv.ModRevision, kv.Lease != 0)
		}
	}
	changes := client.Watch(ctx, e.prefix, clientv3.WithPrefix(), clientv3.WithRev(all.Header.Revision+1))
	lease, alive, err := e.grant(ctx, client)
	if err != nil {
		return err
	}
	defer e.setLease(0)
	register, publish, known := time.NewTimer(0), time.NewTimer(0), time.NewTimer(max(0, v.reached+absentTime-clock.Monotonic()))
	defer register.Stop()
	defer publish.Stop()
	defer known.Stop()
	gathering := true // publish is due
	gather := func() {
		if !gathering {
			gathering = true
			publish.Reset(gatherTime)
		}
	}
	taken, registered := "", false
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case _, ok := <-alive:
			if !ok {
				return errors.New("the lease of this host has expired")
			}
			v.contact = clock.Monotonic()
			continue
		case <-e.changed:
			register.Reset(0)
			continue
		case <-register.C:
			if taken, err = e.register(ctx, client, lease); err != nil {
				return err
			}
			if registered = taken == ""; !registered {
				register.Reset(time.Second)
			}
			gather()
			continue
		case <-known.C: // the hosts that are still absent have died
			gather()
			continue
		case c, ok := <-changes:
			if !ok {
				return errors.New("the watch has ended")
			}
			if err := c.Err(); err != nil {
				return fmt.Errorf("watch: %w", err)
			}
			for _, event := range c.Events {
				value := event.Kv.Value
				if event.Type == clientv3.EventTypeDelete {
					value = nil
				} else if value == nil {
					value = []byte{}
				}
				key := strings.TrimPrefix(string(event.Kv.Key), e.prefix)
				if ask, ok := strings.CutPrefix(key, askKeys); ok {
					e.handleAsk(ctx, client, ask, event.Kv, registered)
					continue
				}
				gather()
				v.set(key, value, event.Kv.ModRevision, event.Kv.Lease != 0)
				if key == hostKeys+e.config.Host.Name && (value == nil || event.Kv.Lease == 0) { // somebody else has deleted or replaced it
					register.Reset(0)
				}
			}
			continue
		case <-publish.C:
			gathering = false
		}
		key, led := v.entries[leaderKey]
		refuses := e.refuses()
		switch {
		case led && !key.damaged && key.leader.Instance == e.instance && refuses:
			if err := e.resign(ctx, client, key.modified); err != nil {
				return err
			}
		case (!led || key.damaged) && taken == "" && !refuses:
			if err := e.campaign(ctx, client, lease, key.modified); err != nil {
				return err
			}
		}
		s := v.snapshot(clock.Monotonic())
		if taken != "" {
			s.Problems, s.Taken = append(s.Problems, taken), true
		}
		e.note(strings.Join(s.Problems, "; "))
		offer(snapshots, s)
	}
}

// note logs a problem once, for debugging: the snapshots tell the problem to the user.
func (e *Etcd) note(problem string) {
	if problem != e.problem {
		e.problem = problem
		if problem != "" {
			e.config.Log.Debug("store of the fleet", "problem", problem)
		}
	}
}

// read reads the keys of the fleet at one revision, without questions and what else somebody may have written.
func (e *Etcd) read(ctx context.Context, client *clientv3.Client) (*clientv3.TxnResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	all, err := client.Txn(ctx).Then(clientv3.OpGet(e.prefix+tableKey), clientv3.OpGet(e.prefix+leaderKey),
		clientv3.OpGet(e.prefix+hostKeys, clientv3.WithPrefix()), clientv3.OpGet(e.prefix+settingKeys, clientv3.WithPrefix())).Commit()
	switch {
	case status.Code(err) == codes.ResourceExhausted: // whoever can write to etcd can do this
		return nil, fmt.Errorf("the keys below %s%s and %s%s have more than %d MiB: delete those of strangers with etcdctl", e.prefix, hostKeys, e.prefix, settingKeys, mostResponse>>20)
	case err != nil:
		return nil, fmt.Errorf("read the keys of the fleet: %w", err)
	}
	return all, nil
}

// grant gets a lease and keeps it alive until ctx is done. The channel is closed when the lease has expired.
func (e *Etcd) grant(ctx context.Context, client *clientv3.Client) (clientv3.LeaseID, <-chan *clientv3.LeaseKeepAliveResponse, error) {
	short, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	lease, err := client.Grant(short, int64(e.config.Lease.Seconds()))
	if err != nil {
		return 0, nil, fmt.Errorf("get a lease: %w", err)
	}
	alive, err := client.KeepAlive(ctx, lease.ID)
	if err != nil {
		return 0, nil, fmt.Errorf("keep the lease: %w", err)
	}
	e.setLease(lease.ID)
	return lease.ID, alive, nil
}

func (e *Etcd) setLease(id clientv3.LeaseID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lease = id
	if id != 0 {
		e.last = id
	}
}

// register writes the registration of this host. taken says that another process has the name.
func (e *Etcd) register(ctx context.Context, client *clientv3.Client, lease clientv3.LeaseID) (taken string, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	e.mu.Lock()
	mine := registered{e.registration, e.instance}
	e.mu.Unlock()
	value, err := json.Marshal(mine)
	if err != nil {
		return "", err
	}
	key := e.prefix + hostKeys + mine.Name
	for range 2 {
		present, err := client.Get(ctx, key)
		if err != nil {
			return "", fmt.Errorf("read the registration of this host: %w", err)
		}
		revision := int64(0)
		if len(present.Kvs) > 0 {
			revision = present.Kvs[0].ModRevision
			var other registered
			// A registration that no lease ends was not written by a host.
			if present.Kvs[0].Lease != 0 && decode(present.Kvs[0].Value, &other) == nil && other.Instance != e.instance {
				return fmt.Sprintf("another process has registered host %s: each host needs a name of its own (key host of the policy); after a restart, its lease ends within %v", mine.Name, e.config.Lease), nil
			}
		}
		done, err := client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", revision)).
			Then(clientv3.OpPut(key, string(value), clientv3.WithLease(lease))).Commit()
		if err != nil {
			return "", fmt.Errorf("register this host: %w", err)
		}
		if done.Succeeded {
			return "", nil
		}
	}
	return "the registration of this host changes all the time", nil
}

// refuses reports whether this host refuses the table of the store.
func (e *Etcd) refuses() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.registration.Refuses
}

// resign lets another host lead, if the key of the leader still has a revision.
func (e *Etcd) resign(ctx context.Context, client *clientv3.Client, revision int64) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	key := e.prefix + leaderKey
	if _, err := client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", revision)).Then(clientv3.OpDelete(key)).Commit(); err != nil {
		return fmt.Errorf("let another host lead: %w", err)
	}
	return nil
}

// campaign makes this host the leader if the key of the leader still has a revision, 0 if there is none.
func (e *Etcd) campaign(ctx context.Context, client *clientv3.Client, lease clientv3.LeaseID, revision int64) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	value, err := json.Marshal(leading{e.config.Host.Name, e.instance})
	if err != nil {
		return err
	}
	key := e.prefix + leaderKey
	_, err = client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", revision)).
		Then(clientv3.OpPut(key, string(value), clientv3.WithLease(lease))).Commit()
	if err != nil {
		return fmt.Errorf("become the leader: %w", err)
	}
	return nil
}

// Write makes a table the present one.
func (e *Etcd) Write(ctx context.Context, from *Snapshot, t *table.Table) error {
	if err := t.Check(); err != nil {
		return err
	}
	value, err := t.Encode()
	if err != nil {
		return err
	}
	leader, err := json.Marshal(leading{e.config.Host.Name, e.instance})
	if err != nil {
		return err
	}
	client, err := e.connect()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	done, err := client.Txn(ctx).If(
		clientv3.Compare(clientv3.Value(e.prefix+leaderKey), "=", string(leader)),
		clientv3.Compare(clientv3.ModRevision(e.prefix+tableKey), "=", from.revision),
	).Then(clientv3.OpPut(e.prefix+tableKey, string(value))).Commit()
	switch {
	case err != nil:
		return fmt.Errorf("write the table: %w", err)
	case !done.Succeeded:
		return ErrNotLeader
	}
	return nil
}

// ChangeSetting changes what the operator wants of a host.
func (e *Etcd) ChangeSetting(ctx context.Context, host string, change func(Setting) (Setting, error)) error {
	named := table.Host{Name: host, Weight: 1}
	if err := named.Check(); err != nil {
		return err
	}
	client, err := e.connect()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	unanswered := func(err error) error {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return fmt.Errorf("etcd has not answered within %v", changeTimeout)
		}
		return err
	}
	key := e.prefix + settingKeys + host
	for {
		found, err := client.Get(ctx, key)
		if err != nil {
			return fmt.Errorf("read the setting of host %s: %w", host, unanswered(err))
		}
		var present Setting
		revision := int64(0)
		if len(found.Kvs) > 0 {
			revision = found.Kvs[0].ModRevision
			if json.Unmarshal(found.Kvs[0].Value, &present) != nil || present.Check() != nil {
				present = Setting{} // damaged, as for snapshots
			}
		}
		next, err := change(present)
		if err == nil {
			err = next.Check()
		}
		if err != nil || next == present {
			return err
		}
		value, err := json.Marshal(next)
		if err != nil {
			return err
		}
		write := clientv3.OpPut(key, string(value))
		if next == (Setting{}) {
			write = clientv3.OpDelete(key)
		}
		done, err := client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", revision)).Then(write).Commit()
		if err != nil {
			return fmt.Errorf("write the setting of host %s: %w; sockeye fleet shows whether it was written", host, unanswered(err))
		}
		if done.Succeeded {
			return nil
		}
	}
}

// connect returns the client. With a user, it asks a server for a token first.
func (e *Etcd) connect() (*clientv3.Client, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.closed:
		return nil, errors.New("the store is closed")
	case e.client != nil:
		return e.client, nil
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints: e.config.Endpoints, TLS: e.config.TLS, Username: e.config.Username, Password: e.config.Password, Logger: zap.NewNop(),
		DialTimeout: requestTimeout, DialKeepAliveTime: time.Second, DialKeepAliveTimeout: requestTimeout, MaxCallRecvMsgSize: mostResponse,
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(connectParams)},
	})
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	e.client = client
	return client, nil
}
