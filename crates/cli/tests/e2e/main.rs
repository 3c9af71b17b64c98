//! The real binary from end to end: real processes, sockets, mounts, a real PostgreSQL, a real fio.
//!
//! No test is skipped: if the machine lacks something, the test fails and says so (`farpool doctor` says how
//! to fix it). Every process and mount is held by a guard, so that a failed test leaves nothing behind. Waits
//! poll until a deadline.

mod bad_input;
mod bench;
mod cache;
mod connections;
mod database;
mod doctor;
mod doors;
mod failures;
mod files;
mod garbage;
mod install;
mod keep;
mod leases;
mod mounts;
mod nodes;
mod order;
mod overflow;
mod paper;
mod postgres;
mod preload;
mod printed;
mod shell;
mod sim;
mod support;
mod up;
mod volume;
