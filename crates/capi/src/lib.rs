//! The C library: files in far memory by `create`, `open`, `read`, `write`, `close`, `delete`, and by
//! asynchronous variants (SIGMOD 2016, section 4.1 and table 2).
//!
//! C1. `include/farpool.h` is the contract. The library exports exactly what it declares (a test compares
//!     them).
//! C2. No panic leaves a function: it becomes an error number.
//! C3. Handles are looked up: one that is null, was closed, or was never given out is refused.
//! Not here: files that several processes share by name (the mount).

mod calls;
mod error;
mod file;
mod handles;
mod pool;
mod workers;

pub use calls::{
    FarpoolOptions, farpool_close, farpool_connect, farpool_create, farpool_delete, farpool_disconnect,
    farpool_last_error, farpool_open, farpool_read, farpool_read_async, farpool_resize, farpool_size,
    farpool_version, farpool_write, farpool_write_async,
};
pub use handles::{ConnectionHandle, FileHandle};
