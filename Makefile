# SPDX-License-Identifier: Apache-2.0

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

export CGO_ENABLED := 0
# Clones in other directories share what go has compiled.
export GOFLAGS := -trimpath $(GOFLAGS)
# Where the demo and the benchmarks write their figures.
export OUT ?= $(CURDIR)/out

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
GOBUILD = go build -ldflags "$(LDFLAGS) -X sockeye/internal/cli/command.Version=$(VERSION)"
# The results of a benchmark name the commit, also if GOFLAGS has -buildvcs=false.
BENCHBUILD = go build -buildvcs=auto -o bin/bench ./bench
PREFIX ?= /usr/local
UNITDIR ?= /etc/systemd/system
BINARY ?= bin/sockeye

CLANG := clang-19
export BPF2GO_CC := $(CLANG)
export BPF2GO_STRIP := llvm-strip-19
export BPF2GO_CFLAGS := -O2 -g -Wall -Werror -mcpu=v3 -I../../bpf/include -I../../../bpf/include -isystem /usr/include/$(shell uname -m)-linux-gnu

GOLANGCI_LINT := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.9.0
GO_LICENSES := github.com/google/go-licenses@v1.6.0
LICENCES := Apache-2.0,BSD-2-Clause,BSD-3-Clause,ISC,MIT

# Debian packages, by what needs them.
DEMO_PACKAGES := frr pmacct
FLEET_PACKAGES := $(DEMO_PACKAGES) etcd-server
CHAIN_PACKAGES := $(DEMO_PACKAGES) default-jre-headless maven
TEST_PACKAGES := $(DEMO_PACKAGES) chromium-headless-shell curl dbus-daemon eapoltest etcd-server freeradius gobgpd iperf3 iproute2 ipvsadm nftables openssh-client openssh-server openssl prometheus systemd syslog-ng-core
RACE_PACKAGES := gcc libc6-dev
VM_PACKAGES := qemu-system-x86 xz-utils debian-archive-keyring
ARM64_PACKAGES := qemu-system-arm xz-utils debian-archive-keyring
DEBIAN_PACKAGES := $(VM_PACKAGES) mmdebstrap e2fsprogs qemu-utils
BENCH_PACKAGES := $(DEMO_PACKAGES) $(VM_PACKAGES) haproxy ipvsadm nftables
BPFTUNE_PACKAGES := make gcc pkg-config bpftool clang-19 libbpf-dev libcap-dev libnl-3-dev libnl-route-3-dev
PMACCT_EBPF_PACKAGES := autoconf automake bpftool clang-19 gcc libbpf-dev libjansson-dev libpcap-dev libtool make pkg-config
BENCH_GATEWAY_PACKAGES := passt iperf3 nginx-light redis-server wget wrk
BENCH_FLEET_PACKAGES := etcd-server ipvsadm nftables
PACKAGE_PACKAGES := iproute2 lintian pmacct rpm syslog-ng-core systemd
HELM_PACKAGES := runc
BPF_PACKAGES := clang-19 llvm-19 libbpf-dev linux-libc-dev

# What "make check" runs in VMs; "make test-vm" runs all.
CHECK_KERNELS := 5.10,newest
VM_KERNELS := 5.10,6.1,6.12,newest
CHECK_VM_TESTS := ./internal/bpf ./internal/bpf/probe ./internal/bigtcp/programs ./internal/trace/capture ./internal/member ./internal/fleet/forward ./lab/vm/selftest
VM_TESTS := $(CHECK_VM_TESTS) ./internal/match ./internal/procsock ./internal/tune ./internal/trace ./internal/trace/packets ./internal/linux ./internal/bigtcp/netif ./internal/bigtcp/sizing ./internal/bigtcp/compat ./internal/bigtcp/verify ./internal/fleet ./room
ARM64_LEFT_OUT := -leave-out '^TestSteerInterrupted$$: repeats an upgrade after each pin, which emulation makes too slow'
VM_E2E_TESTS := TestWaitingRoom$$|TestTakeover$$|TestTemplates$$|TestDrainedWhileWaiting

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build the static binary bin/sockeye
	$(GOBUILD) -o bin/sockeye ./cmd/sockeye

.PHONY: demo
demo: ## Six routers, four nfacctd, with and without Sockeye (KEEP=1 leaves it up)
	@tools/setup $(DEMO_PACKAGES)
	@$(GOBUILD) -o bin/sockeye ./cmd/sockeye
	@go build -o bin/demo ./lab/demo
	@unshare --mount --propagation private bin/demo -sockeye $(CURDIR)/bin/sockeye -out "$(OUT)" $(if $(KEEP),-keep)

.PHONY: demo-chain
demo-chain: ## The demo with Kafka: count the records that its readers get (KEEP=1)
	@tools/setup $(CHAIN_PACKAGES)
	@$(GOBUILD) -o bin/sockeye ./cmd/sockeye
	@go build -o bin/demo ./lab/demo
	@unshare --mount --propagation private bin/demo -chain -sockeye $(CURDIR)/bin/sockeye -out "$(OUT)" $(if $(KEEP),-keep)

.PHONY: simulate
simulate: ## Let fleets of 3 to 1000 hosts run for a simulated year (QUICK=1: a month), and 100 processes with etcd
	@tools/setup etcd-server
	@go run ./lab/simulate -out "$(OUT)" $(if $(QUICK),-days 30) -processes 100

.PHONY: test
test: ## Run all tests that this host can run
	@tools/setup $(TEST_PACKAGES)
	@tools/axe
	@tools/gotest ./...

.PHONY: test-fleet
test-fleet: ## Run the end-to-end tests of the fleet in all forms
	@tools/setup $(TEST_PACKAGES)
	SOCKEYE_FLEET_COMPLETE=1 go run ./tools/testreport go test -json -shuffle=on -count=1 -timeout 20m -run '^TestFleet' ./lab/e2e

.PHONY: test-race
test-race: ## Run the tests of packages with goroutines under the race detector
	@tools/setup $(TEST_PACKAGES) $(RACE_PACKAGES)
	@tools/axe
	@tools/gorace

.PHONY: test-vm
test-vm: ## Run the kernel tests on other kernels, under qemu
	@tools/setup $(VM_PACKAGES) etcd-server
	go run ./lab/vm -kernels $(VM_KERNELS) -timeout 20m $(VM_TESTS)
	go run ./lab/vm -kernels $(VM_KERNELS) -timeout 20m -run '$(VM_E2E_TESTS)' ./lab/e2e
	go run ./lab/vm -kernels newest -timeout 20m -memory 2048 -virtual-time -programs etcd -run '^TestFleetClock$$' ./lab/e2e

.PHONY: test-arm64
test-arm64: ## Run the kernel tests of check, and those of the sandbox, on arm64 under qemu
	@tools/setup $(ARM64_PACKAGES)
	go run ./lab/vm -arch arm64 -kernels newest -timeout 40m $(ARM64_LEFT_OUT) $(CHECK_VM_TESTS) ./internal/placement ./internal/sandbox

.PHONY: test-debian
test-debian: ## Test whole Debian systems under systemd and qemu (RELEASES=trixie, RUN=REGEXP)
	@tools/setup $(DEBIAN_PACKAGES)
	@rm -rf "$(OUT)/debian-install"
	@$(MAKE) --no-print-directory install PREFIX=/usr/local DESTDIR="$(OUT)/debian-install" >/dev/null
	@rm -rf "$(OUT)/debian-packages"
	@for suffix in "" +1; do VERSION_SUFFIX=$$suffix tools/package/build "$(OUT)/debian-packages" amd64 deb || exit; done
	go run ./lab/debian -install "$(OUT)/debian-install" -packages "$(OUT)/debian-packages" -out "$(OUT)" $(if $(RELEASES),-releases $(RELEASES)) $(if $(RUN),-run '$(RUN)')

.PHONY: fuzz
fuzz: ## Fuzz each parser for a while (FUZZTIME=30s)
	@tools/fuzz $(or $(FUZZTIME),30s)

.PHONY: demo-fleet
demo-fleet: ## Three hosts behind a router, with ECMP alone and with Sockeye: one joins, one drains, one dies (KEEP=1)
	@tools/setup $(FLEET_PACKAGES)
	@$(GOBUILD) -o bin/sockeye ./cmd/sockeye
	@go build -o bin/demo ./lab/demo
	@unshare --mount --propagation private bin/demo -fleet -sockeye $(CURDIR)/bin/sockeye -out "$(OUT)" $(if $(KEEP),-keep)

# bench-all takes less than two hours: it has a shorter load for each arm of the long run, and fewer round-trip times.
LONG_RUN = $(if $(LONG),1h,10m)
bench-all: LONG_RUN = $(if $(LONG),1h,1m)
bench-all: GATEWAY_RTTS = -rtts 1,15,285

.PHONY: bench
bench: ## Measure against plain SO_REUSEPORT, HAProxy, nftables and IPVS (QUICK=1: eight minutes; LONG=1: an hour for each arm; PMACCT=its sources, BALANCER=the BPF program's: with pmacct's own eBPF)
	@tools/setup $(BENCH_PACKAGES) $(if $(PMACCT),$(PMACCT_EBPF_PACKAGES))
	@$(GOBUILD) -o bin/sockeye ./cmd/sockeye
	@$(BENCHBUILD)
	@mkdir -p "$(OUT)"
	@unshare --mount --propagation private bin/bench steer -sockeye $(CURDIR)/bin/sockeye $(if $(QUICK),-quick,-vm -long $(LONG_RUN)) \
		$(if $(PMACCT),-pmacct "$$(tools/pmacct-ebpf "$(PMACCT)" "$(BALANCER)")")

.PHONY: bench-tune
bench-tune: ## Measure tune against defaults, routes and setsockopt, in the lab (QUICK=1: two minutes)
	@$(GOBUILD) -o bin/sockeye ./cmd/sockeye
	@$(BENCHBUILD)
	@mkdir -p "$(OUT)"
	@unshare --mount --propagation private bin/bench tune -sockeye $(CURDIR)/bin/sockeye $(if $(QUICK),-quick)

.PHONY: bench-tune-vm
bench-tune-vm: ## Measure the incast with DCTCP, and with bpftune (BPFTUNE=its sources), in a VM
	@tools/setup $(VM_PACKAGES) $(if $(BPFTUNE),$(BPFTUNE_PACKAGES))
	@mkdir -p "$(OUT)"
	@rm -rf "$(OUT)/bpftune"
	$(if $(BPFTUNE),tools/bpftune "$(BPFTUNE)" "$(OUT)/bpftune")
	go run ./lab/vm -kernels newest -timeout 90m -virtual-time $(if $(BPFTUNE),-files "$(OUT)/bpftune") -run 'TestIncastWithPeers$$' ./bench/tune | tee "$(OUT)/bench-tune-vm.log"
	@sed -n 's/^.*bench-tune-vm.json: //p' "$(OUT)/bench-tune-vm.log" >"$(OUT)/bench-tune-vm.json"

.PHONY: bench-trace
bench-trace: ## Measure what tracing costs, against none (QUICK=1: a minute)
	@$(GOBUILD) -o bin/sockeye ./cmd/sockeye
	@$(BENCHBUILD)
	@mkdir -p "$(OUT)"
	@unshare --mount --propagation private bin/bench trace -sockeye $(CURDIR)/bin/sockeye $(if $(QUICK),-quick)

.PHONY: bench-trace-vm
bench-trace-vm: ## Compare two hosts by their traces, and measure fentry and kprobes, in VMs
	@tools/setup $(VM_PACKAGES)
	@$(GOBUILD) -o bin/sockeye ./cmd/sockeye
	@$(BENCHBUILD)
	@mkdir -p "$(OUT)"
	@bin/bench trace-vm -sockeye $(CURDIR)/bin/sockeye

.PHONY: bench-bigtcp
bench-bigtcp: ## Measure what larger packets give, off and on (QUICK=1: a minute)
	@$(BENCHBUILD)
	@mkdir -p "$(OUT)"
	@bin/bench bigtcp $(if $(QUICK),-quick)

.PHONY: bench-gateway
bench-gateway: ## Measure isolate against pasta and no gateway (QUICK=1: two minutes)
	@tools/setup $(BENCH_GATEWAY_PACKAGES)
	@$(BENCHBUILD)
	@mkdir -p "$(OUT)"
	@if new=$$(tools/pasta-sid 2>"$(OUT)/pasta-sid.log"); then set -- -pasta-new "$$new"; \
		else set -- -no-pasta-new "$$(tail -n 1 "$(OUT)/pasta-sid.log")"; fi; \
		unshare --mount --propagation private bin/bench gateway $(if $(QUICK),-quick,$(GATEWAY_RTTS)) "$$@"

.PHONY: bench-continuity
bench-continuity: ## Measure what changes separate, lose and close (QUICK=1: a minute)
	@tools/setup $(DEMO_PACKAGES)
	@$(GOBUILD) -o bin/sockeye ./cmd/sockeye
	@$(BENCHBUILD)
	@mkdir -p "$(OUT)"
	@unshare --mount --propagation private bin/bench continuity -sockeye $(CURDIR)/bin/sockeye $(if $(QUICK),-quick)

.PHONY: bench-watch
bench-watch: ## Measure what 100,000 refusals per second cost (QUICK=1: a minute and a half)
	@$(GOBUILD) -o bin/sockeye ./cmd/sockeye
	@$(BENCHBUILD)
	@mkdir -p "$(OUT)"
	@unshare --mount --propagation private bin/bench watch -sockeye $(CURDIR)/bin/sockeye $(if $(QUICK),-quick)

.PHONY: bench-fleet
bench-fleet: ## Measure forwarding to other hosts of a fleet against the kernel's own, nftables and IPVS (QUICK=1: a minute)
	@tools/setup $(BENCH_FLEET_PACKAGES)
	@$(GOBUILD) -o bin/sockeye ./cmd/sockeye
	@$(BENCHBUILD)
	@mkdir -p "$(OUT)"
	@bin/bench fleet -sockeye $(CURDIR)/bin/sockeye $(if $(QUICK),-quick)

.PHONY: bench-all
bench-all: bench bench-tune bench-trace $(if $(QUICK),,bench-trace-vm) bench-bigtcp bench-gateway bench-continuity bench-watch bench-fleet ## Run all of these, and write docs/benchmarks.md (less than two hours; QUICK=1: twenty minutes, and no page)
	@$(if $(QUICK),,bin/bench summary)

.PHONY: bench-flood
bench-flood: ## Flood a service from ten million forged sources (twenty minutes)
	SOCKEYE_FLOOD_SOURCES=10000000 go test -count=1 -timeout 60m -v -run TestFlood ./internal/bpf

.PHONY: generate
generate: ## Compile the BPF programs, generate their Go, and generate the dashboards
	@tools/setup $(BPF_PACKAGES)
	go generate ./internal/... ./bench/...
	go run ./tools/dashboards dist/grafana

.PHONY: verify-generated
verify-generated: ## Prove that what is generated is what is committed, byte by byte
	@tools/setup $(BPF_PACKAGES)
	@tools/verify-generated

.PHONY: lint
lint: ## Check formatting, vet, and lint
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); exit 1; }
	go vet ./...
	go run $(GOLANGCI_LINT) run ./...

.PHONY: licences
licences: ## Check that every dependency's licence fits
	@# libcap may be used under BSD-3-Clause or GPL-2.0; its file has both, of which the tool sees one.
	go run $(GO_LICENSES) check ./... --allowed_licenses=$(LICENCES) --ignore sockeye --ignore kernel.org/pub/linux/libs/security/libcap 2>&1 | { grep -v "non-Go code\|\.s$$" || true; }

.PHONY: security
security: ## Check that SECURITY.md's tests exist, and the unit's exposure; writes security.json
	@tools/setup systemd
	@go run ./tools/security -out "$(OUT)/security.json"

.PHONY: vulnerabilities
vulnerabilities: ## Look for known vulnerabilities in what is called; says so if the database is away
	go run ./tools/vulncheck -scanner $(GOVULNCHECK) -o "$(OUT)/vulnerabilities" ./...

.PHONY: check
check: verify-generated lint licences vulnerabilities security test-package test-helm test test-race ## What CI runs
	@tools/setup $(VM_PACKAGES)
	go run ./lab/vm -kernels $(CHECK_KERNELS) -timeout 20m $(CHECK_VM_TESTS)
	@cat "$(OUT)/vulnerabilities"

.PHONY: check-all
check-all: check test-fleet demo-fleet test-vm test-arm64 test-debian ## What CI runs, all forms of the fleet tests, the demo of a fleet, all kernels, arm64, and whole Debian systems

.PHONY: binary
binary:
	$(GOBUILD) -o "$(BINARY)" ./cmd/sockeye

.PHONY: docs
docs: ## Write man pages and completions to out/
	@mkdir -p "$(OUT)/man" "$(OUT)/completion"
	go run ./tools/man "$(OUT)/man"
	@for shell in bash zsh fish; do go run ./cmd/sockeye completion $$shell > "$(OUT)/completion/sockeye.$$shell"; done

.PHONY: install
install: build ## Install binary, man pages, completions, unit, examples, alerts and dashboards (PREFIX, DESTDIR)
	@$(MAKE) --no-print-directory install-files

.PHONY: install-files
install-files: docs
	install -D -m 755 "$(BINARY)" $(DESTDIR)$(PREFIX)/bin/sockeye
	install -d $(DESTDIR)$(PREFIX)/share/man/man1
	install -m 644 "$(OUT)"/man/*.1 $(DESTDIR)$(PREFIX)/share/man/man1
	install -D -m 644 "$(OUT)/man/sockeye-policy.5" $(DESTDIR)$(PREFIX)/share/man/man5/sockeye-policy.5
	install -D -m 644 "$(OUT)/completion/sockeye.bash" $(DESTDIR)$(PREFIX)/share/bash-completion/completions/sockeye
	install -D -m 644 "$(OUT)/completion/sockeye.zsh" $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_sockeye
	install -D -m 644 "$(OUT)/completion/sockeye.fish" $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/sockeye.fish
	install -d $(DESTDIR)$(UNITDIR)
	sed 's|@PREFIX@|$(PREFIX)|' dist/sockeye.service > $(DESTDIR)$(UNITDIR)/sockeye.service
	install -d $(DESTDIR)$(PREFIX)/share/sockeye/sockeye.service.d
	install -m 644 dist/sockeye.service.d/*.conf $(DESTDIR)$(PREFIX)/share/sockeye/sockeye.service.d
	install -d $(DESTDIR)$(PREFIX)/share/sockeye/prometheus $(DESTDIR)$(PREFIX)/share/sockeye/grafana
	sed 's|file:///usr/share/|file://$(PREFIX)/share/|' dist/prometheus/sockeye.rules.yml > $(DESTDIR)$(PREFIX)/share/sockeye/prometheus/sockeye.rules.yml
	install -m 644 dist/grafana/*.json $(DESTDIR)$(PREFIX)/share/sockeye/grafana
	@# Links to documents that are not installed become text.
	install -d $(DESTDIR)$(PREFIX)/share/doc/sockeye
	sed -E 's/\[([^][]+)\]\([^()#][^()]*\)/\1/g' docs/runbook.md > $(DESTDIR)$(PREFIX)/share/doc/sockeye/runbook.md
	find examples -type f -printf '%P\n' | xargs -I% install -D -m 644 examples/% $(DESTDIR)$(PREFIX)/share/sockeye/examples/%

.PHONY: uninstall
uninstall: ## Remove what install has installed (PREFIX, DESTDIR)
	rm -f $(DESTDIR)$(PREFIX)/bin/sockeye $(DESTDIR)$(UNITDIR)/sockeye.service
	rm -f $(DESTDIR)$(PREFIX)/share/man/man1/sockeye.1 $(DESTDIR)$(PREFIX)/share/man/man1/sockeye-*.1 $(DESTDIR)$(PREFIX)/share/man/man5/sockeye-policy.5
	rm -f $(DESTDIR)$(PREFIX)/share/bash-completion/completions/sockeye $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_sockeye $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/sockeye.fish
	rm -f $(DESTDIR)$(PREFIX)/share/doc/sockeye/runbook.md
	rm -rf $(DESTDIR)$(PREFIX)/share/sockeye

.PHONY: deb
deb: ## Build the Debian package in out/ (ARCH=arm64), in place of earlier ones
	@rm -f "$(OUT)"/sockeye_*_$(or $(ARCH),$(shell go env GOARCH)).deb
	@tools/package/build "$(OUT)" $(or $(ARCH),$(shell go env GOARCH)) deb

.PHONY: rpm
rpm: ## Build the rpm package in out/ (ARCH=arm64), in place of earlier ones
	@rm -f "$(OUT)"/sockeye-*.$(if $(filter arm64,$(or $(ARCH),$(shell go env GOARCH))),aarch64,x86_64).rpm
	@tools/package/build "$(OUT)" $(or $(ARCH),$(shell go env GOARCH)) rpm

.PHONY: test-package
test-package: ## Compare two builds of the packages, run lintian, install them and the examples in copies of the file system; writes install.json
	@tools/setup $(PACKAGE_PACKAGES)
	@tools/package/test "$(OUT)"

.PHONY: test-helm
test-helm: build ## Lint and render the Helm chart, and run its container by runc
	@tools/setup $(HELM_PACKAGES)
	cd tools/helm && go vet ./... && go test -count=1 ./...

.PHONY: release
release: ## Build binaries, packages, checksums and an SBOM for all architectures in out/release
	@rm -rf "$(OUT)/release"
	@TZ=UTC tools/package/release "$(OUT)/release"

.PHONY: hooks
hooks: ## Use the git hooks in tools/hooks
	git config core.hooksPath tools/hooks

.PHONY: clean
clean: ## Remove what was built
	rm -rf bin out
