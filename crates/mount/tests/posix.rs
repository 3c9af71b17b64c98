//! What programs expect of a file system, tested on a mount. The same holds on any Linux file system:
//! `FARPOOL_POSIX_DIR=/tmp cargo test -p farpool-mount --test posix` tests the tests themselves.

#[path = "posix/aio.rs"]
mod aio;
#[path = "posix/contents.rs"]
mod contents;
#[path = "posix/copying.rs"]
mod copying;
#[path = "posix/holes.rs"]
mod holes;
#[path = "posix/intermediates.rs"]
mod intermediates;
#[path = "posix/locks.rs"]
mod locks;
#[path = "posix/many.rs"]
mod many;
#[path = "posix/mapping.rs"]
mod mapping;
#[path = "posix/model.rs"]
mod model;
#[path = "posix/names.rs"]
mod names;
mod support;
#[path = "posix/xattrs.rs"]
mod xattrs;
