//! What the module uses of the server. The symbols are looked up when they are needed: they are the same in
//! all versions, but the module is built without a server.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

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
