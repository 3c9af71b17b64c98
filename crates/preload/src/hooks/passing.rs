//! Calls that map a file, copy from it within the kernel, or pass descriptors to other processes. Each call
//! first gives up acceleration of the descriptor: from then on, operations on it go to the kernel.

use std::ffi::{c_int, c_uint, c_void};

use libc::{mmsghdr, msghdr, off_t, size_t, ssize_t};

use super::{engine, next};

macro_rules! mmap {
    ($($name:ident),*) => {
        $(#[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C" fn $name(
            at: *mut c_void,
            bytes: size_t,
            access: c_int,
            flags: c_int,
            fd: c_int,
            offset: off_t,
        ) -> *mut c_void {
            if fd >= 0 && flags & libc::MAP_ANONYMOUS == 0 {
                engine().give_away(fd);
                if flags & libc::MAP_TYPE != libc::MAP_PRIVATE && access & libc::PROT_WRITE != 0 {
                    engine().cached.close_door_for(engine(), fd);
                }
            }
            // SAFETY: the program's own call, with its own arguments.
            unsafe { next::mmap(at, bytes, access, flags, fd, offset) }
        })*
    };
}
mmap!(mmap, mmap64);

/// Gives up acceleration of the source first. The kernel copies only up to the size of the source that it has
/// cached, and does not ask the mount for the present size.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn copy_file_range(
    from: c_int,
    from_offset: *mut off_t,
    to: c_int,
    to_offset: *mut off_t,
    bytes: size_t,
    flags: c_uint,
) -> ssize_t {
    if from >= 0 {
        engine().give_away(from);
    }
    // SAFETY: the program's own call, with its own arguments.
    let real = || unsafe { next::copy_file_range(from, from_offset, to, to_offset, bytes, flags) };
    engine().cached.change(engine(), to, real)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program's message, which `sendmsg` is about to read as well.
    unsafe { give_away_passed(message) };
    // SAFETY: the program's own call, with its own arguments.
    unsafe { next::sendmsg(socket, message, flags) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn sendmmsg(socket: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    if !messages.is_null() {
        for index in 0..count as usize {
            // SAFETY: the program vouches for `count` messages, which `sendmmsg` is about to read as well.
            unsafe { give_away_passed(&raw const (*messages.add(index)).msg_hdr) };
        }
    }
    // SAFETY: the program's own call, with its own arguments.
    unsafe { next::sendmmsg(socket, messages, count, flags) }
}

/// Gives up acceleration of the descriptors that a message passes on.
///
/// # Safety
/// `message` is what the program passed to `sendmsg`: it can be read, with all that it points to, until this
/// returns.
unsafe fn give_away_passed(message: *const msghdr) {
    // SAFETY: the program's message is readable until the call returns, its control data is as long as it
    // says, and `CMSG_NXTHDR` stays within it.
    unsafe {
        let Some(message) = message.as_ref().filter(|message| !message.msg_control.is_null()) else { return };
        let mut header = libc::CMSG_FIRSTHDR(message);
        while let Some(at) = header.as_ref() {
            if at.cmsg_level == libc::SOL_SOCKET && at.cmsg_type == libc::SCM_RIGHTS {
                let bytes = at.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let first = libc::CMSG_DATA(header).cast::<c_int>();
                for index in 0..bytes / size_of::<c_int>() {
                    engine().give_away(first.add(index).read_unaligned());
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}
