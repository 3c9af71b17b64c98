//! The symbols that override libc's: one function each, which asks the engine and otherwise calls the next
//! library's function.

// Tests of this crate run with libc's functions instead of these.
#![cfg_attr(test, allow(dead_code))]

mod advice;
mod descriptors;
mod next;
mod passing;
mod positional;
mod programs;

use crate::backend::Backend;
use crate::engine::Engine;

static ENGINE: Engine = Engine::new();

/// The engine behind the hooks.
pub(crate) fn engine() -> &'static Engine {
    &ENGINE
}

/// Replaces the mounts by another backend; false if that was done before. For tests.
pub fn use_backend(backend: &'static dyn Backend) -> bool {
    ENGINE.use_backend(backend)
}

/// Runs when the library is loaded, before the program. Symbols are looked up now, because a look-up is not
/// async-signal-safe.
extern "C" fn start() {
    // A panic of the library is contained, and must print nothing: the program's standard error is not the
    // library's to write to.
    std::panic::set_hook(Box::new(|_| ()));
    next::find_all();
}

#[cfg(not(test))]
#[used]
// SAFETY: the loader calls each function in this section once, and a function without parameters ignores the
// arguments that it passes.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;
