//! The symbols that override libc's: one function each, which asks the engine and otherwise calls the next
//! library's function.

// Tests of this crate run with libc's functions instead of these.
#![cfg_attr(test, allow(dead_code))]

mod advice;
mod changes;
mod descriptors;
mod next;
mod passing;
mod positional;
mod programs;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use farpool_cache::FilePages;

use crate::backend::Backend;
use crate::engine::Engine;

static ENGINE: Engine = Engine::new();

/// Names the directory whose files are cached; `farpool run --cache` sets it.
const CACHE_VARIABLE: &str = "FARPOOL_CACHE";

/// The engine behind the hooks.
pub(crate) fn engine() -> &'static Engine {
    &ENGINE
}

/// Replaces the mounts by another backend; false if that was done before. For tests.
pub fn use_backend(backend: &'static dyn Backend) -> bool {
    ENGINE.use_backend(backend)
}

/// Hooks a process that runs already, and switches the page cache on for the files in a directory. To be
/// called once, by the only thread of a process.
///
/// Returns how many files keep their pages from before: those that were signed ([`sign_cached_files`]) and
/// are as they were then. No process uses the files yet.
///
/// # Errors
/// If the door of these files cannot be opened, or the process cannot be hooked. Then nothing is cached.
pub fn switch_on_cache(directory: &Path) -> io::Result<usize> {
    if is_preloaded() || std::env::var_os(CACHE_VARIABLE).is_some() {
        return Err(io::Error::other(
            "the program was started by `farpool run --cache`; leave one of the two out",
        ));
    }
    if !ENGINE.process.start() {
        return Err(io::Error::other("the kernel cannot clear memory in forks (MADV_WIPEONFORK)"));
    }
    // Before the first hook: a change that is hooked is announced from then on.
    ENGINE.cached.switch_on(directory)?;
    crate::patching::hook_process().inspect_err(|_| ENGINE.cached.switch_off())?;
    Ok(ENGINE.cached.resume())
}

/// Whether this process finds and admits pages. Its children begin with the same. It may be changed at any
/// time; changes of files are announced whatever it says.
pub fn cache_switch() -> &'static AtomicBool {
    &ENGINE.cached.is_enabled
}

/// Signs the files, so that their pages outlast the end of the database. No process uses them any more, and
/// what was written is on the disk. Takes 50 ms and a walk over the directory, for which
/// the end of the server waits.
pub fn sign_cached_files() {
    ENGINE.cached.sign();
}

/// The files of which pages are cached, by their paths from the cache's directory. `None`: the cache is
/// closed, or its daemon does not answer.
pub fn cached_files() -> Option<Vec<(PathBuf, FilePages)>> {
    ENGINE.cached.files(&ENGINE)
}

/// Sets whether files of the cache's directory are pinned, up to the first that does not exist. Returns how
/// many of them the cache knows. `None`: this process does not use the cache.
pub fn set_cached_files_pinned(paths: impl Iterator<Item = PathBuf>, is_pinned: bool) -> Option<usize> {
    ENGINE.cached.set_pinned(&ENGINE, paths, is_pinned)
}

/// Whether the dynamic linker lets the program call the hooks of this library.
fn is_preloaded() -> bool {
    // SAFETY: a C string.
    let first = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"preadv2".as_ptr()) };
    crate::patching::is_own(first)
}

/// Runs when the library is loaded, before the program. Symbols are looked up now, because a look-up is not
/// async-signal-safe.
extern "C" fn start() {
    // SAFETY: nothing was allocated yet.
    unsafe { dlmalloc::enable_alloc_after_fork() };
    // A panic of the library is contained, and must print nothing: the program's standard error is not the
    // library's to write to.
    std::panic::set_hook(Box::new(|_| ()));
    next::find_all();
    // Copied now: programs that set their title overwrite the environment.
    let directory = std::env::var_os(CACHE_VARIABLE).filter(|directory| !directory.is_empty());
    // A library that was loaded later has hooks that nobody calls.
    if let Some(directory) = directory.filter(|_| is_preloaded()) {
        ENGINE.process.start();
        // If it fails, the program runs as if it had been started without the library (K1).
        let _ = ENGINE.cached.switch_on(directory.as_ref());
        [libc::STDOUT_FILENO, libc::STDERR_FILENO].into_iter().for_each(changes::note_standard_stream);
    }
}

#[cfg(not(test))]
#[used]
// SAFETY: the loader calls each function in this section once, and a function without parameters ignores the
// arguments that it passes.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;
