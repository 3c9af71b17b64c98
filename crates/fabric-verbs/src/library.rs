//! libibverbs and librdmacm, loaded once per process and never unloaded. A process without them only lacks
//! this transport.

use std::sync::OnceLock;

use crate::error::VerbsError;
use crate::ffi::{Cm, Verbs};

const VERBS: &str = "libibverbs.so.1";
const CM: &str = "librdmacm.so.1";

/// The functions of both libraries.
pub(crate) struct Library {
    pub(crate) verbs: Verbs,
    pub(crate) cm: Cm,
}

impl Library {
    /// Loads the libraries at the first call; later calls return the same result.
    pub(crate) fn get() -> Result<&'static Library, VerbsError> {
        static LIBRARY: OnceLock<Result<Library, (&'static str, String)>> = OnceLock::new();
        let loaded = LIBRARY.get_or_init(Library::load);
        loaded.as_ref().map_err(|(library, reason)| VerbsError::Library { library, reason: reason.clone() })
    }

    fn load() -> Result<Library, (&'static str, String)> {
        let verbs = open(VERBS)?;
        let cm = open(CM)?;
        // SAFETY: the libraries of these names have the interface declared in `ffi`; both stay loaded, see
        // `open`.
        let verbs = unsafe { Verbs::load(verbs) }.map_err(|error| (VERBS, error.to_string()))?;
        // SAFETY: the library of this name has the interface declared in `ffi`; it stays loaded, see `open`.
        let cm = unsafe { Cm::load(cm) }.map_err(|error| (CM, error.to_string()))?;
        Ok(Library { verbs, cm })
    }
}

fn open(name: &'static str) -> Result<&'static libloading::Library, (&'static str, String)> {
    // SAFETY: at load time, rdma-core's libraries only register themselves.
    let library = unsafe { libloading::Library::new(name) }.map_err(|error| (name, error.to_string()))?;
    // Never unloaded: devices stay open as long as the libraries are loaded, and drivers have threads of
    // their own.
    Ok(Box::leak(Box::new(library)))
}
