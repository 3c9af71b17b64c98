//! The functions of `farpool.h`, which documents them.
//!
//! `# Safety` of all of them: pointers from C are as the header demands, that is, strings end with a zero
//! byte, and buffers have the given length. Handles are numbers, which are looked up.

// All functions have the one contract above.
#![allow(clippy::missing_safety_doc)]

use std::ffi::{c_char, c_int, c_void};

use crate::error::{Failure, answer, last, text};
use crate::file::{Memory, OpenFile};
use crate::handles::{ConnectionHandle, FileHandle};
use crate::pool::{Connection, Target};
use crate::workers::{Context, Done, Job, Kind, must_not_wait};

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
    pool: *mut ConnectionHandle,
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
        // SAFETY: each is null, or a string of the caller that stays unchanged during the call.
        let target = unsafe {
            Target {
                broker: text(options.broker, "options.broker")?,
                tls_dir: text(options.tls_dir, "options.tls_dir")?,
                transport: text(options.transport, "options.transport")?,
                limit_bytes: options.limit_bytes,
            }
        };
        let handle = ConnectionHandle::of(Connection::open(&target)?);
        // SAFETY: not null, and the caller's to be written.
        unsafe { place.write(handle) };
        Ok(0)
    };
    answer(body) as c_int
}

/// `farpool_disconnect`
#[unsafe(no_mangle)]
pub extern "C" fn farpool_disconnect(pool: ConnectionHandle) {
    if !pool.is_null() {
        answer(|| {
            must_not_wait()?;
            let (connection, files) = pool.take_back()?;
            connection.finish();
            drop(files);
            Ok(0)
        });
    }
}

/// `farpool_create`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_create(
    pool: ConnectionHandle,
    name: *const c_char,
    size: u64,
    file: *mut FileHandle,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { open_by(pool, name, file, |pool, name| pool.create(name, size)) }
}

/// `farpool_open`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_open(
    pool: ConnectionHandle,
    name: *const c_char,
    file: *mut FileHandle,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { open_by(pool, name, file, Connection::find) }
}

/// # Safety
/// As for its callers, which pass the program's arguments on (`farpool.h`).
unsafe fn open_by(
    pool: ConnectionHandle,
    name: *const c_char,
    file: *mut FileHandle,
    find: impl FnOnce(&Connection, &str) -> Result<OpenFile, Failure>,
) -> c_int {
    let body = || {
        let connection = pool.get()?;
        let place = out(file)?;
        // SAFETY: null, or a string of the caller's.
        let name =
            unsafe { text(name, "the name") }?.ok_or_else(|| Failure::invalid("a file needs a name"))?;
        let handle = FileHandle::of(pool, find(&connection, name)?)?;
        // SAFETY: not null, and the caller's to be written.
        unsafe { place.write(handle) };
        Ok(0)
    };
    answer(body) as c_int
}

/// `farpool_read`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_read(
    file: FileHandle,
    buffer: *mut c_void,
    bytes: usize,
    offset: u64,
) -> libc::ssize_t {
    // SAFETY: the caller's promise: a buffer to be written.
    answer(|| file.get()?.read(unsafe { Memory::new(buffer.cast(), bytes) }?, offset)) as libc::ssize_t
}

/// `farpool_write`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_write(
    file: FileHandle,
    data: *const c_void,
    bytes: usize,
    offset: u64,
) -> libc::ssize_t {
    // SAFETY: the caller's promise: bytes to be read. They are not written to.
    answer(|| file.get()?.write(unsafe { Memory::new(data.cast_mut().cast(), bytes) }?, offset))
        as libc::ssize_t
}

/// `farpool_read_async`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_read_async(
    file: FileHandle,
    buffer: *mut c_void,
    bytes: usize,
    offset: u64,
    done: Option<Done>,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise: a buffer to be written until `done` is called.
    unsafe { start(file, Kind::Read, buffer, bytes, offset, done, context) }
}

/// `farpool_write_async`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_write_async(
    file: FileHandle,
    data: *const c_void,
    bytes: usize,
    offset: u64,
    done: Option<Done>,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise: bytes to be read until `done` is called.
    unsafe { start(file, Kind::Write, data.cast_mut(), bytes, offset, done, context) }
}

/// # Safety
/// The bytes at `data` are for the operation alone until `done` is called, as `farpool.h` asks of the
/// program.
unsafe fn start(
    file: FileHandle,
    kind: Kind,
    memory: *mut c_void,
    bytes: usize,
    offset: u64,
    done: Option<Done>,
    context: *mut c_void,
) -> c_int {
    let body = || {
        let file = file.get()?;
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
pub unsafe extern "C" fn farpool_size(file: FileHandle, size: *mut u64) -> c_int {
    let body = || {
        let (file, place) = (file.get()?, out(size)?);
        // SAFETY: not null, and the caller's to be written.
        unsafe { place.write(file.size()) };
        Ok(0)
    };
    answer(body) as c_int
}

/// `farpool_resize`
#[unsafe(no_mangle)]
pub extern "C" fn farpool_resize(file: FileHandle, size: u64) -> c_int {
    answer(|| Ok(file.get()?.resize(size).map(|()| 0)?)) as c_int
}

/// `farpool_close`
#[unsafe(no_mangle)]
pub extern "C" fn farpool_close(file: FileHandle) -> c_int {
    let body = || {
        must_not_wait()?;
        file.take_back()?.wait_for_its_operations();
        Ok(0)
    };
    answer(body) as c_int
}

/// `farpool_delete`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_delete(pool: ConnectionHandle, name: *const c_char) -> c_int {
    let body = || {
        // SAFETY: null, or a string of the caller's.
        let name =
            unsafe { text(name, "the name") }?.ok_or_else(|| Failure::invalid("a file needs a name"))?;
        pool.get()?.delete(name).map(|()| 0)
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

/// Checks the pointer to which a result is to be written.
fn out<T>(place: *mut T) -> Result<*mut T, Failure> {
    if place.is_null() { Err(Failure::invalid("the pointer for the result is null")) } else { Ok(place) }
}
