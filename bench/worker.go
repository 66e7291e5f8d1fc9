// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"sockeye/internal/api"
	"sockeye/lab"
)

// A labBench is a benchmark in a lab.
type labBench struct {
	lab *lab.Lab
}

// group makes a cgroup below the lab's, for a rule to name, and returns its name.
func (b *labBench) group(name string) (string, error) {
	err := os.Mkdir(filepath.Join(b.lab.Cgroup(), name), 0o755)
	if err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("make cgroup: %w", err)
	}
	return name, nil
}

func (b *labBench) runDir() string { return filepath.Join(b.lab.Dir(), "run") }

// ask asks the agent.
func (b *labBench) ask(ctx context.Context, path string, into any) error {
	return api.NewClient(api.SocketPath(b.runDir())).Get(ctx, path, nil, into)
}

// worker starts a process of this program in a cgroup below the lab's; several
// may share one.
func (b *labBench) worker(ctx context.Context, n *lab.Namespace, group string, argv ...string) (*worker, error) {
	return startWorker(ctx, b.lab, n, group, append([]string{"/proc/self/exe"}, argv...)...)
}

// A worker is such a process.
type worker struct {
	*lab.Process
	in  io.WriteCloser
	out *bufio.Reader
}

func startWorker(ctx context.Context, l *lab.Lab, n *lab.Namespace, group string, argv ...string) (*worker, error) {
	w := &worker{Process: n.Command(ctx, argv...)}
	w.Name = group
	var err error
	if w.in, err = w.Cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start %s: %w", group, err)
	}
	r, stdout, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", group, err)
	}
	defer stdout.Close()
	l.AtClose(r.Close)
	w.Cmd.Stdout, w.out = stdout, bufio.NewReader(r)
	return w, w.Start()
}

func (w *worker) tell(question any) error {
	b, err := json.Marshal(question)
	if err == nil {
		_, err = w.in.Write(append(b, '\n'))
	}
	if err != nil {
		return w.fail(err)
	}
	return nil
}

func (w *worker) answer(to any) error {
	line, err := w.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, to)
	}
	if err != nil {
		return w.fail(err)
	}
	return nil
}

func (w *worker) ask(question, answer any) error {
	if err := w.tell(question); err != nil {
		return err
	}
	return w.answer(answer)
}

func (w *worker) fail(err error) error {
	_ = w.Kill()
	return fmt.Errorf("ask %s: %w: %w", w.Name, err, w.Err())
}
