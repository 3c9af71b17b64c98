//! Calls that change files without a position, by path, or in the kernel: they are announced to the page
//! cache. Without a cache they are libc's.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use std::io::Write as _;

use libc::{FILE, iovec, mode_t, off_t, size_t, ssize_t};

use super::positional::Pieces;
use super::{engine, next};
use crate::backend::Given;
use crate::sys;

/// Makes a call that changes the file behind a descriptor.
fn changing(fd: c_int, real: impl FnOnce() -> isize) -> isize {
    engine().cached.change(engine(), fd, real)
}

/// # Safety
/// At `from` there are `bytes` bytes, as for `pwrite`.
pub(super) unsafe fn pwrite(fd: c_int, from: *const c_void, bytes: size_t, offset: off_t) -> ssize_t {
    // SAFETY: the program's own call. A page in its place lives until the call returns, and is as long.
    let real = |page: Option<&[u8]>| unsafe {
        next::pwrite(fd, page.map_or(from, |page| page.as_ptr().cast()), bytes, offset)
    };
    let range =
        u64::try_from(offset).ok().zip(u64::try_from(offset.saturating_add_unsigned(bytes as u64)).ok());
    let Some((start, end)) = range.filter(|_| !from.is_null()) else { return real(None) };
    // SAFETY: the caller promises `bytes` readable bytes at `from` for as long as this call lasts.
    let given = unsafe { Given::new(from.cast::<u8>(), bytes) };
    engine().cached.write(engine(), fd, start..end, Some(given), real)
}

/// Makes a call that writes pieces at a position, with a copy of their list: other threads may change the
/// program's.
///
/// # Safety
/// If `count` is positive and `list` neither null nor misaligned, `count` entries can be read at `list` for
/// as long as the call lasts.
unsafe fn writing_pieces(
    fd: c_int,
    list: *const iovec,
    count: c_int,
    offset: off_t,
    real: impl FnOnce(*const iovec) -> ssize_t,
) -> ssize_t {
    let cached = &engine().cached;
    if !cached.is_on() {
        return real(list);
    }
    // SAFETY: the caller promises `count` entries at `list` for as long as this call lasts.
    let Some(own) = (unsafe { Pieces::of(list, count, |piece| piece) }) else {
        return changing(fd, || real(list));
    };
    let bytes = own.all().iter().try_fold(0_u64, |sum, piece| sum.checked_add(piece.iov_len as u64));
    let start = u64::try_from(offset).ok();
    match start.zip(bytes).and_then(|(start, bytes)| Some(start..start.checked_add(bytes)?)) {
        Some(range) => cached.write(engine(), fd, range, None, |_| real(own.all().as_ptr())),
        None => changing(fd, || real(own.all().as_ptr())),
    }
}

/// # Safety
/// As for `pwritev`.
pub(super) unsafe fn pwritev(fd: c_int, from: *const iovec, count: c_int, offset: off_t) -> ssize_t {
    // SAFETY: the program's own call, with its own arguments or a copy of its list.
    unsafe { writing_pieces(fd, from, count, offset, |from| next::pwritev(fd, from, count, offset)) }
}

/// # Safety
/// As for `pwritev2`.
pub(super) unsafe fn pwritev2(
    fd: c_int,
    from: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    // With `RWF_APPEND`, or from -1 on, it goes to another position than `offset`.
    let at = if flags & libc::RWF_APPEND == 0 { offset } else { -1 };
    // SAFETY: the program's own call, with its own arguments or a copy of its list.
    unsafe { writing_pieces(fd, from, count, at, |from| next::pwritev2(fd, from, count, offset, flags)) }
}

macro_rules! changes {
    ($($($name:ident),* => $next:ident($fd:ident: c_int, $($argument:ident: $type:ty),*) -> $answer:ty;)*) => {
        $(changes!(@each $($name),* => $next($fd, $($argument: $type),*) -> $answer);)*
    };
    (@each $($name:ident),* => $next:ident $arguments:tt -> $answer:ty) => {
        $(changes!(@one $name $next $arguments $answer);)*
    };
    (@one $name:ident $next:ident ($fd:ident, $($argument:ident: $type:ty),*) $answer:ty) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name($fd: c_int, $($argument: $type),*) -> $answer {
            // SAFETY: the program's own call, with its own arguments.
            changing($fd, || unsafe { next::$next($fd, $($argument),*) as isize }) as $answer
        }
    };
}

changes! {
    write, __write => write(fd: c_int, from: *const c_void, bytes: size_t) -> ssize_t;
    writev => writev(fd: c_int, from: *const iovec, count: c_int) -> ssize_t;
    ftruncate, ftruncate64 => ftruncate(fd: c_int, bytes: off_t) -> c_int;
    fallocate, fallocate64 => fallocate(fd: c_int, mode: c_int, offset: off_t, bytes: off_t) -> c_int;
    sendfile, sendfile64 => sendfile(fd: c_int, from: c_int, offset: *mut off_t, bytes: size_t) -> ssize_t;
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn splice(
    from: c_int,
    from_offset: *mut off_t,
    to: c_int,
    to_offset: *mut off_t,
    bytes: size_t,
    flags: c_uint,
) -> ssize_t {
    // SAFETY: the program's own call, with its own arguments.
    changing(to, || unsafe { next::splice(from, from_offset, to, to_offset, bytes, flags) })
}

macro_rules! syncs {
    ($($name:ident ($($argument:ident: $type:ty),*);)*) => {
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name(fd: c_int, $($argument: $type),*) -> c_int {
            // SAFETY: the program's own call, with its own arguments.
            let answer = unsafe { next::$name(fd, $($argument),*) };
            if answer != 0 && engine().cached.is_on() {
                forget_unsynced(fd);
            }
            answer
        })*
    };
}

syncs! {
    fsync();
    fdatasync();
    sync_file_range(offset: off_t, bytes: off_t, flags: c_uint);
}

/// Drops a file's pages: writes to it have failed, so the kernel may have lost what the cache has.
fn forget_unsynced(fd: c_int) {
    let errno = sys::last_error();
    changing(fd, || 0);
    sys::set_last_error(errno);
}

/// Opens a file that is to be truncated: first without that, so that it is known which file it is.
fn truncating(flags: c_int, open: impl Fn(c_int) -> c_int) -> c_int {
    crate::patching::hook_new_objects();
    let cached = &engine().cached;
    let truncates =
        flags & libc::O_TRUNC != 0 && flags & libc::O_PATH == 0 && flags & libc::O_TMPFILE != libc::O_TMPFILE;
    if !truncates || !cached.is_on() {
        return open(flags);
    }
    if !matches!(flags & libc::O_ACCMODE, libc::O_WRONLY | libc::O_RDWR) {
        return cached.change_unknown(engine(), || open(flags) as isize) as c_int;
    }
    let fd = open(flags & !libc::O_TRUNC);
    if fd < 0 || !sys::facts(fd).is_some_and(|file| file.is_regular) {
        return fd; // other kinds of files are not truncated
    }
    if changing(fd, || sys::truncate(fd, 0) as isize) == 0 {
        return fd;
    }
    let errno = sys::last_error();
    sys::close(fd);
    sys::set_last_error(errno);
    -1
}

macro_rules! open {
    ($($name:ident $next:ident ($($first:ident: $type:ty),*);)*) => {
        // The mode is a variable argument. If the program passed none, the kernel does not read it.
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name($($first: $type,)* flags: c_int, mode: mode_t) -> c_int {
            // SAFETY: the program's own call, with its own arguments but for a flag.
            truncating(flags, |flags| unsafe { next::$next($($first,)* flags, mode) })
        })*
    };
}

open! {
    open open (path: *const c_char);
    open64 open64 (path: *const c_char);
    __open open (path: *const c_char);
    __open64 open64 (path: *const c_char);
    openat openat (folder: c_int, path: *const c_char);
    openat64 openat64 (folder: c_int, path: *const c_char);
}

macro_rules! open_without_mode {
    ($($name:ident ($($first:ident: $type:ty),*);)*) => {
        // What `open` becomes in programs that were compiled with `_FORTIFY_SOURCE`.
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name($($first: $type,)* flags: c_int) -> c_int {
            // SAFETY: the program's own call, with its own arguments but for a flag.
            truncating(flags, |flags| unsafe { next::$name($($first,)* flags) })
        })*
    };
}

open_without_mode! {
    __open_2 (path: *const c_char);
    __open64_2 (path: *const c_char);
    __openat_2 (folder: c_int, path: *const c_char);
    __openat64_2 (folder: c_int, path: *const c_char);
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn open_by_handle_at(mount: c_int, handle: *mut c_void, flags: c_int) -> c_int {
    // SAFETY: the program's own call, with its own arguments but for a flag.
    truncating(flags, |flags| unsafe { next::open_by_handle_at(mount, handle, flags) })
}

/// `FICLONE` and `FICLONERANGE` of `linux/fs.h`: the file gets blocks of another one.
const CLONES: [c_ulong; 2] = [0x4004_9409, 0x4020_940d];

/// One argument of unknown type, passed where a number or a pointer would be. If the program passed none, the
/// kernel does not read it.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: size_t) -> c_int {
    // SAFETY: the program's own call, with its own arguments.
    let real = || unsafe { next::ioctl(fd, request, argument) };
    if CLONES.contains(&request) { changing(fd, || real() as isize) as c_int } else { real() }
}

macro_rules! creat {
    ($($name:ident $next:ident),*) => {
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name(path: *const c_char, mode: mode_t) -> c_int {
            let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
            // SAFETY: the program's own call, with its own arguments, as `open`.
            truncating(flags, |flags| unsafe { next::$next(path, flags, mode) })
        })*
    };
}
creat!(creat open, creat64 open64);

/// The name of a descriptor's file in `/proc`, without allocating.
struct Link([u8; 32]);

impl Link {
    fn of(fd: c_int) -> Link {
        let mut name = [0; 32];
        // It fits: the number has ten digits at most.
        let _ = write!(&mut name[..31], "/proc/self/fd/{fd}");
        Link(name)
    }

    fn path(&self) -> *const c_char {
        self.0.as_ptr().cast()
    }
}

macro_rules! truncate {
    ($($name:ident),*) => {
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name(path: *const c_char, bytes: off_t) -> c_int {
            let cached = &engine().cached;
            // SAFETY: the program's own call, with its own arguments.
            let real = || unsafe { next::truncate(path, bytes) };
            if !cached.is_on() {
                return real();
            }
            // A descriptor that only names the file: closing it gives up no record lock of the process.
            // SAFETY: the program's own path.
            let fd = unsafe { next::open(path, libc::O_PATH | libc::O_CLOEXEC, 0) };
            if fd < 0 {
                return match sys::last_error() {
                    libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::ENAMETOOLONG | libc::EFAULT => real(),
                    _ => cached.change_unknown(engine(), || real() as isize) as c_int,
                };
            }
            // By the descriptor: the path may mean another file by now.
            let link = Link::of(fd);
            // SAFETY: a C string, which lives until the call returns.
            let answer = changing(fd, || unsafe { next::truncate(link.path(), bytes) } as isize) as c_int;
            let errno = sys::last_error();
            sys::close(fd);
            sys::set_last_error(errno);
            answer
        })*
    };
}
truncate!(truncate, truncate64);

/// Whether a stream with this mode may write.
///
/// # Safety
/// `mode` is null or a C string.
unsafe fn may_write(mode: *const c_char) -> bool {
    // SAFETY: the caller promises a C string.
    !mode.is_null() && unsafe { CStr::from_ptr(mode) }.to_bytes().iter().any(|byte| b"wa+".contains(byte))
}

/// Notes that a stream may write to its file whenever it likes.
///
/// # Safety
/// `stream` is null or an open stream, and `mode` null or a C string.
pub(super) unsafe fn note_stream(stream: *mut FILE, mode: *const c_char) {
    let cached = &engine().cached;
    // SAFETY: the caller promises that `mode` is null or a C string.
    if cached.is_on() && !stream.is_null() && unsafe { may_write(mode) } {
        // SAFETY: the stream is open.
        cached.close_door_for(engine(), unsafe { libc::fileno(stream) });
    }
}

/// Notes that the program may write to a file by standard output or standard error, if this is one of them.
/// What is appended changes no block that is cached.
pub(super) fn note_standard_stream(fd: c_int) {
    if !matches!(fd, libc::STDOUT_FILENO | libc::STDERR_FILENO) || !engine().cached.is_on() {
        return;
    }
    let may_overwrite = sys::status_flags(fd)
        .is_some_and(|flags| flags & libc::O_ACCMODE != libc::O_RDONLY && flags & libc::O_APPEND == 0);
    if may_overwrite && sys::facts(fd).is_some_and(|file| file.is_regular) {
        engine().cached.close_door_for(engine(), fd);
    }
}

/// The flags with which a stream that truncates its file opens it (`fopen(3)`). `None`: it does not truncate
/// a file, or has an encoding, for which only libc can open it.
///
/// # Safety
/// `mode` is null or a C string.
unsafe fn flags_of_truncating(mode: *const c_char) -> Option<c_int> {
    // SAFETY: the caller promises a C string.
    let mode = (!mode.is_null()).then(|| unsafe { CStr::from_ptr(mode) }.to_bytes())?;
    let further = mode.strip_prefix(b"w").filter(|further| !further.contains(&b','))?;
    let has = |flag| further.iter().take(6).any(|byte| *byte == flag);
    let access = if has(b'+') { libc::O_RDWR } else { libc::O_WRONLY };
    let exclusive = if has(b'x') { libc::O_EXCL } else { 0 };
    let at_exec = if has(b'e') { libc::O_CLOEXEC } else { 0 };
    Some(libc::O_CREAT | libc::O_TRUNC | access | exclusive | at_exec)
}

/// Makes a call that opens a stream. If it truncates the file, it is not known which file that is.
pub(super) fn opening(mode: *const c_char, open: impl FnOnce() -> *mut FILE) -> *mut FILE {
    // SAFETY: the program passes null or a C string.
    let truncates = !mode.is_null() && unsafe { CStr::from_ptr(mode) }.to_bytes().starts_with(b"w");
    if !truncates || !engine().cached.is_on() {
        return open();
    }
    let mut stream = std::ptr::null_mut();
    engine().cached.change_unknown(engine(), || {
        stream = open();
        0
    });
    stream
}

/// Opens a stream that truncates its file by a descriptor, so that it is known which file that is.
///
/// # Safety
/// As for `fopen`.
unsafe fn open_truncating(path: *const c_char, mode: *const c_char, flags: c_int) -> *mut FILE {
    // SAFETY: the program's own path. What the user's mask leaves of the mode is that of `fopen`.
    let fd = truncating(flags, |flags| unsafe { next::open(path, flags, 0o666) });
    if fd < 0 {
        return std::ptr::null_mut();
    }
    // SAFETY: a descriptor of its own, which the stream owns from now on, and the program's own mode.
    let stream = unsafe { next::fdopen(fd, mode) };
    if stream.is_null() {
        let errno = sys::last_error();
        sys::close(fd);
        sys::set_last_error(errno);
    }
    stream
}

macro_rules! fopen {
    ($($name:ident),*) => {
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name(path: *const c_char, mode: *const c_char) -> *mut FILE {
            // SAFETY: the program passes null or a C string.
            let flags = unsafe { flags_of_truncating(mode) }.filter(|_| engine().cached.is_on());
            let stream = match flags {
                // SAFETY: the program's own call, with its own arguments.
                Some(flags) => unsafe { open_truncating(path, mode, flags) },
                // SAFETY: the program's own call, with its own arguments.
                None => opening(mode, || unsafe { next::$name(path, mode) }),
            };
            // SAFETY: the stream was just opened, with this mode.
            unsafe { note_stream(stream, mode) };
            stream
        })*
    };
}
fopen!(fopen, fopen64);

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    // SAFETY: the program's own call, with its own arguments.
    let stream = unsafe { next::fdopen(fd, mode) };
    // SAFETY: the stream was just opened, with this mode.
    unsafe { note_stream(stream, mode) };
    stream
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_truncates_is_opened_with_the_flags_of_fopen() {
        // SAFETY: a C string.
        let flags = |mode: &CStr| unsafe { flags_of_truncating(mode.as_ptr()) };
        let created = libc::O_CREAT | libc::O_TRUNC;
        assert_eq!(flags(c"w"), Some(created | libc::O_WRONLY));
        assert_eq!(flags(c"wb+e"), Some(created | libc::O_RDWR | libc::O_CLOEXEC));
        assert_eq!(flags(c"wx"), Some(created | libc::O_WRONLY | libc::O_EXCL));
        assert_eq!((flags(c"r+"), flags(c"a"), flags(c"w,ccs=UTF-8")), (None, None, None));
        // SAFETY: null is allowed.
        assert_eq!(unsafe { flags_of_truncating(std::ptr::null()) }, None);
    }
}
