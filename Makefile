# SPDX-License-Identifier: Apache-2.0

export CGO_ENABLED := 0

CLANG := clang-19
MULTIARCH := $(shell uname -m)-linux-gnu

export BPF2GO_CC := $(CLANG)
export BPF2GO_STRIP := llvm-strip-19
export BPF2GO_CFLAGS := -O2 -g -Wall -Werror -mcpu=v3 -I../../bpf/include -isystem /usr/include/$(MULTIARCH)

generate: ## Compile the BPF programs and generate their Go
	go generate ./internal/bpf
