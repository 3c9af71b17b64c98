//! The symbols that stand before libc's: one function each, which asks the engine and else calls the next library's.

// Tests of this crate run with libc's functions, and do without these.
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

/// Puts something else in the place of the mounts; false if that was done before. For tests.
pub fn use_backend(backend: &'static dyn Backend) -> bool {
    ENGINE.use_backend(backend)
}

/// Runs when the library is loaded, before the program: symbols are looked up now, because the look-up is not
/// async-signal-safe.
extern "C" fn start() {
    // A fault of the library is contained, and the program's standard error is not ours to write to.
    std::panic::set_hook(Box::new(|_| ()));
    next::find_all();
}

#[cfg(not(test))]
#[used]
// SAFETY: the loader calls what lies in this section once, without arguments that a function without any would miss.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;
