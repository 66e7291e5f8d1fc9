// SPDX-License-Identifier: Apache-2.0

package harness

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

// LabBench is a benchmark in a lab.
type LabBench struct {
	Lab *lab.Lab
}

// Group creates a cgroup below that of the lab if it does not exist, and returns its name.
func (b *LabBench) Group(name string) (string, error) {
	err := os.Mkdir(filepath.Join(b.Lab.Cgroup(), name), 0o755)
	if err != nil && !errors.Is(err, os.ErrExist) {
		return "", fmt.Errorf("make cgroup: %w", err)
	}
	return name, nil
}

// RunDir returns the run directory of the agent.
func (b *LabBench) RunDir() string { return filepath.Join(b.Lab.Dir(), "run") }

// Ask sends a request to the agent and decodes its answer.
func (b *LabBench) Ask(ctx context.Context, path string, into any) error {
	return api.NewClient(api.SocketPath(b.RunDir())).Get(ctx, path, nil, into)
}

// Worker is a process that reads questions from stdin and writes answers to stdout, one JSON value per line.
type Worker struct {
	*lab.Process
	In  io.WriteCloser
	out *bufio.Reader
}

// Worker starts this program as a worker in a cgroup below that of the lab. Several workers may share a cgroup.
func (b *LabBench) Worker(ctx context.Context, n *lab.Namespace, group string, argv ...string) (*Worker, error) {
	return StartWorker(ctx, b.Lab, n, group, append([]string{"/proc/self/exe"}, argv...)...)
}

// StartWorker starts a program as a worker in a cgroup below that of the lab.
func StartWorker(ctx context.Context, l *lab.Lab, n *lab.Namespace, group string, argv ...string) (*Worker, error) {
	w := &Worker{Process: n.Command(ctx, argv...)}
	w.Name = group
	var err error
	if w.In, err = w.Cmd.StdinPipe(); err != nil {
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

// Ask sends a question and reads the answer.
func (w *Worker) Ask(question, answer any) error {
	if err := w.Send(question); err != nil {
		return err
	}
	return w.Answer(answer)
}

// Send sends a question that has no answer, or whose answer is read later.
func (w *Worker) Send(question any) error {
	b, err := json.Marshal(question)
	if err == nil {
		_, err = w.In.Write(append(b, '\n'))
	}
	if err != nil {
		return w.fail(err)
	}
	return nil
}

// Answer reads an answer. If the worker does not answer, Answer kills it.
func (w *Worker) Answer(to any) error {
	line, err := w.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, to)
	}
	if err != nil {
		return w.fail(err)
	}
	return nil
}

func (w *Worker) fail(err error) error {
	_ = w.Kill()
	return fmt.Errorf("ask %s: %w: %w", w.Name, err, w.Err())
}
