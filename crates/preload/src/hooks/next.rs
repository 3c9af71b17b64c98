//! The functions that the hooks override: the next ones in the order of loading, mostly libc's.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{FILE, iovec, mmsghdr, mode_t, msghdr, off_t, pid_t, size_t, ssize_t};

thread_local! {
    static SEARCHING: Cell<bool> = const { Cell::new(false) };
}

/// A function of the next library.
struct Symbol {
    name: &'static CStr,
    at: AtomicPtr<c_void>,
}

impl Symbol {
    const fn new(name: &'static CStr) -> Self {
        Symbol { name, at: AtomicPtr::new(null_mut()) }
    }

    /// The function's address. Null if there is none, or in a call that the look-up itself makes, such as an
    /// allocator that maps memory.
    fn get(&self) -> *mut c_void {
        // Relaxed: only the address matters, and it orders nothing.
        let at = self.at.load(Ordering::Relaxed);
        if at.is_null() { self.find() } else { at }
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        if SEARCHING.replace(true) {
            return null_mut();
        }
        // SAFETY: the name is a C string.
        let at = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        SEARCHING.set(false);
        self.at.store(at, Ordering::Relaxed);
        at
    }
}

/// Sets `errno` and returns -1, like a libc that has no such function.
fn missing() -> isize {
    // SAFETY: the thread's own `errno`.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
    -1
}

macro_rules! next {
    ($($name:ident($($argument:ident: $type:ty),*) -> $answer:ty, else $otherwise:expr;)*) => {
        #[allow(non_upper_case_globals)] // named as what they find
        mod symbols {
            $(pub(super) static $name: super::Symbol =
                super::Symbol::new(match std::ffi::CStr::from_bytes_with_nul(
                    concat!(stringify!($name), "\0").as_bytes()) { Ok(name) => name, Err(_) => c"" });)*
        }

        $(pub unsafe fn $name($($argument: $type),*) -> $answer {
            let at = symbols::$name.get();
            if at.is_null() {
                return $otherwise;
            }
            // SAFETY: libc's function of this name has this type.
            let function: unsafe extern "C" fn($($type),*) -> $answer = unsafe { std::mem::transmute(at) };
            // SAFETY: the arguments are the program's own.
            unsafe { function($($argument),*) }
        })*

        /// Looks all of them up.
        pub fn find_all() {
            $(symbols::$name.get();)*
            programs::find_all();
        }
    };
}

next! {
    pread(fd: c_int, to: *mut c_void, bytes: size_t, offset: off_t) -> ssize_t, else missing();
    __pread_chk(fd: c_int, to: *mut c_void, bytes: size_t, offset: off_t, room: size_t) -> ssize_t, else missing();
    pwrite(fd: c_int, from: *const c_void, bytes: size_t, offset: off_t) -> ssize_t, else missing();
    preadv(fd: c_int, to: *const iovec, count: c_int, offset: off_t) -> ssize_t, else missing();
    pwritev(fd: c_int, from: *const iovec, count: c_int, offset: off_t) -> ssize_t, else missing();
    preadv2(fd: c_int, to: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t, else missing();
    pwritev2(fd: c_int, from: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t, else missing();
    write(fd: c_int, from: *const c_void, bytes: size_t) -> ssize_t,
        // SAFETY: the program's own call, with its own arguments.
        else unsafe { libc::syscall(libc::SYS_write, fd, from, bytes) as ssize_t };
    writev(fd: c_int, from: *const iovec, count: c_int) -> ssize_t, else missing();
    ftruncate(fd: c_int, bytes: off_t) -> c_int, else missing() as c_int;
    truncate(path: *const c_char, bytes: off_t) -> c_int, else missing() as c_int;
    fallocate(fd: c_int, mode: c_int, offset: off_t, bytes: off_t) -> c_int, else missing() as c_int;
    sendfile(to: c_int, from: c_int, offset: *mut off_t, bytes: size_t) -> ssize_t, else missing();
    splice(from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, bytes: size_t, flags: c_uint)
        -> ssize_t, else missing();
    open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int,
        // SAFETY: the program's own call, with its own arguments.
        else unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, flags, mode) as c_int };
    open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int,
        // SAFETY: the program's own call, with its own arguments.
        else unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, flags, mode) as c_int };
    openat(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int,
        // SAFETY: the program's own call, with its own arguments.
        else unsafe { libc::syscall(libc::SYS_openat, folder, path, flags, mode) as c_int };
    openat64(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int,
        // SAFETY: the program's own call, with its own arguments.
        else unsafe { libc::syscall(libc::SYS_openat, folder, path, flags, mode) as c_int };
    __open_2(path: *const c_char, flags: c_int) -> c_int, else missing() as c_int;
    __open64_2(path: *const c_char, flags: c_int) -> c_int, else missing() as c_int;
    __openat_2(folder: c_int, path: *const c_char, flags: c_int) -> c_int, else missing() as c_int;
    __openat64_2(folder: c_int, path: *const c_char, flags: c_int) -> c_int, else missing() as c_int;
    open_by_handle_at(mount: c_int, handle: *mut c_void, flags: c_int) -> c_int, else missing() as c_int;
    ioctl(fd: c_int, request: c_ulong, argument: size_t) -> c_int,
        // SAFETY: the program's own call, with its own arguments.
        else unsafe { libc::syscall(libc::SYS_ioctl, fd, request, argument) as c_int };
    fsync(fd: c_int) -> c_int, else missing() as c_int;
    fdatasync(fd: c_int) -> c_int, else missing() as c_int;
    sync_file_range(fd: c_int, offset: off_t, bytes: off_t, flags: c_uint) -> c_int, else missing() as c_int;
    fopen(path: *const c_char, mode: *const c_char) -> *mut FILE, else null_mut();
    fopen64(path: *const c_char, mode: *const c_char) -> *mut FILE, else null_mut();
    fdopen(fd: c_int, mode: *const c_char) -> *mut FILE, else null_mut();
    close(fd: c_int) -> c_int,
        // SAFETY: the descriptor is the program's to close.
        else unsafe { libc::syscall(libc::SYS_close, fd) as c_int };
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int, else missing() as c_int;
    closefrom(first: c_int) -> (), else { missing(); };
    dup(old: c_int) -> c_int, else missing() as c_int;
    dup2(old: c_int, new: c_int) -> c_int, else missing() as c_int;
    dup3(old: c_int, new: c_int, flags: c_int) -> c_int, else missing() as c_int;
    fcntl(fd: c_int, command: c_int, argument: size_t) -> c_int,
        // SAFETY: the argument is the program's.
        else unsafe { libc::syscall(libc::SYS_fcntl, fd, command, argument) as c_int };
    lockf(fd: c_int, command: c_int, bytes: off_t) -> c_int, else missing() as c_int;
    fclose(stream: *mut FILE) -> c_int, else missing() as c_int;
    freopen(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE, else null_mut();
    freopen64(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE, else null_mut();
    mmap(at: *mut c_void, bytes: size_t, access: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void,
        else {
            // SAFETY: the program's own call, with its own arguments.
            let at = unsafe { libc::syscall(libc::SYS_mmap, at, bytes, access, flags, fd, offset) };
            std::ptr::with_exposed_provenance_mut(at as usize)
        };
    copy_file_range(from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, bytes: size_t,
        flags: c_uint) -> ssize_t, else missing();
    posix_fadvise(fd: c_int, offset: off_t, bytes: off_t, advice: c_int) -> c_int, else libc::ENOSYS;
    readahead(fd: c_int, offset: off_t, bytes: size_t) -> ssize_t, else missing();
    sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> ssize_t, else missing();
    sendmmsg(socket: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int, else missing() as c_int;
    execv(path: *const c_char, arguments: *const *const c_char) -> c_int, else missing() as c_int;
    execve(path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int,
        else missing() as c_int;
    execvp(file: *const c_char, arguments: *const *const c_char) -> c_int, else missing() as c_int;
    execvpe(file: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int,
        else missing() as c_int;
    fexecve(fd: c_int, arguments: *const *const c_char, environment: *const *const c_char) -> c_int,
        else missing() as c_int;
    execveat(folder: c_int, path: *const c_char, arguments: *const *const c_char,
        environment: *const *const c_char, flags: c_int) -> c_int, else missing() as c_int;
    posix_spawn(child: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *const c_char, environment: *const *const c_char) -> c_int, else libc::ENOSYS;
    posix_spawnp(child: *mut pid_t, file: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *const c_char, environment: *const *const c_char) -> c_int, else libc::ENOSYS;
    posix_spawn_file_actions_adddup2(actions: *mut c_void, old: c_int, new: c_int) -> c_int, else libc::ENOSYS;
    popen(command: *const c_char, mode: *const c_char) -> *mut FILE, else null_mut();
    system(command: *const c_char) -> c_int, else missing() as c_int;
    wordexp(words: *const c_char, expanded: *mut c_void, flags: c_int) -> c_int, else libc::ENOSYS;
}

/// Functions with a variable number of arguments: only their addresses are known here.
pub mod programs {
    use super::{Symbol, c_long, c_void};

    static EXECL: Symbol = Symbol::new(c"execl");
    static EXECLE: Symbol = Symbol::new(c"execle");
    static EXECLP: Symbol = Symbol::new(c"execlp");

    pub fn find_all() {
        EXECL.get();
        EXECLE.get();
        EXECLP.get();
    }

    pub fn execl() -> *mut c_void {
        or_end(&EXECL)
    }

    pub fn execle() -> *mut c_void {
        or_end(&EXECLE)
    }

    pub fn execlp() -> *mut c_void {
        or_end(&EXECLP)
    }

    fn or_end(symbol: &Symbol) -> *mut c_void {
        let at = symbol.get();
        if at.is_null() { no_such_function as *mut c_void } else { at }
    }

    extern "C" fn no_such_function() -> c_long {
        super::missing() as c_long
    }
}
