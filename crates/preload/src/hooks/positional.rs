//! `pread`, `pwrite` and their relatives, under every name that glibc gives them.
//!
//! Other threads of the program may use its memory at any moment, and the pieces of a call may overlap. So
//! this module makes no reference to that memory.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use libc::{iovec, off_t, size_t, ssize_t};

use super::{changes, engine, next};
use crate::backend::{Given, Room};

/// Most pieces of one call; PostgreSQL uses no more. The kernel takes up to 1024, but these lie on the stack,
/// which may be small.
const PIECES_MAX: usize = 128;

/// # Safety
/// `to` has room for `bytes` bytes, as for `pread`.
unsafe fn read_here(fd: c_int, to: *mut c_void, bytes: size_t, offset: off_t) -> Option<ssize_t> {
    if !is_usable(to, bytes) || engine().has_nothing_to_do_with(fd) {
        return None;
    }
    // SAFETY: the caller promises room for `bytes` bytes at `to` for as long as this call lasts, and `room`
    // is gone when it returns. Other threads may use these bytes meanwhile.
    let room = unsafe { Room::new(to.cast::<u8>(), bytes) };
    engine().read(fd, &[room], offset).map(|bytes| bytes as ssize_t)
}

/// # Safety
/// At `from` there are `bytes` bytes, as for `pwrite`.
unsafe fn write_here(fd: c_int, from: *const c_void, bytes: size_t, offset: off_t) -> Option<ssize_t> {
    if !is_usable(from, bytes) || engine().table.is_plain(fd) {
        return None;
    }
    // SAFETY: the caller promises `bytes` readable bytes at `from` for as long as this call lasts, and
    // `given` is gone when it returns. Other threads may change these bytes meanwhile.
    let given = unsafe { Given::new(from.cast::<u8>(), bytes) };
    engine().write(fd, &[given], offset).map(|bytes| bytes as ssize_t)
}

/// Whether memory at `start` may be copied here. The kernel decides about the rest.
fn is_usable(start: *const c_void, bytes: size_t) -> bool {
    !start.is_null() && isize::try_from(bytes).is_ok()
}

/// The pieces of a call, made from the entries of its list. Each entry is read once, since other threads may
/// change the list.
pub(super) struct Pieces<T> {
    made: [MaybeUninit<T>; PIECES_MAX],
    count: usize,
}

impl<T: Copy> Pieces<T> {
    /// Makes a piece of each entry. `None`: the kernel must decide about one of them, or about their number.
    /// The caller has checked that the entries are needed.
    ///
    /// # Safety
    /// If `count` is positive and `list` neither null nor misaligned, `count` entries can be read at `list`
    /// for as long as the call lasts. Other threads may change them.
    pub(super) unsafe fn of(list: *const iovec, count: c_int, make: impl Fn(iovec) -> T) -> Option<Self> {
        let count = usize::try_from(count).ok().filter(|count| (1..=PIECES_MAX).contains(count))?;
        if list.is_null() || !list.is_aligned() {
            return None;
        }
        let mut made = [const { MaybeUninit::uninit() }; PIECES_MAX];
        for (at, place) in made[..count].iter_mut().enumerate() {
            // SAFETY: volatile, so that the entry that is checked is the one that is used.
            // - In bounds: `at < count`, and the caller promises `count` entries; `list` is aligned and not
            //   null, checked above.
            // - Exclusive: not guaranteed. This relies on volatile reads being plain loads, and every bit
            //   pattern is a valid `iovec`. If another thread changes the entry meanwhile, the copy is old,
            //   new or mixed, and is checked below.
            // - Alive: the caller promises the list for as long as the call lasts.
            let piece = unsafe { list.add(at).read_volatile() };
            if !is_usable(piece.iov_base, piece.iov_len) {
                return None;
            }
            place.write(make(piece));
        }
        Some(Pieces { made, count })
    }

    pub(super) fn all(&self) -> &[T] {
        // SAFETY:
        // - In bounds: `of` has initialised the first `count` places, and `count <= PIECES_MAX`.
        // - Exclusive: no place is written to after `of`, and the slice borrows `self`.
        // - Alive: the places lie in `self`.
        unsafe { std::slice::from_raw_parts(self.made.as_ptr().cast::<T>(), self.count) }
    }
}

/// # Safety
/// As for `preadv`: `count` entries can be read at `to`, and the memory that they name can be written to,
/// for as long as the call lasts.
unsafe fn readv_here(fd: c_int, to: *const iovec, count: c_int, offset: off_t) -> Option<ssize_t> {
    if !engine().is_ours(fd) && !engine().cached.is_on() {
        return None;
    }
    // SAFETY: the caller promises room where each entry says for as long as this call lasts, and the pieces
    // are gone when it returns. Other threads may use these bytes meanwhile.
    let room = |piece: iovec| unsafe { Room::new(piece.iov_base.cast::<u8>(), piece.iov_len) };
    // SAFETY: the caller promises `count` entries at `to` for as long as this call lasts.
    let to = unsafe { Pieces::of(to, count, room) }?;
    engine().read(fd, to.all(), offset).map(|bytes| bytes as ssize_t)
}

/// # Safety
/// As for `pwritev`: `count` entries can be read at `from`, and the bytes that they name, for as long as the
/// call lasts.
unsafe fn writev_here(fd: c_int, from: *const iovec, count: c_int, offset: off_t) -> Option<ssize_t> {
    if !engine().is_ours(fd) {
        return None;
    }
    // SAFETY: the caller promises the bytes that each entry names for as long as this call lasts, and the
    // pieces are gone when it returns. Other threads may change these bytes meanwhile.
    let given = |piece: iovec| unsafe { Given::new(piece.iov_base.cast::<u8>(), piece.iov_len) };
    // SAFETY: the caller promises `count` entries at `from` for as long as this call lasts.
    let from = unsafe { Pieces::of(from, count, given) }?;
    engine().write(fd, from.all(), offset).map(|bytes| bytes as ssize_t)
}

macro_rules! positional {
    ($($name:ident),* => $rest:tt) => {
        $(positional!(@one $name $rest);)*
    };
    (@one $name:ident { $here:ident, $next:path, ($($argument:ident: $type:ty),*) }) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name($($argument: $type),*) -> ssize_t {
            // SAFETY: the arguments are the program's.
            match unsafe { $here($($argument),*) } {
                Some(bytes) => bytes,
                // SAFETY: the same arguments.
                None => unsafe { $next($($argument),*) },
            }
        }
    };
}

positional!(pread, pread64, __pread64 => { read_here, next::pread,
    (fd: c_int, to: *mut c_void, bytes: size_t, offset: off_t) });
positional!(pwrite, pwrite64, __pwrite64 => { write_here, changes::pwrite,
    (fd: c_int, from: *const c_void, bytes: size_t, offset: off_t) });
positional!(preadv, preadv64 => { readv_here, next::preadv,
    (fd: c_int, to: *const iovec, count: c_int, offset: off_t) });
positional!(pwritev, pwritev64 => { writev_here, changes::pwritev,
    (fd: c_int, from: *const iovec, count: c_int, offset: off_t) });
positional!(__pread_chk, __pread64_chk => { checked_read_here, next::__pread_chk,
    (fd: c_int, to: *mut c_void, bytes: size_t, offset: off_t, room: size_t) });
positional!(preadv2, preadv64v2 => { readv2_here, next::preadv2,
    (fd: c_int, to: *const iovec, count: c_int, offset: off_t, flags: c_int) });
positional!(pwritev2, pwritev64v2 => { writev2_here, changes::pwritev2,
    (fd: c_int, from: *const iovec, count: c_int, offset: off_t, flags: c_int) });

/// Leaves a buffer that is too small to libc, which ends the program.
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
