//! The functions of `farpool.h`. What each does is said there.
//!
//! Pointers that come from C are as the header demands: handles of this library that are still open, strings that end with a
//! zero byte, buffers as long as said. That is the `# Safety` of all of them.

// One contract for all, above.
#![allow(clippy::missing_safety_doc)]

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use crate::error::{Failure, answer, last, text};
use crate::file::{Memory, OpenFile};
use crate::pool::{Connection, Target};
use crate::workers::{Context, Done, Job, Kind};

/// `struct farpool_options`.
#[repr(C)]
pub struct FarpoolOptions {
    broker: *const c_char,
    tls_dir: *const c_char,
    transport: *const c_char,
    limit_bytes: u64,
}

/// `farpool_connect`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_connect(
    options: *const FarpoolOptions,
    pool: *mut *mut Connection,
) -> c_int {
    let defaults = FarpoolOptions {
        broker: std::ptr::null(),
        tls_dir: std::ptr::null(),
        transport: std::ptr::null(),
        limit_bytes: 0,
    };
    let body = || {
        // SAFETY: null, or the caller's options.
        let options = unsafe { options.as_ref() }.unwrap_or(&defaults);
        let place = out(pool)?;
        // SAFETY: null, or strings of the caller's that stay for the call.
        let target = unsafe {
            Target {
                broker: text(options.broker, "options.broker")?,
                tls_dir: text(options.tls_dir, "options.tls_dir")?,
                transport: text(options.transport, "options.transport")?,
                limit_bytes: options.limit_bytes,
            }
        };
        let connection = Box::new(Connection::open(&target)?);
        // SAFETY: not null, and the caller's to be written.
        unsafe { place.write(Box::into_raw(connection)) };
        Ok(0)
    };
    answer(body) as c_int
}

/// `farpool_disconnect`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_disconnect(pool: *mut Connection) {
    if !pool.is_null() {
        answer(|| {
            // SAFETY: it came from `farpool_connect`, and nobody uses it any more.
            drop(unsafe { Box::from_raw(pool) });
            Ok(0)
        });
    }
}

/// `farpool_create`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_create(
    pool: *const Connection,
    name: *const c_char,
    size: u64,
    file: *mut *const OpenFile,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { open_by(pool, name, file, |pool, name| pool.create(name, size)) }
}

/// `farpool_open`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_open(
    pool: *const Connection,
    name: *const c_char,
    file: *mut *const OpenFile,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { open_by(pool, name, file, Connection::find) }
}

unsafe fn open_by(
    pool: *const Connection,
    name: *const c_char,
    file: *mut *const OpenFile,
    find: impl FnOnce(&Connection, &str) -> Result<*const OpenFile, Failure>,
) -> c_int {
    let body = || {
        // SAFETY: null, or an open connection.
        let pool = unsafe { handle(pool, "connection") }?;
        let place = out(file)?;
        // SAFETY: null, or a string of the caller's.
        let name =
            unsafe { text(name, "the name") }?.ok_or_else(|| Failure::invalid("a file needs a name"))?;
        let found = find(pool, name)?;
        // SAFETY: not null, and the caller's to be written.
        unsafe { place.write(found) };
        Ok(0)
    };
    answer(body) as c_int
}

/// `farpool_read`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_read(
    file: *const OpenFile,
    buffer: *mut c_void,
    bytes: usize,
    offset: u64,
) -> libc::ssize_t {
    // SAFETY: the caller's promises: an open file, and a buffer to be written.
    answer(|| unsafe { handle(file, "file")?.read(Memory::new(buffer.cast(), bytes)?, offset) })
        as libc::ssize_t
}

/// `farpool_write`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_write(
    file: *const OpenFile,
    data: *const c_void,
    bytes: usize,
    offset: u64,
) -> libc::ssize_t {
    // SAFETY: the caller's promises: an open file, and bytes to be read. They are not written to.
    answer(|| unsafe { handle(file, "file")?.write(Memory::new(data.cast_mut().cast(), bytes)?, offset) })
        as libc::ssize_t
}

/// `farpool_read_async`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_read_async(
    file: *const OpenFile,
    buffer: *mut c_void,
    bytes: usize,
    offset: u64,
    done: Option<Done>,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promises: an open file, and a buffer to be written until `done` is called.
    unsafe { start(file, Kind::Read, buffer, bytes, offset, done, context) }
}

/// `farpool_write_async`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_write_async(
    file: *const OpenFile,
    data: *const c_void,
    bytes: usize,
    offset: u64,
    done: Option<Done>,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promises: an open file, and bytes to be read until `done` is called.
    unsafe { start(file, Kind::Write, data.cast_mut(), bytes, offset, done, context) }
}

unsafe fn start(
    file: *const OpenFile,
    kind: Kind,
    memory: *mut c_void,
    bytes: usize,
    offset: u64,
    done: Option<Done>,
    context: *mut c_void,
) -> c_int {
    let body = || {
        // SAFETY: null, or an open file.
        let file = unsafe { shared(file) }?;
        // SAFETY: the caller's promise.
        let memory = unsafe { Memory::new(memory.cast(), bytes) }?;
        let done =
            done.ok_or_else(|| Failure::invalid("an asynchronous operation needs a function to call"))?;
        let context = Context(context);
        file.start(|file| Job { file, kind, memory, offset, done, context })?;
        Ok(0)
    };
    answer(body) as c_int
}

/// `farpool_size`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_size(file: *const OpenFile, size: *mut u64) -> c_int {
    let body = || {
        let place = out(size)?;
        // SAFETY: null, or an open file; a place of the caller's.
        unsafe { place.write(handle(file, "file")?.size()) };
        Ok(0)
    };
    answer(body) as c_int
}

/// `farpool_resize`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_resize(file: *const OpenFile, size: u64) -> c_int {
    // SAFETY: null, or an open file.
    answer(|| Ok(unsafe { handle(file, "file") }?.resize(size).map(|()| 0)?)) as c_int
}

/// `farpool_close`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_close(file: *const OpenFile) -> c_int {
    // SAFETY: null, or an open file.
    answer(|| unsafe { shared(file) }?.close().map(|()| 0)) as c_int
}

/// `farpool_delete`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_delete(pool: *const Connection, name: *const c_char) -> c_int {
    let body = || {
        // SAFETY: null, or a string of the caller's.
        let name =
            unsafe { text(name, "the name") }?.ok_or_else(|| Failure::invalid("a file needs a name"))?;
        // SAFETY: null, or an open connection.
        unsafe { handle(pool, "connection") }?.delete(name).map(|()| 0)
    };
    answer(body) as c_int
}

/// `farpool_last_error`
#[unsafe(no_mangle)]
pub extern "C" fn farpool_last_error() -> *const c_char {
    last()
}

/// `farpool_version`
#[unsafe(no_mangle)]
pub extern "C" fn farpool_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Where a result goes.
fn out<T>(place: *mut T) -> Result<*mut T, Failure> {
    if place.is_null() { Err(Failure::invalid("no place for the result: a null pointer")) } else { Ok(place) }
}

/// # Safety
/// `handle` is null, or a handle that is open for `'a`.
unsafe fn handle<'a, T>(handle: *const T, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: the caller's promise.
    unsafe { handle.as_ref() }.ok_or_else(|| Failure::invalid(format!("the {what} is a null pointer")))
}

/// A share of an open file, for an operation that may outlast the handle.
///
/// # Safety
/// As [`handle`].
unsafe fn shared(file: *const OpenFile) -> Result<Arc<OpenFile>, Failure> {
    // SAFETY: as the caller promises, it is open: then the connection holds a share of it, of which this makes another.
    unsafe {
        handle(file, "file")?;
        Arc::increment_strong_count(file);
        Ok(Arc::from_raw(file))
    }
}
