//! What SQL may ask of the cache. `farpool.sql` defines the functions and a view that uses them.

use std::ffi::{c_int, c_void};
use std::fmt::Write;
use std::panic::catch_unwind;
use std::path::PathBuf;

use farpool_cache::{FilePages, RelationFile};

use crate::server;

/// How the server calls these functions (`Pg_finfo_record`, version 1).
#[repr(C)]
pub struct CallingConvention {
    version: c_int,
}

static VERSION_1: CallingConvention = CallingConvention { version: 1 };

/// A call by the server (`FunctionCallInfoBaseData`), up to the arguments.
#[repr(C)]
pub struct Call {
    function: *mut c_void,
    context: *mut c_void,
    result: *mut c_void,
    collation: u32,
    is_null: bool,
    argument_count: i16,
}

/// An argument (`NullableDatum`).
#[repr(C)]
struct Argument {
    value: usize,
    is_null: bool,
}

/// The arguments of a call. `None`: one of them is null.
///
/// # Safety
/// `call` comes from the server, and has `COUNT` arguments.
unsafe fn arguments<const COUNT: usize>(call: *mut Call) -> Option<[usize; COUNT]> {
    let mut values = [0; COUNT];
    for (at, value) in values.iter_mut().enumerate() {
        // SAFETY: the arguments follow the head, which has no padding at its end. The server does not change
        // them during the call.
        let argument = unsafe { &*call.add(1).cast::<Argument>().add(at) };
        if argument.is_null {
            return None;
        }
        *value = argument.value;
    }
    Some(values)
}

/// Answers a call: null if there is no value.
///
/// # Safety
/// `call` comes from the server.
unsafe fn answer(call: *mut Call, value: Option<usize>) -> usize {
    // SAFETY: the server's, for as long as the call lasts, and nobody else uses it meanwhile.
    unsafe { (*call).is_null = value.is_none() };
    value.unwrap_or_default()
}

/// Says how [`farpool_cached_files`] is called.
#[unsafe(no_mangle)]
pub extern "C" fn pg_finfo_farpool_cached_files() -> *const CallingConvention {
    &raw const VERSION_1
}

/// `farpool.cached_files() RETURNS json`: an array with an object for each file of the databases of which
/// pages are cached; null if the cache is closed or does not answer.
///
/// # Safety
/// Only the server calls this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_cached_files(call: *mut Call) -> usize {
    let files = catch_unwind(farpool_preload::cached_files).ok().flatten();
    let text = files.map(|files| as_json(&files)).and_then(|json| server::text(json.as_bytes()));
    // SAFETY: the server's call.
    unsafe { answer(call, text) }
}

/// Says how [`farpool_set_pinned`] is called.
#[unsafe(no_mangle)]
pub extern "C" fn pg_finfo_farpool_set_pinned() -> *const CallingConvention {
    &raw const VERSION_1
}

/// `farpool.set_pinned(database oid, filenode oid, pinned boolean) RETURNS integer`: sets whether the
/// files of a relation (its segments and its visibility map) are pinned, and returns how many of them the cache
/// knows; null if this process does not use the cache.
///
/// # Safety
/// Only the server calls this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farpool_set_pinned(call: *mut Call) -> usize {
    // SAFETY: the server's call, of a function with three arguments.
    let arguments = unsafe { arguments::<3>(call) };
    let pinned = arguments.and_then(|[database, filenode, is_pinned]| {
        catch_unwind(|| set_pinned(database as u32, filenode as u32, is_pinned as u8 != 0)).ok()?
    });
    // SAFETY: the server's call.
    unsafe { answer(call, pinned) }
}

fn set_pinned(database: u32, filenode: u32, is_pinned: bool) -> Option<usize> {
    let main = format!("base/{database}/{filenode}");
    let segments = (1..).map(|number: u32| PathBuf::from(format!("{main}.{number}")));
    let segments = [PathBuf::from(&main)].into_iter().chain(segments);
    let map = [PathBuf::from(format!("{main}_vm"))].into_iter();
    let pinned = farpool_preload::set_cached_files_pinned(segments, is_pinned)?;
    Some(pinned + farpool_preload::set_cached_files_pinned(map, is_pinned)?)
}

fn as_json(files: &[(PathBuf, FilePages)]) -> String {
    let mut json = String::from("[");
    for (path, FilePages { pages, is_pinned, .. }) in files {
        let Some(RelationFile { database, filenode, fork }) = RelationFile::parse(path) else { continue };
        let comma = if json.len() > 1 { "," } else { "" };
        let _always = write!(
            json,
            r#"{comma}{{"database":{database},"filenode":{filenode},"fork":{},"pages":{pages},"pinned":{is_pinned}}}"#,
            fork.is_some()
        );
    }
    json.push(']');
    json
}
