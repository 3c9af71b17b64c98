//! Unmodified databases on a real mount, and behind a real page cache: `make test-databases`.
//!
//! Each test has a pool and a mount of its own. It does the same work on the mount (or with a page cache) and
//! on the local disk, and compares the results. Ctrl-C ends a run cleanly: every wait of every test checks
//! one flag, and guards clean up.
//!
//! The tests of PostgreSQL also run with the interposer, on a mount that lets it work on files directly; the
//! mount's counters prove that it did. `cargo build -p farpool-preload` builds the interposer.
//!
//! The tests with a page cache compare its pages with the disk in the end; its counters prove that pages were
//! found there.
//!
//! `FARPOOL_WRAPPER="env LD_PRELOAD=…" make test-databases` starts every database with that command.

mod cached;
mod columns;
mod duckdb;
mod paper;
mod postgres;
mod sqlite;
mod support;
mod tablespace;
