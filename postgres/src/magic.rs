//! What the server asks of a module before it loads it: for which version it was built, and with which
//! limits. One module serves several versions: the server that asks has its version in the data directory.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::ptr::null;

use crate::server;

/// Versions with which the module was tested.
pub const TESTED: [c_int; 2] = [15, 18];

/// The server's limits, as they are unless somebody has built it with others (`pg_config_manual.h`).
const FUNCTION_ARGUMENTS: c_int = 100;
const INDEX_KEYS: c_int = 32;
const NAME_BYTES: c_int = 64;
/// How builds of the community name their kind; others differ on purpose.
const KIND: &[u8] = b"PostgreSQL";

/// `Pg_abi_values` of version 18, which is also the tail of the older `Pg_magic_struct`.
#[repr(C)]
struct Abi {
    version: c_int,
    function_arguments: c_int,
    index_keys: c_int,
    name_bytes: c_int,
    floats_by_value: c_int,
    kind: [u8; 32],
}

/// `Pg_magic_struct` of the versions up to 17.
#[repr(C)]
pub struct Magic {
    bytes: c_int,
    abi: Abi,
}

/// The same since version 18.
#[repr(C)]
struct NamedMagic {
    bytes: c_int,
    abi: Abi,
    name: *const c_char,
    version: *const c_char,
}

// SAFETY: the pointers are null, and never written to.
unsafe impl Sync for NamedMagic {}

/// For a version such as 15.
const fn abi(version: c_int) -> Abi {
    let mut kind = [0; 32];
    let mut at = 0;
    while at < KIND.len() {
        kind[at] = KIND[at];
        at += 1;
    }
    Abi {
        version: version * 100, // `PG_VERSION_NUM / 100`
        function_arguments: FUNCTION_ARGUMENTS,
        index_keys: INDEX_KEYS,
        name_bytes: NAME_BYTES,
        floats_by_value: 1,
        kind,
    }
}

const fn magic(version: c_int) -> Magic {
    Magic { bytes: size_of::<Magic>() as c_int, abi: abi(version) }
}

static UP_TO_17: [Magic; 3] = [magic(15), magic(16), magic(17)];
static SINCE_18: NamedMagic =
    NamedMagic { bytes: size_of::<NamedMagic>() as c_int, abi: abi(18), name: null(), version: null() };

/// Called by the server before it calls anything else. The answer for another version than its own is an
/// error there.
#[unsafe(no_mangle)]
pub extern "C" fn Pg_magic_func() -> *const c_void {
    let version = std::panic::catch_unwind(|| version_of(&server::data_directory()?)).ok().flatten();
    let version = version.unwrap_or_default();
    match UP_TO_17.iter().find(|magic| magic.abi.version == version * 100) {
        Some(magic) => (&raw const *magic).cast(),
        None => (&raw const SINCE_18).cast(),
    }
}

/// The version of the server to which a data directory belongs.
pub fn version_of(data: &Path) -> Option<c_int> {
    std::fs::read_to_string(data.join("PG_VERSION")).ok()?.trim().parse().ok()
}
