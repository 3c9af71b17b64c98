//! Unmodified databases on a real mount: `make test-databases`.
//!
//! Each test has a pool and a mount of its own, does on the mount what it does on the local disk, and
//! compares. Ctrl-C ends a run in good order: every wait of every test looks at one flag, and guards clean
//! up.
//!
//! What PostgreSQL does is done once more with the interposer, on a mount that lets it work on files
//! directly; and that it did so is counted by the mount. `cargo build -p farpool-preload` makes the
//! interposer.
//!
//! `FARPOOL_WRAPPER="env LD_PRELOAD=…" make test-databases` runs every database by that command.

mod columns;
mod duckdb;
mod paper;
mod postgres;
mod sqlite;
mod support;
mod tablespace;
