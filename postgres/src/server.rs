//! What the module uses of the server. The symbols are looked up when they are needed: they are the same in
//! all versions, but the module is built without a server.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

/// Levels of messages (`elog.h`).
#[derive(Clone, Copy)]
pub enum Level {
    /// To the server's log.
    Log = 15,
    /// The same, and marked as a warning.
    Warning = 19,
}

/// A function that is called at the end with the exit code and a word (`pg_on_exit_callback`).
pub type AtEnd = extern "C" fn(c_int, usize);

/// The address of a symbol of the server.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a C string.
    let at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!at.is_null()).then_some(at)
}

/// Whether the postmaster loads the libraries that all its children have.
pub fn is_preloading() -> bool {
    let flag = symbol(c"process_shared_preload_libraries_in_progress");
    // SAFETY: the server's variable of this name is a `bool`. It has one thread now.
    flag.is_some_and(|flag| unsafe { flag.cast::<u8>().read() } != 0)
}

/// The data directory.
pub fn data_directory() -> Option<PathBuf> {
    let variable = symbol(c"DataDir")?.cast::<*const c_char>();
    // SAFETY: the server's variable of this name is a pointer to a C string, or null. It has one thread now.
    unsafe {
        let path = variable.read();
        (!path.is_null()).then(|| PathBuf::from(OsStr::from_bytes(CStr::from_ptr(path).to_bytes())))
    }
}

/// The value of a setting. `None`: there is no such setting.
pub fn setting(name: &CStr) -> Option<String> {
    type GetConfigOption = unsafe extern "C" fn(*const c_char, bool, bool) -> *const c_char;
    let function = symbol(c"GetConfigOption")?;
    // SAFETY: the server's function of this name has this type.
    let get = unsafe { std::mem::transmute::<*mut c_void, GetConfigOption>(function) };
    // SAFETY: a C string. A setting that is missing is no error, and all settings may be read.
    let value = unsafe { get(name.as_ptr(), true, false) };
    // SAFETY: null, or a C string that lasts until the setting changes.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) }.to_string_lossy().into_owned())
}

/// The level of a setting that superusers may change at any time (`PGC_SUSET`). The configuration file, and
/// the settings of a database or a role, may change it, too.
const BY_SUPERUSER: c_int = 5;

/// Defines a setting that is on or off, and begins on. `false`: the server cannot do that. (It ends if the
/// setting is there already, or if it has no memory; M1 rests on that neither is so.)
pub fn define_switch(name: &'static CStr, what: &'static CStr, variable: &'static AtomicBool) -> bool {
    type Text = *const c_char;
    type Hook = *const c_void;
    type Define = unsafe extern "C" fn(Text, Text, Text, *mut bool, bool, c_int, c_int, Hook, Hook, Hook);
    let Some(define) = symbol(c"DefineCustomBoolVariable") else { return false };
    let (variable, none) = (variable.as_ptr(), std::ptr::null());
    // SAFETY: the server's function of this name has this type; a hook may be null. The strings and the
    // variable are never freed. The server stores true and false there from its only thread.
    unsafe {
        let define = std::mem::transmute::<*mut c_void, Define>(define);
        let (name, what) = (name.as_ptr(), what.as_ptr());
        define(name, what, std::ptr::null(), variable, true, BY_SUPERUSER, 0, none, none, none);
    }
    true
}

/// Has the server warn of settings with this prefix that nobody has defined, and refuse them later.
pub fn reserve_settings(prefix: &CStr) {
    type Reserve = unsafe extern "C" fn(*const c_char);
    if let Some(reserve) = symbol(c"MarkGUCPrefixReserved") {
        // SAFETY: the server's function of this name has this type. It copies the string.
        unsafe { std::mem::transmute::<*mut c_void, Reserve>(reserve)(prefix.as_ptr()) };
    }
}

/// Has a function called when this process ends, but not when its children do. `false`: the server cannot do
/// that. (The server ends if all its twenty entries for such functions are taken; it uses a few, and M1 rests on
/// that.)
pub fn call_at_end(function: AtEnd) -> bool {
    type OnProcExit = unsafe extern "C" fn(AtEnd, usize);
    let Some(register) = symbol(c"on_proc_exit") else { return false };
    // SAFETY: the server's function of this name has this type. The function is never unloaded.
    unsafe { std::mem::transmute::<*mut c_void, OnProcExit>(register)(function, 0) };
    true
}

/// Memory that the server frees at the end of the statement is asked for in this way: without an error if
/// there is none (`MCXT_ALLOC_NO_OOM`).
const WITHOUT_ERROR: c_int = 2;
/// A value of variable length begins with its length in bytes, times four (`SET_VARSIZE_4B`).
const LENGTH_BYTES: usize = 4;
/// The longest value of that kind.
const TEXT_MAX: usize = (1 << 30) - 1;

/// A text for the server, as a `Datum`. `None`: it is too long, or there is no memory.
pub fn text(bytes: &[u8]) -> Option<usize> {
    type Allocate = unsafe extern "C" fn(usize, c_int) -> *mut c_void;
    let length = bytes.len() + LENGTH_BYTES;
    let allocate = symbol(c"palloc_extended").filter(|_| length <= TEXT_MAX)?;
    // SAFETY: the server's function of this name has this type. With this flag and this size, it does not
    // jump.
    let memory = unsafe { std::mem::transmute::<*mut c_void, Allocate>(allocate)(length, WITHOUT_ERROR) };
    if memory.is_null() {
        return None;
    }
    let head = ((length as u32) << 2).to_le_bytes();
    let memory = memory.cast::<u8>();
    // SAFETY: the memory is new, and has room for both.
    unsafe {
        memory.copy_from_nonoverlapping(head.as_ptr(), LENGTH_BYTES);
        memory.add(LENGTH_BYTES).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
    }
    Some(memory.addr())
}

/// Process id of the postmaster.
pub fn postmaster() -> Option<u32> {
    let variable = symbol(c"PostmasterPid")?.cast::<c_int>();
    // SAFETY: the server's variable of this name is an `int`, which the postmaster sets before its first fork.
    u32::try_from(unsafe { variable.read() }).ok()
}

/// Bytes of names (`BGW_MAXLEN`, `BGW_EXTRALEN` in `bgworker.h`).
const WORKER_NAME_BYTES: usize = 96;
const WORKER_EXTRA_BYTES: usize = 128;
/// Every worker has the server's shared memory (`BGWORKER_SHMEM_ACCESS`). This one needs no database.
const WORKER_FLAGS: c_int = 1;
/// Started with the postmaster: also while the server is in recovery (`BgWorkerStart_PostmasterStart`).
const AT_START: c_int = 0;
/// How long a worker that has failed waits for its next start.
const RESTART_SECONDS: c_int = 10;

/// `BackgroundWorker`, whose name of the library is longer since version 17 (`MAXPGPATH`).
#[repr(C)]
struct BackgroundWorker<const LIBRARY_BYTES: usize> {
    name: [u8; WORKER_NAME_BYTES],
    kind: [u8; WORKER_NAME_BYTES],
    flags: c_int,
    start: c_int,
    restart_seconds: c_int,
    library: [u8; LIBRARY_BYTES],
    function: [u8; WORKER_NAME_BYTES],
    argument: usize,
    extra: [u8; WORKER_EXTRA_BYTES],
    to_notify: libc::pid_t,
}

/// Text with zeros behind it. `None`: it has no room.
fn padded<const BYTES: usize>(text: &[u8]) -> Option<[u8; BYTES]> {
    let mut padded = [0; BYTES];
    padded[..BYTES - 1].get_mut(..text.len())?.copy_from_slice(text);
    Some(padded)
}

/// Has the postmaster start a process that runs a function of a library. If all workers that the server may
/// have are taken (`max_worker_processes`), it logs that. `None`: the server cannot do that, or a name is too
/// long.
pub fn register_worker(version: c_int, name: &str, library: &CStr, function: &str) -> Option<()> {
    if version < 17 {
        register::<96>(name, library, function)
    } else {
        register::<1024>(name, library, function)
    }
}

fn register<const LIBRARY_BYTES: usize>(name: &str, library: &CStr, function: &str) -> Option<()> {
    type Register<const BYTES: usize> = unsafe extern "C" fn(*mut BackgroundWorker<BYTES>);
    let register = symbol(c"RegisterBackgroundWorker")?;
    let mut worker = BackgroundWorker::<LIBRARY_BYTES> {
        name: padded(name.as_bytes())?,
        kind: padded(name.as_bytes())?,
        flags: WORKER_FLAGS,
        start: AT_START,
        restart_seconds: RESTART_SECONDS,
        library: padded(library.to_bytes())?,
        function: padded(function.as_bytes())?,
        argument: 0,
        extra: [0; WORKER_EXTRA_BYTES],
        to_notify: 0,
    };
    // SAFETY: the server's function of this name has this type, in the version whose structure this is. It
    // copies the structure, and reports what is wrong with it at the level LOG (M2).
    unsafe { std::mem::transmute::<*mut c_void, Register<LIBRARY_BYTES>>(register)(&raw mut worker) };
    Some(())
}

/// Reports a message.
pub fn report(level: Level, message: &str) {
    type Start = unsafe extern "C" fn(c_int, *const c_char) -> bool;
    type Message = unsafe extern "C" fn(*const c_char, ...) -> c_int;
    type Finish = unsafe extern "C" fn(*const c_char, c_int, *const c_char);
    let (Some(start), Some(text), Some(finish)) =
        (symbol(c"errstart"), symbol(c"errmsg_internal"), symbol(c"errfinish"))
    else {
        return;
    };
    let Ok(message) = CString::new(message) else { return };
    // SAFETY: the server's functions of these names have these types. The format has one string, which is
    // given. A message of these levels returns (M2).
    unsafe {
        let start = std::mem::transmute::<*mut c_void, Start>(start);
        let text = std::mem::transmute::<*mut c_void, Message>(text);
        let finish = std::mem::transmute::<*mut c_void, Finish>(finish);
        if start(level as c_int, std::ptr::null()) {
            text(c"%s".as_ptr(), message.as_ptr());
            finish(c"farpool".as_ptr(), 0, c"farpool".as_ptr());
        }
    }
}
