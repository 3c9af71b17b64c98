//! `pread`, `pwrite` and their relatives, under every name that glibc gives them.

use std::ffi::{c_int, c_void};
use std::io::{IoSlice, IoSliceMut};

use libc::{iovec, off_t, size_t, ssize_t};

use super::{engine, next};

/// Most pieces of one call; PostgreSQL's most. The kernel takes up to 1024, but they are put down on the stack here, and
/// threads may have little of it.
const PIECES_MAX: usize = 128;

/// # Safety
/// `to` has room for `bytes` bytes that nobody else uses meanwhile, as for `pread`.
unsafe fn read_here(fd: c_int, to: *mut c_void, bytes: size_t, offset: off_t) -> Option<ssize_t> {
    if to.is_null() || isize::try_from(bytes).is_err() || engine().table.is_plain(fd) {
        return None;
    }
    // SAFETY: the program vouches for `bytes` bytes at `to`, and has lent them to this call alone.
    let piece = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes) };
    engine().read(fd, &mut [IoSliceMut::new(piece)], offset).map(|bytes| bytes as ssize_t)
}

/// # Safety
/// At `from` there are `bytes` bytes that nobody changes meanwhile, as for `pwrite`.
unsafe fn write_here(fd: c_int, from: *const c_void, bytes: size_t, offset: off_t) -> Option<ssize_t> {
    if from.is_null() || isize::try_from(bytes).is_err() || engine().table.is_plain(fd) {
        return None;
    }
    // SAFETY: the program vouches for `bytes` bytes at `from`, unchanged while this call runs.
    let piece = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
    engine().write(fd, &[IoSlice::new(piece)], offset).map(|bytes| bytes as ssize_t)
}

/// The pieces of a call, if all of them could be slices. The caller has made sure that the call is one of ours.
///
/// # Safety
/// At `pieces` there are `count` pieces, which stay as they are for as long as the answer is used.
unsafe fn pieces<'a>(pieces: *const iovec, count: c_int) -> Option<&'a [iovec]> {
    let count = usize::try_from(count).ok().filter(|count| (1..=PIECES_MAX).contains(count))?;
    if pieces.is_null() || !pieces.is_aligned() {
        return None;
    }
    // SAFETY: the program vouches for `count` pieces.
    let pieces = unsafe { std::slice::from_raw_parts(pieces, count) };
    let usable = |piece: &iovec| !piece.iov_base.is_null() && isize::try_from(piece.iov_len).is_ok();
    pieces.iter().all(usable).then_some(pieces)
}

/// # Safety
/// As for `preadv`: `count` pieces at `to`, each with room that nobody else uses meanwhile.
unsafe fn readv_here(fd: c_int, to: *const iovec, count: c_int, offset: off_t) -> Option<ssize_t> {
    if !engine().is_ours(fd) {
        return None;
    }
    // SAFETY: as the caller's.
    let given = unsafe { pieces(to, count) }?;
    let mut copy = [const { std::mem::MaybeUninit::<IoSliceMut<'_>>::uninit() }; PIECES_MAX];
    for (place, piece) in copy.iter_mut().zip(given) {
        // SAFETY: the program vouches for the piece, and has lent it to this call alone.
        let bytes = unsafe { std::slice::from_raw_parts_mut(piece.iov_base.cast::<u8>(), piece.iov_len) };
        place.write(IoSliceMut::new(bytes));
    }
    // SAFETY: as many were written as are taken, and nothing has a destructor.
    let to =
        unsafe { std::slice::from_raw_parts_mut(copy.as_mut_ptr().cast::<IoSliceMut<'_>>(), given.len()) };
    engine().read(fd, to, offset).map(|bytes| bytes as ssize_t)
}

unsafe fn writev_here(fd: c_int, from: *const iovec, count: c_int, offset: off_t) -> Option<ssize_t> {
    if !engine().is_ours(fd) {
        return None;
    }
    // SAFETY: as the caller's.
    let given = unsafe { pieces(from, count) }?;
    // SAFETY: `IoSlice` is `iovec` in memory, as its documentation promises, and each piece was checked.
    let from = unsafe { std::slice::from_raw_parts(given.as_ptr().cast::<IoSlice<'_>>(), given.len()) };
    engine().write(fd, from, offset).map(|bytes| bytes as ssize_t)
}

macro_rules! positional {
    ($($name:ident),* => $rest:tt) => {
        $(positional!(@one $name $rest);)*
    };
    (@one $name:ident { $here:ident, $next:ident, ($($argument:ident: $type:ty),*) }) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name($($argument: $type),*) -> ssize_t {
            // SAFETY: the arguments are the program's.
            match unsafe { $here($($argument),*) } {
                Some(bytes) => bytes,
                // SAFETY: the same arguments.
                None => unsafe { next::$next($($argument),*) },
            }
        }
    };
}

positional!(pread, pread64, __pread64 => { read_here, pread,
    (fd: c_int, to: *mut c_void, bytes: size_t, offset: off_t) });
positional!(pwrite, pwrite64, __pwrite64 => { write_here, pwrite,
    (fd: c_int, from: *const c_void, bytes: size_t, offset: off_t) });
positional!(preadv, preadv64 => { readv_here, preadv,
    (fd: c_int, to: *const iovec, count: c_int, offset: off_t) });
positional!(pwritev, pwritev64 => { writev_here, pwritev,
    (fd: c_int, from: *const iovec, count: c_int, offset: off_t) });
positional!(__pread_chk, __pread64_chk => { checked_read_here, __pread_chk,
    (fd: c_int, to: *mut c_void, bytes: size_t, offset: off_t, room: size_t) });
positional!(preadv2, preadv64v2 => { readv2_here, preadv2,
    (fd: c_int, to: *const iovec, count: c_int, offset: off_t, flags: c_int) });
positional!(pwritev2, pwritev64v2 => { writev2_here, pwritev2,
    (fd: c_int, from: *const iovec, count: c_int, offset: off_t, flags: c_int) });

/// A buffer that is too small ends the program, which libc does.
unsafe fn checked_read_here(
    fd: c_int,
    to: *mut c_void,
    bytes: size_t,
    offset: off_t,
    room: size_t,
) -> Option<ssize_t> {
    // SAFETY: the arguments are the program's.
    if bytes > room { None } else { unsafe { read_here(fd, to, bytes, offset) } }
}

unsafe fn readv2_here(
    fd: c_int,
    to: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> Option<ssize_t> {
    // SAFETY: the arguments are the program's.
    if flags != 0 { None } else { unsafe { readv_here(fd, to, count, offset) } }
}

unsafe fn writev2_here(
    fd: c_int,
    from: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> Option<ssize_t> {
    if flags & libc::RWF_APPEND != 0 {
        engine().give_away(fd);
    }
    // SAFETY: the arguments are the program's.
    if flags != 0 { None } else { unsafe { writev_here(fd, from, count, offset) } }
}
