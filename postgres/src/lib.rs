//! The module for PostgreSQL: `shared_preload_libraries = '/path/to/libfarpool_postgres.so'`. The postmaster
//! loads it, and all its children are forks. It hooks the calls by which they use files, and switches the
//! [page cache](farpool_preload::cached) on for the data directory. Files stay where they are.
//!
//! M1. The server starts whatever happens here. If something is missing, its files are not cached, and its
//!     log says why.
//! M2. No function here leaves by an error of the server, which would jump over frames of Rust (`longjmp`).
//!     So only messages are reported, at most of the level WARNING, and memory is asked for in the way that
//!     answers with a null pointer.

mod functions;
mod magic;
mod server;
mod watcher;

use std::ffi::{CStr, c_int};
use std::path::{Path, PathBuf};

use farpool_cache::{ControlFile, ServerState};
use server::Level;

/// Of the setting `farpool.enabled`, in `pg_settings`.
const WHAT_IT_SWITCHES: &CStr = c"Reads pages from far memory and puts pages there.";

/// Called by the server when it has loaded the module.
#[unsafe(no_mangle)]
pub extern "C" fn _PG_init() {
    if !server::is_preloading() {
        return; // in a backend, a message may end in a jump (M2)
    }
    let done = std::panic::catch_unwind(init).unwrap_or_else(|_| Err("a fault in the module".to_owned()));
    match done {
        Ok((data, kept)) => server::report(
            Level::Log,
            &format!(
                "farpool: pages of {} are cached while `farpool cache attach` runs; {kept} files have pages from before",
                data.display()
            ),
        ),
        Err(why) => server::report(Level::Warning, &format!("farpool: nothing is cached: {why}")),
    }
}

fn init() -> Result<(PathBuf, usize), String> {
    let data = server::data_directory().ok_or("the server does not say where its data are")?;
    check_version(&data)?;
    // Also if nothing is cached: then it has no effect, but the server knows its name.
    if !server::define_switch(c"farpool.enabled", WHAT_IT_SWITCHES, farpool_preload::cache_switch()) {
        server::report(
            Level::Warning,
            "farpool: there is no setting farpool.enabled: the server has no settings of modules",
        );
    }
    server::reserve_settings(c"farpool");
    if let Some(method) = server::setting(c"io_method").filter(|method| method == "io_uring") {
        return Err(format!("io_method = {method} reads files by itself: set it to worker or sync"));
    }
    let kept = farpool_preload::switch_on_cache(&data).map_err(|error| error.to_string())?;
    if !server::call_at_end(sign_at_end) {
        server::report(Level::Warning, "farpool: no page outlasts a restart: the server has no on_proc_exit");
    }
    if let Err(why) = watcher::register(&data) {
        server::report(Level::Warning, &format!("farpool: changes of the cache are not logged: {why}"));
    }
    Ok((data, kept))
}

/// Called by the postmaster when all its children but the logging collector have ended. It still has
/// `postmaster.pid`, so no other server uses the files.
extern "C" fn sign_at_end(_: c_int, _: usize) {
    // Otherwise the disk may not have what the server has written, and the server replays its log at the next
    // start: that must find the pages of the disk.
    let is_clean = server::data_directory().is_some_and(|data| has_shut_down(&data));
    if is_clean {
        farpool_preload::sign_cached_files();
    }
}

/// Whether the server has written everything to the disk, and its log has nothing to replay. (A standby may
/// leave out its last restartpoint: then the disk may lack what it has written, and it replays its log.)
fn has_shut_down(data: &Path) -> bool {
    ControlFile::read(data).is_ok_and(|control| control.state == ServerState::ShutDown)
}

/// Other versions may write files in ways that no test has tried.
fn check_version(data: &Path) -> Result<(), String> {
    let version = magic::version_of(data).ok_or("there is no PG_VERSION in the data directory")?;
    if magic::TESTED.contains(&version) {
        return Ok(());
    }
    let tested = magic::TESTED.map(|version| version.to_string());
    Err(format!("this is PostgreSQL {version}, and the module was tested with {} only", tested.join(", ")))
}
