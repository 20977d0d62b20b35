# Braid. `make` lists the targets. docs/development.md explains the choices made here.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# The workspace's modules, as far as they hold code.
MODULES   = $(foreach m,$(shell sed -n 's|^[[:space:]]*\./||p' go.work),$(if $(shell find $m -name '*.go' -print -quit),$m))
ALL       = $(MODULES:%=./%/...)
UNIT      = $(filter-out ./test/...,$(ALL))
SOURCES   = $(wildcard cmd pkg services test tools)
CODEGEN  := bin/buf bin/protoc-gen-go bin/protoc-gen-go-grpc
TOOLS    := $(patsubst tools/%/go.mod,bin/%,$(wildcard tools/*/go.mod))
# Schemas are compared with this git ref; empty = no comparison.
AGAINST  ?= $(shell for r in origin/main main; do git rev-parse -q --verify $$r:proto/braid >/dev/null 2>&1 && echo $$r && break; done)
PKG      ?= work
BENCH    ?= .
COUNT    ?= 6
FUZZTIME ?= 10s

help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-18s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

build: bin/braid ## Build bin/braid and compile every package
	go build work

demo: bin/braid ## Run the main job on real input: three brokers, one killed, nothing lost
	bin/braid demo $(ARGS)

test: ## Run all tests (PKG=… for some), with the race detector and invariants
	go test -race -timeout=9m $(PKG)

test-plain: ## Run the unit tests as users build: no race detector, allocation limits on
	go test -timeout=5m $(UNIT)

test-race: ## Hunt for races: unit tests three times, shuffled, on 1, 2 and 4 CPUs
	go test -race -shuffle=on -count=3 -cpu=1,2,4 -timeout=30m $(UNIT)

test-integration: ## Run the tests that need several services, with the race detector
	go test -race -timeout=9m ./test/...

torture: ## Kill and pause processes under load for 20 rounds, and check every ack (ARGS='-seed=…')
	go test -count=1 -v -timeout=40m ./test/torture -rounds=20 $(ARGS)

bench: bin/benchstat ## Run the benchmarks (PKG=… BENCH=regexp COUNT=n), summarise bin/bench.txt
	go test -run='^$$' -bench='$(BENCH)' -benchmem -count=$(COUNT) -timeout=60m $(PKG) | tee bin/bench.txt
	bin/benchstat bin/bench.txt

fuzz: bin/house ## Run every fuzz target for FUZZTIME (10s)
	bin/house fuzz | while read -r dir name; do echo "fuzz $$dir $$name"; \
	  go test -run='^$$' -fuzz="^$$name\$$" -fuzztime=$(FUZZTIME) "./$$dir" </dev/null; done

generate: $(CODEGEN) bin/braid ## Generate Go code from proto/, and docs/configuration.md from the settings (committed)
	bin/buf generate
	new=$$(mktemp); trap 'rm -f "$$new"' EXIT; bin/braid reference > "$$new"; cat "$$new" > docs/configuration.md

lint: verify-house verify-proto verify-generated verify-modules verify-code ## Check all that can be checked without running it

verify: lint test ## Check everything a change has to pass

verify-house: bin/house ## Check formatting, go lines, names and module rules
	@test -z "$$(gofmt -l $(SOURCES) | tee /dev/stderr)" || { echo 'not formatted: run make fix'; exit 1; }
	GOWORK=off go -C tools/house test ./...
	bin/house check

verify-proto: bin/buf ## Check the schemas: lint, format, compatibility with main
	bin/buf lint
	bin/buf format --diff --exit-code
	@if [ -z "$(AGAINST)" ]; then echo 'buf breaking: skipped, no main with schemas to compare with'; exit 0; fi; \
	old=$$(mktemp -d); trap 'rm -rf "$$old"' EXIT; git archive $(AGAINST) buf.yaml proto | tar -x -C "$$old"; \
	echo 'bin/buf breaking --against $(AGAINST)'; bin/buf breaking --against "$$old"

verify-generated: $(CODEGEN) bin/braid ## Check that what is generated is up to date
	@new=$$(mktemp -d); trap 'rm -rf "$$new"' EXIT; bin/buf generate -o "$$new"; \
	diff -r "$$new/proto/gen/go" proto/gen/go || { echo 'generated code is stale: run make generate'; exit 1; }
	@bin/braid reference | diff docs/configuration.md - || { echo 'docs/configuration.md is stale: run make generate'; exit 1; }

verify-modules: ## Check that each module builds and vets alone, outside the workspace
	@for m in $(MODULES); do echo "go vet $$m"; GOWORK=off go -C $$m vet -mod=readonly ./...; done

verify-code: bin/golangci-lint ## Run golangci-lint with the import law
	bin/golangci-lint run $(ALL)

fix: bin/buf bin/golangci-lint ## Repair what can be repaired: formatting, imports, simple findings
	bin/buf format -w
	bin/golangci-lint fmt $(SOURCES)
	bin/golangci-lint run --fix $(ALL)

tidy: ## Tidy every module, then give all of them the workspace's versions
	for m in $(MODULES); do GOWORK=off go -C $$m mod tidy; done
	go work sync # leaves checksums out, so tidy again
	for m in $(MODULES); do GOWORK=off go -C $$m mod tidy; done

tools: $(TOOLS) ## Build the development tools into bin/

clean: ## Remove what make built
	rm -rf bin

# Go's build cache decides what to do again, so this rule always runs.
bin/braid: FORCE
	go build -o $@ ./cmd/braid

# A tool is rebuilt when a file of its module changes. Its package is the module's one tool directive.
.SECONDEXPANSION:
bin/%: tools/%/go.mod $$(wildcard tools/$$*/*)
	GOWORK=off go -C tools/$* build -o $(CURDIR)/$@ $$(awk '$$1 == "tool" { print $$2 }' $<)
	@touch $@

FORCE:
.PHONY: FORCE help build demo test test-plain test-race test-integration torture bench fuzz generate lint verify tidy tools clean fix \
  verify-house verify-proto verify-generated verify-modules verify-code
