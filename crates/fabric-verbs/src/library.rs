//! libibverbs and librdmacm, loaded once per process and kept: a process without them only lacks this
//! transport.

use std::sync::OnceLock;

use crate::error::VerbsError;
use crate::ffi::{Cm, Verbs};

const VERBS: &str = "libibverbs.so.1";
const CM: &str = "librdmacm.so.1";

/// The functions of both.
pub(crate) struct Library {
    pub(crate) verbs: Verbs,
    pub(crate) cm: Cm,
}

impl Library {
    /// Loads them, the first time; later calls give the same answer.
    pub(crate) fn get() -> Result<&'static Library, VerbsError> {
        static LIBRARY: OnceLock<Result<Library, (&'static str, String)>> = OnceLock::new();
        let loaded = LIBRARY.get_or_init(Library::load);
        loaded.as_ref().map_err(|(library, reason)| VerbsError::Library { library, reason: reason.clone() })
    }

    fn load() -> Result<Library, (&'static str, String)> {
        let verbs = open(VERBS)?;
        let cm = open(CM)?;
        // SAFETY: these names stand for the interface that `ffi` writes down; both stay loaded, see `open`.
        let verbs = unsafe { Verbs::load(verbs) }.map_err(|error| (VERBS, error.to_string()))?;
        // SAFETY: as above.
        let cm = unsafe { Cm::load(cm) }.map_err(|error| (CM, error.to_string()))?;
        Ok(Library { verbs, cm })
    }
}

fn open(name: &'static str) -> Result<&'static libloading::Library, (&'static str, String)> {
    // SAFETY: rdma-core's libraries do nothing at load time but register themselves.
    let library = unsafe { libloading::Library::new(name) }.map_err(|error| (name, error.to_string()))?;
    // Never unloaded: devices stay open for as long as they are loaded, and drivers have threads of their
    // own.
    Ok(Box::leak(Box::new(library)))
}
