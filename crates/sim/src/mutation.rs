//! The mutation of the runs on this thread. Rules ask for it here, so all mutations of a scenario share one
//! type, and the code under test is compiled once. A run stays on one thread, so a thread-local value is
//! enough.

use std::cell::Cell;

thread_local! {
    static MUTATION: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Sets the mutation for the runs of this thread from now on.
pub(crate) fn set(mutation: Option<&'static str>) {
    MUTATION.set(mutation);
}

/// The mutation of this thread's runs.
pub(crate) fn get() -> Option<&'static str> {
    MUTATION.get()
}

/// Whether this is the mutation of this thread's runs.
pub(crate) fn is(mutation: &str) -> bool {
    get() == Some(mutation)
}
