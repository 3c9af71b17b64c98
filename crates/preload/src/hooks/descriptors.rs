//! Calls that close descriptors, copy them, or change their flags.

#![allow(non_snake_case)] // glibc's names

use std::ffi::{c_char, c_int, c_uint};

use libc::{FILE, off_t, size_t};

use super::{changes, engine, next};

/// `CLOSE_RANGE_CLOEXEC` of `linux/close_range.h`: the call closes nothing yet.
const CLOSE_RANGE_CLOEXEC: c_int = 4;

/// Makes a call that closes a descriptor.
fn closing<T>(fd: c_int, real: impl FnOnce() -> T) -> T {
    engine().cached.replacements.note(fd);
    engine().close(fd, real)
}

/// Makes a call that gives a descriptor the meaning of another one.
fn replacing(old: c_int, new: c_int, real: impl FnOnce() -> c_int) -> c_int {
    engine().cached.replacements.note(new);
    let answer = engine().replace(old, new, real);
    if answer >= 0 {
        changes::note_standard_stream(new);
    }
    answer
}

macro_rules! close {
    ($($name:ident),*) => {
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name(fd: c_int) -> c_int {
            // SAFETY: the program's own call, with its own arguments.
            closing(fd, || unsafe { next::close(fd) })
        })*
    };
}
close!(close, __close);

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    engine().cached.replacements.note_all();
    // SAFETY: the program's own call, with its own arguments.
    let answer = unsafe { next::close_range(first, last, flags) };
    engine().close_range(first, last, || answer == 0 && flags & CLOSE_RANGE_CLOEXEC == 0);
    answer
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn closefrom(first: c_int) {
    engine().cached.replacements.note_all();
    // SAFETY: the program's own call, with its own arguments.
    unsafe { next::closefrom(first) };
    engine().close_range(first.max(0).unsigned_abs(), c_uint::MAX, || true);
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn dup(old: c_int) -> c_int {
    // SAFETY: the program's own call, with its own arguments.
    let new = unsafe { next::dup(old) };
    if new >= 0 {
        engine().copied(old, new);
    }
    new
}

macro_rules! dup2 {
    ($($name:ident),*) => {
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name(old: c_int, new: c_int) -> c_int {
            // SAFETY: the program's own call, with its own arguments.
            replacing(old, new, || unsafe { next::dup2(old, new) })
        })*
    };
}
dup2!(dup2, __dup2);

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    // SAFETY: the program's own call, with its own arguments.
    replacing(old, new, || unsafe { next::dup3(old, new, flags) })
}

macro_rules! fcntl {
    ($($name:ident),*) => {
        // One argument of unknown type, passed where a number or a pointer would be. If the program passed
        // none, the kernel does not read it.
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name(fd: c_int, command: c_int, argument: size_t) -> c_int {
            // SAFETY: the program's own call; `argument` is the program's own, or a number of flags.
            let real = |argument| unsafe { next::fcntl(fd, command, argument) };
            match command {
                libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
                    let new = real(argument);
                    if new >= 0 {
                        engine().copied(fd, new);
                    }
                    new
                }
                libc::F_GETFL => engine().program_flags(fd, real(argument)),
                libc::F_SETFL => engine().set_flags(fd, argument as c_int, |flags| real(flags as size_t)),
                libc::F_SETLK | libc::F_SETLKW => {
                    engine().note_record_locks();
                    real(argument)
                }
                _ => real(argument),
            }
        })*
    };
}
fcntl!(fcntl, fcntl64, __fcntl);

macro_rules! lockf {
    ($($name:ident),*) => {
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name(fd: c_int, command: c_int, bytes: off_t) -> c_int {
            engine().note_record_locks();
            // SAFETY: the program's own call, with its own arguments.
            unsafe { next::lockf(fd, command, bytes) }
        })*
    };
}
lockf!(lockf, lockf64);

/// The descriptor behind a stream; -1 if it has none.
///
/// # Safety
/// `stream` is null or an open stream that no thread closes during the call.
unsafe fn descriptor(stream: *mut FILE) -> c_int {
    // SAFETY: the thread's own `errno`, and the program's stream, which is still open.
    unsafe {
        let errno = *libc::__errno_location();
        let fd = libc::fileno(stream);
        *libc::__errno_location() = errno;
        fd
    }
}

macro_rules! fclose {
    ($($name:ident),*) => {
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name(stream: *mut FILE) -> c_int {
            // SAFETY: the stream is the program's, and open until `real` runs.
            let fd = unsafe { descriptor(stream) };
            // SAFETY: the program's own call, with its own arguments.
            closing(fd, || unsafe { next::fclose(stream) })
        })*
    };
}
fclose!(fclose, _IO_fclose);

macro_rules! freopen {
    ($($name:ident),*) => {
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE {
            // SAFETY: the stream is the program's, and open until `real` runs.
            let fd = unsafe { descriptor(stream) };
            // SAFETY: the program's own call, with its own arguments.
            let stream = closing(fd, || changes::opening(mode, || unsafe { next::$name(path, mode, stream) }));
            // SAFETY: the stream was just opened, with this mode.
            unsafe { changes::note_stream(stream, mode) };
            stream
        })*
    };
}
freopen!(freopen, freopen64);
