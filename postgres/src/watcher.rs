//! A background worker of the server that looks at the cache once a second, and logs changes of its state. It
//! uses no file of the server, and so has no place in the cache.
//!
//! It leaves signals blocked, as the server hands them to a worker, and takes the one that asks for its end
//! while it waits. So no handler of the server runs here, whose errors would jump (M2). The postmaster signs
//! files after all its children have ended, so also after this one.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

use farpool_cache::{DoorFile, look_at};

use crate::magic;
use crate::server::{self, Level};

/// Time between two looks. A state is logged once two of them have found it.
const PAUSE: Duration = Duration::from_secs(1);
/// The state in which no cache is attached, as it is when the server starts. It is not logged then.
const DETACHED: &str = "detached";

/// Has the server start the worker.
pub fn register(data: &Path) -> Result<(), String> {
    let version = magic::version_of(data).ok_or("the server does not say its version")?;
    let library = own_path().ok_or("the module does not find its own path")?;
    server::register_worker(version, "farpool cache watcher", library, "farpool_watch_cache").ok_or_else(
        || {
            format!(
                "the server has no background workers, or the path {} is too long",
                library.to_string_lossy()
            )
        },
    )
}

/// The path of this library, as the server has loaded it.
fn own_path() -> Option<&'static CStr> {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: an address of this library, and room for the answer.
    let is_found = unsafe { libc::dladdr(farpool_watch_cache as *const _, found.as_mut_ptr()) } != 0;
    // SAFETY: all zeros are a valid value, too.
    let path = unsafe { found.assume_init() }.dli_fname;
    // SAFETY: the linker's own C string, which lasts as long as the library, and that is never unloaded.
    (is_found && !path.is_null()).then(|| unsafe { CStr::from_ptr(path) })
}

/// The worker's main function: the server ends the process when it returns.
#[unsafe(no_mangle)]
pub extern "C" fn farpool_watch_cache(_: usize) {
    let done = std::panic::catch_unwind(watch).unwrap_or_else(|_| Err("a fault in the module".to_owned()));
    if let Err(why) = done {
        server::report(Level::Warning, &format!("farpool: changes of the cache are not logged: {why}"));
    }
}

fn watch() -> Result<(), String> {
    let data = server::data_directory().ok_or("the server does not say where its data are")?;
    let postmaster = server::postmaster().ok_or("the server does not say which process is its postmaster")?;
    let door = DoorFile::open(&data).map_err(|error| error.to_string())?;
    // SAFETY: this sets what this process gets when its parent dies.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM as libc::c_ulong) };
    let (mut logged, mut before) = ((DETACHED, 0), None);
    // The parent may have died before it was asked for the signal.
    while std::os::unix::process::parent_id() == postmaster && !is_asked_to_end_within(PAUSE) {
        let found = look_at(&door).map_err(|error| format!("{}: {error}", door.path().display()))?;
        // Another cache may have come between two looks.
        let is_new = found.0 != logged.0 || (found.0 == "open" && found.1 != logged.1);
        if is_new && before == Some(found) && found.0 != "opening" {
            server::report(Level::Log, &format!("farpool: cache {}: {}", found.0, explain(found.0)));
            logged = found;
        }
        before = Some(found);
    }
    Ok(())
}

/// Waits for the signal by which the server ends its children.
fn is_asked_to_end_within(pause: Duration) -> bool {
    let pause = libc::timespec { tv_sec: pause.as_secs() as _, tv_nsec: pause.subsec_nanos().into() };
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `set` is made before it is used, and lives until the calls return. The signal is blocked.
    let got = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
        libc::sigtimedwait(set.as_ptr(), std::ptr::null_mut(), &raw const pause)
    };
    got == libc::SIGTERM
}

/// What a state means for the server.
fn explain(state: &str) -> &'static str {
    match state {
        "open" => "pages are found in far memory",
        "closed" => {
            "a program changes files in a way that the cache cannot follow, or is stopped within a call; files are read \
             from the disk"
        }
        "silent" => {
            "`farpool cache attach` does not answer; pages are found until its leases end, then the disk is read"
        }
        "abandoned" => {
            "`farpool cache attach` was killed; pages are found until its leases end, then the disk is read"
        }
        _ => "files are read from the disk",
    }
}
