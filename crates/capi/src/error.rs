//! Error numbers for C, and error messages for people.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use farpool_control::ControlError;
use farpool_file::FileError;
use farpool_pool::PoolError;

/// Why a call failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) errno: i32,
    text: String,
}

impl Failure {
    pub(crate) fn new(errno: i32, text: impl Into<String>) -> Self {
        Failure { errno, text: text.into() }
    }

    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Failure::new(libc::EINVAL, text)
    }
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        let errno = match error {
            FileError::NoSpace | FileError::TooFewNodes { .. } => libc::ENOSPC,
            FileError::TooLarge => libc::EFBIG,
            FileError::Short => libc::ENFILE,
            // The data is lost, damaged or unavailable.
            _ => libc::EIO,
        };
        Failure::new(errno, error.to_string())
    }
}

impl From<PoolError> for Failure {
    fn from(error: PoolError) -> Self {
        let errno = match error {
            PoolError::BrokerUnreachable { .. } => libc::EHOSTUNREACH,
            PoolError::Start(_) => libc::EAGAIN,
            PoolError::Control(_)
            | PoolError::LimitTooSmall { .. }
            | PoolError::Overflow(_)
            | PoolError::RegionSize { .. }
            | PoolError::OtherRegionSize { .. } => libc::EINVAL,
        };
        Failure::new(errno, in_words_of_c(&error.to_string()))
    }
}

/// Names the members of `struct farpool_options` where a message names options of the command line. What it
/// says of certificates is left as it is: the other side gets its certificates by `--tls-dir` as well.
fn in_words_of_c(text: &str) -> String {
    text.replace("raise --limit", "raise options.limit_bytes")
        .replace("name it with --broker HOST:PORT", "set options.broker to HOST:PORT")
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        Failure::invalid(error.to_string())
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Failure::new(error.raw_os_error().unwrap_or(libc::EIO), error.to_string())
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs the body of a call (C2). Returns its result, or the negative error number; the error message is
/// stored for this thread.
pub(crate) fn answer(body: impl FnOnce() -> Result<i64, Failure>) -> i64 {
    // Unwind safety: after a panic, only state shared with other threads is used again. It is under locks
    // that do not poison.
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        Err(Failure::new(libc::EIO, "internal error of the library: see standard error for details"))
    });
    outcome.unwrap_or_else(|failure| {
        let number = -i64::from(failure.errno);
        LAST.with_borrow_mut(|last| *last = CString::new(failure.text).unwrap_or_default());
        number
    })
}

/// The message of this thread's last failure.
pub(crate) fn last() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}

/// Reads a string that C has passed; `None` for null.
///
/// # Safety
/// `text` is null, or a string that ends with a zero byte and stays unchanged for `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { CStr::from_ptr(text) };
    bytes.to_str().map(Some).map_err(|_| Failure::invalid(format!("{what} is not UTF-8")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_members_of_the_options_in_place_of_options_of_the_command_line() {
        let small = PoolError::LimitTooSmall { limit_bytes: 1, region_bytes: 2 };
        let reason = "refused; start one with `farpool up`, or name it with --broker HOST:PORT".to_owned();
        let unreachable = PoolError::BrokerUnreachable { broker: "127.0.0.1:1".to_owned(), reason };
        for (error, member) in [(small, "options.limit_bytes"), (unreachable, "options.broker")] {
            let text = Failure::from(error).text;
            assert!(text.contains(member) && !text.contains("--"), "{text}");
        }
    }
}
