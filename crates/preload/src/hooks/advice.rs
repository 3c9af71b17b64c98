//! Calls that have the kernel read a file ahead. On a registered description they do nothing. Otherwise the
//! kernel would keep pages (`O_DIRECT` does not prevent that here), which accelerated writes do not update,
//! and show them to the next process that opens the file.

use std::ffi::c_int;

use libc::{off_t, size_t, ssize_t};

use super::{engine, next};
use crate::table::flag;

macro_rules! fadvise {
    ($($name:ident),*) => {
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name(fd: c_int, offset: off_t, bytes: off_t, advice: c_int) -> c_int {
            if advice == libc::POSIX_FADV_WILLNEED && bytes >= 0 && engine().is_served(fd, 0) {
                return 0; // advice need not be followed
            }
            // SAFETY: the program's own call, with its own arguments.
            unsafe { next::posix_fadvise(fd, offset, bytes, advice) }
        })*
    };
}
fadvise!(posix_fadvise, posix_fadvise64);

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn readahead(fd: c_int, offset: off_t, bytes: size_t) -> ssize_t {
    if engine().is_served(fd, flag::READABLE) {
        return 0;
    }
    // SAFETY: the program's own call, with its own arguments.
    unsafe { next::readahead(fd, offset, bytes) }
}
