// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"

	"sockeye/internal/api"
	"sockeye/internal/fault"
)

func TestTraceRefusals(t *testing.T) {
	f := newFake(t)
	span := "a duration, as in 90s, 5m or 1h"
	keys := "keys: rule, protocol, remote, port, service, cgroup, tune_rule, arm, other"
	stages := "stages: send, stack, qdisc, nic, network, total, rx_stack, reader"
	compare := "usage: sockeye trace compare {SELECT-A SELECT-B | A.json B.json} [flags]"
	times := "FROM..TO in the format 14:05, 2026-01-31T14:05:00Z or -10m; without TO, the period ends now"
	name := "use --pid and --fd, or --local and --remote, with the values of ss -tnp; a UDP socket (ss -uanp) by --pid and --fd"
	address := "as in 192.0.2.1, 192.0.2.1:1790 or [2001:db8::1]:1790"
	ports := "give both ports, as in --local 10.0.0.1:1790 --remote 192.0.2.1:40000"
	for _, c := range []struct{ args, message, hint string }{
		{"trace slwo", `unknown command "slwo"`, "did you mean sockeye trace slow?"},
		{"trace replies", `unknown command "replies"`, "sockeye trace --help lists the commands"},
		{"trace --wtach", "unknown flag: --wtach", "did you mean --watch?"},
		{"trace -o yaml", `--output is "yaml"`, "table or json"},
		{"trace -o jsonl", `--output is "jsonl"`, "table or json"},
		{"trace --stage qdsic", `there is no stage "qdsic"`, "did you mean qdisc?"},
		{"trace --stage stack,netwotk", `there is no stage "netwotk"`, "did you mean network?"},
		{"trace --stage zzzzzzzz", `there is no stage "zzzzzzzz"`, stages},
		{"trace --stage stack,", `there is no stage ""`, stages},
		{"trace --since 5", `--since is "5"`, span},
		{"trace --since 0s", `--since is "0s"`, span},
		{"trace --since -5m", `--since is "-5m"`, span},
		{"trace --since=", `--since is ""`, span},
		{"trace --since 1000000h1m1000000000h", `--since is "1000000h1m1000000000h"`, span},
		{"trace --select rule", `--select is "rule": "rule" is not key=value`, keys},
		{"trace --select rlue=x", `--select is "rlue=x": unknown key "rlue"`, "did you mean rule?"},
		{"trace --select port=99999", `--select is "port=99999": port cannot be "99999"`, "use a number from 1 to 65535"},

		{"trace slow 3", `unexpected argument "3"`, "usage: sockeye trace slow [flags]"},
		{"trace slow -n 0", "--number is 0", "1 to 1000"},
		{"trace slow -n 1001", "--number is 1001", "1 to 1000"},
		{"trace slow -n many", `--number is "many"`, "a whole number"},
		{"trace slow --since soon", `--since is "soon"`, span},
		{"trace slow --select =", `--select is "=": unknown key ""`, keys},

		{"trace samples -o yaml", `--output is "yaml"`, "table or jsonl"},
		{"trace samples --count 0", "--count is 0", "1 or more"},
		{"trace samples --count -1", "--count is -1", "1 or more"},
		{"trace samples --for 0", `--for is "0"`, span},
		{"trace samples --buffer=", `--buffer is ""`, "a size, as in 256KB or 4MB"},
		{"trace samples --buffer 4096", `--buffer is "4096"`, "a size, as in 256KB or 4MB"},
		{"trace samples --buffer -4KB", `--buffer is "-4KB"`, "a size, as in 256KB or 4MB"},
		{"trace samples --buffer 1.5MB", `--buffer is "1.5MB"`, "a size, as in 256KB or 4MB"},
		{"trace samples --buffer 4kb", `--buffer is "4kb"`, "a size, as in 256KB or 4MB"},
		{"trace samples --buffer 0B", `--buffer is "0B"`, "4KB to 256MB"},
		{"trace samples --buffer 2048B", `--buffer is "2048B"`, "4KB to 256MB"},
		{"trace samples --buffer 300MB", `--buffer is "300MB"`, "4KB to 256MB"},
		{"trace samples --buffer 999999999MiB", `--buffer is "999999999MiB"`, "4KB to 256MB"},
		{"trace samples --select remote=here", `--select is "remote=here": remote cannot be "here"`, "use a prefix such as 192.0.2.0/24, or an address"},

		{"trace report", "FILE is missing", "usage: sockeye trace report FILE [flags]"},
		{"trace report a b", `unexpected argument "b"`, "usage: sockeye trace report FILE [flags]"},
		{"trace report EMPTY", `FILE is ""`, "usage: sockeye trace report FILE [flags]"},
		{"trace report x.html --since x", `--since is "x"`, span},
		{"trace report x.html --select x", `--select is "x": "x" is not key=value`, keys},

		{"trace save", "FILE is missing", "usage: sockeye trace save FILE [flags]"},
		{"trace save EMPTY", `FILE is ""`, "usage: sockeye trace save FILE [flags]"},
		{"trace save x.json --since x", `--since is "x"`, span},

		{"trace compare", "SELECT-A is missing", compare},
		{"trace compare rule=a", "SELECT-B is missing", compare},
		{"trace compare rule=a rule=b rule=c", `unexpected argument "rule=c"`, compare},
		{"trace compare rule=a rule=a", "both sides are the same", "name two different groups, or two periods with --period-a and --period-b"},
		{"trace compare rule=a b", `SELECT-B is "b": "b" is not key=value`, keys},
		{"trace compare amr=treated rule=b", `SELECT-A is "amr=treated": unknown key "amr"`, "did you mean arm?"},
		{"trace compare rule=a --trial x", `unexpected argument "rule=a"`, compare},
		{"trace compare rule=a rule=b --select rule=c", "--select requires --period-a and --period-b, or two files", "without --period-a and --period-b, SELECT-A and SELECT-B select the groups"},
		{"trace compare --trial=", `--trial is ""`, "sockeye tune lists the rules"},
		{"trace compare --trial a,arm=x", `--trial is "a,arm=x"`, "sockeye tune lists the rules"},
		{"trace compare --period-a -2m..-1m", "--period-a and --period-b must be used together", compare},
		{"trace compare --period-b -2m..-1m", "--period-a and --period-b must be used together", compare},
		{"trace compare --period-a -2m..-1m --period-b -1m.. --since 5m", "--period-a and --since are mutually exclusive", "select groups with --select"},
		{"trace compare --period-a -2m..-1m --period-b -1m.. --trial x", "--period-a and --trial are mutually exclusive", "select groups with --select"},
		{"trace compare --period-a -2m..-1m --period-b -1m.. rule=a", `unexpected argument "rule=a"`, compare},
		{"trace compare --period-a -2m --period-b -1m..", `--period-a is "-2m"`, times},
		{"trace compare --period-a ..-2m --period-b -1m..", `--period-a is "..-2m"`, times},
		{"trace compare --period-a -2m..-1m --period-b 25:00..", `--period-b is "25:00.."`, times},
		{"trace compare --period-a -2m..-1m --period-b -1m..yesterday", `--period-b is "-1m..yesterday"`, times},
		{"trace compare --period-a -2m..-1m --period-b --1m..", `--period-b is "--1m.."`, times},
		{"trace compare --period-a -1m..-2m --period-b -1m..", `--period-a is "-1m..-2m", which ends before it begins`, times},
		{"trace compare --period-a 2099-01-01T00:00:00Z.. --period-b -1m..", `--period-a is "2099-01-01T00:00:00Z..", which ends before it begins`, times},
		{"trace compare --period-a -3m..-1m --period-b -2m..", "--period-a and --period-b overlap", "use periods without a common part"},
		{"trace compare --period-a -2m.. --period-b -2m..", "--period-a and --period-b overlap", "use periods without a common part"},
		{"trace compare --period-a -2m..-1m --period-b -1m.. --select x=y", `--select is "x=y": unknown key "x"`, keys},

		{"trace packets", "the connection is missing", name},
		{"trace packets --pid 1", "the connection is missing", name},
		{"trace packets --fd 1", "the connection is missing", name},
		{"trace packets --local 192.0.2.1:1", "the connection is missing", name},
		{"trace packets --pid 1 --fd 1 --local 192.0.2.1:1", "--pid and --fd exclude --local and --remote", name},
		{"trace packets --pid 0 --fd 1", "--pid is 0", "a PID, 1 or more"},
		{"trace packets --pid 1 --fd -1", "--fd is -1", "a file descriptor, 0 or more"},
		{"trace packets --pid nfacctd --fd 1", `--pid is "nfacctd"`, "a whole number"},
		{"trace packets --local x --remote 192.0.2.1:1", `"x" is not an IP address or IP:port`, address},
		{"trace packets --local 192.0.2.1:1 --remote [::1]:1", "192.0.2.1 and ::1 are of different families", "a connection has two IPv4 or two IPv6 addresses"},
		{"trace packets --local 192.0.2.1 --remote 192.0.2.2:1", "a port is missing", ports},
		{"trace packets --pid 1 --fd 1 --for 11m", `--for is "11m"`, "at most 10m0s"},
		{"trace packets --pid 1 --fd 1 --for never", `--for is "never"`, span},
		{"trace packets --pid 1 --fd 1 --limit 0", "--limit is 0", "1 to 10000000"},
		{"trace packets --pid 1 --fd 1 --limit 10000001", "--limit is 10000001", "1 to 10000000"},
		{"trace packets --pid 1 --fd 1 --buffer 1", `--buffer is "1"`, "a size, as in 256KB or 4MB"},
		{"trace packets --pid 1 --fd 1 --write=", `--write is ""`, "name a file"},
		{"trace packets --pid 1 --fd 1 --force", "--force requires --write", "--force replaces an existing file"},
		{"trace packets --pid 1 --fd 1 -w /dev/null --force", "/dev/null exists and is not a regular file", "name another file"},
		{"trace packets 812:7", `unexpected argument "812:7"`, "usage: sockeye trace packets (--pid N --fd N | --local A:P --remote A:P) [flags]"},
	} {
		t.Run(strings.ReplaceAll(c.args, "/", "_"), func(t *testing.T) {
			h := *f.host
			h.t = t
			args := strings.Fields(c.args)
			for i := range args {
				if args[i] == "EMPTY" {
					args[i] = ""
				}
			}
			if strings.Contains(c.args, "-o ") {
				if r := h.sockeye(args...); r.code != 2 || r.err != "sockeye: "+c.message+"\nhint: "+c.hint+"\n" || r.out != "" {
					t.Errorf("%+v", r)
				}
				return
			}
			h.refused(2, c.message, c.hint, nil, args...)
		})
	}
	f.isFailure(f.sockeye("trace", "--watch", "-o", "json"), 2, "--watch and --output json are mutually exclusive", "without --watch there is one answer")
	if len(f.asked) > 0 {
		t.Errorf("requests to the agent: %q", f.asked)
	}

	// The agent's own error passes through with its code.
	for _, key := range []string{"trace", "trace/results", "trace/history", "trace/slow", "trace/samples", "trace/packets"} {
		f.answers["GET /v1/"+key] = api.Failure{Error: "not for you", Hint: "ask root", Code: fault.CodeNotPermitted}
	}
	for _, args := range []string{"trace", "trace slow", "trace samples", "trace report DIR/x.html", "trace compare rule=a rule=b", "trace packets --pid 1 --fd 1"} {
		f.refused(4, "not for you", "ask root", nil, strings.Fields(strings.ReplaceAll(args, "DIR", f.dir))...)
	}
}
